"""The network estimator: a model fitted on merged stages, read at full and at no treatment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class GNNConfig:
  """Training of the network; defaults are the authors'.

  Attributes:
    learning_rate: of Adam.
    epochs: passes over the stages; each stage is one full-graph step.
  """

  learning_rate: float = 4e-3
  epochs: int = 400

  def __post_init__(self) -> None:
    if not self.learning_rate > 0 or self.epochs < 1:
      raise ValueError(
        f"learning_rate = {self.learning_rate}, epochs = {self.epochs}; expected a positive rate "
        "and one epoch or more"
      )


def gnn_gate(
  params: Any,
  apply_fn: Callable[[Any, jax.Array], jax.Array],
  inputs: jax.Array,
  y: jax.Array,
  all_treated: jax.Array,
  none_treated: jax.Array,
  config: GNNConfig,
) -> tuple[jax.Array, jax.Array]:
  """Fits `apply_fn` to the stages in order and contrasts its means at full and no treatment.

  Whatever of the graph does not depend on the parameters belongs into the inputs, so that it is
  computed once and not in each of the `L * epochs` steps: `models.graph.build_gnn` does so.

  Args:
    params: initial parameters; the authors fix the seed of the network over replications.
    apply_fn: `apply_fn(params, inputs [N, D]) -> [N]`.
    inputs: `[L, N, D]` inputs of each stage.
    y: `[L, N]` outcomes.
    all_treated: `[N, D]` inputs with everybody treated.
    none_treated: `[N, D]` inputs with nobody treated.
    config: training.

  Returns:
    tau, and `[epochs]` means over the stages of the squared error just before each stage's step.

  Raises:
    ValueError: stages of inputs and outcomes that do not agree.
  """
  if inputs.shape[:2] != y.shape:
    raise ValueError(
      f"inputs have shape {inputs.shape} and y {y.shape}; expected the same stages and nodes"
    )
  optimiser = optax.adam(config.learning_rate)

  def step(carry: tuple[Any, Any], stage: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
    params, state = carry
    x, target = stage
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((apply_fn(p, x) - target) ** 2))(params)
    updates, state = optimiser.update(gradient, state, params)
    return (optax.apply_updates(params, updates), state), loss

  def epoch(carry: tuple[Any, Any], _: None) -> tuple[Any, jax.Array]:
    carry, losses = jax.lax.scan(step, carry, (inputs, y))
    return carry, losses.mean()

  # Replications may be spread over devices by `jax.shard_map`, while the initial parameters are the
  # same on all: the gradient of such a shared value is the sum over devices. Here every device
  # fits its own data, so the parameters are made to depend on them.
  own = inputs[0, 0, 0] < y[0, 0]
  start = jax.tree.map(lambda leaf: jnp.where(own, leaf, leaf), (params, optimiser.init(params)))
  (params, _), losses = jax.lax.scan(epoch, start, None, length=config.epochs)
  tau = apply_fn(params, all_treated).mean() - apply_fn(params, none_treated).mean()
  return tau, losses
