"""Blocked attention in plain XLA: what runs everywhere.

An online softmax over blocks of keys; no array of queries x keys is ever made. Blocks behind the
last key that any row can see are not touched. Slots that hold no key are set to zero before they
meet a product, so that what lies in them cannot matter, NaN included.

Names of sizes: B rows, T queries and S key slots of each, H heads, K heads of keys and values,
G = H / K, R = G * block_q rows of a tile, D head size, P slots of a page, M pages of a table row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlib_ext.attention.rope import Rope, apply_rotation, rotation
from jaxlib_ext.attention.state import AttnState


class Options(NamedTuple):
  """What is fixed when compiling.

  Attributes:
    causal: query at position p sees keys up to p.
    window: only the last `window` of them, p included.
    soft_cap: scores become `c * tanh(score / c)`.
    scale: factor of the products q k.
    block_q: queries in a tile.
    block_k: keys in a tile; in pages, at least this many.
  """

  causal: bool = True
  window: int | None = None
  soft_cap: float | None = None
  scale: float = 1.0
  block_q: int = 128
  block_k: int = 256


class Lengths(NamedTuple):
  """Where the queries and keys of each row are, all int32.

  Attributes:
    q_len: `[B]` queries in use.
    kv_len: `[B]` keys in use.
    q_offset: `[B]` position of the first query among the keys.
    q_segment: `[B, T]`, or None; see `flash_attention`.
    kv_segment: `[B, S]`, or None.
  """

  q_len: jax.Array
  kv_len: jax.Array
  q_offset: jax.Array
  q_segment: jax.Array | None = None
  kv_segment: jax.Array | None = None


def wide_dtype(*arrays: jax.Array) -> Any:
  """float32, or float64 where an input has it."""
  return functools.reduce(jnp.promote_types, (x.dtype for x in arrays), jnp.dtype(jnp.float32))


# --- Flash attention -----------------------------------------------------------------------------


def flash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  lengths: Lengths,
  options: Options,
  forward: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> AttnState:
  """`q [B, T, H, D]`, `k [B, S, K, D]`, `v [B, S, K, Dv]` -> state `[B, T, H]`; differentiable.

  `forward` computes o and lse from the other arguments in place of XLA; the derivative is the same.
  """
  return AttnState(*_flash(q, k, v, lengths, options, forward or _flash_forward))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _flash(q, k, v, lengths, options, forward):
  return forward(q, k, v, lengths, options)


def _flash_fwd(q, k, v, lengths, options, forward):
  o, lse = forward(q, k, v, lengths, options)
  return (o, lse), (q, k, v, lengths, o, lse)


def _flash_bwd(options, forward, saved, cotangents):
  q, k, v, lengths, o, lse = saved
  dq, dk, dv = first_order_only(
    functools.partial(_flash_backward, lengths=lengths, options=options),
    "flash_attention has no second derivative; differentiate it once, or use "
    "jax.nn.dot_product_attention where a second derivative is needed.",
  )(q, k, v, o, lse, *cotangents)
  return dq, dk, dv, None


_flash.defvjp(_flash_fwd, _flash_bwd)


def first_order_only(fn: Callable[..., Any], message: str) -> Callable[..., Any]:
  """`fn`, whose derivative raises a NotImplementedError with this message."""
  wrapped = jax.custom_jvp(fn)

  @wrapped.defjvp
  def refuse(primals, tangents):
    raise NotImplementedError(message)

  return wrapped


class _Tile(NamedTuple):
  """One tile of queries of all rows: indices, positions, and which of them are in use."""

  start: jax.Array
  index: jax.Array  # [bq]
  position: jax.Array  # [B, bq]
  used: jax.Array  # [B, bq]
  segment: jax.Array | None  # [B, bq]
  first_key: jax.Array
  last_key: jax.Array


def _query_tile(i: jax.Array, num_queries: int, lengths: Lengths, options: Options) -> _Tile:
  """Tile i; the last one is moved back into the array and its rows of the tile before are unused.

  The forward pass writes those rows twice, so `used` there says whether they are queries at all.
  """
  size = options.block_q
  start = jnp.minimum(i * size, num_queries - size)
  index = start + jnp.arange(size, dtype=jnp.int32)
  position = index[None] + lengths.q_offset[:, None]
  used = index[None] < lengths.q_len[:, None]
  segment = None
  if lengths.q_segment is not None:
    segment = lax.dynamic_slice_in_dim(lengths.q_segment, start, size, 1)
    used &= segment >= 0
  low, high = key_range(position, used, lengths.kv_len, options)
  return _Tile(start, index, position, used, segment, low, high)


def key_range(
  position: jax.Array, used: jax.Array, kv_len: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
  """First and end of the keys that any query in use can see, over all rows."""
  end = kv_len[:, None]
  if options.causal:
    end = jnp.minimum(end, position + 1)
  end = jnp.where(used, jnp.maximum(end, 0), 0)
  high = jnp.max(end, initial=0)
  if options.window is None:
    return jnp.zeros_like(high), high
  first = jnp.maximum(position - options.window + 1, 0)
  return jnp.min(jnp.where(used & (end > first), first, high), initial=0x7FFFFFFF), high


def visible(
  position: jax.Array, used: jax.Array, key: jax.Array, live: jax.Array, options: Options
) -> jax.Array:
  """`[B, bq, bk]`: query sees key. position, used `[B, bq]`; key, live `[B, bk]`."""
  seen = used[:, :, None] & live[:, None]
  if options.causal:
    seen &= key[:, None] <= position[:, :, None]
  if options.window is not None:
    seen &= key[:, None] > position[:, :, None] - options.window
  return seen


def _key_tile(
  j: jax.Array, tile: _Tile, k: jax.Array, v: jax.Array, lengths: Lengths, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Keys and values of tile j with zeros in empty slots, who sees whom, and where it starts."""
  num_keys = k.shape[1]
  size = options.block_k
  start = jnp.minimum(j * size, num_keys - size)
  key = start + jnp.arange(size, dtype=jnp.int32)
  live = (key[None] < lengths.kv_len[:, None]) & (key >= j * size)[None]
  segment = None
  if lengths.kv_segment is not None:
    segment = lax.dynamic_slice_in_dim(lengths.kv_segment, start, size, 1)
    live &= segment >= 0
  wide = wide_dtype(k)
  k, v = (
    jnp.where(live[:, :, None, None], lax.dynamic_slice_in_dim(x, start, size, 1), 0).astype(wide)
    for x in (k, v)
  )
  seen = visible(tile.position, tile.used, jnp.broadcast_to(key[None], live.shape), live, options)
  if segment is not None:
    seen &= tile.segment[:, :, None] == segment[:, None]
  return k, v, seen, start


def _fold(x: jax.Array, num_kv_heads: int) -> jax.Array:
  """`[B, bq, H, D]` -> `[B, K, R, D]`."""
  batch, size, heads, width = x.shape
  x = x.reshape(batch, size, num_kv_heads, heads // num_kv_heads, width)
  return x.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, width)


def _unfold(x: jax.Array, size: int) -> jax.Array:
  """`[B, K, R, D]` -> `[B, bq, H, D]`."""
  batch, kv_heads, rows, width = x.shape
  x = x.reshape(batch, kv_heads, rows // size, size, width).transpose(0, 3, 1, 2, 4)
  return x.reshape(batch, size, -1, width)


def _per_row(seen: jax.Array, rows: int) -> jax.Array:
  """`[B, bq, bk]` -> `[B, 1, R, bk]`: the same for each head of a group."""
  batch, size, keys = seen.shape
  seen = jnp.broadcast_to(seen[:, None], (batch, rows // size, size, keys))
  return seen.reshape(batch, 1, rows, keys)


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
  return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def online_softmax(
  num_rows: tuple[int, int, int],
  value_size: int,
  dtype: Any,
  first: jax.Array,
  end: jax.Array,
  tile: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
  options: Options,
) -> AttnState:
  """Goes through tiles of keys.

  Args:
    num_rows: B, K, R.
    value_size: Dv.
    dtype: of the sums.
    first: first tile.
    end: tile after the last.
    tile: j -> products `[B, K, R, bk]`, values `[B, bk, K, Dv]`, seen `[B, 1, R, bk]`.
    options: scale and soft_cap.

  Returns:
    State of `[B, K, R, Dv]` and `[B, K, R]`.
  """

  def body(j, carry):
    top, total, acc = carry
    scores, values, seen = tile(j)
    scores = _capped(scores * options.scale, options.soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    weight = jnp.exp(scores - shift[..., None])
    shrink = jnp.exp(top - shift)
    total = total * shrink + weight.sum(axis=-1)
    acc = acc * shrink[..., None] + jnp.einsum("bkrs,bskd->bkrd", weight, values)
    return new_top, total, acc

  start = (
    jnp.full(num_rows, -jnp.inf, dtype),
    jnp.zeros(num_rows, dtype),
    jnp.zeros((*num_rows, value_size), dtype),
  )
  top, total, acc = lax.fori_loop(first, end, body, start)
  empty = total == 0
  safe = jnp.where(empty, 1, total)
  o = jnp.where(empty[..., None], 0, acc / safe[..., None])
  return AttnState(o, jnp.where(empty, -jnp.inf, jnp.where(empty, 0, top) + jnp.log(safe)))


def _flash_forward(
  q: jax.Array, k: jax.Array, v: jax.Array, lengths: Lengths, options: Options
) -> tuple[jax.Array, jax.Array]:
  batch, num_queries, heads, _ = q.shape
  kv_heads, value_size = k.shape[2], v.shape[3]
  wide = wide_dtype(q, k, v)
  o = jnp.zeros((batch, num_queries, heads, value_size), wide)
  lse = jnp.full((batch, num_queries, heads), -jnp.inf, wide)
  if not o.size or not k.shape[1]:
    return o, lse
  options = _fit(options, num_queries, k.shape[1])
  size = options.block_q

  def body(i, carry):
    o, lse = carry
    tile = _query_tile(i, num_queries, lengths, options)
    rows = lax.dynamic_slice_in_dim(q, tile.start, size, 1).astype(wide)
    rows = _fold(rows, kv_heads)

    def keys(j):
      k_tile, v_tile, seen, _ = _key_tile(j, tile, k, v, lengths, options)
      products = jnp.einsum("bkrd,bskd->bkrs", rows, k_tile)
      return products, v_tile, _per_row(seen, rows.shape[2])

    state = online_softmax(
      rows.shape[:3],
      value_size,
      wide,
      tile.first_key // options.block_k,
      _ceil(tile.last_key, options.block_k),
      keys,
      options,
    )
    o = lax.dynamic_update_slice_in_dim(o, _unfold(state.o, size), tile.start, 1)
    found = _unfold(state.lse[..., None], size)[..., 0]
    return o, lax.dynamic_update_slice_in_dim(lse, found, tile.start, 1)

  num_tiles = _ceil(num_queries, size)
  if num_tiles == 1:
    return body(jnp.int32(0), (o, lse))
  # Tiles in which no row has a query stay zero and -inf.
  used_tiles = _ceil(jnp.minimum(lengths.q_len.max(), num_queries), size)
  return lax.fori_loop(0, used_tiles, body, (o, lse))


def _flash_backward(q, k, v, o, lse, do, dlse, *, lengths, options):
  """Gradients from saved o and lse, tile by tile: scores are computed again."""
  num_queries, kv_heads = q.shape[1], k.shape[2]
  wide = wide_dtype(q, k, v)
  if not q.size or not k.size or not v.size:
    return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
  options = _fit(options, num_queries, k.shape[1])
  size = options.block_q

  def body(i, carry):
    tile = _query_tile(i, num_queries, lengths, options)
    tile = tile._replace(used=tile.used & (tile.index >= i * size)[None])

    def rows_of(x):
      return lax.dynamic_slice_in_dim(x, tile.start, size, 1).astype(wide)

    # Rows without keys take no part, whatever is in them.
    lse_rows = rows_of(lse)
    empty = (lse_rows == -jnp.inf)[..., None]
    q_rows = _fold(jnp.where(empty, 0, rows_of(q)), kv_heads)
    do_rows = jnp.where(empty, 0, rows_of(do))
    delta = jnp.sum(rows_of(o) * do_rows, axis=-1) - jnp.where(empty[..., 0], 0, rows_of(dlse))
    do_rows = _fold(do_rows, kv_heads)
    delta = _fold(delta[..., None], kv_heads)
    lse_rows = _fold(jnp.where(empty, 0, lse_rows[..., None]), kv_heads)

    def keys(j, carry):
      dq, dk, dv = carry
      k_tile, v_tile, seen, start = _key_tile(j, tile, k, v, lengths, options)
      scores = jnp.einsum("bkrd,bskd->bkrs", q_rows, k_tile) * options.scale
      scores = _capped(scores, options.soft_cap)
      seen = _per_row(seen, q_rows.shape[2])
      weight = jnp.exp(jnp.where(seen, scores - lse_rows, -jnp.inf))
      ds = weight * (jnp.einsum("bkrd,bskd->bkrs", do_rows, v_tile) - delta)
      if options.soft_cap is not None:
        ds = ds * (1 - jnp.square(scores / options.soft_cap))
      ds = ds * options.scale
      dq = dq + jnp.einsum("bkrs,bskd->bkrd", ds, k_tile)
      dk = _add(dk, jnp.einsum("bkrs,bkrd->bskd", ds, q_rows), start)
      dv = _add(dv, jnp.einsum("bkrs,bkrd->bskd", weight, do_rows), start)
      return dq, dk, dv

    dq, dk, dv = carry
    first = tile.first_key // options.block_k
    end = _ceil(tile.last_key, options.block_k)
    found, dk, dv = lax.fori_loop(first, end, keys, (jnp.zeros_like(q_rows), dk, dv))
    return _add(dq, _unfold(found, size), tile.start), dk, dv

  start = tuple(jnp.zeros(x.shape, wide) for x in (q, k, v))
  used_tiles = _ceil(jnp.minimum(lengths.q_len.max(), num_queries), size)
  dq, dk, dv = lax.fori_loop(0, used_tiles, body, start)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _add(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
  """`x[:, start:start+n] += part`."""
  old = lax.dynamic_slice_in_dim(x, start, part.shape[1], 1)
  return lax.dynamic_update_slice_in_dim(x, old + part, start, 1)


def _ceil(x: Any, by: int) -> Any:
  return (x + by - 1) // by


def _fit(options: Options, num_queries: int, num_keys: int) -> Options:
  """Tiles no larger than the arrays."""
  return options._replace(
    block_q=min(options.block_q, num_queries), block_k=min(options.block_k, num_keys)
  )


# --- Paged attention -----------------------------------------------------------------------------


class Pages(NamedTuple):
  """A paged cache as seen by chunks of queries; W chunks, each of one row of the table.

  Attributes:
    k: `[pages, P, K, D]`.
    v: `[pages, P, K, Dv]`.
    table: `[rows, M]` int32.
    kept_len: `[rows, M]` int32 slots in use of each page, or None for all up to the row's length.
    delta: `[rows, M]` int32 positions that the keys of each page have yet to be turned by, or None.
    rope: static, with delta.
    raw_keys: static; keys are not rotated at all, and slot i owes delta + i.
    turn: static; "query" turns a copy of the queries back for each page, "key" turns keys.
  """

  k: jax.Array
  v: jax.Array
  table: jax.Array
  kept_len: jax.Array | None = None
  delta: jax.Array | None = None
  rope: Rope | None = None
  raw_keys: bool = False
  turn: str = "query"


class Chunks(NamedTuple):
  """Chunks of queries, each of one sequence.

  Attributes:
    row: `[W]` int32 row of the page table.
    position: `[W, n]` int32 slot of each query in its sequence.
    used: `[W, n]` bool.
    kv_len: `[W]` int32.
  """

  row: jax.Array
  position: jax.Array
  used: jax.Array
  kv_len: jax.Array


def paged(q: jax.Array, pages: Pages, chunks: Chunks, options: Options, group: int) -> AttnState:
  """Chunks `q [W, n, H, D]` over a paged cache -> state `[W, n, H]`.

  Args:
    q: queries.
    pages: the cache.
    chunks: who they are; chunks without a query come last.
    options: block_k is the least number of slots in a tile.
    group: chunks that go through their tiles together, as long as the longest needs.
  """
  num_chunks, size, heads, _ = q.shape
  wide = wide_dtype(q, pages.k, pages.v)
  o = jnp.zeros((num_chunks, size, heads, pages.v.shape[3]), wide)
  lse = jnp.full((num_chunks, size, heads), -jnp.inf, wide)
  if not o.size or not pages.k.size or not pages.table.size:
    return AttnState(o, lse)
  group = min(group, num_chunks)

  def body(i, carry):
    start = jnp.minimum(i * group, num_chunks - group)
    part_q, part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, group, 0), (q, chunks))
    found = _paged_group(part_q.astype(wide), pages, part, options)
    return tuple(
      lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(carry, found, strict=True)
    )

  if num_chunks == group:
    return AttnState(*body(jnp.int32(0), (o, lse)))
  in_use = jnp.max(
    jnp.where(chunks.used.any(axis=1), jnp.arange(1, num_chunks + 1, dtype=jnp.int32), 0)
  )
  return AttnState(*lax.fori_loop(0, _ceil(in_use, group), body, (o, lse)))


def _paged_group(q: jax.Array, pages: Pages, chunks: Chunks, options: Options) -> AttnState:
  size = q.shape[1]
  wide = q.dtype
  _, page_size, kv_heads, _ = pages.k.shape
  width = pages.table.shape[1]
  count = min(max(options.block_k // page_size, 1), width)
  table = pages.table[chunks.row]
  kept_len = None if pages.kept_len is None else pages.kept_len[chunks.row]
  delta = None if pages.delta is None else pages.delta[chunks.row]
  first, end = key_range(chunks.position, chunks.used, chunks.kv_len, options)
  rows = _fold(q, kv_heads)
  slot = jnp.arange(page_size, dtype=jnp.int32)
  slot_rotation = rotation(slot, pages.rope, wide) if pages.raw_keys else None

  def tile(j):
    start = jnp.minimum(j * count, width - count)
    column = start + jnp.arange(count, dtype=jnp.int32)
    key = column[:, None] * page_size + slot[None]  # [p, P]
    live = (key[None] < chunks.kv_len[:, None, None]) & (column >= j * count)[None, :, None]
    if kept_len is not None:
      kept = lax.dynamic_slice_in_dim(kept_len, start, count, 1)
      live &= slot[None, None] < kept[:, :, None]
    # Entries of the table behind the last key may be anything.
    page = lax.dynamic_slice_in_dim(table, start, count, 1)
    page = jnp.where(live.any(axis=2), page, 0)
    k, v = (jnp.where(live[..., None, None], x[page], 0).astype(wide) for x in (pages.k, pages.v))
    if pages.raw_keys:
      k = apply_rotation(k, *(x[None, None, :, None] for x in slot_rotation))

    def flat(x):  # [W, p, P, ...] -> [W, p * P, ...]
      return x.reshape(x.shape[0], count * page_size, *x.shape[3:])

    if delta is None:
      products = jnp.einsum("wkrd,wskd->wkrs", rows, flat(k))
    else:
      owed = lax.dynamic_slice_in_dim(delta, start, count, 1)
      owed = jnp.where(live.any(axis=2), owed, 0)
      cos, sin = (x[:, :, None, None] for x in rotation(owed, pages.rope, wide))
      if pages.turn == "key":
        products = jnp.einsum("wkrd,wskd->wkrs", rows, flat(apply_rotation(k, cos, sin)))
      else:

        def turned(k):
          # (R(delta) k) . q = k . (R(-delta) q)
          copies = apply_rotation(rows[:, None], cos, -sin)
          found = jnp.einsum("wpkrd,wpskd->wkrps", copies, k)
          return found.reshape(*found.shape[:3], count * page_size)

        def as_they_are(k):
          return jnp.einsum("wkrd,wskd->wkrs", rows, flat(k))

        products = lax.cond(jnp.any(owed != 0), turned, as_they_are, k)
    seen = visible(
      chunks.position,
      chunks.used,
      jnp.broadcast_to(key.reshape(1, -1), (q.shape[0], count * page_size)),
      flat(live),
      options,
    )
    return products, flat(v), _per_row(seen, rows.shape[2])

  slots = count * page_size
  first_tile, end_tile = first // slots, jnp.minimum(_ceil(end, slots), _ceil(width, count))
  state = online_softmax(
    rows.shape[:3], pages.v.shape[3], wide, first_tile, end_tile, tile, options
  )
  return AttnState(_unfold(state.o, size), _unfold(state.lse[..., None], size)[..., 0])


def split_into_chunks(
  kv_len: jax.Array, cu_q_len: jax.Array, num_seqs: jax.Array, num_tokens: int, size: int
) -> tuple[Chunks, jax.Array]:
  """Chunks of at most `size` packed queries, none with two sequences.

  Args:
    kv_len: `[rows]` int32.
    cu_q_len: `[rows + 1]` int32 start of each sequence among the packed queries.
    num_seqs: sequences in use.
    num_tokens: N packed queries.
    size: of a chunk.

  Returns:
    The chunks, and `[W, size]` int32 index of each of their queries, N where there is none.
  """
  num_rows = kv_len.shape[0]
  in_use = jnp.arange(num_rows, dtype=jnp.int32) < num_seqs
  q_len = jnp.where(in_use, cu_q_len[1:] - cu_q_len[:-1], 0)
  counts = _ceil(q_len, size)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  num_chunks = max(min(num_tokens, num_tokens // size + num_rows), 1)
  chunk = jnp.arange(num_chunks, dtype=jnp.int32)
  row = jnp.searchsorted(ends, chunk, side="right").astype(jnp.int32)
  row = jnp.minimum(row, num_rows - 1)
  index = (chunk - (ends - counts)[row])[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
  used = (index < q_len[row][:, None]) & (chunk < ends[-1])[:, None]
  position = index + (kv_len - q_len)[row][:, None]
  token = jnp.where(used, index + cu_q_len[:-1][row][:, None], num_tokens)
  return Chunks(row, position, used, kv_len[row]), token


def update_pages(
  k_pages: jax.Array,
  v_pages: jax.Array,
  new_k: jax.Array,
  new_v: jax.Array,
  slot_mapping: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Puts new keys and values into slots of pages; a slot below zero or beyond the last is none."""

  def put(pages, new):
    slots = pages.reshape(-1, *pages.shape[2:])
    # An index below zero would count from the end.
    at = jnp.where(slot_mapping < 0, slots.shape[0], slot_mapping)
    return slots.at[at].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)

  return put(k_pages, new_k), put(v_pages, new_v)
