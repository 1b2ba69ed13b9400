"""A solve of `:paper`, for compiling ahead of time: see tests/aot/compile_entry.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from algorithms import opi
from experiments.opi.config import get_config

# v5e has 17 GB a chip: its slice of four does not hold 10 million states with 80 successors.
CHIPS = ("v5p:2x2x1", "v6e:2x2", "A100", "H200")


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers the solution of the large sparse model.

  Args:
    mesh: axes ("data", "model"); states are spread over the first.
  """
  config = get_config("paper")
  sparse = config.sparse
  rows = NamedSharding(mesh, PartitionSpec("data"))
  shape = (sparse.num_states, sparse.num_actions, sparse.num_successors)

  def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

  mdp = opi.SparseMDP(
    array(*shape[:2]), array(*shape, dtype=jnp.int32), array(*shape), sparse.discount
  )
  solver = config.solver
  settings = opi.OPIConfig(solver.num_sweeps, solver.lookahead, epsilon=solver.epsilon)
  return jax.jit(lambda model: opi.solve_sharded(model, mesh, settings)).lower(mdp)
