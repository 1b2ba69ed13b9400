"""Trains every arm of a table for every seed in one compiled call.

Models (a seed and an arm each) are spread over the mesh axis "model" and their rows over the axis
"data"; group sums are added over "data" before the gap is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from algorithms import fairness_metrics, jrf
from algorithms.noise import TransitionMatrix, flip
from experiments.datasets.tabular import Tabular
from experiments.jrf import arms as arms_lib
from experiments.jrf.arms import Arm
from launch.run import Run
from models.mlp import build_mlp


@dataclasses.dataclass(frozen=True)
class Training:
  """Choices of a table that do not differ between its arms; keys of the config.

  standardise_on: "train", or "all" as the authors do, which lets the test rows leak.
  """

  hidden: tuple[int, ...]
  initial: str
  steps: int
  eval_every: int
  learning_rate: float
  weight_decay: float
  early_stopping: bool
  test_fraction: float
  validation_fraction: float
  standardise_on: str
  ema_decay: float = 0.0
  penalty: str = "abs"
  vmap_models: int = 1

  @staticmethod
  def from_config(config: ml_collections.ConfigDict) -> Training:
    return Training(
      hidden=tuple(config.model.hidden),
      initial=config.model.initial,
      steps=config.train.steps,
      eval_every=config.train.eval_every,
      learning_rate=config.train.learning_rate,
      weight_decay=config.train.weight_decay,
      early_stopping=config.train.early_stopping,
      test_fraction=config.dataset.test_fraction,
      validation_fraction=config.dataset.validation_fraction,
      standardise_on=config.dataset.standardise_on,
      ema_decay=config.train.ema_decay,
      penalty=config.fairness.penalty,
      vmap_models=config.train.vmap_models,
    )

  def jrf_config(self, mode: str, axis_name: str | None) -> jrf.JRFConfig:
    return jrf.JRFConfig(
      mode=mode,
      penalty=self.penalty,
      learning_rate=self.learning_rate,
      weight_decay=self.weight_decay,
      ema_decay=self.ema_decay,
      axis_name=axis_name,
    )


@flax.struct.dataclass
class Part:
  """Clean rows of one part of a split: features `[N, D]` float32, the rest `[N]` int32."""

  features: Any
  labels: Any
  attribute: Any


def split(data: Tabular, key: jax.Array, training: Training) -> dict[str, Part]:
  """Shuffled and standardised parts "train", "validation" and "test" of a data set.

  Args:
    data: all rows.
    key: typed PRNG key, consumed.
    training: fractions and what to standardise on.
  """
  num_rows = data.labels.shape[0]
  order = np.asarray(jax.random.permutation(key, num_rows))
  num_test = round(training.test_fraction * num_rows)
  num_validation = round(training.validation_fraction * (num_rows - num_test))
  pieces = {
    "test": order[:num_test],
    "validation": order[num_test : num_test + num_validation],
    "train": order[num_test + num_validation :],
  }
  base = data.features if training.standardise_on == "all" else data.features[pieces["train"]]
  mean = base.mean(axis=0, dtype=np.float64)
  spread = base.std(axis=0, dtype=np.float64)
  # A column that is constant in the training rows would be divided by 0.
  spread = np.where(spread > 0, spread, 1.0)
  return {
    name: Part(
      features=((data.features[rows] - mean) / spread).astype(np.float32),
      labels=data.labels[rows],
      attribute=data.attribute[rows],
    )
    for name, rows in pieces.items()
  }


@flax.struct.dataclass
class Rows:
  """What an arm sees of the rows besides their features, `[N]` each: see `jrf.Batch`."""

  labels: jax.Array
  attribute: jax.Array
  weights: jax.Array


def noise_keys(run: Run, seed: int) -> tuple[jax.Array, jax.Array]:
  """Keys of the flips on the training and on the validation rows of a seed."""
  train, validation = jax.random.split(run.key(f"noise/seed={seed}"))
  return train, validation


def noisy_rows(part: Part, arm: Arm, key: jax.Array) -> tuple[Rows, jax.Array]:
  """Rows with flipped labels and groups, and the shares `[2]` of the flipped groups.

  Arms given one key differ in their rates only: a higher rate flips a superset.
  """
  label_key, attribute_key = jax.random.split(key)
  labels = flip(label_key, part.labels, TransitionMatrix.binary(*arm.label))
  noisy = flip(attribute_key, part.attribute, TransitionMatrix.binary(*arm.attribute))
  shares = jnp.bincount(noisy, length=2) / max(noisy.shape[0], 1)
  seen = arms_lib.seen_attribute(arm, part.attribute, noisy)
  return Rows(labels, seen, arms_lib.row_weights(arm, labels, noisy)), shares


@flax.struct.dataclass
class Table:
  """Device arrays of M models, one for each seed and arm of one mode of the correction.

  seed `[M]` is the index of a model's features in train_features `[S, N, D]` and
  validation_features `[S, V, D]`; the rest has the leading axis `[M]`.
  """

  train_features: jax.Array
  validation_features: jax.Array
  seed: jax.Array
  train_rows: Rows
  validation_rows: Rows
  problem: jrf.JRFProblem


_MODELS, _FEATURES, _ROWS = P("model"), P(None, "data", None), P("model", "data")
TABLE_SPECS = Table(_FEATURES, _FEATURES, _MODELS, _ROWS, _ROWS, _MODELS)


def make_table(
  parts: Sequence[dict[str, Part]],
  arms: Sequence[Arm],
  keys: Sequence[tuple[jax.Array, jax.Array]],
  mesh: Mesh,
) -> Table:
  """Puts noise on the parts of every seed and lays the models out over the mesh.

  Rows of weight 0 and copies of the last model are added so that the devices divide both; noise
  is drawn before, so that it does not depend on the number of devices. `keys` are those of
  `noise_keys`, a pair for each seed.
  """

  @jax.jit
  def noisy(parts: dict[str, Part], keys: tuple[jax.Array, jax.Array]) -> Any:
    train_key, validation_key = keys
    made = []
    for arm in arms:
      train, shares = noisy_rows(parts["train"], arm, train_key)
      validation, _ = noisy_rows(parts["validation"], arm, validation_key)
      # Weights are for training: early stopping looks at the rows as they come.
      validation = validation.replace(weights=jnp.ones_like(validation.weights))
      made.append((train, validation, arms_lib.problem(arm, shares)))
    return jax.tree.map(lambda *x: jnp.stack(x), *made)

  per_seed = [noisy(part, pair) for part, pair in zip(parts, keys, strict=True)]
  train_rows, validation_rows, problem = jax.tree.map(lambda *x: np.concatenate(x), *per_seed)
  table = Table(
    train_features=np.stack([part["train"].features for part in parts]),
    validation_features=np.stack([part["validation"].features for part in parts]),
    seed=np.repeat(np.arange(len(parts), dtype=np.int32), len(arms)),
    train_rows=train_rows,
    validation_rows=validation_rows,
    problem=problem,
  )
  return jax.tree.map(
    lambda spec, tree: place(tree, spec, mesh), TABLE_SPECS, table, is_leaf=_is_spec
  )


def _is_spec(x: Any) -> bool:
  return isinstance(x, P)


def place(tree: Any, spec: P, mesh: Mesh) -> Any:
  """Arrays on the mesh: models padded with copies of the last one, rows with zeros."""

  def put(x: Any) -> jax.Array:
    x = np.asarray(x)
    for axis, name in enumerate(spec):
      if name is not None:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, -x.shape[axis] % mesh.shape[name])
        x = np.pad(x, padding, mode="edge" if name == "model" else "constant")
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(put, tree)


def first_states(
  params: Sequence[Any], num_arms: int, config: jrf.JRFConfig, mesh: Mesh
) -> jrf.JRFState:
  """States `[M]` before the first update: every arm of a seed starts from the same weights."""
  states = [jrf.init(p, config) for p in params for _ in range(num_arms)]
  return place(jax.tree.map(lambda *x: np.stack(x), *states), _MODELS, mesh)


ApplyFn = Callable[[Any, jax.Array], jax.Array]


def make_trainer(
  mesh: Mesh, apply_fn: ApplyFn, training: Training, mode: str, num_steps: int
) -> Callable[[jrf.JRFState, Table], tuple[jrf.JRFState, dict[str, jax.Array]]]:
  """A compiled `(state, table) -> (state, metrics [M])` that makes `num_steps` updates."""
  config = training.jrf_config(mode, "data")

  def all_models(state: jrf.JRFState, table: Table):
    def one_model(arguments):
      state, seed, rows, validation_rows, problem = arguments
      validation = None
      if training.early_stopping:
        validation = _batch(table.validation_features[seed], validation_rows)
      state, history = jrf.run(
        state,
        apply_fn,
        _batch(table.train_features[seed], rows),
        problem,
        config,
        num_steps,
        validation=validation,
        eval_every=num_steps,
      )
      return state, {name: values[-1] for name, values in history.items()}

    models = (state, table.seed, table.train_rows, table.validation_rows, table.problem)
    return jax.lax.map(one_model, models, batch_size=training.vmap_models)

  sharded = jax.shard_map(all_models, mesh=mesh, in_specs=(_MODELS, TABLE_SPECS), out_specs=_MODELS)
  return jax.jit(sharded)


def _batch(features: jax.Array, rows: Rows) -> jrf.Batch:
  return jrf.Batch(features, rows.labels, rows.attribute, rows.weights)


def make_evaluator(
  mesh: Mesh, apply_fn: ApplyFn, with_scores: bool
) -> Callable[..., tuple[dict[str, jax.Array], jax.Array | None]]:
  """A compiled `(params, seed [M], part) -> (metrics [M], scores [M, N] or None)`.

  The metrics are those of `fairness_metrics.evaluate` on the clean rows `[S, N]` of a part.
  """

  def all_models(params: Any, seed: jax.Array, part: Part):
    def one_model(arguments):
      params, seed = arguments
      scores = jax.nn.sigmoid(apply_fn(params, part.features[seed]))
      metrics = fairness_metrics.evaluate(scores, part.labels[seed], part.attribute[seed])
      return metrics, scores if with_scores else None

    return jax.lax.map(one_model, (params, seed))

  return jax.jit(
    jax.shard_map(all_models, mesh=mesh, in_specs=(_MODELS, _MODELS, P()), out_specs=_MODELS)
  )


def train_table(
  run: Run,
  data: Tabular,
  arms: Sequence[Arm],
  seeds: int,
  training: Training,
  with_scores: bool = False,
) -> dict[str, Any]:
  """Trains and evaluates all arms for all seeds; call it inside a unit of `run`.

  Returns:
    "test" and "validation": metrics of `fairness_metrics.evaluate` on clean rows, `[S, A]` each,
    arms in the order given; "best_step" `[S, A]`; with `with_scores` also "test_scores"
    `[S, A, N]`.
  """
  parts = [split(data, run.key(f"split/seed={seed}"), training) for seed in range(seeds)]
  keys = [noise_keys(run, seed) for seed in range(seeds)]
  init, apply_fn = build_mlp(data.features.shape[1], training.hidden, initial=training.initial)
  params = [init(run.key(f"init/seed={seed}")) for seed in range(seeds)]

  modes = sorted({arm.mode for arm in arms})
  members = {mode: [i for i, arm in enumerate(arms) if arm.mode == mode] for mode in modes}
  tables, states = {}, {}
  for mode in modes:
    chosen = [arms[i] for i in members[mode]]
    tables[mode] = make_table(parts, chosen, keys, run.mesh)
    config = training.jrf_config(mode, "data")
    states[mode] = first_states(params, len(chosen), config, run.mesh)

  done = 0
  restored = run.checkpoints.restore(states)
  if restored is not None:
    done, states = restored
    run.say(f"going on from step {done} of {training.steps}")
  chunk = min(training.eval_every, training.steps)
  trainers = {}
  what = f"{len(arms)} arms x {seeds} seeds, {training.steps} steps by {chunk}"
  for at in run.progress(range(done, training.steps, chunk), what):
    size = min(chunk, training.steps - at)
    for mode in modes:
      if (mode, size) not in trainers:
        trainers[mode, size] = make_trainer(run.mesh, apply_fn, training, mode, size)
      states[mode], metrics = trainers[mode, size](states[mode], tables[mode])
      means = {f"{mode}/{name}": np.mean(v) for name, v in gather(metrics).items()}
      run.log(at + size, **means)
    run.checkpoints.save(at + size, states)

  def in_order(per_mode: dict[str, Any]) -> np.ndarray:
    """`[S, A, ...]` in the order of the arms, from `[M, ...]` for each mode."""
    shaped = [
      np.asarray(per_mode[mode])[: seeds * len(members[mode])].reshape(
        seeds, len(members[mode]), *per_mode[mode].shape[1:]
      )
      for mode in modes
    ]
    order = np.argsort(np.concatenate([members[mode] for mode in modes]))
    return np.concatenate(shaped, axis=1)[:, order]

  states = gather(states)
  result: dict[str, Any] = {"best_step": in_order({m: states[m].best_step for m in modes})}
  best = jax.tree.map(
    lambda *x: np.concatenate(in_order(dict(zip(modes, x, strict=True)))),
    *[states[mode].best_params for mode in modes],
  )
  seed = np.repeat(np.arange(seeds, dtype=np.int32), len(arms))
  best, seed = place((best, seed), _MODELS, run.mesh)
  for name in ("test", "validation"):
    part = jax.tree.map(lambda *x: np.stack(x), *[part[name] for part in parts])
    if not part.labels.shape[1]:
      continue
    evaluate = make_evaluator(run.mesh, apply_fn, with_scores and name == "test")
    metrics, scores = gather(evaluate(best, seed, part))
    shape = (seeds, len(arms))
    kept = seeds * len(arms)
    result[name] = {k: v[:kept].reshape(shape) for k, v in metrics.items()}
    if scores is not None:
      result["test_scores"] = scores[:kept].reshape(*shape, -1)
  return result


def gather(tree: Any) -> Any:
  """Arrays spread over the devices of all processes, as NumPy arrays in every process."""
  if jax.process_count() == 1:
    return jax.tree.map(np.asarray, tree)
  return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)
