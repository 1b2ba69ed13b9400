"""Monte Carlo study of a ramp-up: draws, simulates and estimates, many replications at once.

A *cell* is a randomisation level (unit or cluster), a plan (which stages are run) and the outcomes
on it. Replications are spread over the mesh axis "data"; a chunk of them is one unit of the run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from algorithms import gate
from launch.run import Run
from models import graph as graph_lib
from models.graph import Graph, build_gnn

LEVELS = ("unit", "cluster")
CHUNK = 40  # replications that a killed run loses at most


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
    second_hop: the operator W W without its diagonal, whose rows need not sum to 1; None where it
      would be too large.
  """

  name: str
  graph: Graph
  cluster: np.ndarray
  second_hop: Graph | None

  def design(self, config: ml_collections.ConfigDict, level: str, plan: Plan) -> gate.RolloutDesign:
    return gate.make_design(
      plan.shares,
      self.graph.num_nodes,
      self.cluster if level == "cluster" else None,
      randomisation=config.randomisation,
      nested=plan.nested,
    )

  @property
  def num_clusters(self) -> int:
    return int(self.cluster.max()) + 1


def outcome(config: ml_collections.ConfigDict, kind: str) -> gate.OutcomeConfig:
  c = config.outcome
  return gate.OutcomeConfig(kind, c.intercept, c.direct, c.spillover, c.second_hop, c.noise)


def true_effects(config: ml_collections.ConfigDict, network: Network) -> dict[str, float]:
  """GATE of each outcome of the config; growth of a dynamic graph does not move it."""
  return {
    kind: float(gate.true_gate(outcome(config, kind), network.graph))
    for kind in config.outcome.names
  }


Cells = dict[tuple[str, str, str, str, str], np.ndarray]


def run_cell(run: Run, network: Network, level: str, plan: Plan) -> Cells:
  """`[R]` estimates of every outcome, merge and cheap estimator, over R replications."""
  config = run.config
  kinds = list(config.outcome.names) if plan.name == "ramp" else ["two_hop"]
  fixed, dynamic = [k for k in kinds if k != "dynamic"], [k for k in kinds if k == "dynamic"]
  design = network.design(config, level, plan)
  cells: Cells = {}
  for group, is_dynamic in ((fixed, False), (dynamic, True)):
    if not group:
      continue
    name = f"{level}, {plan.name}{', dynamic' if is_dynamic else ''}"
    models = tuple(outcome(config, kind) for kind in group)
    replicate = functools.partial(estimates, models, is_dynamic)
    setup = make_setup(network.graph, design, plan)
    found = monte_carlo(run, name, replicate, setup, config.replications, config.batch)
    for estimator, values in found.items():
      for i, kind in enumerate(group):
        for j, merge in enumerate(plan.merges):
          if np.all(np.isfinite(values[:, i, j])):
            cells[kind, level, plan.name, merge.name, estimator] = values[:, i, j]
  return cells


@struct.dataclass
class Setup:
  """Arrays of a cell; they reach the devices as arguments, so nothing is compiled into constants.

  Attributes:
    graph, design: see `Network`.
    merges: `[M, L]`, 1 where a merge takes a stage.
    linear, quadratic: contrasts of the regression features.
    curved: `[M]`, 1 for merges with three distinct shares, which a curve needs, else NaN.
    polynomial: `[M, L]` weights of the stage means, NaN rows where shares repeat.
    grams: `[M, F, F]` for the moment estimator.
  """

  graph: Graph
  design: gate.RolloutDesign
  merges: jax.Array
  linear: jax.Array
  quadratic: jax.Array
  curved: jax.Array
  polynomial: jax.Array
  grams: jax.Array


def make_setup(graph: Graph, design: gate.RolloutDesign, plan: Plan) -> Setup:
  merges = np.array([[float(s in m.stages) for s in range(len(plan.shares))] for m in plan.merges])
  shares = [np.asarray(plan.shares_of(m)) for m in plan.merges]
  polynomial = np.zeros(merges.shape)
  for row, (merge, p) in enumerate(zip(plan.merges, shares, strict=True)):
    distinct = p.size > 1 and np.unique(p).size == p.size
    polynomial[row, list(merge.stages)] = gate.polynomial_weights(p) if distinct else np.nan
  return Setup(
    graph=graph,
    design=design,
    merges=jnp.asarray(merges),
    linear=gate.contrast("linear", (graph,), graph.num_nodes),
    quadratic=gate.contrast("quadratic", (graph,), graph.num_nodes),
    curved=jnp.asarray([1.0 if np.unique(p).size >= 3 else np.nan for p in shares]),
    polynomial=jnp.asarray(polynomial),
    grams=jnp.stack(
      [gate.known_gram((graph,), design.replace(shares=jnp.asarray(p)))[0] for p in shares]
    ),
  )


def estimates(
  models: Sequence[gate.OutcomeConfig], dynamic: bool, setup: Setup, key: jax.Array
) -> dict[str, jax.Array]:
  """One replication: `[outcomes, merges]` of each estimator; "dim" is ols on own treatment."""
  graph, design = setup.graph, setup.design
  z_key, graph_key, *y_keys = jax.random.split(key, 2 + len(models))
  z = gate.draw_rollout(z_key, design)
  seen = gate.draw_dynamic_graphs(graph_key, graph, len(design.shares)) if dynamic else graph
  e = gate.exposures((seen,), z)
  x_linear = gate.design_matrix("linear", z, e)
  x_quadratic = gate.design_matrix("quadratic", z, e)
  y = jnp.stack(
    [gate.simulate_outcome(k, m, graph, z, e[..., 0]) for k, m in zip(y_keys, models, strict=True)]
  )

  def merged(x: jax.Array, contrast: jax.Array) -> jax.Array:
    moments = jax.vmap(gate.stage_moments, (None, 0))(x, y)
    over_merges = jax.vmap(gate.ols_from_moments, (None, 0, None))
    return jax.vmap(over_merges, (0, None, None))(moments, setup.merges, contrast)

  by_stage = jax.vmap(gate.stage_horvitz_thompson, (0, None, None))(y, z, design.shares)
  drawn = jnp.isfinite(by_stage[:1]).astype(by_stage.dtype) * setup.merges
  return {
    "dim": merged(x_linear[..., :1], setup.linear[:1]),
    "ols": merged(x_linear, setup.linear),
    "quadratic": merged(x_quadratic, setup.quadratic) * setup.curved[None, :],
    "ht": jnp.nan_to_num(by_stage) @ drawn.T / drawn.sum(axis=1)[None, :],
    "polynomial": y.mean(axis=2) @ setup.polynomial.T,
    "moment": _moment_estimates(setup, x_linear, y),
  }


def _moment_estimates(setup: Setup, x: jax.Array, y: jax.Array) -> jax.Array:
  """`gate.moment` of every outcome and merge, `[outcomes, merges]`, from sums of each stage.

  Every unit's expected features are its stage's share, so they enter as a number a stage.
  """
  cross = jnp.einsum("lnf,oln->olf", x, y) / x.shape[1]
  mean_y = y.mean(axis=2)[:, :, None]

  def one(merge: jax.Array, gram: jax.Array) -> jax.Array:
    share = merge / merge.sum()
    total = jnp.einsum("l,olf->of", share, cross - share @ setup.design.shares * mean_y)
    return jnp.linalg.solve(gram, total.T).T @ setup.linear

  return jax.vmap(one, out_axes=1)(setup.merges, setup.grams)


def monte_carlo(
  run: Run,
  name: str,
  replicate: Callable[[Any, jax.Array], Any],
  setup: Any,
  replications: int,
  batch: int,
) -> dict[str, np.ndarray]:
  """`[R, ...]` of every leaf of `replicate(setup, key)`, a chunk of keys a unit of the run.

  Keys are spread over the mesh axis "data"; each device maps over its own, `batch` at a time.
  """
  keys = jax.random.split(run.key(f"replications/{name}"), replications)
  mapped = spread(replicate, batch, run.mesh)
  shape = -(-min(CHUNK, replications) // run.mesh.shape["data"]) * run.mesh.shape["data"]

  def compute(some: jax.Array) -> dict[str, np.ndarray]:
    # The devices get equal parts, and all chunks have one compiled shape.
    filled = jnp.concatenate([some, jnp.broadcast_to(some[:1], (shape - len(some),))])
    found = jax.tree.map(_everywhere, mapped(setup, filled))
    return jax.tree.map(lambda values: values[: len(some)], found)

  parts = [
    run.unit(f"{name}, from {start}", functools.partial(compute, keys[start : start + CHUNK]))
    for start in run.progress(range(0, replications, CHUNK), name)
  ]
  return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def spread(
  replicate: Callable[[Any, jax.Array], Any], batch: int, mesh: Mesh
) -> Callable[[Any, jax.Array], Any]:
  """`replicate` over many keys, each device of the axis "data" with its part of them."""

  def mapped(setup: Any, keys: jax.Array) -> Any:
    return jax.lax.map(lambda key: replicate(setup, key), keys, batch_size=batch)

  return jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))


def _everywhere(value: jax.Array) -> np.ndarray:
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value, tiled=True))
  return np.asarray(value)


def run_gnn(run: Run, network: Network, level: str, plan: Plan) -> Cells:
  """`[R]` estimates of the graph network, for the outcomes and merges of the config."""
  config = run.config
  merges = [plan.merges[plan.index(f"last {k}")] for k in config.gnn.merged]
  cells: Cells = {}
  init, *_ = build_gnn(config.gnn.kind, config.gnn.hidden, config.gnn.rectify_output)
  params = jax.tree.map(lambda w: w.astype(jnp.float32), init(run.key("network"), 2))
  setup = (network.graph, network.design(config, level, plan), params)
  for kind in config.gnn.outcomes:
    found = monte_carlo(
      run,
      f"{level}, network, {kind}",
      functools.partial(gnn_estimates, config, merges, kind),
      setup,
      config.gnn.replications,
      config.gnn.batch,
    )
    for j, merge in enumerate(merges):
      cells[kind, level, plan.name, merge.name, "gnn"] = found["gnn"][:, j]
  return cells


def gnn_estimates(
  config: ml_collections.ConfigDict,
  merges: Sequence[Merge],
  kind: str,
  setup: tuple[Graph, gate.RolloutDesign, Any],
  key: jax.Array,
) -> dict[str, jax.Array]:
  """One replication of the network: `[merges]` estimates, trained in float32.

  `setup` is the graph, the design and the network's initial parameters, the same in all
  replications as in the authors' code.
  """
  c = config.gnn
  graph, design, params = setup
  _, basis, apply_fn = build_gnn(c.kind, c.hidden, c.rectify_output)

  def inputs(graph: Graph, z: jax.Array) -> jax.Array:
    degree = graph_lib.degree(graph)
    if c.normalise_degree:
      degree = (degree - degree.mean()) / jnp.maximum(degree.std(), 1e-6)
    return basis(graph, jnp.stack([z, degree], axis=-1)).astype(jnp.float32)

  z_key, graph_key, y_key = jax.random.split(key, 3)
  z = gate.draw_rollout(z_key, design)
  if kind == "dynamic":
    seen = gate.draw_dynamic_graphs(graph_key, graph, len(design.shares))
    x, last = jax.vmap(inputs)(seen, z), jax.tree.map(lambda leaf: leaf[-1], seen)
  else:
    seen = last = graph
    x = jax.vmap(inputs, (None, 0))(graph, z)
  e = gate.exposures((seen,), z)[..., 0]
  y = gate.simulate_outcome(y_key, outcome(config, kind), graph, z, e).astype(jnp.float32)
  ones = jnp.ones(graph.num_nodes, z.dtype)
  ends = inputs(last, ones), inputs(last, jnp.zeros_like(ones))
  training = gate.GNNConfig(c.learning_rate, c.epochs)
  found = [
    gate.gnn_gate(params, apply_fn, x[np.array(m.stages)], y[np.array(m.stages)], *ends, training)
    for m in merges
  ]
  return {"gnn": jnp.stack([tau for tau, _ in found])}


COVERED = ("linear", "two_hop")  # the regression fits the first and misses part of the second


def intervals(
  models: Sequence[gate.OutcomeConfig],
  merges: Sequence[Merge],
  setup: tuple[Graph, gate.RolloutDesign],
  key: jax.Array,
) -> dict[str, jax.Array]:
  """One replication of `ols`: `[outcomes, merges]` estimates and ends of their 95% intervals."""
  graph, design = setup
  z_key, *y_keys = jax.random.split(key, 1 + len(models))
  z = gate.draw_rollout(z_key, design)
  e = gate.exposures((graph,), z)
  x = gate.design_matrix("linear", z, e)
  contrast = jnp.ones(2, x.dtype)  # rows of the graph sum to 1
  y = jnp.stack(
    [gate.simulate_outcome(k, m, graph, z, e[..., 0]) for k, m in zip(y_keys, models, strict=True)]
  )
  found: dict[str, list[jax.Array]] = {"tau": [], "low": [], "high": []}
  for merge in merges:
    at = np.array(merge.stages)
    regress = jax.vmap(
      lambda rows, at=at: gate.ols(x[at], rows, contrast, design.cluster, design.num_clusters)
    )
    estimate = regress(y[:, at])
    ends = gate.interval(estimate, design.num_clusters)
    for name, value in zip(found, (estimate.tau, *ends), strict=True):
      found[name].append(value)
  return {name: jnp.stack(values, axis=1) for name, values in found.items()}


def run_coverage(run: Run, network: Network, level: str, plan: Plan) -> dict[str, dict[str, Any]]:
  """How often the 95% interval of `ols` covers the estimator's mean, and the GATE, by outcome."""
  config = run.config
  merges = tuple(m for m in plan.merges if m.name.startswith("last"))
  design = network.design(config, level, plan)
  models = tuple(outcome(config, kind) for kind in COVERED)
  found = monte_carlo(
    run,
    f"{level}, coverage",
    functools.partial(intervals, models, merges),
    (network.graph, design),
    config.coverage_replications,
    config.batch,
  )

  def covers(values: np.ndarray) -> np.ndarray:
    return np.mean((found["low"] <= values) & (values <= found["high"]), axis=0)

  truth = np.array([float(gate.true_gate(model, network.graph)) for model in models])
  of_mean = covers(found["tau"].mean(axis=0))
  of_gate = covers(truth[None, :, None])
  return {
    kind: {
      "merges": [merge.name for merge in merges],
      "covered": of_mean[i].tolist(),
      "covers_gate": of_gate[i].tolist(),
      "replications": config.coverage_replications,
      "num_clusters": design.num_clusters,
    }
    for i, kind in enumerate(COVERED)
  }


def theory(
  run: Run, network: Network, plan: Plan, merges: Sequence[str]
) -> dict[tuple[str, str, str], dict[str, float]]:
  """The bias formula for the two_hop outcome, by (level, estimator, merge)."""
  config = run.config
  if network.second_hop is None:
    return {}
  model = gate.as_linear(outcome(config, "two_hop"), network.graph, network.second_hop)
  moments = jax.jit(gate.bias_moments)
  found = {}
  for level in LEVELS:
    design = network.design(config, level, plan)
    for estimator, operators in (("dim", ()), ("ols", (network.graph,))):

      def compute(operators: tuple[Graph, ...] = operators, design: Any = design) -> Any:
        of_graph = moments(operators, model, design)
        shares = [plan.shares_of(plan.merges[plan.index(m)]) for m in merges]
        return [
          _numbers(gate.merged_bias(of_graph, design.replace(shares=jnp.asarray(p))))
          for p in shares
        ]

      of_merges = run.unit(f"theory, {level}, {estimator}", compute)
      found |= {(level, estimator, m): f for m, f in zip(merges, of_merges, strict=True)}
  return found


def _numbers(report: gate.BiasReport) -> dict[str, float]:
  return {
    "single": float(report.single),
    "merged": float(report.merged),
    "finite": float(report.finite),
    "h": float(report.design.leverage),
    "shrinkage": float(report.design.shrinkage),
  }
