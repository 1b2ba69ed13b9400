"""Training a causal language model on token sequences: the loss, its step, and a run of steps.

  L = sum_{b,t} w[b, t] (-log p(x[b, t] | x[b, <t])) / sum_{b,t} w[b, t]

The weight of a token says how much it counts: 0 for padding, less for a question than for its
answer. The model is a callable `(params, tokens [B, T]) -> logits [B, T, V]`; only the parameters
that are passed are trained, so that an adapter trains alone when the callable closes over the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

ApplyFn = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LMConfig:
  """AdamW with warm-up and cosine decay.

  Attributes:
    num_steps: length of the schedule.
    learning_rate: its peak.
    warmup_steps: steps of linear growth from 0.
    final_fraction: learning rate at the end, as a share of the peak.
    weight_decay: on matrices only.
    clip_norm: largest norm of a gradient.
    beta2: of Adam.

  Raises:
    ValueError: a field outside its range.
  """

  num_steps: int
  learning_rate: float = 1e-3
  warmup_steps: int = 100
  final_fraction: float = 0.1
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  beta2: float = 0.99

  def __post_init__(self):
    if self.num_steps < 1 or not 0 <= self.warmup_steps <= self.num_steps:
      raise ValueError(
        f"num_steps = {self.num_steps}, warmup_steps = {self.warmup_steps}; expected 1 or more "
        "steps, the warm-up among them"
      )
    if not self.learning_rate > 0 or not self.clip_norm > 0 or self.weight_decay < 0:
      raise ValueError(
        f"learning_rate = {self.learning_rate}, clip_norm = {self.clip_norm}, weight_decay = "
        f"{self.weight_decay}; expected positive numbers (the decay may be 0)"
      )
    if not 0 <= self.final_fraction <= 1 or not 0 <= self.beta2 < 1:
      raise ValueError(
        f"final_fraction = {self.final_fraction}, beta2 = {self.beta2}; expected [0, 1] and [0, 1)"
      )


@struct.dataclass
class LMState:
  """Attributes: `params`, `opt_state`, and `step`, the number of updates made."""

  params: Any
  opt_state: Any
  step: jax.Array


def make_optimizer(config: LMConfig) -> optax.GradientTransformation:
  """The optimiser of `LMConfig`."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0 if config.warmup_steps else config.learning_rate,
    config.learning_rate,
    config.warmup_steps,
    max(config.num_steps, config.warmup_steps + 1),
    config.final_fraction * config.learning_rate,
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      schedule,
      b2=config.beta2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )


def init(params: Any, config: LMConfig) -> LMState:
  """A state before the first update."""
  return LMState(params, make_optimizer(config).init(params), jnp.int32(0))


def token_log_probs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """`log p(x_t | x_<t)` of `tokens [B, T]` under `logits [B, T, V]`, for t = 1..T-1: `[B, T-1]`."""
  targets = tokens[:, 1:]
  logits = logits[:, :-1]
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)


def loss(logits: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
  """The weighted mean cross-entropy, in nats a token.

  Args:
    logits: `[B, T, V]`.
    tokens: `[B, T]`.
    weights: `[B, T]`; that of the first token is not used, nothing predicts it.
  """
  weights = weights[:, 1:]
  total = jnp.sum(weights)
  return -jnp.sum(weights * token_log_probs(logits, tokens)) / jnp.maximum(total, 1e-9)


def step(
  state: LMState, apply_fn: ApplyFn, tokens: jax.Array, weights: jax.Array, config: LMConfig
) -> tuple[LMState, dict[str, jax.Array]]:
  """One update on a batch.

  Returns:
    `(state, {"loss", "gradient_norm"})`.
  """
  value, gradient = jax.value_and_grad(lambda p: loss(apply_fn(p, tokens), tokens, weights))(
    state.params
  )
  updates, opt_state = make_optimizer(config).update(gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  metrics = {"loss": value, "gradient_norm": optax.global_norm(gradient)}
  return LMState(params, opt_state, state.step + 1), metrics


def run(
  state: LMState,
  apply_fn: ApplyFn,
  tokens: jax.Array,
  weights: jax.Array,
  config: LMConfig,
) -> tuple[LMState, dict[str, jax.Array]]:
  """An update for each batch of `tokens [N, B, T]` and `weights [N, B, T]`, in order.

  Returns:
    `(state, metrics)`, each metric `[N]`.
  """

  def body(state: LMState, batch: tuple[jax.Array, jax.Array]):
    return step(state, apply_fn, *batch, config)

  return jax.lax.scan(body, state, (tokens, weights))
