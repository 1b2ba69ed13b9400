"""Monte Carlo study of a ramp-up: draws, simulates and estimates, many replications at once.

A *cell* is a randomisation level (unit or cluster), a plan (which stages are run) and the outcomes
on it. Replications are spread over the mesh axis "data"; a chunk of them is one unit of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from algorithms import gate
from launch.run import Run
from models import graph as graph_lib
from models.graph import Graph

LEVELS = ("unit", "cluster")
# Estimators of the study; "dim" is the regression on the own treatment alone.
ESTIMATORS = ("dim", "ht", "moment", "ols", "quadratic", "polynomial")


@dataclasses.dataclass(frozen=True)
class Merge:
  """Stages that are merged: `stages` are indices into the shares of a plan."""

  name: str
  stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A ramp-up: shares of its stages, whether assignments are nested, and what is merged."""

  name: str
  shares: tuple[float, ...]
  nested: bool
  merges: tuple[Merge, ...]

  def index(self, merge: str) -> int:
    return [m.name for m in self.merges].index(merge)

  def shares_of(self, merge: Merge) -> tuple[float, ...]:
    return tuple(self.shares[s] for s in merge.stages)


def make_plans(shares: Sequence[float]) -> dict[str, Plan]:
  """The ramp, the ramp with fresh draws at each stage, and the largest share again and again."""
  stages = (0.0, *(float(p) for p in shares))
  last = len(stages) - 1
  merges = [Merge(f"last {k}", tuple(range(last - k + 1, last + 1))) for k in range(last, 0, -1)]
  merges += [Merge(f"0 + {p:g}", (0, i)) for i, p in enumerate(stages) if i]
  repeats = [Merge(f"repeat {k}", tuple(range(k))) for k in range(1, last + 1)]
  return {
    "ramp": Plan("ramp", stages, True, tuple(merges)),
    "fresh": Plan("fresh", stages, False, tuple(merges)),
    "repeat": Plan("repeat", (stages[-1],) * last, False, tuple(repeats)),
  }


@dataclasses.dataclass(frozen=True)
class Network:
  """What a study needs of a graph.

  Attributes:
    name: for the report.
    graph: means over neighbours, row-stochastic.
    cluster: `[N]` community of each node.
    second_hop: the operator W W without its diagonal; its rows need not sum to 1.
    source: "real" or "simulated".
  """

  name: str
  graph: Graph
  cluster: np.ndarray
  second_hop: Graph
  source: str

  def design(self, config: ml_collections.ConfigDict, level: str, plan: Plan) -> gate.RolloutDesign:
    return gate.make_design(
      plan.shares,
      self.graph.num_nodes,
      self.cluster if level == "cluster" else None,
      randomisation=config.randomisation,
      nested=plan.nested,
    )
