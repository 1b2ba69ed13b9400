"""The training step of `:paper`, for compiling ahead of time: see tests/aot/compile_entry.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from algorithms import jrf
from algorithms.noise import TransitionMatrix
from experiments.jrf.config import get_config
from experiments.jrf.training import TABLE_SPECS, Rows, Table, Training, make_trainer
from models.mlp import build_mlp

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "A100", "H200")

# Adult with dataset.features="all", the larger of the two choices.
_NUM_PEOPLE = 48_842
_NUM_FEATURES = 105
# Of the 16 models that `:paper` trains at once: 192 models, about 40 arms for each of 5 seeds.
_NUM_BATCHES = 12


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers one full-batch update of all models, with the trainer that a run uses.

  Args:
    mesh: axes ("data", "model"); rows are sharded over the first, models over the second.
  """
  config = get_config("paper")
  training = Training.from_config(config)
  jrf_config = training.jrf_config("exact", "data")
  init, apply_fn = build_mlp(_NUM_FEATURES, training.hidden)
  num_models = _NUM_BATCHES * training.vmap_models * mesh.shape["model"]

  def num_rows(share: float) -> int:
    rows = round(share * _NUM_PEOPLE)
    return rows + -rows % mesh.shape["data"]

  train = num_rows((1.0 - training.test_fraction) * (1.0 - training.validation_fraction))
  validation = num_rows((1.0 - training.test_fraction) * training.validation_fraction)
  channel = TransitionMatrix(_array(num_models, 2, 2))
  table = Table(
    train_features=_array(config.seeds, train, _NUM_FEATURES),
    validation_features=_array(config.seeds, validation, _NUM_FEATURES),
    seed=_array(num_models, dtype=jnp.int32),
    train_rows=_rows(num_models, train),
    validation_rows=_rows(num_models, validation),
    problem=jrf.JRFProblem(channel, channel, _array(num_models)),
  )
  state = jax.eval_shape(
    jax.vmap(lambda key: jrf.init(init(key), jrf_config)),
    jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_models)),
  )

  def shard(spec: PartitionSpec, tree: Any) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: x.update(sharding=sharding), tree)

  table = jax.tree.map(shard, TABLE_SPECS, table, is_leaf=lambda x: isinstance(x, PartitionSpec))
  trainer = make_trainer(mesh, apply_fn, training, "exact", num_steps=1)
  return trainer.lower(shard(PartitionSpec("model"), state), table)


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _rows(num_models: int, num_rows: int) -> Rows:
  flipped = _array(num_models, num_rows, dtype=jnp.int32)
  return Rows(labels=flipped, attribute=flipped, weights=_array(num_models, num_rows))
