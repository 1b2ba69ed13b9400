"""Roll-out designs: who is treated at each stage of a ramp-up."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

RANDOMISATIONS = ("bernoulli", "complete")


@struct.dataclass
class RolloutDesign:
  """A ramp-up experiment; `make_design` checks and builds one.

  Attributes:
    shares: `[L]` treatment share of each stage.
    cluster: `[N]` int32, the randomisation unit of each node: 0..K-1. Unit-level randomisation is
      `cluster = arange(N)`.
    num_clusters: K, static.
    randomisation: "bernoulli" treats each cluster on its own, "complete" exactly `round(p K)` of
      them; static.
    nested: one score a cluster is kept through all stages, so treatment is never withdrawn;
      otherwise fresh scores at each stage. Static.
  """

  shares: jax.Array
  cluster: jax.Array
  num_clusters: int = struct.field(pytree_node=False)
  randomisation: str = struct.field(pytree_node=False)
  nested: bool = struct.field(pytree_node=False)


def make_design(
  shares: Sequence[float] | np.ndarray,
  num_nodes: int,
  cluster: np.ndarray | None = None,
  *,
  randomisation: str = "bernoulli",
  nested: bool = True,
) -> RolloutDesign:
  """Checks a design on the host and builds it.

  Args:
    shares: `[L]` treatment share of each stage, in [0, 1].
    num_nodes: N.
    cluster: `[N]` integers naming each node's cluster 0..K-1; unit level when None.
    randomisation: one of RANDOMISATIONS.
    nested: see `RolloutDesign`.

  Raises:
    ValueError: a share outside [0, 1], no stage, cluster ids that do not cover all nodes or leave
      a number out, or an unknown randomisation.
  """
  shares = np.asarray(shares, np.float64)
  if shares.ndim != 1 or not shares.size:
    raise ValueError(f"shares = {shares!r}; expected one treatment share a stage, at least one")
  if not np.all((shares >= 0) & (shares <= 1)):
    bad = int(np.flatnonzero(~((shares >= 0) & (shares <= 1)))[0])
    raise ValueError(f"shares[{bad}] = {shares[bad]}; expected shares from 0 to 1, not percent")
  if randomisation not in RANDOMISATIONS:
    raise ValueError(
      f"randomisation = {randomisation!r}; expected one of {', '.join(RANDOMISATIONS)}"
    )
  cluster = np.arange(num_nodes) if cluster is None else np.asarray(cluster)
  if cluster.shape != (num_nodes,) or not np.issubdtype(cluster.dtype, np.integer):
    raise ValueError(
      f"cluster has shape {cluster.shape} and type {cluster.dtype}; expected one integer for each "
      f"of the {num_nodes} nodes. A node in no community needs a cluster of its own"
    )
  found = np.unique(cluster)
  if not np.array_equal(found, np.arange(found.size)):
    raise ValueError(
      f"cluster holds the numbers {found[0]} to {found[-1]}, {found.size} different ones; expected "
      "0 to K - 1 with none left out: np.unique(cluster, return_inverse=True)[1] relabels"
    )
  return RolloutDesign(
    jnp.asarray(shares), jnp.asarray(cluster, jnp.int32), int(found.size), randomisation, nested
  )


def draw_rollout(key: jax.Array, design: RolloutDesign) -> jax.Array:
  """Draws one assignment of all stages.

  Returns:
    `[L, N]` of 0. and 1.
  """
  stages = design.shares.shape[0]
  rows = 1 if design.nested else stages
  score = jax.random.uniform(key, (rows, design.num_clusters))
  score = jnp.broadcast_to(score, (stages, design.num_clusters))
  if design.randomisation == "bernoulli":
    treated = score < design.shares[:, None].astype(score.dtype)
  else:
    rank = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1)
    treated = rank < jnp.round(design.shares * design.num_clusters)[:, None]
  return treated.astype(design.shares.dtype)[:, design.cluster]
