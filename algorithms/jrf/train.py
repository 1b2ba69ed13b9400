"""Training with the jointly robust loss."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from algorithms.jrf import gap as gap_lib
from algorithms.noise import TransitionMatrix

__all__ = [
  "CRITERIA",
  "Batch",
  "JRFConfig",
  "JRFProblem",
  "JRFState",
  "MassEMA",
  "forward_bce",
  "init",
  "jrf_loss",
  "run",
  "step",
]

CRITERIA = ("demographic_parity", "equal_opportunity", "equalised_odds")

Params = Any
ApplyFn = Callable[[Params, jax.Array], jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class JRFConfig:
  """Static choices of the method; hashable, so a jit-static argument.

  Attributes:
    mode: how observed groups are turned into clean ones, see `group_means`.
    reduction: how group means become one gap, see `mirl_gap`.
    penalty: shape of the penalty, see `penalise`.
    criterion: what is equalised; the two label-dependent ones are inferred extensions.
    num_groups: K.
    learning_rate: of Adam, the authors' 5e-3.
    weight_decay: decoupled, a step shrinks weights by learning_rate * weight_decay; 0 is the
      authors' plain Adam.
    ema_decay: of the group masses, 0 for full batches, 0.9 to 0.99 for minibatches.
    paper_bug_compat: permits mode `paper_v2`.
    axis_name: mesh axis that rows are sharded on when called inside `jax.shard_map`.
  """

  mode: str = "exact"
  reduction: str = "binary"
  penalty: str = "abs"
  criterion: str = "demographic_parity"
  num_groups: int = 2
  learning_rate: float = 5e-3
  weight_decay: float = 1e-4
  ema_decay: float = 0.0
  paper_bug_compat: bool = False
  axis_name: str | None = None

  def __post_init__(self) -> None:
    for name, allowed in (
      ("mode", gap_lib.MODES),
      ("reduction", gap_lib.REDUCTIONS),
      ("penalty", gap_lib.PENALTIES),
      ("criterion", CRITERIA),
    ):
      value = getattr(self, name)
      if value not in allowed:
        nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ValueError(f"{name} is {value!r} (expected one of {allowed}){hint}")
    for name, valid, expected in (
      ("num_groups", self.num_groups >= 2, "at least 2"),
      ("learning_rate", self.learning_rate > 0, "more than 0"),
      ("weight_decay", self.weight_decay >= 0, "0 or more"),
      ("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)"),
    ):
      if not valid:
        raise ValueError(f"{name} is {getattr(self, name)} (expected {expected}).")
    if self.mode == "paper_v2" and not self.paper_bug_compat:
      raise ValueError(
        "mode is 'paper_v2', the authors' asymmetric formula with exchanged rates, whose zero is "
        "not parity; set paper_bug_compat=True to reproduce their table with it, else use 'exact'."
      )
    if self.mode != "exact" and self.num_groups != 2:
      raise ValueError(
        f"mode {self.mode!r} is for 2 groups and num_groups is {self.num_groups}; use 'exact'."
      )
    if self.mode != "exact" and self.criterion != "demographic_parity":
      raise ValueError(
        f"criterion {self.criterion!r} has no form in mode {self.mode!r}; use mode 'exact'."
      )
    if self.reduction == "binary" and self.num_groups != 2:
      raise ValueError(
        f"reduction 'binary' is for 2 groups and num_groups is {self.num_groups}; use 'max' or "
        "'pairwise'."
      )


@flax.struct.dataclass
class JRFProblem:
  """What differs between the arms of a table, all arrays: a whole table is one `vmap`.

  The naive penalty has an identity attribute channel, forward correction alone has
  `fairness_weight` 0, the gap correction alone an identity label channel, and the clean-attribute
  oracle an identity attribute channel on clean attributes.

  Attributes:
    label_transition: channel of the label, 2 values.
    attribute_transition: channel of the attribute, K values.
    fairness_weight: `[]` lambda >= 0, nats for each unit of penalty.
  """

  label_transition: TransitionMatrix
  attribute_transition: TransitionMatrix
  fairness_weight: jax.Array


@flax.struct.dataclass
class Batch:
  """Rows to train or validate on.

  Attributes:
    features: `[B, D]`.
    labels: `[B]` int, observed (noisy) labels in {0, 1}.
    attribute: `[B]` int, observed (noisy) groups in 0..K-1.
    weights: `[B]` float; 0 marks a padding row.
  """

  features: jax.Array
  labels: jax.Array
  attribute: jax.Array
  weights: jax.Array


@flax.struct.dataclass
class MassEMA:
  """Running means of the group masses over minibatches, not yet corrected for their start at 0.

  Attributes:
    mass: `[C]` s, with C = K cells, or 2K for a label-dependent criterion.
    prior: `[C]` q.
    count: `[]` int32, batches seen.
  """

  mass: jax.Array
  prior: jax.Array
  count: jax.Array


@flax.struct.dataclass
class JRFState:
  """State of training.

  Attributes:
    params: current parameters.
    opt_state: of the optimiser.
    ema: running group masses.
    step: `[]` int32, updates made.
    best_params: parameters with the lowest objective on the noisy validation batch; without one,
      the current parameters.
    best_objective: `[]` that objective, infinite before the first validation.
    best_step: `[]` int32, number of updates behind `best_params`.
  """

  params: Params
  opt_state: optax.OptState
  ema: MassEMA
  step: jax.Array
  best_params: Params
  best_objective: jax.Array
  best_step: jax.Array


def _safe_log(probability: jax.Array) -> jax.Array:
  """Log that is -inf at 0, with gradient 0 there instead of NaN."""
  positive = probability > 0
  return jnp.where(positive, jnp.log(jnp.where(positive, probability, 1.0)), -jnp.inf)


def forward_bce(logits: jax.Array, labels: jax.Array, transition: TransitionMatrix) -> jax.Array:
  """Forward-corrected binary cross entropy, in log space.

  The probability of the observed label is `f_fwd = (1 - r10) f + r01 (1 - f)`, with
  `f = sigmoid(logit)`. Its expectation under noise is least at `f = P(Y = 1 | x)` if the rates are
  right and `r01 + r10 < 1`. The gradient to the logit is damped by
  `(1 - r01 - r10) f (1 - f) / (f_fwd (1 - f_fwd))`.

  Args:
    logits: `[B]` of the clean label.
    labels: `[B]` int, observed labels in {0, 1}.
    transition: channel of the label, 2 values; rates of 0 are safe.

  Returns:
    `[B]` loss in nats.

  Raises:
    ValueError: if logits and labels differ in shape.
  """
  if logits.shape != labels.shape:
    raise ValueError(
      f"logits have shape {logits.shape} and labels {labels.shape} (expected one [B] for both); "
      "let apply_fn drop its last axis of size 1."
    )
  log_rates = _safe_log(transition.matrix)
  positive = labels == 1
  if_clean_1 = jnp.where(positive, log_rates[1, 1], log_rates[1, 0])
  if_clean_0 = jnp.where(positive, log_rates[0, 1], log_rates[0, 0])
  return -jnp.logaddexp(
    if_clean_1 + jax.nn.log_sigmoid(logits), if_clean_0 + jax.nn.log_sigmoid(-logits)
  )


def _smooth_masses(
  mass: jax.Array, prior: jax.Array, ema: MassEMA, decay: float
) -> tuple[jax.Array, jax.Array, MassEMA]:
  """Bias-corrected running means whose gradient is that of the current batch at full weight."""
  count = ema.count + 1

  def advance(running: jax.Array, current: jax.Array) -> jax.Array:
    current = jax.lax.stop_gradient(current).astype(running.dtype)
    return decay * running + (1.0 - decay) * current

  updated = MassEMA(advance(ema.mass, mass), advance(ema.prior, prior), count)
  start = 1.0 - decay ** count.astype(mass.dtype)

  def straight_through(running: jax.Array, current: jax.Array) -> jax.Array:
    return current + jax.lax.stop_gradient(running / start - current)

  return straight_through(updated.mass, mass), straight_through(updated.prior, prior), updated


def _criterion_masses(
  scores: jax.Array, batch: Batch, config: JRFConfig
) -> tuple[jax.Array, jax.Array]:
  if config.criterion == "demographic_parity":
    return gap_lib.group_mass(
      scores, batch.attribute, batch.weights, config.num_groups, config.axis_name
    )
  return gap_lib.joint_group_mass(
    scores, batch.attribute, batch.labels, batch.weights, config.num_groups, config.axis_name
  )


def _criterion_gap(
  mass: jax.Array, prior: jax.Array, problem: JRFProblem, config: JRFConfig
) -> tuple[jax.Array, jax.Array]:
  """Gap and number of cells that it had to leave out, both `[]`."""
  transition = problem.attribute_transition
  if config.criterion == "demographic_parity":
    gap = gap_lib.mirl_gap(mass, prior, transition, config.mode, config.reduction)
  else:
    transition = gap_lib.joint_transition(transition, problem.label_transition)
    corrected = (
      gap_lib.equal_opportunity_gap
      if config.criterion == "equal_opportunity"
      else gap_lib.equalised_odds_gap
    )
    gap = corrected(mass, prior, transition, config.reduction)
  _, present = gap_lib.group_means(mass, prior, transition, config.mode)
  return gap, jnp.sum(~present)


def jrf_loss(
  params: Params,
  apply_fn: ApplyFn,
  batch: Batch,
  problem: JRFProblem,
  config: JRFConfig,
  ema: MassEMA | None = None,
) -> tuple[jax.Array, tuple[Metrics, MassEMA | None]]:
  """Forward-corrected cross entropy plus lambda times the penalised corrected gap.

  Inside `jax.shard_map` with `check_vma=True` and rows sharded on `config.axis_name`, loss and
  gradient are the global ones on every device: sums are added over the axis before they are
  divided and before the gap is taken. (With `check_vma=False` the gradient is not.)

  Args:
    params: of the model.
    apply_fn: `apply_fn(params, [B, D]) -> [B]` logits.
    batch: B rows.
    problem: channels and lambda.
    config: static choices.
    ema: running group masses; with it and `config.ema_decay > 0` the gap is that of the running
      masses, with the gradient of the current batch's.

  Returns:
    `(loss, (metrics, ema))`: `[]` loss in nats; `[]` metrics `bce` (weighted mean, nats), `gap`,
    `empty_groups` (cells left out of the gap) and `objective` (the loss); the updated ema.
  """
  logits = apply_fn(params, batch.features)
  scores = jax.nn.sigmoid(logits)
  losses = forward_bce(logits, batch.labels, problem.label_transition)
  weights = batch.weights.astype(losses.dtype)
  sums = jnp.stack([jnp.sum(weights * losses), jnp.sum(weights)])
  if config.axis_name is not None:
    sums = jax.lax.psum(sums, config.axis_name)
  bce = sums[0] / jnp.where(sums[1] > 0, sums[1], 1.0)

  mass, prior = _criterion_masses(scores, batch, config)
  if ema is not None and config.ema_decay > 0:
    mass, prior, ema = _smooth_masses(mass, prior, ema, config.ema_decay)
  gap, empty_groups = _criterion_gap(mass, prior, problem, config)
  loss = bce + problem.fairness_weight * gap_lib.penalise(gap, config.penalty)
  metrics = {"bce": bce, "gap": gap, "empty_groups": empty_groups, "objective": loss}
  return loss, (metrics, ema)


def _optimiser(config: JRFConfig) -> optax.GradientTransformation:
  if config.weight_decay == 0:
    return optax.adam(config.learning_rate)
  return optax.adamw(config.learning_rate, weight_decay=config.weight_decay)


def init(params: Params, config: JRFConfig) -> JRFState:
  """State before the first update.

  Args:
    params: initial parameters; give every method of a comparison the same ones.
    config: static choices.
  """
  dtype = jnp.result_type(*jax.tree.leaves(params))
  cells = config.num_groups * (1 if config.criterion == "demographic_parity" else 2)
  ema = MassEMA(
    mass=jnp.zeros(cells, dtype), prior=jnp.zeros(cells, dtype), count=jnp.zeros((), jnp.int32)
  )
  return JRFState(
    params=params,
    opt_state=_optimiser(config).init(params),
    ema=ema,
    step=jnp.zeros((), jnp.int32),
    best_params=params,
    best_objective=jnp.full((), jnp.inf, dtype),
    best_step=jnp.zeros((), jnp.int32),
  )


def _update(
  state: JRFState, apply_fn: ApplyFn, batch: Batch, problem: JRFProblem, config: JRFConfig
) -> tuple[JRFState, Metrics]:
  gradient_fn = jax.grad(jrf_loss, has_aux=True)
  gradient, (metrics, ema) = gradient_fn(state.params, apply_fn, batch, problem, config, state.ema)
  updates, opt_state = _optimiser(config).update(gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return state.replace(params=params, opt_state=opt_state, ema=ema, step=state.step + 1), metrics


def _keep_best(
  state: JRFState,
  apply_fn: ApplyFn,
  problem: JRFProblem,
  config: JRFConfig,
  validation: Batch | None,
) -> tuple[JRFState, Metrics]:
  """Early stopping: remembers the parameters if their validation objective is the lowest yet."""
  if validation is None:
    return state.replace(best_params=state.params, best_step=state.step), {}
  objective, (metrics, _) = jrf_loss(state.params, apply_fn, validation, problem, config)
  better = objective < state.best_objective

  def choose(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(better, new, old)

  state = state.replace(
    best_params=jax.tree.map(choose, state.params, state.best_params),
    best_objective=choose(objective.astype(state.best_objective.dtype), state.best_objective),
    best_step=choose(state.step, state.best_step),
  )
  return state, metrics


def step(
  state: JRFState,
  apply_fn: ApplyFn,
  batch: Batch,
  problem: JRFProblem,
  config: JRFConfig,
  validation: Batch | None = None,
) -> tuple[JRFState, Metrics]:
  """One Adam update, then one look at the validation batch if there is one.

  Args:
    state: from `init` or an earlier step.
    apply_fn: `apply_fn(params, [B, D]) -> [B]` logits.
    batch: rows to train on.
    problem: channels and lambda.
    config: static choices.
    validation: held-out rows with noisy labels and attributes, for early stopping on the same
      corrected objective; no clean data is needed.

  Returns:
    The next state and the metrics of `jrf_loss` before the update; those of the validation batch
    after it have the prefix `validation_`.
  """
  state, metrics = _update(state, apply_fn, batch, problem, config)
  state, held_out = _keep_best(state, apply_fn, problem, config, validation)
  return state, metrics | {f"validation_{name}": value for name, value in held_out.items()}


def run(
  state: JRFState,
  apply_fn: ApplyFn,
  batch: Batch,
  problem: JRFProblem,
  config: JRFConfig,
  num_steps: int,
  validation: Batch | None = None,
  eval_every: int = 1,
) -> tuple[JRFState, Metrics]:
  """Full-batch training, a scan over `step`.

  Validation is an outer scan around `eval_every` updates, not a `lax.cond` on the step: under
  `vmap` over arms a batched predicate would evaluate at every step. Calling it again on the
  returned state goes on where it stopped, so long runs can be saved between calls.

  Args:
    state: from `init` or an earlier run.
    apply_fn: `apply_fn(params, [B, D]) -> [B]` logits.
    batch: all training rows.
    problem: channels and lambda.
    config: static choices.
    num_steps: updates to make.
    validation: see `step`.
    eval_every: updates between looks at the validation batch.

  Returns:
    The last state and the history: training metrics `[num_steps]`, and with a validation batch
    `validation_*` metrics `[num_steps / eval_every]`.

  Raises:
    ValueError: if num_steps is not a positive multiple of eval_every.
  """
  if num_steps < 1 or eval_every < 1 or num_steps % eval_every:
    raise ValueError(
      f"num_steps is {num_steps} and eval_every {eval_every} (expected num_steps to be a positive "
      "multiple of eval_every); change one of them."
    )

  def update(state: JRFState, _) -> tuple[JRFState, Metrics]:
    return _update(state, apply_fn, batch, problem, config)

  def chunk(state: JRFState, _) -> tuple[JRFState, tuple[Metrics, Metrics]]:
    state, metrics = jax.lax.scan(update, state, length=eval_every)
    state, held_out = _keep_best(state, apply_fn, problem, config, validation)
    return state, (metrics, held_out)

  state, (metrics, held_out) = jax.lax.scan(chunk, state, length=num_steps // eval_every)
  history = {name: values.reshape(num_steps) for name, values in metrics.items()}
  return state, history | {f"validation_{name}": values for name, values in held_out.items()}
