"""Sizes of tiles, from what they take."""

from __future__ import annotations

OPERATIONS = (
  "flash_attention",
  "decode_attention",
  "ragged_paged_attention",
  "packet_attention",
  "shared_prefix_attention",
  "verify_attention",
)

# Rows of a paged batch that go through their tiles together with XLA.
GROUP = 8
# Up to here it is cheaper to turn a chunk's queries for each page than the page's keys.
TURN_QUERIES = 8
_MAX_CHUNK = 128
# Memory of a TPU core that a kernel may use, v5e's, less a tenth; for scalars, tables among them.
VMEM_BYTES = 16 * 2**20 * 9 // 10
SMEM_BYTES = 2**20 * 9 // 10
_LANES = 128


def xla_blocks(num_queries: int) -> tuple[int, int]:
  """Queries and keys of a tile.

  Measured on CPU: 128 x 128 is among the fastest for prefill; a few queries want longer tiles.
  """
  return (128, 256) if num_queries <= 16 else (128, 128)


def tpu_flash(
  num_queries: int, num_keys: int, group: int, width: int, value_width: int, itemsize: int
) -> tuple[dict[str, int], int]:
  """Queries and keys of a tile of the TPU kernel, and bytes of the chip's memory it takes."""
  block_q, block_k = min(128, _up(num_queries, 16)), min(512, _up(num_keys, 128))

  def vmem() -> int:
    rows = group * block_q
    moving = itemsize * (_up(width, _LANES) * (rows + block_k) + _up(value_width, _LANES) * block_k)
    # o and lse go out in float32, and are kept with the largest score while tiles go by.
    state = 4 * rows * (_up(value_width, _LANES) + 2 * _LANES)
    # Scores, weights and both halves of these.
    return 2 * moving + 3 * state + 4 * 4 * rows * block_k

  while vmem() > VMEM_BYTES and (block_q > 16 or block_k > 128):
    if block_k > 128 and block_k >= block_q:
      block_k = _up(block_k // 2, 128)
    else:
      block_q = _up(block_q // 2, 16)
  return {"block_q": block_q, "block_k": block_k}, vmem()


def tpu_paged(
  page_size: int,
  columns: int,
  kv_heads: int,
  rows: int,
  width: int,
  value_width: int,
  itemsize: int,
) -> tuple[dict[str, int], int]:
  """Slots of a tile of the TPU kernel over pages, and bytes of the chip's memory it takes.

  `rows` are the queries of a chunk for one head of keys, those of its whole group.
  """
  rows = _up(rows, 16)
  count = max(min(256 // page_size, columns, 32), 1)

  def vmem() -> int:
    # A register holds 32 bytes of one lane: 8 heads of float32, 16 of bfloat16.
    heads = _up(kv_heads, 32 // itemsize)
    widths = _up(width, _LANES) + _up(value_width, _LANES)
    moving = itemsize * count * page_size * heads * widths
    queries = kv_heads * rows * 2 * itemsize * _up(width, _LANES)
    state = 4 * kv_heads * rows * (_up(value_width, _LANES) + 2 * _LANES)
    scores = 4 * 4 * rows * _up(count * page_size, _LANES)
    head = 4 * count * page_size * 2 * widths
    return 2 * (moving + queries) + 3 * state + scores + head

  while vmem() > VMEM_BYTES and count > 1:
    count //= 2
  return {"block_k": count * page_size}, vmem()


def _up(x: int, by: int) -> int:
  return -(-x // by) * by


def chunk_size(num_tokens: int, num_seqs: int) -> int:
  """Queries of a chunk of a packed batch: the power of two above the mean of a sequence."""
  mean = -(-num_tokens // max(num_seqs, 1))
  return min(1 << max(mean - 1, 0).bit_length(), _MAX_CHUNK)
