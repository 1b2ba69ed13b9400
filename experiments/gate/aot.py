"""A batch of `:paper`, for compiling ahead of time: see tests/aot/compile_entry.py."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from algorithms import gate
from experiments.gate import study
from experiments.gate.config import get_config
from models.graph import Graph, build_gnn

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "A100", "H200")
# Replications have nothing to tell each other.
ADDS_UP = False

# The authors' graph, Stanford3; the number of its clusters does not change what is compiled much.
_NUM_NODES = 11_621
_NUM_EDGES = 2 * 568_330
_NUM_CLUSTERS = 400


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers a batch of network replications, trained on the merges that `:paper` asks for.

  Args:
    mesh: axes ("data", "model"); replications are spread over the first.
  """
  config = get_config("paper")
  plan = study.make_plans(config.shares)["ramp"]
  merges = tuple(plan.merges[plan.index(f"last {k}")] for k in config.gnn.merged)
  graph = Graph(
    _array(_NUM_EDGES, dtype=jnp.int32),
    _array(_NUM_EDGES, dtype=jnp.int32),
    _array(_NUM_EDGES),
    _NUM_NODES,
  )
  design = gate.RolloutDesign(
    _array(len(plan.shares)),
    _array(_NUM_NODES, dtype=jnp.int32),
    _NUM_CLUSTERS,
    config.randomisation,
    plan.nested,
  )
  init, *_ = build_gnn(config.gnn.kind, config.gnn.hidden, config.gnn.rectify_output)
  params = jax.eval_shape(lambda: init(jax.random.key(0), 2))
  count = config.gnn.batch * mesh.shape["data"]
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
  replicate = functools.partial(study.gnn_estimates, config, merges, "linear")

  def shard(spec: PartitionSpec, tree: Any) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: x.update(sharding=sharding), tree)

  setup = shard(PartitionSpec(), (graph, design, params))
  mapped = study.spread(replicate, config.gnn.batch, mesh)
  return mapped.lower(setup, shard(PartitionSpec("data"), keys))


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)
