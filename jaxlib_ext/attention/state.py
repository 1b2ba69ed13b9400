"""Attention states and their merge.

For a query and a set of keys I with scores s, lse(I) = log sum_I exp(s_i) and o(I) is the mean of
the values under softmax(s). Two disjoint sets merge exactly (FlashInfer calls it recursive
attention). Logarithms are natural. No keys at all is o = 0, lse = -inf, the identity of the merge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class AttnState(NamedTuple):
  """Attention over some keys.

  Attributes:
    o: `[..., D]` mean of values, float32 or wider; zero where there is no key.
    lse: `[...]` natural logarithm of the sum of exp(score), -inf where there is no key.
  """

  o: jax.Array
  lse: jax.Array


def merge(a: AttnState, b: AttnState) -> AttnState:
  """The state over the keys of both; the two sets must be disjoint.

  Commutes bit for bit, and `AttnState(0, -inf)` changes nothing: the larger lse always comes first.
  """
  swap = b.lse > a.lse
  top, low = jnp.where(swap, b.lse, a.lse), jnp.where(swap, a.lse, b.lse)
  # A finite shift: -inf - -inf would be NaN, and so would the derivative of a masked -inf.
  empty = top == -jnp.inf
  lonely = low == -jnp.inf
  gap = jnp.where(lonely, 0.0, jnp.where(lonely, 0.0, low) - jnp.where(empty, 0.0, top))
  weight = jnp.where(lonely, 0.0, jnp.exp(gap))[..., None]
  o_top = jnp.where(swap[..., None], b.o, a.o)
  o_low = jnp.where(swap[..., None], a.o, b.o)
  o_top = jnp.where(empty[..., None], 0.0, o_top)
  o_low = jnp.where(lonely[..., None], 0.0, o_low)
  o = (o_top + weight * o_low) / (1.0 + weight)
  return AttnState(o, top + jnp.log1p(weight[..., 0]))


def merge_states(o: jax.Array, lse: jax.Array) -> AttnState:
  """Merges n states over disjoint sets of keys.

  Args:
    o: `[..., n, D]`.
    lse: `[..., n]`.

  Returns:
    `AttnState` of `[..., D]` and `[...]`, float32 or wider.

  Raises:
    ValueError: shapes that do not belong together.
  """
  if o.ndim < 2 or o.shape[:-1] != lse.shape:
    raise ValueError(f"o is {o.shape}, lse is {lse.shape}; expected [..., n, D] and [..., n]")
  wide = jnp.promote_types(o.dtype, jnp.float32)
  o, lse = o.astype(wide), lse.astype(wide)
  alone = lse == -jnp.inf
  top = jnp.max(lse, axis=-1, keepdims=True, initial=-jnp.inf)
  empty = top == -jnp.inf
  shift = jax.lax.stop_gradient(jnp.where(empty, 0.0, top))
  weight = jnp.where(alone, 0.0, jnp.exp(jnp.where(alone, 0.0, lse - shift)))
  total = weight.sum(axis=-1, keepdims=True)
  safe = jnp.where(empty, 1.0, total)
  o = jnp.where(alone[..., None], 0.0, o)
  merged = jnp.sum(o * (weight / safe)[..., None], axis=-2)
  return AttnState(merged, jnp.where(empty, -jnp.inf, shift + jnp.log(safe))[..., 0])


def finalize(state: AttnState, dtype: Any) -> jax.Array:
  """The output of attention in the type of the model."""
  return state.o.astype(dtype)
