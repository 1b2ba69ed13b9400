"""Multilayer perceptron for tabular data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

__all__ = ["MLP", "build_mlp"]


class MLP(nn.Module):
  """Dense layers with ReLU between them.

  Weights are small enough to be replicated on every device, so they carry no logical axis names.

  Attributes:
    hidden: widths of the hidden layers; `()` is a linear model.
    num_outputs: width of the output; 1 drops the last axis.
    initial: "lecun", normal kernels of variance 1 / fan-in and zero biases, or "uniform", kernels
      and biases uniform within 1 / sqrt(fan-in): PyTorch's, for protocols that used it.
  """

  hidden: tuple[int, ...] = (32, 32)
  num_outputs: int = 1
  initial: str = "lecun"

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    """Maps `[B, D]` features to `[B]` (one output) or `[B, num_outputs]` logits."""
    activations = features
    for width in self.hidden:
      activations = nn.relu(self._dense(width, activations))
    logits = self._dense(self.num_outputs, activations)
    return logits[..., 0] if self.num_outputs == 1 else logits

  def _dense(self, width: int, inputs: jax.Array) -> jax.Array:
    if self.initial == "lecun":
      return nn.Dense(width)(inputs)
    bound = inputs.shape[-1] ** -0.5

    def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
      return jax.random.uniform(key, shape, dtype, -bound, bound)

    return nn.Dense(width, kernel_init=uniform, bias_init=uniform)(inputs)


def build_mlp(
  num_features: int,
  hidden: tuple[int, ...] = (32, 32),
  num_outputs: int = 1,
  initial: str = "lecun",
) -> tuple[Callable[[jax.Array], Any], Callable[[Any, jax.Array], jax.Array]]:
  """Functional form of `MLP`.

  Initial weights depend on the key only: methods are compared from identical weights by giving
  each the params of one call. Keep the returned `apply_fn`: a jit with it as static argument
  compiles again for that of another call.

  Args:
    num_features: D.
    hidden: widths of the hidden layers.
    num_outputs: width of the output.
    initial: see `MLP`.

  Returns:
    `(init, apply_fn)`: `init(key) -> params` consumes a typed key, `apply_fn(params, [B, D])`
    gives `[B]` or `[B, num_outputs]` logits.

  Raises:
    ValueError: if a width is not positive, or `initial` is unknown.
  """
  hidden = tuple(hidden)
  for name, width in (("num_features", num_features), ("num_outputs", num_outputs)):
    if width < 1:
      raise ValueError(f"{name} is {width} (expected at least 1).")
  if any(width < 1 for width in hidden):
    raise ValueError(f"hidden is {hidden} (expected positive widths); use () for a linear model.")
  if initial not in ("lecun", "uniform"):
    raise ValueError(f"initial is {initial!r} (expected 'lecun' or 'uniform').")
  model = MLP(hidden, num_outputs, initial)

  def init(key: jax.Array) -> Any:
    return model.init(key, jnp.zeros((1, num_features)))

  return init, model.apply
