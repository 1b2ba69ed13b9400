"""Attention as Pallas kernels for TPUs: many queries over dense keys, and chunks over pages.

Both go through tiles of keys with an online softmax whose state stays on the chip, and touch only
tiles that some query sees. Products of float32 are taken at full precision; of bfloat16 they are
exact, and weights are split in two so that rounding them costs nothing. Names of sizes are those of
`xla`. The derivative of `flash` is that of `xla`, from the saved lse.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxlib_ext.attention import xla
from jaxlib_ext.attention.rope import Rope, rotation
from jaxlib_ext.attention.state import AttnState

# Position of a query that is not in use.
_UNUSED = -(2**31)
_EMPTY = -jnp.inf


# --- What the two kernels share ------------------------------------------------------------------


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
  """`[R, D]`, `[S, D]` -> `[R, S]` float32."""
  precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else lax.Precision.DEFAULT
  return lax.dot_general(
    q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def _weighted(weight: jax.Array, v: jax.Array) -> jax.Array:
  """`[R, S]` float32, `[S, Dv]` -> `[R, Dv]` float32."""

  def product(x: jax.Array, precision: lax.Precision) -> jax.Array:
    return lax.dot_general(
      x, v, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )

  if v.dtype == jnp.float32:
    return product(weight, lax.Precision.HIGHEST)
  high = weight.astype(v.dtype)
  low = (weight - high.astype(jnp.float32)).astype(v.dtype)
  return product(high, lax.Precision.DEFAULT) + product(low, lax.Precision.DEFAULT)


def _seen(
  position: jax.Array, key: jax.Array, kv_len: jax.Array, options: xla.Options
) -> jax.Array:
  """Queries at `position [R, 1]` see keys at `key [1, S]`."""
  seen = (key < kv_len) & (position != _UNUSED)
  if options.causal:
    seen &= key <= position
  if options.window is not None:
    # Not `key > position - window`: that wraps around where the position is not in use.
    seen &= position - key < options.window
  return seen


def _add_tile(
  top: jax.Array,
  total: jax.Array,
  acc: jax.Array,
  scores: jax.Array,
  seen: jax.Array,
  v: jax.Array,
  options: xla.Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One step of the online softmax; `top`, `total` are `[R, 1]`, `acc` is `[R, Dv]`."""
  scores = scores * options.scale
  if options.soft_cap is not None:
    scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
  scores = jnp.where(seen, scores, _EMPTY)
  new_top = jnp.maximum(top, scores.max(axis=1, keepdims=True))
  shift = jnp.where(new_top == _EMPTY, 0.0, new_top)
  weight = jnp.exp(scores - shift)
  shrink = jnp.exp(top - shift)
  total = total * shrink + weight.sum(axis=1, keepdims=True)
  return new_top, total, acc * shrink + _weighted(weight, v)


def _finish(top: jax.Array, total: jax.Array, acc: jax.Array) -> tuple[jax.Array, jax.Array]:
  empty = total == 0
  safe = jnp.where(empty, 1.0, total)
  o = jnp.where(empty, 0.0, acc / safe)
  return o, jnp.where(empty, _EMPTY, jnp.where(empty, 0.0, top) + jnp.log(safe))


def _pad(x: jax.Array, axis: int, size: int, value: Any = 0) -> jax.Array:
  """`x` with its axis filled up to `size`."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, widths, constant_values=value)


def _up(x: int, by: int) -> int:
  return -(-x // by) * by


def _key_ranges(
  position: jax.Array, used: jax.Array, kv_len: jax.Array, options: xla.Options, size: int
) -> tuple[jax.Array, jax.Array]:
  """First tile and end of the tiles of `size` keys that each row of `position [N, n]` sees."""

  def row(position: jax.Array, used: jax.Array, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    return xla.key_range(position[None], used[None], kv_len[None], options)

  first, end = jax.vmap(row)(position, used, kv_len)
  return first // size, (end + size - 1) // size


# --- Many queries over dense keys ----------------------------------------------------------------


def flash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  lengths: xla.Lengths,
  options: xla.Options,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """As `xla.flash`: o `[B, T, H, Dv]` and lse `[B, T, H]`.

  The grid is (row, head of keys, tile of queries, tile of keys). All query heads of a head of keys
  are in one tile, so that a tile of keys is read once for them.

  Args:
    q: `[B, T, H, D]`.
    k: `[B, S, K, D]`.
    v: `[B, S, K, Dv]`.
    lengths: as `xla.flash`.
    options: block_q queries, a multiple of 16, and block_k keys, of 128.
    interpret: for `pallas_call`.
  """
  batch, num_queries, heads, width = q.shape
  num_keys, kv_heads, value_width = *k.shape[1:3], v.shape[3]
  if not (batch and num_queries and num_keys):
    o = jnp.zeros((batch, num_queries, heads, value_width), jnp.float32)
    return o, jnp.full(o.shape[:3], _EMPTY, jnp.float32)
  group = heads // kv_heads
  block_q = min(options.block_q, _up(num_queries, 16))
  block_k = min(options.block_k, _up(num_keys, 128))
  padded_q, padded_k = _up(num_queries, block_q), _up(num_keys, block_k)
  tiles_q, tiles_k = padded_q // block_q, padded_k // block_k
  segments = lengths.q_segment is not None

  index = jnp.arange(padded_q, dtype=jnp.int32)[None]
  used = jnp.broadcast_to(index < lengths.q_len[:, None], (batch, padded_q))
  if segments:
    q_segment = _pad(lengths.q_segment, 1, padded_q, -1)
    kv_segment = _pad(lengths.kv_segment, 1, padded_k, -1)
    used &= q_segment >= 0
    v = jnp.where(lengths.kv_segment[:, :, None, None] >= 0, v, 0)
  position = jnp.where(used, index + lengths.q_offset[:, None], _UNUSED)
  first, end = _key_ranges(
    position.reshape(-1, block_q),
    used.reshape(-1, block_q),
    jnp.repeat(lengths.kv_len, tiles_q),
    options,
    block_k,
  )

  q = _pad(q, 1, padded_q).reshape(batch, padded_q, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
  k, v = (_pad(x, 1, padded_k).transpose(0, 2, 1, 3) for x in (k, v))

  def kernel(first, end, kv_len, q_ref, k_ref, v_ref, position_ref, *refs):
    *segment_refs, o_ref, lse_ref, top, total, acc = refs
    row, tile, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    at = row * tiles_q + tile

    @pl.when(j == 0)
    def _():
      top[...] = jnp.full_like(top, _EMPTY)
      total[...] = jnp.zeros_like(total)
      acc[...] = jnp.zeros_like(acc)

    @pl.when((j >= first[at]) & (j < end[at]))
    def _():
      start = j * block_k
      key = start + lax.broadcasted_iota(jnp.int32, (1, block_k), 1)
      seen = _seen(position_ref[0], key, kv_len[row], options)
      if segments:
        seen &= segment_refs[0][0] == segment_refs[1][0]
      seen = jnp.broadcast_to(seen.astype(jnp.int32)[None], (group, block_q, block_k))
      seen = seen.reshape(group * block_q, block_k) != 0
      slot = start + lax.broadcasted_iota(jnp.int32, (block_k, value_width), 0)
      values = jnp.where(slot < kv_len[row], v_ref[0, 0], 0)
      scores = _scores(q_ref[0, 0].reshape(group * block_q, width), k_ref[0, 0])
      top[...], total[...], acc[...] = _add_tile(
        top[...], total[...], acc[...], scores, seen, values, options
      )

    @pl.when(j == tiles_k - 1)
    def _():
      o, lse = _finish(top[...], total[...], acc[...])
      o_ref[0, 0] = o.reshape(group, block_q, value_width)
      lse_ref[0, 0] = lse.reshape(group, block_q, 1)

  def key_tile(row, tile, j, first, end):
    # A tile that is not used is the last used one again: it is not fetched.
    at = row * tiles_q + tile
    return jnp.clip(j, first[at], jnp.maximum(end[at] - 1, first[at]))

  def at_queries(row, head, tile, j, *scalars):
    return row, head, 0, tile, 0

  def at_keys(row, head, tile, j, first, end, kv_len):
    return row, head, jnp.minimum(key_tile(row, tile, j, first, end), tiles_k - 1), 0

  in_specs = [
    pl.BlockSpec((1, 1, group, block_q, width), at_queries),
    pl.BlockSpec((1, 1, block_k, width), at_keys),
    pl.BlockSpec((1, 1, block_k, value_width), at_keys),
    pl.BlockSpec((1, block_q, 1), lambda row, head, tile, j, *scalars: (row, tile, 0)),
  ]
  arrays = [q, k, v, position[..., None]]
  if segments:
    in_specs += [
      pl.BlockSpec((1, block_q, 1), lambda row, head, tile, j, *scalars: (row, tile, 0)),
      pl.BlockSpec(
        (1, 1, block_k),
        lambda row, head, tile, j, *scalars: (row, 0, at_keys(row, head, tile, j, *scalars)[2]),
      ),
    ]
    arrays += [q_segment[..., None], kv_segment[:, None]]
  num_rows = group * block_q
  o, lse = pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct((batch, kv_heads, group, padded_q, size), jnp.float32)
      for size in (value_width, 1)
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(batch, kv_heads, tiles_q, tiles_k),
      in_specs=in_specs,
      out_specs=[
        pl.BlockSpec((1, 1, group, block_q, size), at_queries) for size in (value_width, 1)
      ],
      scratch_shapes=[pltpu.VMEM((num_rows, size), jnp.float32) for size in (1, 1, value_width)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
    ),
    interpret=interpret,
    name="flash_attention",
  )(first, end, lengths.kv_len, *arrays)

  def unfold(x: jax.Array) -> jax.Array:
    x = x.transpose(0, 3, 1, 2, 4).reshape(batch, padded_q, heads, -1)
    return x[:, :num_queries]

  return unfold(o), unfold(lse)[..., 0]


# --- Chunks of queries over pages ----------------------------------------------------------------


def paged(
  q: jax.Array,
  pages: xla.Pages,
  chunks: xla.Chunks,
  options: xla.Options,
  interpret: Any = False,
) -> AttnState:
  """As `xla.paged`: chunks `q [W, n, H, D]` over a paged cache -> state `[W, n, H]`.

  The grid is (chunk). Pages stay in the large memory; those of a tile are copied in while the tile
  before is computed, and pages without a key are not copied.

  Keys that owe a rotation are not turned: with C and S the cosines and sines of a page, and q~ the
  queries with their halves exchanged, (R k) q = (k C) q + (k S) q~. `pages.turn` changes nothing.

  Args:
    q: queries.
    pages: the cache.
    chunks: who they are.
    options: block_k is the number of slots in a tile, a multiple of the page size.
    interpret: for `pallas_call`.
  """
  num_chunks, size, heads, width = q.shape
  num_pages, page_size, kv_heads, _ = pages.k.shape
  value_width, columns = pages.v.shape[3], pages.table.shape[1]
  if not (num_chunks and size and num_pages and columns):
    o = jnp.zeros((num_chunks, size, heads, value_width), jnp.float32)
    return AttnState(o, jnp.full(o.shape[:3], _EMPTY, jnp.float32))
  group = heads // kv_heads
  count = max(options.block_k // page_size, 1)
  slots = count * page_size
  num_rows = _up(group * size, 16)
  moved, kept = pages.delta is not None, pages.kept_len is not None

  first, end = _key_ranges(chunks.position, chunks.used, chunks.kv_len, options, slots)
  end = jnp.minimum(end, -(-columns // count))
  position = jnp.where(chunks.used, chunks.position, _UNUSED)
  position = _pad(jnp.tile(position, (1, group)), 1, num_rows, _UNUSED)[..., None]

  def fold(x: jax.Array) -> jax.Array:
    x = x.reshape(num_chunks, size, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    return _pad(x.reshape(num_chunks, kv_heads, group * size, width), 2, num_rows)

  def by_chunk(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda w, *scalars: (w, *(0 for _ in shape)))

  in_place = pl.BlockSpec(memory_space=pl.ANY)
  scalars = [chunks.row, chunks.kv_len, first, end, pages.table.reshape(-1)]
  if kept:
    scalars.append(pages.kept_len.reshape(-1))
  arrays = [fold(q), position, pages.k, pages.v]
  in_specs = [by_chunk(kv_heads, num_rows, width), by_chunk(num_rows, 1), in_place, in_place]
  buffers = [
    pltpu.VMEM((2, count, page_size, kv_heads, width), pages.k.dtype),
    pltpu.VMEM((2, count, page_size, kv_heads, value_width), pages.v.dtype),
  ]
  if moved:
    entry_turns = _turns(pages.delta.reshape(-1), pages.rope, width)
    slot_turns = _turns(jnp.arange(page_size, dtype=jnp.int32), pages.rope, width)
    arrays += [fold(_exchanged(q, pages.rope)), *(x[:, None] for x in entry_turns), *slot_turns]
    whole = pl.BlockSpec((page_size, width), lambda w, *scalars: (0, 0))
    in_specs += [by_chunk(kv_heads, num_rows, width), in_place, in_place, whole, whole]
    buffers += [pltpu.VMEM((2, count, 1, width), jnp.float32)] * 2

  def kernel(*refs):
    refs = list(refs)
    row_ref, kv_len_ref, first_ref, end_ref, table_ref = refs[:5]
    kept_ref = refs[5] if kept else None
    refs = refs[len(scalars) :]
    inputs, outputs, scratch = refs[: len(arrays)], refs[len(arrays) :][:2], refs[len(arrays) + 2 :]
    q_ref, position_ref = inputs[:2]
    copied = [*inputs[2:4], *(inputs[5:7] if moved else ())]
    *buffer_refs, top, total, acc, semaphores = scratch
    w = pl.program_id(0)
    row, kv_len, first, end = row_ref[w], kv_len_ref[w], first_ref[w], end_ref[w]

    def kept_slots(column):
      return kept_ref[row * columns + column] if kept else page_size

    def copies(tile, side, act):
      """Starts, or waits for, the copies of a tile's pages to one side of the buffers."""

      def one(p, carry):
        column = jnp.minimum(tile * count + p, columns - 1)
        live = (tile * count + p < columns) & (column * page_size < kv_len)
        live &= kept_slots(column) > 0

        @pl.when(live)
        def _():
          page, entry = table_ref[row * columns + column], row * columns + column
          for i, (source, buffer) in enumerate(zip(copied, buffer_refs, strict=True)):
            at = page if i < 2 else entry
            act(pltpu.make_async_copy(source.at[at], buffer.at[side, p], semaphores.at[side, i]))

        return carry

      lax.fori_loop(0, count, one, 0)

    def lengths_of(tile, index, shape):
      """Slots in use of the page of each slot; `index` are slots of the tile."""

      def one(p, found):
        here = kept_slots(jnp.minimum(tile * count + p, columns - 1))
        return jnp.where(lax.div(index, page_size) == p, here, found)

      return lax.fori_loop(0, count, one, jnp.zeros(shape, jnp.int32))

    def live_slots(tile, shape, axis):
      index = lax.broadcasted_iota(jnp.int32, shape, axis)
      live = tile * slots + index < kv_len
      live &= tile * slots + index < columns * page_size
      if kept:
        live &= lax.rem(index, page_size) < lengths_of(tile, index, shape)
      return live

    top[...] = jnp.full_like(top, _EMPTY)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    @pl.when(first < end)
    def _():
      copies(first, 0, lambda copy: copy.start())

    def body(tile, carry):
      side = lax.rem(tile - first, 2)

      @pl.when(tile + 1 < end)
      def _():
        copies(tile + 1, 1 - side, lambda copy: copy.start())

      copies(tile, side, lambda copy: copy.wait())
      key = tile * slots + lax.broadcasted_iota(jnp.int32, (1, slots), 1)
      seen = _seen(position_ref[0], key, kv_len, options) & live_slots(tile, (1, slots), 1)
      live = live_slots(tile, (slots, value_width), 0)
      k_buffer, v_buffer = buffer_refs[:2]
      for head in range(kv_heads):
        k = k_buffer[side, :, :, head].reshape(slots, width)
        v = jnp.where(live, v_buffer[side, :, :, head].reshape(slots, value_width), 0)
        if moved:
          scores = turned_scores(side, q_ref[0, head], inputs[4][0, head], k, *inputs[7:9])
        else:
          scores = _scores(q_ref[0, head], k)
        top[head], total[head], acc[head] = _add_tile(
          top[head], total[head], acc[head], scores, seen, v, options
        )
      return carry

    def turned_scores(side, q, exchanged, k, slot_cos, slot_sin):
      cos, sin = (buffer[side] for buffer in buffer_refs[2:])  # [count, 1, D]
      if pages.raw_keys:
        a, b = slot_cos[...][None], slot_sin[...][None]
        cos, sin = cos * a - sin * b, sin * a + cos * b
      k = k.astype(jnp.float32).reshape(count, page_size, width)
      q, exchanged = q.astype(jnp.float32), exchanged.astype(jnp.float32)
      return _scores(q, (k * cos).reshape(slots, width)) + _scores(
        exchanged, (k * sin).reshape(slots, width)
      )

    lax.fori_loop(first, end, body, 0)
    outputs[0][0], outputs[1][0] = _finish(top[...], total[...], acc[...])

  o, lse = pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct((num_chunks, kv_heads, num_rows, last), jnp.float32)
      for last in (value_width, 1)
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(num_chunks,),
      in_specs=in_specs,
      out_specs=[by_chunk(kv_heads, num_rows, last) for last in (value_width, 1)],
      scratch_shapes=[
        *buffers,
        *(pltpu.VMEM((kv_heads, num_rows, last), jnp.float32) for last in (1, 1, value_width)),
        pltpu.SemaphoreType.DMA((2, len(buffers))),
      ],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
    interpret=interpret,
    name="paged_attention",
  )(*scalars, *arrays)

  def unfold(x: jax.Array) -> jax.Array:
    x = x[:, :, : group * size].reshape(num_chunks, kv_heads, group, size, -1)
    return x.transpose(0, 3, 1, 2, 4).reshape(num_chunks, size, heads, -1)

  return AttnState(unfold(o), unfold(lse)[..., 0])


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  lengths: xla.Lengths,
  options: xla.Options,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """As `flash` for a few queries a row: a dense cache is pages of as many slots as divide it."""
  batch, num_queries = q.shape[:2]
  # A copy, of short caches only: `_choose` lets no other through.
  k, v = (_pad(x, 1, _up(x.shape[1], 8)) for x in (k, v))
  page_size = dense_page(k.shape[1])
  columns = k.shape[1] // page_size
  table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
  k, v = (x.reshape(batch * columns, page_size, *x.shape[2:]) for x in (k, v))
  index = jnp.arange(num_queries, dtype=jnp.int32)[None]
  chunks = xla.Chunks(
    jnp.arange(batch, dtype=jnp.int32),
    index + lengths.q_offset[:, None],
    index < lengths.q_len[:, None],
    lengths.kv_len,
  )
  return tuple(paged(q, xla.Pages(k, v, table), chunks, options, interpret))


def dense_page(capacity: int) -> int:
  """Slots of the pages into which a dense cache is cut: a power of two that divides it."""
  return min(capacity & -capacity, 128)


def _turns(delta: jax.Array, rope: Rope, width: int) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines `[N, D]` of both halves of the keys; 1 and 0 where nothing turns."""
  found = []
  for x, still in zip(rotation(delta, rope, jnp.float32), (1, 0), strict=True):
    found.append(_pad(jnp.concatenate([x, x], axis=1), 1, width, still))
  return found[0], found[1]


def _exchanged(q: jax.Array, rope: Rope) -> jax.Array:
  """q~: the second half of what turns, then less the first; zero where nothing turns."""
  n = len(rope.frequencies)
  return _pad(jnp.concatenate([q[..., n : 2 * n], -q[..., :n]], axis=-1), q.ndim - 1, q.shape[-1])
