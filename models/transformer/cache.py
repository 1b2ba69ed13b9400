"""Keys and values of tokens that were seen: an immutable pytree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from models.transformer.config import TransformerConfig


@struct.dataclass
class KVCache:
  """A dense cache; keys are stored rotated.

  Attributes:
    k: a layer's keys `[B, S, K, D]`, a tuple over layers; stacked `[L, B, S, K, D]` when the model
      scans over layers.
    v: values, alike.
    length: `[B]` int32 slots in use; what lies beyond is never read.
  """

  k: Any
  v: Any
  length: jax.Array

  @property
  def capacity(self) -> int:
    return jax.tree.leaves(self.k)[0].shape[-3]


def init_cache(config: TransformerConfig, batch: int, capacity: int) -> KVCache:
  """An empty cache of `capacity` slots a row.

  Raises:
    ValueError: a batch or capacity below 1, or a capacity beyond the model's context.
  """
  if batch < 1 or not 1 <= capacity <= config.max_positions:
    raise ValueError(
      f"batch = {batch}, capacity = {capacity}; expected 1 or more rows and 1.."
      f"{config.max_positions} slots, the model's context"
    )
  shape = (batch, capacity, config.num_kv_heads, config.head_dim)

  def empty() -> Any:
    if config.scan_layers:
      return jnp.zeros((config.num_layers, *shape), config.activation_dtype)
    return tuple(jnp.zeros(shape, config.activation_dtype) for _ in range(config.num_layers))

  return KVCache(empty(), empty(), jnp.zeros(batch, jnp.int32))


def write(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Puts `new [B, T, K, D]` into `slots [B, S, K, D]` from slot `start [B]` on.

  A row that would pass the last slot is moved back by XLA's rule, so callers keep start + T <= S.
  """
  put = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=0))
  return put(slots, new.astype(slots.dtype), start)


def repeat(cache: KVCache, times: int) -> KVCache:
  """The cache with every row `times` times in a row: one prompt, several continuations."""
  axis = 1 if not isinstance(cache.k, tuple) else 0
  k, v = jax.tree.map(lambda x: jnp.repeat(x, times, axis=axis), (cache.k, cache.v))
  return KVCache(k, v, jnp.repeat(cache.length, times))
