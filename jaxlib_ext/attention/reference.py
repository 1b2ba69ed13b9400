"""Attention in NumPy float64, one query and one head at a time: short, slow, and what tests trust.

Nothing here is shared with the implementations. Pages are gathered and keys rotated first.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def attend(
  q: Array,
  k: Array,
  v: Array,
  seen: Array,
  *,
  scale: float | None = None,
  soft_cap: float | None = None,
) -> tuple[Array, Array]:
  """Attention under a mask.

  Args:
    q: `[T, H, D]`.
    k: `[S, K, D]`.
    v: `[S, K, Dv]`.
    seen: `[T, S]` bool, query sees key.
    scale: of scores; `D ** -0.5` when None.
    soft_cap: c of `c * tanh(score / c)`.

  Returns:
    o `[T, H, Dv]` and lse `[T, H]`, float64; 0 and -inf for a query that sees nothing.
  """
  group = q.shape[1] // k.shape[1]
  scale = q.shape[2] ** -0.5 if scale is None else scale
  o = np.zeros((*q.shape[:2], v.shape[2]))
  lse = np.full(q.shape[:2], -np.inf)
  for t in range(q.shape[0]):
    keys = np.flatnonzero(seen[t])
    if not keys.size:
      continue
    for h in range(q.shape[1]):
      score = k[keys, h // group].astype(np.float64) @ q[t, h].astype(np.float64) * scale
      if soft_cap is not None:
        score = soft_cap * np.tanh(score / soft_cap)
      weight = np.exp(score - score.max())
      o[t, h] = weight @ v[keys, h // group].astype(np.float64) / weight.sum()
      lse[t, h] = score.max() + np.log(weight.sum())
  return o, lse


def mask(
  num_queries: int,
  num_keys: int,
  q_len: int,
  kv_len: int,
  *,
  causal: bool = True,
  q_offset: int | None = None,
  q_segment: Array | None = None,
  kv_segment: Array | None = None,
  window: int | None = None,
  kept: Array | None = None,
) -> Array:
  """`[T, S]` who sees whom, in the words of `api.flash_attention`; `kept [S]` are slots in use."""
  t, s = np.arange(num_queries)[:, None], np.arange(num_keys)[None]
  position = t + (kv_len - q_len if q_offset is None else q_offset)
  seen = (t < q_len) & (s < kv_len)
  if causal:
    seen &= s <= position
  if window is not None:
    seen &= s > position - window
  if q_segment is not None:
    seen &= (q_segment[:, None] == kv_segment[None]) & (q_segment >= 0)[:, None]
  if kept is not None:
    seen &= kept[None]
  return seen


def flash(q: Array, k: Array, v: Array, q_len: Array, kv_len: Array, **options):
  """`api.flash_attention`: rows of `[B, ...]` one by one; lists o `[T, H, Dv]`, lse `[T, H]`."""
  per_row = {
    name: options.pop(name)
    for name in ("q_offset", "q_segment", "kv_segment")
    if options.get(name) is not None
  }
  masked = {name: options.pop(name) for name in ("causal", "window") if name in options}
  found = [
    attend(
      q[b],
      k[b],
      v[b],
      mask(
        q.shape[1],
        k.shape[1],
        int(q_len[b]),
        int(kv_len[b]),
        **masked,
        **{name: x[b] for name, x in per_row.items()},
      ),
      **options,
    )
    for b in range(q.shape[0])
  ]
  o, lse = zip(*found, strict=True)
  return np.stack(o), np.stack(lse)


def ragged(
  q: Array,
  k_pages: Array,
  v_pages: Array,
  page_table: Array,
  kv_len: Array,
  cu_q_len: Array,
  num_seqs: int,
  *,
  delta: Array | None = None,
  kept_len: Array | None = None,
  frequencies: Array | None = None,
  raw_keys: bool = False,
  causal: bool = True,
  window: int | None = None,
  **options,
) -> tuple[Array, Array]:
  """`api.ragged_paged_attention`, and `api.packet_attention` with delta."""
  o = np.zeros((*q.shape[:2], v_pages.shape[3]))
  lse = np.full(q.shape[:2], -np.inf)
  page_size = k_pages.shape[1]
  for r in range(num_seqs):
    first, end, length = int(cu_q_len[r]), int(cu_q_len[r + 1]), int(kv_len[r])
    used = page_table[r, : -(-length // page_size)]
    k = k_pages[used].astype(np.float64)
    slot = np.arange(page_size)
    if delta is not None:
      owed = delta[r, : len(used), None] + (slot[None] if raw_keys else 0 * slot[None])
      k = rotate(k, owed[:, :, None], frequencies)
    kept = None
    if kept_len is not None:
      kept = (slot[None] < kept_len[r, : len(used), None]).reshape(-1)
    k, v = k.reshape(-1, *k.shape[2:]), v_pages[used].reshape(-1, *v_pages.shape[2:])
    seen = mask(end - first, len(k), end - first, length, causal=causal, window=window, kept=kept)
    o[first:end], lse[first:end] = attend(q[first:end], k, v, seen, **options)
  return o, lse


def rotate(x: Array, position: Array, frequencies: Array) -> Array:
  """Rotary embedding of the half-split layout, `x [..., D]` by `position [...]`, float64."""
  x = x.astype(np.float64)
  n = len(frequencies)
  angle = np.asarray(position)[..., None] * np.asarray(frequencies, np.float64)
  first, second = x[..., :n], x[..., n : 2 * n]
  turned = [
    first * np.cos(angle) - second * np.sin(angle),
    second * np.cos(angle) + first * np.sin(angle),
  ]
  return np.concatenate([*turned, x[..., 2 * n :]], axis=-1)


def flash_gradients(
  q: Array, k: Array, v: Array, seen: Array, do: Array, dlse: Array, **options
) -> tuple[Array, Array, Array]:
  """Gradients of `sum(o * do) + sum(lse * dlse)` of `attend`, float64, with its dense formula."""
  scale = options.get("scale") or q.shape[2] ** -0.5
  soft_cap = options.get("soft_cap")
  q, k, v = (x.astype(np.float64) for x in (q, k, v))
  group = q.shape[1] // k.shape[1]
  dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
  for h in range(q.shape[1]):
    keys, values = k[:, h // group], v[:, h // group]
    raw = q[:, h] @ keys.T * scale
    score = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    score = np.where(seen, score, -np.inf)
    top = score.max(axis=1, keepdims=True, initial=-np.inf)
    weight = np.exp(score - np.where(np.isfinite(top), top, 0))
    total = weight.sum(axis=1, keepdims=True)
    weight = weight / np.where(total > 0, total, 1)
    lost = do[:, h] @ values.T
    ds = weight * (lost - (weight * lost).sum(axis=1, keepdims=True) + dlse[:, h, None])
    if soft_cap is not None:
      ds = ds * (1 - np.tanh(raw / soft_cap) ** 2)
    dq[:, h] = ds @ keys * scale
    dk[:, h // group] += ds.T @ q[:, h] * scale
    dv[:, h // group] += weight.T @ do[:, h]
  return dq, dk, dv
