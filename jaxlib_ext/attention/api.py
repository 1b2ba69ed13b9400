"""The operations, their checks, and the choice of how they are computed.

All of them: H query heads over K heads of keys and values, H a multiple of K, head h uses K-head
h // (H / K). Scores are `scale * q k`, `scale = D ** -0.5` unless given, sums are float32 or wider.
A query without keys gives zero and lse = -inf. Slots behind a length are never read: NaN there
changes nothing. Lengths, tables, offsets and deltas are traced, so new values do not compile again.

`implementation`:
  None           Pallas where the platform and the shapes have a kernel, else XLA; `explain` tells
  "xla"          blocked XLA, anywhere
  "pallas_tpu"   the Pallas TPU kernel, or an error; there is no silent change to another
  "pallas_gpu"   an error: there is no kernel for GPUs here, XLA serves them
  "interpret"    the Pallas TPU kernel in the interpreter: slow, for tests

With `return_lse=True` an operation returns `AttnState(o, lse)` in float32 or wider, which `merge`
joins with the states of other keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jaxlib_ext.attention import blocks, tpu, xla
from jaxlib_ext.attention.rope import MAX_DELTA, Rope
from jaxlib_ext.attention.state import AttnState, finalize, merge

IMPLEMENTATIONS = (None, "xla", "pallas_tpu", "pallas_gpu", "interpret")


# --- Operations ----------------------------------------------------------------------------------


def flash_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_len: jax.Array | None = None,
  kv_len: jax.Array | None = None,
  *,
  causal: bool = True,
  q_offset: jax.Array | None = None,
  q_segment: jax.Array | None = None,
  kv_segment: jax.Array | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | AttnState:
  """Attention of many queries over dense keys; differentiable once, through lse too.

  Args:
    q: `[B, T, H, D]`.
    k: `[B, S, K, D]`.
    v: `[B, S, K, Dv]`.
    q_len: `[B]` int32 queries in use; all when None. The others give zero.
    kv_len: `[B]` int32 keys in use; all when None.
    causal: query t sees key s only if s <= t + q_offset.
    q_offset: `[B]` int32 slot of the first query among the keys; `kv_len - q_len` when None, so
      that the last query sees the last key.
    q_segment: `[B, T]` int32; a query sees keys of its own segment only. Below zero is padding,
      which sees nothing and is not seen.
    kv_segment: `[B, S]` int32, with q_segment.
    window: a query at slot p sees slots p - window + 1 .. p (from there on when not causal).
    soft_cap: c, scores become `c * tanh(score / c)`.
    scale: of the scores.
    return_lse: return an `AttnState`.
    implementation: see the module.

  Returns:
    `[B, T, H, Dv]` in the type of q, or the state.

  Raises:
    ValueError: shapes, types or values that do not go together, or an implementation that is not
      available for them. The message names the argument.
    NotImplementedError: a second derivative.
  """
  _check_heads(q, k, v, "BTHD", "BSKD")
  batch, num_queries = q.shape[:2]
  options = _options(q, causal, window, soft_cap, scale)
  q_len = _lengths("q_len", q_len, batch, num_queries)
  kv_len = _lengths("kv_len", kv_len, batch, k.shape[1])
  if q_offset is None:
    q_offset = kv_len - q_len
  else:
    _check_int32("q_offset", q_offset, (batch,))
  if (q_segment is None) != (kv_segment is None):
    given, missing = ("q_segment", "kv_segment")[:: 1 if kv_segment is None else -1]
    raise ValueError(f"{given} is given and {missing} is not; give both or neither.")
  if q_segment is not None:
    _check_int32("q_segment", q_segment, (batch, num_queries))
    _check_int32("kv_segment", kv_segment, k.shape[:2])
  lengths = xla.Lengths(q_len, kv_len, q_offset, q_segment, kv_segment)
  choice = _choose("flash_attention", {"q": q, "k": k, "v": v}, implementation)
  return _out(_dense(choice, q, k, v, lengths, options), q, return_lse)


def decode_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  kv_len: jax.Array,
  *,
  page_table: jax.Array | None = None,
  causal: bool = True,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | AttnState:
  """Attention of the last few tokens over a cache that already holds them.

  Query j of row b is at slot `kv_len[b] - Nq + j`. Made for Nq of 1 to 8; more work too. Time goes
  with the longest row of the batch, not with the capacity. Over a dense cache it has the derivative
  of `flash_attention`, over pages none.

  Args:
    q: `[B, Nq, H, D]`.
    k: `[B, S, K, D]`, or pages `[pages, P, K, D]` with a page table.
    v: like k, `Dv` wide.
    kv_len: `[B]` int32.
    page_table: `[B, M]` int32 pages of each row in order; entries behind the last page in use may
      be anything.
    causal: False lets every query see all kv_len keys.
    window: see `flash_attention`, as are all that follow.
    soft_cap: likewise.
    scale: likewise.
    return_lse: likewise.
    implementation: likewise.

  Returns:
    `[B, Nq, H, Dv]` in the type of q, or the state.

  Raises:
    ValueError: as `flash_attention`; also a table that is too narrow, or names pages that are not
      there, where its values are known. Under `checkify` it is checked when it runs.
  """
  paged = page_table is not None
  _check_heads(q, k, v, "BTHD", "NPKD" if paged else "BSKD", same_batch=not paged)
  batch = q.shape[0]
  options = _options(q, causal, window, soft_cap, scale)
  arrays = {"q": q, "k": k, "v": v}
  if not paged:
    kv_len = _lengths("kv_len", kv_len, batch, k.shape[1])
    choice = _choose("decode_attention", arrays, implementation)
    q_len = jnp.full_like(kv_len, q.shape[1])
    lengths = xla.Lengths(q_len, kv_len, kv_len - q_len)
    return _out(_dense(choice, q, k, v, lengths, options), q, return_lse)
  _check_int32("kv_len", kv_len, (batch,))
  _check_table(page_table, kv_len, batch, k)
  choice = _choose("decode_attention", arrays | {"page_table": page_table}, implementation)
  state = _paged_decode(choice, q, k, v, page_table, kv_len, options)
  return _out(state, q, return_lse)


def ragged_paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  kv_len: jax.Array,
  cu_q_len: jax.Array,
  num_seqs: jax.Array | int | None = None,
  *,
  causal: bool = True,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  chunk_size: int | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | AttnState:
  """Attention of packed queries of many sequences over pages: prefill and decode in one batch.

  Query j of sequence r, packed at `cu_q_len[r] + j`, is at slot `kv_len[r] - q_len[r] + j`, where
  `q_len[r] = cu_q_len[r + 1] - cu_q_len[r]`. Its keys are in the pages already. No derivative.

  Args:
    q: `[N, H, D]`; queries of no sequence give zero.
    k_pages: `[pages, P, K, D]`.
    v_pages: `[pages, P, K, Dv]`.
    page_table: `[R, M]` int32, see `decode_attention`.
    kv_len: `[R]` int32 keys of each sequence, the new ones included.
    cu_q_len: `[R + 1]` int32, from 0 on, not falling up to num_seqs.
    num_seqs: sequences in use, the first of the R; all when None.
    causal: see `flash_attention`.
    window: likewise.
    soft_cap: likewise.
    scale: likewise.
    chunk_size: static; queries of a sequence that are computed together. From N / R when None.
    return_lse: as `flash_attention`.
    implementation: see the module.

  Returns:
    `[N, H, Dv]` in the type of q, or the state.

  Raises:
    ValueError: as `decode_attention`; also a falling cu_q_len, or one beyond N, where it is known.
  """
  options = _options(q, causal, window, soft_cap, scale)
  state = _ragged(
    "ragged_paged_attention",
    q,
    xla.Pages(k_pages, v_pages, page_table),
    (kv_len, cu_q_len, num_seqs),
    options,
    chunk_size,
    implementation,
  )
  return _out(state, q, return_lse)


def packet_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  page_delta: jax.Array,
  kv_len: jax.Array,
  cu_q_len: jax.Array,
  num_seqs: jax.Array | int | None = None,
  *,
  rope: Rope | None = None,
  kept_len: jax.Array | None = None,
  raw_keys: bool = False,
  turn: str | None = None,
  causal: bool = True,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  chunk_size: int | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | AttnState:
  """`ragged_paged_attention` over pages that moved: each owes its keys a rotation.

  Keys were stored with the positions of the place where they were computed. A page used elsewhere
  owes them `page_delta` more positions, and R(p + delta) = R(delta) R(p). Nothing is written: the
  rotation happens on the way. One page may be in many tables, with another delta in each.

  Args:
    q: `[N, H, D]`, rotated to their final positions.
    k_pages: `[pages, P, K, D]`.
    v_pages: `[pages, P, K, Dv]`; values have no position.
    page_table: `[R, M]` int32.
    page_delta: `[R, M]` int32 positions owed, within +-524,287. With raw_keys the position of slot
      0 of the page.
    kv_len: `[R]` int32 slots of each sequence, those not in use inside its pages included.
    cu_q_len: `[R + 1]` int32.
    num_seqs: as `ragged_paged_attention`.
    rope: the rotary embedding of the model, with its scaled frequencies.
    kept_len: `[R, M]` int32 slots in use of each page, from its first on: packets start on a page
      of their own, so their last page may have room. All up to kv_len when None.
    raw_keys: keys are stored without rotation.
    turn: static; "query" turns a copy of the queries back for each page, "key" turns the keys; the
      results agree to rounding. The cheaper one for the chunk size when None.
    causal: by slots; see `flash_attention`.
    window: in slots, those not in use included.
    soft_cap: see `flash_attention`.
    scale: likewise.
    chunk_size: as `ragged_paged_attention`.
    return_lse: as `flash_attention`.
    implementation: see the module.

  Returns:
    `[N, H, Dv]` in the type of q, or the state.

  Raises:
    ValueError: as `ragged_paged_attention`; also no rope, or one too wide for the heads.
  """
  options = _options(q, causal, window, soft_cap, scale)
  if rope is None:
    raise ValueError("page_delta is given without rope; give the rotary embedding of the model.")
  if 2 * len(rope.frequencies) > k_pages.shape[-1]:
    raise ValueError(
      f"rope has {len(rope.frequencies)} frequencies, k_pages a head size of {k_pages.shape[-1]}; "
      "expected at most half as many frequencies."
    )
  if turn not in (None, "query", "key"):
    raise ValueError(f"turn is {turn!r}; expected 'query', 'key' or None")
  _check_int32("page_delta", page_delta, page_table.shape)
  if kept_len is not None:
    _check_int32("kept_len", kept_len, page_table.shape)
  known = _known(page_delta)
  if known is not None and known.size and np.abs(known.astype(np.int64)).max() > MAX_DELTA:
    raise ValueError(f"page_delta has {known.flat[np.abs(known).argmax()]}; limit {MAX_DELTA}")
  pages = xla.Pages(
    k_pages, v_pages, page_table, kept_len, page_delta, rope, raw_keys, turn or "auto"
  )
  state = _ragged(
    "packet_attention",
    q,
    pages,
    (kv_len, cu_q_len, num_seqs),
    options,
    chunk_size,
    implementation,
  )
  return _out(state, q, return_lse)


def shared_prefix_attention(
  q: jax.Array,
  prefix_k: jax.Array,
  prefix_v: jax.Array,
  prefix_len: jax.Array,
  suffix_k: jax.Array,
  suffix_v: jax.Array,
  suffix_len: jax.Array,
  *,
  prefix_table: jax.Array | None = None,
  suffix_table: jax.Array | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | AttnState:
  """Decode of C candidates that share a prefix, which is read once for all of them.

  Queries of all candidates meet the prefix in one product, each candidate then its own suffix, and
  the two states merge: L + C * suffix slots are read in place of C * (L + suffix). Deeper trees are
  the same again: merge the state of this with that of `decode_attention(..., causal=False)` over
  the prefix above.

  Args:
    q: `[R, C, Nq, H, D]` the last tokens of each candidate, at the end of its suffix.
    prefix_k: `[R, L, K, D]`, or pages with prefix_table.
    prefix_v: alike.
    prefix_len: `[R]` int32.
    suffix_k: `[R, C, S, K, D]` with the keys of q in it, or pages with suffix_table.
    suffix_v: alike.
    suffix_len: `[R, C]` int32.
    prefix_table: `[R, M]` int32.
    suffix_table: `[R, C, M]` int32.
    soft_cap: see `flash_attention`.
    scale: likewise.
    return_lse: likewise.
    implementation: likewise.

  Returns:
    `[R, C, Nq, H, Dv]` in the type of q, or the state.

  Raises:
    ValueError: as `decode_attention`.
  """
  if q.ndim != 5:
    raise ValueError(f"q is {q.shape}; expected [R, C, Nq, H, D]")
  rows, candidates, num_queries, heads, width = q.shape
  _check_int32("suffix_len", suffix_len, (rows, candidates))
  common = {
    "soft_cap": soft_cap,
    "scale": scale,
    "return_lse": True,
    "implementation": implementation,
  }
  above = decode_attention(
    q.reshape(rows, candidates * num_queries, heads, width),
    prefix_k,
    prefix_v,
    prefix_len,
    page_table=prefix_table,
    causal=False,
    **common,
  )
  flat = rows * candidates
  if suffix_table is None:
    if suffix_k.ndim != 5 or suffix_k.shape[:2] != (rows, candidates):
      raise ValueError(f"suffix_k is {suffix_k.shape}; expected [{rows}, {candidates}, S, K, D]")
    if suffix_v.ndim != 5 or suffix_v.shape[:2] != (rows, candidates):
      raise ValueError(f"suffix_v is {suffix_v.shape}; expected [{rows}, {candidates}, S, K, Dv]")
    suffix_k, suffix_v = (x.reshape(flat, *x.shape[2:]) for x in (suffix_k, suffix_v))
  else:
    if suffix_table.ndim != 3 or suffix_table.shape[:2] != (rows, candidates):
      raise ValueError(f"suffix_table is {suffix_table.shape}; expected [{rows}, {candidates}, M]")
    suffix_table = suffix_table.reshape(flat, -1)
  own = decode_attention(
    q.reshape(flat, num_queries, heads, width),
    suffix_k,
    suffix_v,
    suffix_len.reshape(flat),
    page_table=suffix_table,
    **common,
  )
  shape = (rows, candidates, num_queries, heads)
  above, own = (AttnState(o.reshape(*shape, -1), lse.reshape(shape)) for o, lse in (above, own))
  return _out(merge(above, own), q, return_lse)


def verify_attention(
  q: jax.Array,
  prefix_k: jax.Array,
  prefix_v: jax.Array,
  prefix_len: jax.Array,
  own_k: jax.Array,
  own_v: jax.Array,
  *,
  suffix_k: jax.Array | None = None,
  suffix_v: jax.Array | None = None,
  suffix_len: jax.Array | None = None,
  prefix_table: jax.Array | None = None,
  suffix_table: jax.Array | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | AttnState:
  """Tokens that look at a cache without being written to it: the verify tokens of a reward model.

  Verify token i of a candidate sees the whole prefix, the candidate's whole suffix if there is one,
  and the candidate's verify tokens 0 .. i.

  Args:
    q: `[R, C, Nq, H, D]`.
    prefix_k: as `shared_prefix_attention`.
    prefix_v: likewise.
    prefix_len: likewise.
    own_k: `[R, C, Nq, K, D]` keys of the verify tokens themselves.
    own_v: `[R, C, Nq, K, Dv]`.
    suffix_k: what each candidate has behind the prefix, in a cache; or None for nothing.
    suffix_v: likewise.
    suffix_len: `[R, C]` int32, with suffix_k.
    prefix_table: as `shared_prefix_attention`.
    suffix_table: likewise.
    soft_cap: see `flash_attention`.
    scale: likewise.
    return_lse: likewise.
    implementation: likewise.

  Returns:
    `[R, C, Nq, H, Dv]` in the type of q, or the state.

  Raises:
    ValueError: as `shared_prefix_attention`; also own_k that has not one key a query, or a suffix
      of which parts are missing.
  """
  if q.ndim != 5 or own_k.shape[:3] != q.shape[:3]:
    raise ValueError(f"q is {q.shape}, own_k is {own_k.shape}; expected [R, C, Nq, ...] of both")
  missing = [x is None for x in (suffix_k, suffix_v, suffix_len)]
  if any(missing) != all(missing):
    raise ValueError("give all of suffix_k, suffix_v and suffix_len, or none of them.")
  rows, candidates, num_queries = q.shape[:3]
  common = {"soft_cap": soft_cap, "scale": scale, "implementation": implementation}
  own_len = jnp.full((rows, candidates), num_queries, jnp.int32)
  state = shared_prefix_attention(
    q,
    prefix_k,
    prefix_v,
    prefix_len,
    own_k,
    own_v,
    own_len,
    prefix_table=prefix_table,
    return_lse=True,
    **common,
  )
  if suffix_k is not None:
    flat = rows * candidates
    _check_int32("suffix_len", suffix_len, (rows, candidates))
    if suffix_table is None:
      suffix_k, suffix_v = (x.reshape(flat, *x.shape[2:]) for x in (suffix_k, suffix_v))
    else:
      suffix_table = suffix_table.reshape(flat, -1)
    o, lse = decode_attention(
      q.reshape(flat, *q.shape[2:]),
      suffix_k,
      suffix_v,
      suffix_len.reshape(flat),
      page_table=suffix_table,
      causal=False,
      return_lse=True,
      **common,
    )
    state = merge(state, AttnState(o.reshape(state.o.shape), lse.reshape(state.lse.shape)))
  return _out(state, q, return_lse)


def update_kv_pages(
  k_pages: jax.Array,
  v_pages: jax.Array,
  new_k: jax.Array,
  new_v: jax.Array,
  slot_mapping: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Writes new keys and values into slots of pages, in place.

  The pages are donated: called outside of a jitted function, the arrays that were given are gone.

  Args:
    k_pages: `[pages, P, K, D]`.
    v_pages: `[pages, P, K, Dv]`.
    new_k: `[N, K, D]`.
    new_v: `[N, K, Dv]`.
    slot_mapping: `[N]` int32, `page * P + slot`; a token with a negative one is not written.

  Returns:
    The pages with the new tokens.

  Raises:
    ValueError: shapes or types that do not go together.
  """
  _check_int32("slot_mapping", slot_mapping, (new_k.shape[0],))
  for name, pages, new in (("k", k_pages, new_k), ("v", v_pages, new_v)):
    if pages.ndim != 4 or new.shape != (new_k.shape[0], *pages.shape[2:]):
      raise ValueError(
        f"{name}_pages is {pages.shape}, new_{name} is {new.shape}; expected [pages, P, K, D] and "
        "[N, K, D] with the same K and D"
      )
  if k_pages.shape[:3] != v_pages.shape[:3]:
    raise ValueError(f"k_pages is {k_pages.shape}, v_pages is {v_pages.shape}; they do not match")
  return _update(k_pages, v_pages, new_k, new_v, slot_mapping)


# --- Choice --------------------------------------------------------------------------------------


class ChoiceKey(NamedTuple):
  """What of a choice a compiled function depends on, the tiles apart."""

  op: str
  implementation: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """How an operation is computed, and why.

  Attributes:
    op: the operation.
    implementation: "xla", "pallas_tpu" or "interpret".
    reason: in words.
    blocks: sizes of the tiles.
    vmem_bytes: estimate of on-chip memory, of Pallas TPU kernels only.
  """

  op: str
  implementation: str
  reason: str
  blocks: Mapping[str, int]
  vmem_bytes: int | None = None

  @property
  def key(self) -> ChoiceKey:
    return ChoiceKey(self.op, self.implementation)


def explain(
  op: str,
  shapes: Mapping[str, Any],
  *,
  dtype: Any = jnp.float32,
  implementation: str | None = None,
  platform: str | None = None,
) -> Choice:
  """What an operation would use for these shapes.

  Args:
    op: its name, such as "flash_attention".
    shapes: shape, or anything with shape and dtype, of its arrays: "q", "k", "v", and "page_table"
      where there is one. `k_pages` and `v_pages` count as k and v.
    dtype: of shapes that have none.
    implementation: as the operation takes it.
    platform: "cpu", "gpu" or "tpu"; that of the default device when None.

  Returns:
    The choice.

  Raises:
    ValueError: an unknown operation, arrays missing, or an explicit implementation that cannot.
  """
  if op not in blocks.OPERATIONS:
    raise ValueError(f"op is {op!r}; expected one of {', '.join(blocks.OPERATIONS)}")
  arrays = {}
  for name, value in shapes.items():
    if not hasattr(value, "dtype"):
      value = jax.ShapeDtypeStruct(tuple(value), dtype)
    arrays[name.removesuffix("_pages")] = value
  if missing := {"q", "k", "v"} - arrays.keys():
    raise ValueError(f"shapes has no {', '.join(sorted(missing))}; expected q, k and v")
  return _choose(op, arrays, implementation, platform)


def _choose(
  op: str,
  arrays: Mapping[str, Any],
  implementation: str | None,
  platform: str | None = None,
  chunk_size: int | None = None,
) -> Choice:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation is {implementation!r}; expected one of "
      f"{', '.join(map(repr, IMPLEMENTATIONS))}"
    )
  num_queries = chunk_size or _queries_at_once(op, arrays)
  tiles = blocks.xla_blocks(num_queries)
  sizes = {"block_q": tiles[0], "block_k": tiles[1]}
  if implementation == "xla":
    return Choice(op, "xla", "asked for", sizes)
  if implementation == "pallas_gpu":
    raise NotImplementedError(
      f"{op} has no Pallas kernel for GPUs; give implementation='xla' or None, which serve them."
    )
  if implementation is None:
    platform = platform or jax.default_backend()
    if platform != "tpu":
      return Choice(op, "xla", f"there is no kernel for {platform}", sizes)
    if spread := _spread():
      return Choice(op, "xla", spread, sizes)
  elif platform not in (None, "tpu") and implementation == "pallas_tpu":
    raise ValueError(f"implementation is 'pallas_tpu' on {platform}; expected a TPU, or 'xla'")
  reason, found, vmem = _tpu_tiles(op, arrays, num_queries)
  if reason is None:
    why = "asked for" if implementation else "a TPU, and shapes that the kernel takes"
    return Choice(op, implementation or "pallas_tpu", why, found, vmem)
  if implementation is None:
    return Choice(op, "xla", reason, sizes)
  raise ValueError(f"implementation is {implementation!r}, and {op} cannot: {reason}.")


def _queries_at_once(op: str, arrays: Mapping[str, Any]) -> int:
  """Queries of a row, or of a chunk, that go through the keys together."""
  shape = arrays["q"].shape
  if op in ("ragged_paged_attention", "packet_attention") and "page_table" in arrays:
    return blocks.chunk_size(shape[0], arrays["page_table"].shape[0])
  # All candidates of a row share its prefix.
  return math.prod(shape[1:-2]) if len(shape) == 5 else shape[-3]


def _spread() -> str | None:
  """Why a kernel cannot be called here: XLA does not split one over devices by itself."""
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    manual = jax.sharding.AxisType.Manual
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    if spread := [name for name, size, kind in axes if size > 1 and kind != manual]:
      return f"the mesh has {', '.join(spread)}; inside jax.shard_map a kernel can be called"
  if mesh.empty and jax.device_count() > 1:
    return "there are several devices and no mesh is set; set one, or give 'pallas_tpu'"
  return None


def _tpu_tiles(
  op: str, arrays: Mapping[str, Any], num_queries: int
) -> tuple[str | None, Mapping[str, int], int | None]:
  """Why the TPU kernel cannot take the arrays, or None; its tiles; bytes of on-chip memory."""
  q, k, v = (arrays[name] for name in "qkv")
  if not (q.dtype == k.dtype == v.dtype) or q.dtype not in (jnp.float32, jnp.bfloat16):
    return f"q is {q.dtype}, k is {k.dtype}; expected both float32 or both bfloat16", {}, None
  group, width, value_width = q.shape[-2] // k.shape[2], q.shape[-1], v.shape[-1]
  itemsize = k.dtype.itemsize
  if op == "flash_attention":
    found, vmem = blocks.tpu_flash(num_queries, k.shape[1], group, width, value_width, itemsize)
  else:
    page_size, columns = k.shape[1], 1
    if "page_table" in arrays:
      columns = arrays["page_table"].shape[-1]
      if page_size % 8:
        return f"pages have {page_size} slots; expected a multiple of 8", {}, None
    else:
      capacity = -(-page_size // 8) * 8
      if page_size % 8 and page_size > 128:
        return (
          f"the cache has {page_size} slots; expected a multiple of 8, at best of 128",
          {},
          None,
        )
      page_size = tpu.dense_page(capacity)
      columns = capacity // page_size
    rows = q.shape[0] if "page_table" not in arrays else arrays["page_table"].shape[-2]
    smem = 4 * 2 * rows * columns
    if smem > blocks.SMEM_BYTES:
      return (
        f"tables of {rows} rows x {columns} pages take {smem:,} bytes of {blocks.SMEM_BYTES:,} for "
        "scalars; expected fewer rows, or larger pages",
        {},
        None,
      )
    found, vmem = blocks.tpu_paged(
      page_size, columns, k.shape[2], group * num_queries, width, value_width, itemsize
    )
  if vmem > blocks.VMEM_BYTES:
    return (
      f"the smallest tiles, {dict(found)}, take {vmem:,} bytes of {blocks.VMEM_BYTES:,} on the "
      "chip; expected fewer queries at once, smaller pages or fewer heads",
      {},
      vmem,
    )
  return None, found, vmem


# --- Calls ---------------------------------------------------------------------------------------


def _dense(
  choice: Choice,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  lengths: xla.Lengths,
  options: xla.Options,
) -> AttnState:
  return _dense_jit(q, k, v, lengths, options=options._replace(**choice.blocks), choice=choice.key)


def _paged_decode(
  choice: Choice,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  page_table: jax.Array,
  kv_len: jax.Array,
  options: xla.Options,
) -> AttnState:
  batch, num_queries = q.shape[:2]
  position = (kv_len - num_queries)[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
  used = jnp.ones(position.shape, bool)
  chunks = xla.Chunks(jnp.arange(batch, dtype=jnp.int32), position, used, kv_len)
  options = options._replace(**choice.blocks)
  return _paged_jit(
    q, k, v, page_table, None, None, chunks, options=options, moved=None, choice=choice.key
  )


def _ragged(
  op: str,
  q: jax.Array,
  pages: xla.Pages,
  lengths: tuple[jax.Array, jax.Array, jax.Array | int | None],
  options: xla.Options,
  chunk_size: int | None,
  implementation: str | None,
) -> AttnState:
  kv_len, cu_q_len, num_seqs = lengths
  if q.ndim != 3:
    raise ValueError(f"q is {q.shape}; expected [N, H, D]")
  _check_heads(q[None], pages.k, pages.v, "BTHD", "NPKD", same_batch=False)
  num_tokens, rows = q.shape[0], pages.table.shape[0]
  _check_int32("kv_len", kv_len, (rows,))
  _check_int32("cu_q_len", cu_q_len, (rows + 1,))
  num_seqs = rows if num_seqs is None else num_seqs
  _check_table(pages.table, kv_len, rows, pages.k, num_seqs)
  known, known_seqs = _known(cu_q_len), _known(num_seqs)
  if known_seqs is not None and not 0 <= int(known_seqs) <= rows:
    raise ValueError(f"num_seqs is {int(known_seqs)}; expected 0..{rows}, rows of page_table")
  if known is not None and known_seqs is not None:
    starts = known[: int(known_seqs) + 1]
    if starts[0] < 0 or (np.diff(starts) < 0).any() or starts[-1] > num_tokens:
      raise ValueError(
        f"cu_q_len is {starts.tolist()}; expected numbers that do not fall, from 0 on and up to "
        f"{num_tokens}, the queries in q"
      )
  if chunk_size is not None and chunk_size < 1:
    raise ValueError(f"chunk_size is {chunk_size}; expected at least 1")
  size = chunk_size or blocks.chunk_size(num_tokens, rows)
  arrays = {"q": q, "k": pages.k, "v": pages.v, "page_table": pages.table}
  choice = _choose(op, arrays, implementation, chunk_size=size)
  options = options._replace(**choice.blocks)
  moved = None
  if pages.rope is not None:
    turn = pages.turn
    if turn == "auto":
      turn = "query" if size <= blocks.TURN_QUERIES else "key"
    moved = (pages.rope, pages.raw_keys, turn)
  num_seqs = jnp.asarray(num_seqs, jnp.int32)
  return _ragged_jit(
    q,
    pages.k,
    pages.v,
    pages.table,
    pages.kept_len,
    pages.delta,
    (kv_len, cu_q_len, num_seqs),
    options=options,
    moved=moved,
    size=size,
    choice=choice.key,
  )


@functools.partial(jax.jit, static_argnames=("options", "choice"))
def _dense_jit(q, k, v, lengths, *, options, choice):
  forward = None
  if choice.implementation != "xla":
    kernel = tpu.flash if choice.op == "flash_attention" else tpu.decode
    forward = functools.partial(kernel, interpret=choice.implementation == "interpret")
  return xla.flash(q, k, v, lengths, options, forward)


def _no_derivative(fn: Any) -> Any:
  return xla.first_order_only(
    fn,
    "attention over pages has no derivative; use flash_attention over dense keys for training, or "
    "jax.lax.stop_gradient on what goes in.",
  )


@functools.partial(jax.jit, static_argnames=("options", "moved", "choice"))
def _paged_jit(q, k, v, table, kept_len, delta, chunks, *, options, moved, choice):
  def run(q, k, v):
    pages = xla.Pages(k, v, table, kept_len, delta, *(moved or ()))
    if choice.implementation == "xla":
      return xla.paged(q, pages, chunks, options, blocks.GROUP)
    return tpu.paged(q, pages, chunks, options, choice.implementation == "interpret")

  return _no_derivative(run)(q, k, v)


@functools.partial(jax.jit, static_argnames=("options", "moved", "size", "choice"))
def _ragged_jit(q, k, v, table, kept_len, delta, lengths, *, options, moved, size, choice):
  num_tokens = q.shape[0]
  chunks, token = xla.split_into_chunks(*lengths, num_tokens, size)
  if not num_tokens:
    wide = xla.wide_dtype(q, k, v)
    return AttnState(jnp.zeros((0, q.shape[1], v.shape[3]), wide), jnp.zeros((0, q.shape[1]), wide))
  rows = q[jnp.minimum(token, num_tokens - 1)]
  o, lse = _paged_jit(
    rows, k, v, table, kept_len, delta, chunks, options=options, moved=moved, choice=choice
  )
  return AttnState(
    jnp.zeros((num_tokens, *o.shape[2:]), o.dtype).at[token].set(o, mode="drop"),
    jnp.full((num_tokens, *lse.shape[2:]), -jnp.inf, lse.dtype).at[token].set(lse, mode="drop"),
  )


_update = jax.jit(xla.update_pages, donate_argnums=(0, 1))


def _out(state: AttnState, q: jax.Array, return_lse: bool) -> jax.Array | AttnState:
  return state if return_lse else finalize(state, q.dtype)


# --- Checks --------------------------------------------------------------------------------------


def _check_heads(
  q: jax.Array, k: jax.Array, v: jax.Array, q_axes: str, k_axes: str, same_batch: bool = True
) -> None:
  expected = f"q [{', '.join(q_axes)}], k [{', '.join(k_axes)}], v alike"
  shapes = f"q is {q.shape}, k is {k.shape}, v is {v.shape}"
  if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
    raise ValueError(f"{shapes}; expected {expected}")
  if k.shape[:3] != v.shape[:3]:
    raise ValueError(f"k is {k.shape}, v is {v.shape}; expected the same but for the last axis")
  if k.dtype != v.dtype:
    raise ValueError(f"k is {k.dtype}, v is {v.dtype}; expected the same type")
  if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k)):
    raise ValueError(f"q is {q.dtype}, k is {k.dtype}; expected floating point")
  if q.shape[-1] != k.shape[-1]:
    raise ValueError(f"q has a head size of {q.shape[-1]}, k of {k.shape[-1]}; expected the same")
  if not k.shape[2] or q.shape[2] % k.shape[2]:
    raise ValueError(
      f"q has {q.shape[2]} heads, k has {k.shape[2]}; expected a multiple, since each head of keys "
      "serves a whole group of query heads"
    )
  if same_batch and q.shape[0] != k.shape[0]:
    raise ValueError(f"q has {q.shape[0]} rows, k has {k.shape[0]}; expected the same")


def _options(
  q: jax.Array, causal: bool, window: int | None, soft_cap: float | None, scale: float | None
) -> xla.Options:
  if window is not None and window <= 0:
    raise ValueError(f"window is {window}; expected at least 1, or None for all keys")
  if soft_cap is not None and not 0 < soft_cap < math.inf:
    raise ValueError(f"soft_cap is {soft_cap}; expected a number above 0, or None for none")
  if scale is not None and not math.isfinite(scale):
    raise ValueError(f"scale is {scale}; expected a finite number, or None for D ** -0.5")
  if scale is None:
    scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
  return xla.Options(
    bool(causal),
    None if window is None else int(window),
    None if soft_cap is None else float(soft_cap),
    float(scale),
  )


def _check_int32(name: str, x: jax.Array, shape: Sequence[int]) -> None:
  if x.dtype != jnp.int32 or x.shape != tuple(shape):
    raise ValueError(f"{name} is {x.dtype} {x.shape}; expected int32 {tuple(shape)}")


def _lengths(name: str, x: jax.Array | None, batch: int, capacity: int) -> jax.Array:
  """Checked lengths; where they are known, none beyond what is there."""
  if x is None:
    return jnp.full(batch, capacity, jnp.int32)
  _check_int32(name, x, (batch,))
  known = _known(x)
  if known is not None and ((known < 0) | (known > capacity)).any():
    raise ValueError(f"{name} is {known.tolist()}; expected 0..{capacity}, what the array holds")
  return jnp.asarray(x)


def _check_table(
  table: jax.Array,
  kv_len: jax.Array,
  rows: int,
  k_pages: jax.Array,
  num_seqs: jax.Array | int | None = None,
) -> None:
  """A table that is wide enough and names pages that are there, as far as its values are known."""
  if table.ndim != 2 or table.dtype != jnp.int32 or table.shape[0] != rows:
    raise ValueError(f"page_table is {table.dtype} {table.shape}; expected int32 [{rows}, M]")
  num_pages, page_size = k_pages.shape[:2]
  room = table.shape[1] * page_size
  in_use = np.arange(rows) < (rows if num_seqs is None else num_seqs)
  known = [_known(x) for x in (table, kv_len, in_use)]
  if all(x is not None for x in known):
    table, kv_len, in_use = known
    longest = int(np.max(kv_len * in_use, initial=0))
    if longest > room:
      raise ValueError(
        f"kv_len has {longest}, page_table has room for {table.shape[1]} pages of {page_size} "
        f"slots, {room}; give a wider table"
      )
    live = np.arange(table.shape[1])[None] * page_size < (kv_len * in_use)[:, None]
    bad = table[live & ((table < 0) | (table >= num_pages))]
    if bad.size:
      raise ValueError(f"page_table names page {bad[0]}; expected 0..{num_pages - 1}")
    return
  kv_len = jnp.where(jnp.asarray(in_use), kv_len, 0)
  longest = kv_len.max(initial=0)
  checkify.debug_check(
    longest <= room, "kv_len has {longest}, page_table has room for {room}", longest=longest,
    room=jnp.int32(room),
  )  # fmt: skip
  start = jnp.arange(table.shape[1], dtype=jnp.int32)[None] * page_size
  live = start < kv_len[:, None]
  checkify.debug_check(
    jnp.all(~live | ((table >= 0) & (table < num_pages))),
    "page_table names a page that is not there; expected 0..{last}",
    last=jnp.int32(num_pages - 1),
  )


def _known(x: Any) -> np.ndarray | None:
  """The values, or None while they are being traced."""
  try:
    return np.asarray(x)
  except jax.errors.TracerArrayConversionError:
    return None
