"""Rotary positions that are owed to keys: exact angles at any position.

float32 angles `position * frequency` are off by 1e-7 of the angle: 1e-2 radians at position
100,000. Here frequencies are turns per position in fixed point, and integers wrap around where
angles do, so the error of an angle stays near 1e-7 radians at every position.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

# Bits of a turn per position: a word that wraps around, and some more behind it.
_WORD, _MORE = 32, 12
# |delta| * 2^_MORE has to fit an int32.
MAX_DELTA = 2 ** (31 - _MORE) - 1


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary embedding of the half-split layout: dimension i turns with dimension i + n.

  Attributes:
    frequencies: n angles in radians per position, after any scaling that the model has (Llama 3).
      2n may be less than the head size; the rest is not rotated.
  """

  frequencies: tuple[float, ...]

  @classmethod
  def from_theta(cls, theta: float, size: int) -> Rope:
    """`theta ** (-2i / size)` for i below size / 2 (Su et al. 2021, equation 15)."""
    return cls(tuple(float(theta ** (-2 * i / size)) for i in range(size // 2)))

  @functools.cached_property
  def words(self) -> tuple[np.ndarray, np.ndarray]:
    """Turns per position in fixed point: int32 `[n]` of 32 bits and of the 12 bits behind them."""
    turns = np.array(self.frequencies, np.longdouble) / (2 * np.longdouble(np.pi))
    units = np.rint((turns % 1) * np.longdouble(2 ** (_WORD + _MORE))).astype(np.uint64)
    high = (units >> np.uint64(_MORE)).astype(np.uint32).view(np.int32)
    return high, (units & np.uint64(2**_MORE - 1)).astype(np.int32)


def rotation(delta: jax.Array, rope: Rope, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """cos and sin `[..., n]` of the angles that positions `delta [...]`, int32, stand for.

  Exact to a few 1e-7 for |delta| up to `MAX_DELTA`, 524,287.
  """
  high, more = (jnp.asarray(word) for word in rope.words)
  high, more = (jnp.expand_dims(word, range(delta.ndim)) for word in (high, more))
  delta = delta[..., None]
  turn = delta * high + ((delta * more) >> _MORE)
  angle = turn.astype(dtype) * (2 * np.pi / 2**_WORD)
  return jnp.cos(angle), jnp.sin(angle)


def apply_rotation(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Turns `x [..., D]` by angles whose cos and sin are `[..., n]`, of as many axes."""
  n = cos.shape[-1]
  first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
  parts = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)


def rotate(x: jax.Array, delta: jax.Array, rope: Rope) -> jax.Array:
  """Turns `x [..., D]` by `delta`, int32 of the shape `[...]` or one that broadcasts to it.

  Computed in float32 or wider and returned in the type of x.

  Raises:
    ValueError: a rotation of more dimensions than x has, or delta not int32.
  """
  if 2 * len(rope.frequencies) > x.shape[-1]:
    raise ValueError(
      f"rope has {len(rope.frequencies)} frequencies, x has a head size of {x.shape[-1]}; "
      "expected at most half as many frequencies."
    )
  if delta.dtype != jnp.int32:
    raise ValueError(f"delta is {delta.dtype}; expected int32")
  wide = jnp.promote_types(x.dtype, jnp.float32)
  delta = jnp.expand_dims(delta, range(x.ndim - 1 - delta.ndim))
  cos, sin = rotation(delta, rope, wide)
  return apply_rotation(x.astype(wide), cos, sin).astype(x.dtype)
