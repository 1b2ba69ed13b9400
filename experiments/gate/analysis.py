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

SINGULAR = 1e12  # condition number of features that the design cannot tell apart
NOTE = (
  "Intervals hold noise, not the bias of interference that the features miss, and where they miss "
  "some they hold too little of the noise too. `bias bound` is the largest bias for the stated "
  "class of spill-overs. Known-Gram: its bias formula is exact, its noise grows with the level of "
  "y."
)


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  """Reads graph, clusters and log, and reports every estimate that the stages allow.

  Raises:
    ValueError: files or settings that do not fit, or stages that no regression can use.
  """
  table = networks.read(config)
  graph, kept = graphs.to_graph(table, config.isolated)
  names = [table.names[i] for i in kept]
  cluster = networks.read_clusters(config.clusters, names) if config.clusters else None
  everyone = None
  if config.clusters:
    everyone = networks.read_clusters(config.clusters, table.names)
  log = read_log(config.log, table.names, everyone)
  if config.trend and log.shares.size < 2:
    raise ValueError("config.trend = True with one stage; a trend needs two or more. Leave it out")
  z, y = jnp.asarray(log.z[:, kept]), jnp.asarray(log.y[:, kept])
  steps = np.diff(log.z, axis=0)
  nested = bool(np.all(steps >= 0) or np.all(steps <= 0))
  design = gate.make_design(
    log.shares, kept.size, cluster, randomisation=config.randomisation, nested=nested
  )
  if design.num_clusters < 2:
    raise ValueError(
      "all nodes are in one randomisation unit, so nothing was randomised between them; expected "
      "two or more in config.clusters"
    )
  how = "" if log.shares.size < 2 else f" ({'nested' if nested else 'not nested'})"
  shares = ", ".join(f"{p:g}" for p in log.shares)
  run.say(
    f"{networks.describe(config, table, graph, kept)}; {design.num_clusters:,} randomisation "
    f"units, stages with shares {shares}{how}"
  )
  isolated = int(np.sum(np.bincount(np.asarray(graph.receivers), minlength=kept.size) == 0))
  for text in log.warnings:
    run.warn(text)
  means, errors = _stage_means(np.asarray(y), np.asarray(design.cluster), design.num_clusters)
  realised = np.asarray(z).mean(axis=1)
  run.table(
    "Stages",
    [
      {"stage": stage, "planned share": p, "realised share": r, "mean y": m}
      for stage, p, r, m in zip(log.stages, log.shares, realised, means, strict=True)
    ],
  )
  rows = estimates(config, run, graph, design, z, y, log)
  conditions = [row["condition"] for row in rows if row["condition"] is not None]
  for kind in config.features:
    for text in gate.warnings(
      log.shares.tolist(),
      design.num_clusters,
      num_isolated=isolated,
      features=kind,
      condition=max(conditions),
      trend=config.trend,
    ):
      run.warn(text)
  for row in rows:
    run.metric(f"estimate/{row['name']}", row["estimate"], "y")
  run.table("Estimates of the GATE", rows, NOTE)
  of_design = _design_row(config, graph, design, "all stages", config.trend, isolated)
  run.table("The design", [of_design], _design_caption(config))
  for row in rows:
    run.say(_sentence(row))
  run.say(_design_sentence(of_design))
  run.say(NOTE)
  figures.draw_estimates(run, rows, networks.title(config))
  figures.draw_means(run, log.shares, means, errors)
  largest = int(np.argmax(log.shares))
  what = f"Stage {log.stages[largest]}, share {log.shares[largest]:g}"
  figures.draw_network(run, graph, np.asarray(design.cluster), log.z[largest][kept], what)


def estimates(
  config: ml_collections.ConfigDict,
  run: Run,
  graph: Graph,
  design: gate.RolloutDesign,
  z: jnp.ndarray,
  y: jnp.ndarray,
  log: RolloutLog,
) -> list[dict[str, Any]]:
  """A row for each estimator; regressions have an interval, the others do not.

  Raises:
    ValueError: no regression of the config can be fitted to these stages.
  """
  e = gate.exposures((graph,), z)
  inner = np.unique(log.shares)[1:-1]
  knots = jnp.asarray(inner)
  distinct = np.unique(log.shares).size
  within = float(np.mean(log.shares * (1 - log.shares)))
  time = np.linspace(0, 1, log.shares.size)[:, None, None]
  trend = jnp.broadcast_to(jnp.asarray(time), (*z.shape, 1)) if config.trend else None
  rows = []

  def regress(kind: str, stages: slice, name: str, nuisance: jnp.ndarray | None) -> None:
    x = gate.design_matrix(kind, z[stages], e[stages], knots)
    columns, names = x, gate.feature_names(kind, 1, inner.size)
    if nuisance is not None:
      columns, names = jnp.concatenate([x, nuisance], axis=-1), [*names, "trend"]
    try:
      gate.check_features(columns, names)
    except ValueError as error:
      run.warn(f"{name} is left out: {error}")
      return
    contrast = gate.contrast(kind, (graph,), graph.num_nodes, knots)
    found = gate.ols(x, y[stages], contrast, design.cluster, design.num_clusters, nuisance)
    low, high = gate.interval(found, design.num_clusters)
    rows.append(_row(name, found.tau, found.se, low, high, found.condition))

  for kind in config.features:
    name = f"ols, {kind}, all stages" + (", trend taken out" if config.trend else "")
    if kind in ("quadratic", "spline") and distinct < 3:
      run.warn(f"{name} is left out: a curve needs three distinct shares, there are {distinct}")
      continue
    regress(kind, slice(None), name, trend)
  inside = np.flatnonzero((log.shares > 0) & (log.shares < 1))
  if distinct > 1 and inside.size:
    last = int(inside[np.argmax(log.shares[inside])])
    name = f"ols, linear, share {log.shares[last]:g} only"
    regress("linear", slice(last, last + 1), name, None)
  if not rows:
    raise ValueError(
      "no regression can be fitted to these stages (see the warnings); add a stage of another "
      "share, such as the one before the experiment with share 0"
    )
  # These see no trend, so they would take it for an effect beside regressions that do not.
  if not config.trend:
    if within > 0:
      gram, mean_x = gate.known_gram((graph,), design)
      if np.linalg.cond(gram) < SINGULAR:
        x = gate.design_matrix("linear", z, e)
        linear = gate.contrast("linear", (graph,), graph.num_nodes)
        tau = gate.moment(x, mean_x, y, gram, linear)
        rows.append(_row("known-Gram moments, all stages", tau))
    if distinct == log.shares.size > 1:
      weights = jnp.asarray(gate.polynomial_weights(log.shares))
      rows.append(_row("polynomial roll-out (no graph)", gate.polynomial_rollout(y, weights)))
  if inside.size:
    rows.append(_row("Hajek, mean of stages", gate.hajek(y, z)))
    tau = gate.horvitz_thompson(y, z, design.shares)
    rows.append(_row("Horvitz-Thompson, mean of stages", tau))
  return rows


def diagnose(run: Run, network: Network, plan: Plan) -> None:
  """The designs of the simulated study, as a reader of a log sees theirs."""
  rows = []
  for level in LEVELS:
    design = network.design(run.config, level, plan)
    for merge in plan.merges:
      some = design.replace(shares=jnp.asarray(plan.shares_of(merge)))
      rows.append(_design_row(run.config, network.graph, some, f"{level}, {merge.name}"))
  caption = f"{_design_caption(run.config)} The two_hop outcome's add up to more."
  run.table("The designs", rows, caption)
  shares = list(plan.shares[1:])
  for text in gate.warnings(shares, network.num_clusters):
    run.warn(f"cluster level: {text}")


def _design_row(
  config: ml_collections.ConfigDict,
  graph: Graph,
  design: gate.RolloutDesign,
  name: str,
  trend: bool = False,
  isolated: int = 0,
) -> dict[str, Any]:
  shares = np.asarray(design.shares, np.float64)
  within = float(np.mean(shares * (1 - shares)))
  between = between_stages(shares, trend)
  row = {"stages": name, "v_w": within, "v_b": between}
  unknown = {**row, "h": None, "1 + rho h": None, "condition": None, "bias bound": None}
  if isolated:  # the formulas are for means over neighbours
    return unknown
  report = gate.design_report((graph,), design)
  if not float(report.condition) < SINGULAR:  # nobody's neighbours differ from them
    return unknown
  leverage = float(report.leverage)
  shrinkage = 1 + between / within * leverage if within > 0 else np.inf
  bound = 0.0
  if within > 0:
    bound = float(_bound(config, graph, design)) * float(report.shrinkage) / shrinkage
  return {
    **row,
    "h": leverage,
    "1 + rho h": shrinkage,
    "condition": float(report.condition),
    "bias bound": bound,
  }


def between_stages(shares: np.ndarray, trend: bool) -> float:
  """v_b: the variance of the shares over the stages, or what a linear trend leaves of it."""
  if not trend:
    return float(np.var(shares))
  time = np.arange(shares.size)
  line = np.polyval(np.polyfit(time, shares, 1), time)
  return float(np.mean((shares - line) ** 2))


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
  left = " that the trend leaves" if config.trend else ""
  return (
    f"v_w, v_b: variance of treatment within and between stages{left}; merging divides the bias of "
    f"a single stage by 1 + rho h. Bias bound of ols, linear: for spill-overs from {who} that add "
    f"up to at most {config.bound.total_spillover:g} units of y for each unit (config.bound; set "
    "it to your outcome), a direct effect that is the same for all, and many clusters."
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
  start = f"design: v_w {row['v_w']:.4g}, v_b {row['v_b']:.4g}"
  if row["h"] is None:
    return (
      f"{start}; h and the bias bound are undefined, for nodes without neighbours or for clusters "
      "that hold all of each other's neighbours"
    )
  return (
    f"{start}, h {row['h']:.4g}, 1 + rho h {row['1 + rho h']:.4g}, condition number "
    f"{row['condition']:.3g}, bias bound {row['bias bound']:.4g}"
  )


def _stage_means(
  y: np.ndarray, cluster: np.ndarray, num_clusters: int
) -> tuple[np.ndarray, np.ndarray]:
  """Mean of each stage, and its standard error from cluster totals."""
  means = y.mean(axis=1)
  centred = y - means[:, None]
  totals = np.stack([np.bincount(cluster, row, minlength=num_clusters) for row in centred])
  return means, np.sqrt((totals**2).sum(axis=1)) / y.shape[1]
