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


def xla_blocks(num_queries: int) -> tuple[int, int]:
  """Queries and keys of a tile.

  Measured on CPU: 128 x 128 is among the fastest for prefill; a few queries want longer tiles.
  """
  return (128, 256) if num_queries <= 16 else (128, 128)


def chunk_size(num_tokens: int, num_seqs: int) -> int:
  """Queries of a chunk of a packed batch: the power of two above the mean of a sequence."""
  mean = -(-num_tokens // max(num_seqs, 1))
  return min(1 << max(mean - 1, 0).bit_length(), _MAX_CHUNK)
