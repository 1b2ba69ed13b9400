"""Bias and variance of merged stages under linear interference, without an N x N array.

One stage has `Cov(z) = p (1 - p) S`, where `S = C C'` for Bernoulli clusters with indicator matrix
C (the identity at unit level), and `S = K / (K - 1) (C C' - 1 1' / K)` where exactly `p K` clusters
are treated. With features `x_i = (z_i, (W z)_i, ...)` let, as averages over units,

  M[P, Q] = avg_i (P S Q')_ii      m[P] = avg_i (P S B')_ii      P, Q among I, W, ...
  v_w = mean_s p_s (1 - p_s)       v_b = Var_s(p_s)              rho = v_b / v_w
  delta = (1, ..., 1)              h = delta' M^-1 delta

Every unit has expected features `p_s delta`, so the pooled moments are `v_w M + v_b delta delta'`
and `v_w m + v_b tau delta`. Hence, by Sherman and Morrison,

  one stage, any share    bias_1 = delta' M^-1 m - tau
  merged stages           bias_L = bias_1 / (1 + rho h)

The paper states that merging reduces the bias; these formulas are derived here, for any linear
features, and hold exactly for the moment estimator and for least squares as the number of units
grows. `finite` is the correction of least squares for the pooled mean, which few clusters need: the
same formulas with M and m less the covariances of the means over all rows, relative to v_w.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from algorithms.gate.design import RolloutDesign
from algorithms.gate.interference import LinearInterference, total_effect
from models import graph as graph_lib
from models.graph import Graph


@struct.dataclass
class DesignReport:
  """What a design can identify, whatever the outcomes.

  Attributes:
    within: v_w, mean of `p (1 - p)` over the stages.
    between: v_b, variance of the shares over the stages.
    ratio: rho; infinite where every stage treats everybody or nobody, which leaves no bias, and NaN
      where all stages are one of the two, which shows no effect.
    leverage: h; larger means that merging helps more.
    shrinkage: `1 + rho h`, by which merging divides the bias of a single stage.
    gram: M, `[F, F]`.
    condition: condition number of M.
  """

  within: jax.Array
  between: jax.Array
  ratio: jax.Array
  leverage: jax.Array
  shrinkage: jax.Array
  gram: jax.Array
  condition: jax.Array


@struct.dataclass
class BiasReport:
  """Bias of regressions on merged stages, for a given interference model.

  Attributes:
    tau: the GATE.
    single: bias of one stage, the same at every share.
    merged: bias of all stages of the design together.
    finite: `merged` for least squares with finitely many clusters: what its sums have in
      expectation. The expectation of their quotient still differs, by order 1 / K.
    noise_variance: variance that the outcome noise alone gives, to leading order.
    design: the report of the design.
  """

  tau: jax.Array
  single: jax.Array
  merged: jax.Array
  finite: jax.Array
  noise_variance: jax.Array
  design: DesignReport


@struct.dataclass
class _Pairs:
  """Operators summed over the clusters of their columns, as (row, cluster) pairs.

  rows, clusters: `[E]` of each pair; pairs beyond the last one have row N.
  values: `[E, Q]`, entry of `P C` for each of Q operators.
  of_edge: `[E]` pair of each edge, edges in the order in which they were given.
  """

  rows: jax.Array
  clusters: jax.Array
  values: jax.Array
  of_edge: jax.Array


def check_operator(graph: Graph) -> None:
  """Refuses an exposure operator whose rows do not sum to 1, on the host.

  Raises:
    ValueError: naming the first such row; or an operator with a stage axis.
  """
  _check_nodes("operator", graph, graph.num_nodes)
  total = np.bincount(
    np.asarray(graph.receivers), np.asarray(graph.weights, np.float64), minlength=graph.num_nodes
  )
  bad = np.flatnonzero(np.abs(total - 1) > 1e-6)
  if bad.size:
    raise ValueError(
      f"row {bad[0]} of an exposure operator sums to {total[bad[0]]:.6g} ({bad.size} such rows); "
      "expected 1, as of a mean over neighbours. Normalise the rows; drop nodes without "
      "neighbours, or use the moment estimator with known_gram, which knows each unit's mean"
    )


def design_report(operators: Sequence[Graph], design: RolloutDesign) -> DesignReport:
  """What merging the stages of a design does to the bias.

  Args:
    operators: exposures beside the own treatment, row-stochastic (see `check_operator`); `()` is
      difference in means.
    design: the stages that are merged.

  Raises:
    ValueError: graph and design of different sizes, an operator a stage, or complete randomisation
      of a single cluster. So do the other functions here.
  """
  gram, _ = _design_moments(_stack(operators, design), design)
  return _report(gram, design)


@struct.dataclass
class BiasMoments:
  """What the bias needs of graph, interference and randomisation units; shares do not enter.

  Attributes:
    gram: M, `[F, F]`.
    cross: m, `[F]`.
    mean_gram: `1' P S Q' 1 / N^2`, `[F, F]`, of the features' means over units.
    mean_cross: `1' P S B' 1 / N^2`, `[F]`.
    tau: the GATE.
    noise_variance: of one outcome, over N.
  """

  gram: jax.Array
  cross: jax.Array
  mean_gram: jax.Array
  mean_cross: jax.Array
  tau: jax.Array
  noise_variance: jax.Array


def bias_moments(
  operators: Sequence[Graph], model: LinearInterference, design: RolloutDesign
) -> BiasMoments:
  """The moments from which `merged_bias` has the bias of any stages; arguments as `bias_theory`."""
  joint, joint_mean = _design_moments([*_stack(operators, design), _effects(model, design)], design)
  return BiasMoments(
    gram=joint[:-1, :-1],
    cross=joint[:-1, -1],
    mean_gram=joint_mean[:-1, :-1],
    mean_cross=joint_mean[:-1, -1],
    tau=total_effect(model),
    noise_variance=model.noise_sd**2 / design.cluster.shape[0],
  )


def merged_bias(moments: BiasMoments, design: RolloutDesign) -> BiasReport:
  """Bias of the merged stages of a design, given the moments of its graph."""
  report = _report(moments.gram, design)

  def of_one_stage(gram: jax.Array, cross: jax.Array) -> tuple[jax.Array, jax.Array]:
    delta = jnp.ones(cross.shape, cross.dtype)
    alpha = jnp.linalg.solve(gram, delta)
    return alpha @ cross - moments.tau, alpha.sum()

  single, _ = of_one_stage(moments.gram, moments.cross)
  # By Sherman and Morrison the pooled mean takes its part of M and m only: no v_b appears in it.
  centre = _mean_variance(design) / jnp.where(report.within > 0, report.within, 1)
  centred, leverage = of_one_stage(
    moments.gram - centre * moments.mean_gram, moments.cross - centre * moments.mean_cross
  )
  noise = moments.noise_variance / design.shares.shape[0]
  return BiasReport(
    tau=moments.tau,
    single=single,
    merged=single / report.shrinkage,
    finite=centred / (1 + report.ratio * leverage),
    noise_variance=noise * report.leverage / _pooled(report),
    design=report,
  )


def bias_theory(
  operators: Sequence[Graph], model: LinearInterference, design: RolloutDesign
) -> BiasReport:
  """Bias of the regression on own treatment and exposures.

  Args:
    operators: exposures beside the own treatment, row-stochastic (see `check_operator`); `()` is
      difference in means.
    model: the interference.
    design: the stages that are merged.
  """
  return merged_bias(bias_moments(operators, model, design), design)


def known_gram(operators: Sequence[Graph], design: RolloutDesign) -> tuple[jax.Array, jax.Array]:
  """Pooled covariance and means of the features that the design implies, for `estimators.moment`.

  Rows may sum to anything: a node without neighbours has exposure 0 in every stage. Each unit is
  centred by its own mean over the stages, so that its intercept does not matter. (Derived.)

  Returns:
    `[F, F]` expected covariance of a unit over its stages, mean over units; and `[L, N, F]`
    expected features.
  """
  stacked = _stack(operators, design)
  gram, _ = _design_moments(stacked, design)
  ones = jnp.ones(design.cluster.shape[0], gram.dtype)
  totals = jnp.stack([graph_lib.apply(op, ones) for op in stacked], axis=-1)
  mean_x = design.shares[:, None, None] * totals[None, :, :]
  centred = mean_x - mean_x.mean(axis=0, keepdims=True)
  spread = jnp.einsum("lnf,lng->fg", centred, centred) / (mean_x.shape[0] * mean_x.shape[1])
  within = jnp.mean(design.shares * (1 - design.shares))
  return within * gram + spread, mean_x


def moment_statistics(
  operators: Sequence[Graph], model: LinearInterference, design: RolloutDesign, block: int = 64
) -> tuple[jax.Array, jax.Array]:
  """Exact mean and variance of the moment estimator under Bernoulli randomisation.

  With `alpha = G^-1 delta`, `H = alpha_1 I + alpha_2 W + ...`, `zeta = z - p` and
  `c_s = (p_s - mean p) sum(alpha)`, a stage contributes

    (H zeta + c 1)' (a + p B 1 + B zeta + noise) = constant + u' zeta + zeta' H' B zeta + noise part

  which summed over clusters is a quadratic form in K independent scores. Stages that are nested
  share the scores: their products have the moments of `_score_moments`. (Derived.)

  Args:
    operators: exposures beside the own treatment, row-stochastic (see `check_operator`).
    model: the interference.
    design: the merged stages, of Bernoulli randomisation.
    block: clusters at a time in the K x K sums; memory is O((E + N + K) block).

  Returns:
    The mean of the estimator, which is the GATE and the merged bias, and its variance.

  Raises:
    ValueError: complete randomisation, or a block below 1.
  """
  if design.randomisation != "bernoulli":
    raise ValueError(
      f"randomisation = {design.randomisation!r}; the exact variance is for 'bernoulli'. For "
      "complete randomisation draw roll-outs and take their variance"
    )
  if block < 1:
    raise ValueError(f"block = {block}; expected 1 or more clusters at a time, such as 64")
  stacked, effects = _stack(operators, design), _effects(model, design)
  nodes, clusters = design.cluster.shape[0], design.num_clusters
  stages = design.shares.shape[0]
  pairs = _pairs([*stacked, effects], design.cluster)
  joint = _sum_of_squares(pairs.values) / nodes
  report = _report(joint[:-1, :-1], design)
  # G^-1 delta, which is finite for v_w = 0 too, where G alone cannot be inverted.
  alpha = jnp.linalg.solve(report.gram, jnp.ones(len(stacked), joint.dtype)) / _pooled(report)
  tau = total_effect(model)
  mean = report.within * (alpha @ joint[:-1, -1]) + report.between * tau * alpha.sum()

  ones = jnp.ones(nodes, joint.dtype)

  def weigh(values: jax.Array) -> jax.Array:  # H values
    return sum(a * graph_lib.apply(op, values) for a, op in zip(alpha, stacked, strict=True))

  def weigh_transposed(values: jax.Array) -> jax.Array:  # H' values
    return sum(
      a * graph_lib.apply_transpose(op, values) for a, op in zip(alpha, stacked, strict=True)
    )

  def by_cluster(values: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(values, design.cluster, clusters)

  shift = (design.shares - design.shares.mean()) * alpha.sum()
  level = by_cluster(weigh_transposed(model.intercept))
  slope = by_cluster(weigh_transposed(graph_lib.apply(effects, ones)))
  spread = by_cluster(graph_lib.apply_transpose(effects, ones))
  linear = (
    level[None, :] + design.shares[:, None] * slope[None, :] + shift[:, None] * spread[None, :]
  )
  own = jax.ops.segment_sum(
    (pairs.values[:, :-1] @ alpha) * pairs.values[:, -1], pairs.clusters, clusters
  )

  def squares(start: jax.Array) -> jax.Array:
    columns = design.cluster[:, None] == (start + jnp.arange(block))[None, :]
    columns = columns.astype(joint.dtype)
    both = weigh_transposed(graph_lib.apply(effects, columns))
    both = both + graph_lib.apply_transpose(effects, weigh(columns))
    return jnp.sum(by_cluster(both) ** 2)

  every = jnp.sum(jax.lax.map(squares, jnp.arange(0, clusters, block)))
  crossed = (every - 4 * jnp.sum(own**2)) / 2

  s, t = design.shares[:, None], design.shares[None, :]
  moment = _score_moments(s, t)
  mixed = jnp.sum(linear * own[None, :], axis=1)
  first, second = moment(1, 1), moment(2, 2) - moment(2, 0) * moment(0, 2)
  per_pair = (
    first * _sum_of_squares(linear.T)
    + moment(1, 2) * mixed[:, None]
    + moment(2, 1) * mixed[None, :]
    + second * jnp.sum(own**2)
    + first**2 * crossed
  )
  if not design.nested:
    per_pair = jnp.diagonal(per_pair)
  variances = design.shares * (1 - design.shares)
  noise = model.noise_sd**2 * jnp.sum(
    nodes * shift**2 + variances * nodes * (alpha @ report.gram @ alpha)
  )
  return mean, (jnp.sum(per_pair) + noise) / float(nodes * stages) ** 2


def bias_bound(
  operators: Sequence[Graph],
  design: RolloutDesign,
  total_spillover: float,
  support: Graph | None = None,
) -> jax.Array:
  """Largest bias of the merged stages over a class of interference.

  The class holds every spill-over matrix with zero diagonal and absolute row sums of at most
  `total_spillover`, beside a direct effect that is the same for all units. The bias is linear in
  the matrix, so its extreme puts each row's whole spill-over on the entry of largest coefficient
  `|alpha_1 S_ij + sum_h alpha_h (W_h S)_ij - 1|`, `alpha = M^-1 delta`. (Derived.)

  Args:
    operators: exposures beside the own treatment, row-stochastic (see `check_operator`).
    design: the merged stages.
    total_spillover: bound of the row sums, in units of the outcome.
    support: spill-over on the entries of this graph only; None for any pair of units.

  Returns:
    The bound, in units of the outcome.
  """
  stacked = _stack(operators, design)
  nodes, clusters = design.cluster.shape[0], design.num_clusters
  gram, _ = _design_moments(stacked, design)
  report = _report(gram, design)
  alpha = jnp.linalg.solve(gram, jnp.ones(len(stacked), gram.dtype))
  asked = [] if support is None else [support]
  for graph in asked:
    _check_nodes("support", graph, nodes)
  pairs = _pairs([*stacked, *asked], design.cluster)
  found = pairs.values[:, : len(stacked)] @ alpha
  outside = jnp.zeros((), found.dtype)
  if design.randomisation == "complete":
    scale = clusters / (clusters - 1)
    found, outside = scale * (found - alpha.sum() / clusters), -alpha.sum() / (clusters - 1)
  coefficient = jnp.abs(found - 1)
  if support is None:
    size = jax.ops.segment_sum(jnp.ones(nodes, jnp.int32), design.cluster, clusters)
    at = jnp.minimum(pairs.rows, nodes - 1)
    # A unit alone in its cluster has nobody else there to be affected by.
    alone = (design.cluster[at] == pairs.clusters) & (size[pairs.clusters] == 1)
    present = pairs.rows < nodes
    rows = jax.ops.segment_max(jnp.where(present & ~alone, coefficient, 0), at, nodes)
    # A row that has a pair with every cluster leaves no unit outside.
    seen = jax.ops.segment_sum(present.astype(jnp.int32), at, nodes)
    rows = jnp.maximum(rows, jnp.where(seen < clusters, jnp.abs(outside - 1), 0))
  else:
    edges = support.weights.shape[0]
    used = (support.weights != 0) & (support.senders != support.receivers)
    of_edge = jnp.where(used, coefficient[pairs.of_edge[-edges:]], 0)
    rows = jnp.maximum(jax.ops.segment_max(of_edge, support.receivers, nodes), 0)
  return total_spillover * rows.mean() / report.shrinkage


def _stack(operators: Sequence[Graph], design: RolloutDesign) -> list[Graph]:
  """The operators of all features: the own treatment first."""
  nodes = jnp.arange(design.cluster.shape[0], dtype=jnp.int32)
  dtype = operators[0].weights.dtype if operators else design.shares.dtype
  for i, operator in enumerate(operators):
    _check_nodes(f"operators[{i}]", operator, nodes.shape[0])
  if design.randomisation == "complete" and design.num_clusters < 2:
    raise ValueError(
      "num_clusters = 1 with complete randomisation, which treats all units or none whatever is "
      "drawn; expected 2 or more clusters, or 'bernoulli'"
    )
  return [Graph(nodes, nodes, jnp.ones(nodes.shape, dtype), nodes.shape[0]), *operators]


def _check_nodes(name: str, graph: Graph, nodes: int) -> None:
  if graph.weights.ndim != 1:
    raise ValueError(
      f"{name} has weights of shape {graph.weights.shape}, with a stage axis; the theory is for "
      "graphs that do not change. Take the report of each stage's graph"
    )
  # Indexing beyond the last cluster would not fail, it would give the last one.
  if graph.num_nodes != nodes:
    raise ValueError(
      f"{name} has {graph.num_nodes} nodes and the design {nodes}; expected one node numbering for "
      "all: make the design with the graph's num_nodes"
    )


def _effects(model: LinearInterference, design: RolloutDesign) -> Graph:
  """B as an operator."""
  nodes = design.cluster.shape[0]
  _check_nodes("model.spillover", model.spillover, nodes)
  for name, values in (("intercept", model.intercept), ("direct", model.direct)):
    if values.shape != (nodes,):
      raise ValueError(
        f"model.{name} has shape {values.shape}; expected one number for each of the {nodes} units"
      )
  nodes = jnp.arange(model.spillover.num_nodes, dtype=jnp.int32)
  receivers = jnp.concatenate([nodes, model.spillover.receivers])
  order = jnp.argsort(receivers, stable=True)
  return Graph(
    jnp.concatenate([nodes, model.spillover.senders])[order],
    receivers[order],
    jnp.concatenate([model.direct, model.spillover.weights])[order],
    model.spillover.num_nodes,
  )


def _pairs(operators: Sequence[Graph], cluster: jax.Array) -> _Pairs:
  rows = jnp.concatenate([op.receivers for op in operators])
  clusters = jnp.concatenate([cluster[op.senders] for op in operators])
  columns = jnp.concatenate(
    [jnp.full(op.weights.shape, i, jnp.int32) for i, op in enumerate(operators)]
  )
  weights = jnp.concatenate([op.weights for op in operators])
  order = jnp.lexsort((clusters, rows))
  rows, clusters = rows[order], clusters[order]
  new = (rows[1:] != rows[:-1]) | (clusters[1:] != clusters[:-1])
  pair = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new, dtype=jnp.int32)])
  edges = rows.shape[0]
  values = jnp.zeros((edges, len(operators)), weights.dtype)
  values = values.at[pair, columns[order]].add(weights[order])
  return _Pairs(
    rows=jnp.full(edges, operators[0].num_nodes, rows.dtype).at[pair].set(rows),
    clusters=jnp.zeros(edges, clusters.dtype).at[pair].set(clusters),
    values=values,
    of_edge=jnp.zeros(edges, jnp.int32).at[order].set(pair),
  )


def _sum_of_squares(values: jax.Array) -> jax.Array:
  """`values' values`, `[Q, Q]`, of `values [E, Q]` with E large.

  As a sum, which XLA takes in parts: its matrix product adds float32 one after the other, and was
  1% off at four million edges.
  """
  return jnp.sum(values[:, :, None] * values[:, None, :], axis=0)


def _design_moments(
  operators: Sequence[Graph], design: RolloutDesign
) -> tuple[jax.Array, jax.Array]:
  """`avg_i (P S Q')_ii` and `1' P S Q' 1 / N^2` for all pairs of operators, `[Q, Q]` each."""
  nodes, clusters = design.cluster.shape[0], design.num_clusters
  pairs = _pairs(operators, design.cluster)
  gram = _sum_of_squares(pairs.values) / nodes
  columns = jax.ops.segment_sum(pairs.values, pairs.clusters, clusters)
  # As floats: the square of N overflows an int32 from 46,341 nodes on.
  mean = _sum_of_squares(columns) / float(nodes) ** 2
  if design.randomisation == "complete":
    ones = jnp.ones(nodes, gram.dtype)
    totals = jnp.stack([graph_lib.apply(op, ones) for op in operators], axis=-1)
    scale, total = clusters / (clusters - 1), totals.sum(axis=0)
    gram = scale * (gram - _sum_of_squares(totals) / float(nodes * clusters))
    mean = scale * (mean - jnp.outer(total, total) / float(nodes**2 * clusters))
  return gram, mean


def _report(gram: jax.Array, design: RolloutDesign) -> DesignReport:
  shares = design.shares
  within, between = jnp.mean(shares * (1 - shares)), jnp.var(shares)
  ratio = between / within
  leverage = jnp.linalg.solve(gram, jnp.ones(gram.shape[0], gram.dtype)).sum()
  return DesignReport(
    within=within,
    between=between,
    ratio=ratio,
    leverage=leverage,
    shrinkage=1 + ratio * leverage,
    gram=gram,
    condition=jnp.linalg.cond(gram),
  )


def _pooled(report: DesignReport) -> jax.Array:
  """`v_w + v_b h`: `(v_w M + v_b delta delta')^-1 delta` is `M^-1 delta` over this."""
  return report.within + report.between * report.leverage


def _mean_variance(design: RolloutDesign) -> jax.Array:
  """Variance of the treated share over all stages, in units of the randomisation units."""
  p = design.shares
  if design.nested:
    joint = jnp.minimum(p[:, None], p[None, :]) - p[:, None] * p[None, :]
    return joint.mean()
  return jnp.sum(p * (1 - p)) / p.shape[0] ** 2


def _score_moments(p: jax.Array, r: jax.Array):
  """`(a, b) -> E[(z - p)^a (w - r)^b]` for `z = 1[u < p]` and `w = 1[u < r]` of one uniform u."""
  low, high = jnp.minimum(p, r), jnp.maximum(p, r)

  def moment(a: int, b: int) -> jax.Array:
    both = low * (1 - p) ** a * (1 - r) ** b
    one = (high - low) * ((p > low) - p) ** a * ((r > low) - r) ** b
    return both + one + (1 - high) * (-p) ** a * (-r) ** b

  return moment
