"""Estimates from the reader's own roll-out log, with everything that should be said about them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_collections
import numpy as np

from algorithms import gate
from experiments.datasets import graphs
from experiments.gate import figures, networks
from experiments.gate.log import RolloutLog, read_log
from experiments.gate.study import LEVELS, Network, Plan
from launch.run import Run
from models.graph import Graph

NOTE = (
  "Intervals hold noise, not the bias of interference that the features miss; `bias bound` is the "
  "largest such bias for the stated class of spill-overs."
)


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  """Reads graph, clusters and log, and reports every estimate that the stages allow."""
  table = networks.read(config)
  graph, kept = graphs.to_graph(table, config.isolated)
  names = [table.names[i] for i in kept]
  cluster = networks.read_clusters(config.clusters, names) if config.clusters else None
  everyone = None
  if config.clusters:
    everyone = networks.read_clusters(config.clusters, table.names)
  log = read_log(config.log, table.names, everyone)
  for text in log.warnings:
    run.warn(text)
  z, y = jnp.asarray(log.z[:, kept]), jnp.asarray(log.y[:, kept])
  nested = bool(np.all(np.diff(log.z, axis=0) >= 0))
  design = gate.make_design(
    log.shares, kept.size, cluster, randomisation=config.randomisation, nested=nested
  )
  run.say(
    f"{networks.title(config)}: {kept.size:,} nodes, {design.num_clusters:,} randomisation units, "
    f"stages with shares {', '.join(f'{p:g}' for p in log.shares)} "
    f"({'nested' if nested else 'not nested'}), {len(table.names) - kept.size} nodes left out"
  )
  isolated = int(np.sum(np.bincount(np.asarray(graph.receivers), minlength=kept.size) == 0))
  rows = estimates(config, graph, design, z, y, log)
  for row in rows:
    run.metric(f"estimate/{row['name']}", row["estimate"], "y")
  run.table("Estimates of the GATE", rows, NOTE)
  of_design = [_design_row(config, graph, design, "all stages")] if not isolated else []
  run.table("The design", of_design, _design_caption(config))
  worst = max([row["condition"] for row in rows if row["condition"] is not None], default=1.0)
  for kind in config.features:
    for text in gate.warnings(
      log.shares.tolist(),
      design.num_clusters,
      num_isolated=isolated,
      features=kind,
      condition=worst,
      trend=config.trend,
    ):
      run.warn(text)
  for row in rows:
    run.say(_sentence(row))
  for row in of_design:
    run.say(_design_sentence(row))
  run.say(NOTE)
  figures.draw_estimates(run, rows, networks.title(config))
  means, errors = _stage_means(np.asarray(y), np.asarray(design.cluster), design.num_clusters)
  figures.draw_means(run, log.shares, means, errors)
  largest = int(np.argmax(log.shares))
  what = f"Stage {log.stages[largest]}, share {log.shares[largest]:g}"
  figures.draw_network(run, graph, np.asarray(design.cluster), log.z[largest][kept], what)


def estimates(
  config: ml_collections.ConfigDict,
  graph: Graph,
  design: gate.RolloutDesign,
  z: jnp.ndarray,
  y: jnp.ndarray,
  log: RolloutLog,
) -> list[dict[str, Any]]:
  """A row for each estimator; regressions have an interval, the others do not.

  Raises:
    ValueError: features that cannot be told apart; the message names them.
  """
  e = gate.exposures((graph,), z)
  inner = np.unique(log.shares)[1:-1]
  knots = jnp.asarray(inner)
  distinct = np.unique(log.shares).size
  order = np.linspace(0, 1, log.shares.size)[:, None, None]
  trend = jnp.broadcast_to(jnp.asarray(order), (*z.shape, 1)) if config.trend else None
  rows = []
  for kind in config.features:
    if kind == "spline" and not inner.size:
      continue
    x = gate.design_matrix(kind, z, e, knots)
    gate.check_features(x, gate.feature_names(kind, 1, inner.size))
    found = gate.ols(
      x,
      y,
      gate.contrast(kind, (graph,), graph.num_nodes, knots),
      design.cluster,
      design.num_clusters,
      trend,
    )
    low, high = gate.interval(found, design.num_clusters)
    rows.append(_row(f"ols, {kind}, all stages", found.tau, found.se, low, high, found.condition))
  last = int(np.argmax(log.shares))
  if distinct > 1 and 0 < log.shares[last] < 1:
    x = gate.design_matrix("linear", z, e)[last : last + 1]
    found = gate.ols(
      x,
      y[last : last + 1],
      gate.contrast("linear", (graph,), graph.num_nodes),
      design.cluster,
      design.num_clusters,
    )
    low, high = gate.interval(found, design.num_clusters)
    name = f"ols, linear, share {log.shares[last]:g} only"
    rows.append(_row(name, found.tau, found.se, low, high, found.condition))
  gram, mean_x = gate.known_gram((graph,), design)
  x = gate.design_matrix("linear", z, e)
  linear = gate.contrast("linear", (graph,), graph.num_nodes)
  rows.append(_row("known-Gram moments, all stages", gate.moment(x, mean_x, y, gram, linear)))
  if np.any((log.shares > 0) & (log.shares < 1)):
    rows.append(_row("Hajek, mean of stages", gate.hajek(y, z)))
    rows.append(
      _row("Horvitz-Thompson, mean of stages", gate.horvitz_thompson(y, z, design.shares))
    )
  if distinct == log.shares.size > 1:
    weights = jnp.asarray(gate.polynomial_weights(log.shares))
    rows.append(_row("polynomial roll-out (no graph)", gate.polynomial_rollout(y, weights)))
  return rows


def diagnose(run: Run, network: Network, plan: Plan) -> None:
  """The designs of the simulated study, as a reader of a log sees theirs."""
  rows = []
  for level in LEVELS:
    design = network.design(run.config, level, plan)
    for merge in plan.merges:
      some = design.replace(shares=jnp.asarray(plan.shares_of(merge)))
      rows.append(_design_row(run.config, network.graph, some, f"{level}, {merge.name}"))
  run.table("The designs", rows, _design_caption(run.config))
  shares = list(plan.shares[1:])
  for text in gate.warnings(shares, network.num_clusters):
    run.warn(f"cluster level: {text}")


def _design_row(
  config: ml_collections.ConfigDict, graph: Graph, design: gate.RolloutDesign, name: str
) -> dict[str, Any]:
  report = gate.design_report((graph,), design)
  return {
    "stages": name,
    "v_w": float(report.within),
    "v_b": float(report.between),
    "h": float(report.leverage),
    "1 + rho h": float(report.shrinkage),
    "condition": float(report.condition),
    "bias bound": float(_bound(config, graph, design)),
  }


def _bound(config: ml_collections.ConfigDict, graph: Graph, design: gate.RolloutDesign) -> Any:
  supports = {"any": None, "neighbours": graph}
  if config.bound.support not in supports:
    raise ValueError(
      f"config.bound.support = {config.bound.support!r}; expected {' or '.join(supports)}"
    )
  support = supports[config.bound.support]
  return gate.bias_bound((graph,), design, config.bound.total_spillover, support)


def _design_caption(config: ml_collections.ConfigDict) -> str:
  who = "neighbours" if config.bound.support == "neighbours" else "any other units"
  return (
    "v_w, v_b: variance of treatment within and between stages; merging divides the bias of a "
    f"single stage by 1 + rho h. Bias bound of ols, linear: for spill-overs from {who} that add "
    f"up to at most {config.bound.total_spillover:g} units of y for each unit (config.bound)."
  )


def _row(
  name: str, tau: Any, se: Any = None, low: Any = None, high: Any = None, condition: Any = None
) -> dict[str, Any]:
  def number(value: Any) -> float | None:
    return None if value is None else float(value)

  return {
    "name": name,
    "estimate": float(tau),
    "se": number(se),
    "low": number(low),
    "high": number(high),
    "condition": number(condition),
  }


def _sentence(row: dict[str, Any]) -> str:
  interval = "" if row["low"] is None else f"  95% interval [{row['low']:.4g}, {row['high']:.4g}]"
  return f"  {row['name']:<36} {row['estimate']:10.4g}{interval}"


def _design_sentence(row: dict[str, Any]) -> str:
  return (
    f"design: v_w {row['v_w']:.4g}, v_b {row['v_b']:.4g}, h {row['h']:.4g}, 1 + rho h "
    f"{row['1 + rho h']:.4g}, condition number {row['condition']:.3g}, bias bound "
    f"{row['bias bound']:.4g}"
  )


def _stage_means(
  y: np.ndarray, cluster: np.ndarray, num_clusters: int
) -> tuple[np.ndarray, np.ndarray]:
  """Mean of each stage, and its standard error from cluster totals."""
  means = y.mean(axis=1)
  centred = y - means[:, None]
  totals = np.stack([np.bincount(cluster, row, minlength=num_clusters) for row in centred])
  return means, np.sqrt((totals**2).sum(axis=1)) / y.shape[1]
