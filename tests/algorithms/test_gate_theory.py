"""The bias and variance of merged stages against enumeration, dense algebra and Monte Carlo.

Compiling takes most of the time: where it can, a test uses the sizes of another one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse

from algorithms.gate import estimators, theory
from algorithms.gate.design import RolloutDesign, make_design
from algorithms.gate.interference import LinearInterference
from models.graph import Graph, from_edges

bias_theory = jax.jit(theory.bias_theory)
bias_moments = jax.jit(theory.bias_moments)
moment_statistics = jax.jit(theory.moment_statistics, static_argnames="block")


def random_operator(
  rng: np.random.Generator, nodes: int, per_row: int, normalise: bool = True
) -> Graph:
  """A directed weighted operator without a diagonal, `per_row` entries a row and some padding."""
  senders = np.concatenate(
    [(i + 1 + rng.permutation(nodes - 1)[:per_row]) % nodes for i in range(nodes)]
  )
  receivers = np.repeat(np.arange(nodes), per_row)
  weights = rng.uniform(0.2, 1.0, senders.size)
  if not normalise:
    weights *= rng.choice([-1.0, 1.0, 2.0], weights.size)
  graph = from_edges(senders, receivers, nodes, weights, normalise=normalise)
  padding = Graph(
    np.full(3, nodes - 1, np.int32), np.full(3, nodes - 1, np.int32), np.zeros(3), nodes
  )
  return jax.tree.map(lambda a, b: jnp.asarray(np.concatenate([a, b])), graph, padding)


def random_model(rng: np.random.Generator, nodes: int, noise_sd: float) -> LinearInterference:
  return LinearInterference(
    jnp.asarray(rng.normal(1, 1, nodes)),
    jnp.asarray(rng.normal(1, 1, nodes)),
    random_operator(rng, nodes, 3, normalise=False),
    jnp.asarray(noise_sd),
  )


def dense(graph: Graph) -> np.ndarray:
  matrix = np.zeros((graph.num_nodes, graph.num_nodes))
  np.add.at(matrix, (np.asarray(graph.receivers), np.asarray(graph.senders)), graph.weights)
  return matrix


def sparse_matrix(graph: Graph) -> sparse.csr_array:
  """The operator in float64, repeated entries added up."""
  at = (np.asarray(graph.receivers), np.asarray(graph.senders))
  values = np.asarray(graph.weights, np.float64)
  return sparse.csr_array((values, at), shape=(graph.num_nodes, graph.num_nodes))


def dense_effects(model: LinearInterference) -> np.ndarray:
  return dense(model.spillover) + np.diag(np.asarray(model.direct))


def indicator(cluster: np.ndarray) -> np.ndarray:
  return (np.asarray(cluster)[:, None] == np.arange(np.max(cluster) + 1)[None, :]).astype(float)


def covariance(design: RolloutDesign) -> np.ndarray:
  """S, the covariance of one stage's treatments over p (1 - p)."""
  of_cluster = indicator(design.cluster)
  clusters = of_cluster.shape[1]
  if design.randomisation == "bernoulli":
    return of_cluster @ of_cluster.T
  centred = np.eye(clusters) - 1 / clusters
  return of_cluster @ centred @ of_cluster.T * clusters / (clusters - 1)


def every_rollout(design: RolloutDesign) -> tuple[np.ndarray, np.ndarray]:
  """Probabilities `[A]` and treatments `[A, L, N]` of all roll-outs that a design can draw."""
  shares, clusters = np.asarray(design.shares), design.num_clusters
  if design.randomisation == "complete":
    counts = np.round(shares * clusters).astype(int)
    orders = np.array(list(itertools.permutations(range(clusters))))
    if design.nested:
      z = orders[:, None, :] < counts[None, :, None]
    else:
      rows = [np.unique(orders < count, axis=0) for count in counts]
      z = np.array([np.stack(each) for each in itertools.product(*rows)])
    prob = np.full(len(z), 1 / len(z))
  elif design.nested:
    # A cluster's score falls into one of L + 1 intervals between the sorted shares.
    ends = np.concatenate([[0.0], np.sort(shares), [1.0]])
    where = np.array(list(itertools.product(range(len(shares) + 1), repeat=clusters)))
    prob = np.diff(ends)[where].prod(axis=1)
    z = ends[:-1][where][:, None, :] < shares[None, :, None]
  else:
    z = np.array(list(itertools.product((0, 1), repeat=clusters * len(shares))))
    z = z.reshape(len(z), len(shares), clusters)
    p = shares[None, :, None]
    prob = np.where(z == 1, p, 1 - p).prod(axis=(1, 2))
  return prob, z.astype(float)[:, :, np.asarray(design.cluster)]


def features(z: np.ndarray, operators: Sequence[Graph]) -> np.ndarray:
  """`[..., F]` treatment and exposures."""
  return np.stack([z, *(z @ dense(op).T for op in operators)], axis=-1)


def clusters_of(nodes: int, clusters: int) -> np.ndarray:
  """Clusters of unequal size when `clusters` does not divide `nodes`."""
  return np.arange(nodes) % clusters


@jax.jit
def theory_and_gram(
  operators: tuple[Graph, ...], model: LinearInterference, design: RolloutDesign
) -> tuple[theory.BiasReport, tuple[jax.Array, jax.Array]]:
  return theory.bias_theory(operators, model, design), theory.known_gram(operators, design)


ENUMERATED = {
  "unit, fresh": ((0.2, 0.5), 8, None, "bernoulli", False, 1),
  "unit, nested, two operators": ((0.7, 0.1), 8, None, "bernoulli", True, 2),
  "clusters, treatment only": ((0.1, 0.4), 10, 4, "bernoulli", True, 0),
  "clusters, nested": ((0.05, 0.3, 0.5), 10, 4, "bernoulli", True, 1),
  "clusters, fresh": ((0.05, 0.3, 0.5), 10, 4, "bernoulli", False, 1),
  "complete, nested": ((0.0, 0.25, 0.5), 9, 4, "complete", True, 1),
  "complete, fresh": ((0.25, 0.5), 9, 4, "complete", False, 1),
}


@pytest.mark.parametrize("case", ENUMERATED)
def test_bias_equals_enumeration(x64, case):
  shares, nodes, clusters, randomisation, nested, hops = ENUMERATED[case]
  rng = np.random.default_rng(len(case))
  design = make_design(
    shares,
    nodes,
    None if clusters is None else clusters_of(nodes, clusters),
    randomisation=randomisation,
    nested=nested,
  )
  operators = tuple(random_operator(rng, nodes, 3) for _ in range(hops))
  model = random_model(rng, nodes, 0.3)
  effects, intercept = dense_effects(model), np.asarray(model.intercept)
  tau = effects.sum() / nodes

  prob, z = every_rollout(design)
  x, y = features(z, operators), intercept + z @ effects.T
  np.testing.assert_allclose(prob.sum(), 1, atol=1e-12)
  mean_x = np.einsum("a,alnf->lnf", prob, x)
  centred = x - mean_x.mean(axis=(0, 1))
  rows = len(shares) * nodes
  gram = np.einsum("a,alnf,alng->fg", prob, centred, centred, optimize=True) / rows
  cross = np.einsum("a,alnf,aln->f", prob, centred, y, optimize=True) / rows
  sampled = x - x.mean(axis=(1, 2), keepdims=True)
  sampled_gram = np.einsum("a,alnf,alng->fg", prob, sampled, sampled, optimize=True) / rows
  sampled_cross = np.einsum("a,alnf,aln->f", prob, sampled, y, optimize=True) / rows

  report, (known, known_mean) = theory_and_gram(operators, model, design)
  np.testing.assert_allclose(report.tau, tau, atol=1e-12)
  expected = np.linalg.solve(gram, cross).sum() - tau
  np.testing.assert_allclose(report.merged, expected, atol=1e-10)
  # Least squares with the expectations of its own sums: the finite-K formula claims no more.
  expected = np.linalg.solve(sampled_gram, sampled_cross).sum() - tau
  np.testing.assert_allclose(report.finite, expected, atol=1e-10)
  ones = np.ones(1 + hops)
  expected = 0.09 / rows * ones @ np.linalg.solve(gram, ones)
  np.testing.assert_allclose(report.noise_variance, expected, rtol=1e-10)
  np.testing.assert_allclose(known, gram, atol=1e-12)
  np.testing.assert_allclose(known_mean, mean_x, atol=1e-12)
  np.testing.assert_allclose(report.design.condition, np.linalg.cond(report.design.gram))


@jax.jit
def moment_estimates(
  operators: tuple[Graph, ...],
  design: RolloutDesign,
  x: jax.Array,
  y: jax.Array,
  contrast: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`[A]` estimates of all roll-outs, and the known Gram and means that they use."""
  gram, mean_x = theory.known_gram(operators, design)
  over_rollouts = jax.vmap(estimators.moment, (0, None, 0, None, None))
  return over_rollouts(x, mean_x, y, gram, contrast), gram, mean_x


def test_moment_estimator_has_the_bias_of_the_formula(x64):
  rng = np.random.default_rng(5)
  design = make_design((0.05, 0.3, 0.5), 10, clusters_of(10, 4))
  operators = (random_operator(rng, 10, 3),)
  model = random_model(rng, 10, 0.0)
  prob, z = every_rollout(design)
  x, y = features(z, operators), np.asarray(model.intercept) + z @ dense_effects(model).T
  found, _, _ = moment_estimates(operators, design, x, y, np.ones(2))
  report, _ = theory_and_gram(operators, model, design)
  np.testing.assert_allclose(prob @ np.asarray(found), report.tau + report.merged, atol=1e-10)


def test_nodes_without_neighbours(x64):
  senders, receivers = np.array([1, 2, 0, 3, 1, 2]), np.array([0, 0, 1, 1, 2, 3])
  operator = from_edges(senders, receivers, 6)  # nodes 4 and 5 have no neighbour
  design = make_design((0.1, 0.5), 6)
  matrix = dense(operator)
  effects = 1.5 * np.eye(6) + 0.8 * matrix
  prob, z = every_rollout(design)
  # The nodes without neighbours have other intercepts, which are no part of the effect.
  intercept = np.array([2.0, 1.0, 2.5, 1.5, 9.0, -4.0])
  x, y = features(z, (operator,)), intercept + z @ effects.T
  mean_x = np.einsum("a,alnf->lnf", prob, x)
  centred = x - mean_x.mean(axis=0)
  contrast = np.array([1.0, matrix.sum() / 6])
  found, gram, mean = moment_estimates((operator,), design, x, y, contrast)
  expected = np.einsum("a,alnf,alng->fg", prob, centred, centred) / 12
  np.testing.assert_allclose(gram, expected, atol=1e-12)
  np.testing.assert_allclose(mean, mean_x, atol=1e-12)
  # Under the linear model the contrast of the units' full exposures has no bias.
  np.testing.assert_allclose(prob @ np.asarray(found), effects.sum() / 6, atol=1e-10)


def enumerated_moment_estimator(
  operators: Sequence[Graph], model: LinearInterference, design: RolloutDesign
) -> tuple[float, float]:
  """Mean and variance of the moment estimator over all roll-outs, the Gram enumerated as well."""
  prob, z = every_rollout(design)
  x, y = features(z, operators), np.asarray(model.intercept) + z @ dense_effects(model).T
  centred = x - np.einsum("a,alnf->f", prob, x) / x[0, ..., 0].size
  gram = np.einsum("a,alnf,alng->fg", prob, centred, centred, optimize=True) / x[0, ..., 0].size
  alpha = np.linalg.solve(gram, np.ones(x.shape[-1]))
  weights = centred @ alpha / x[0, ..., 0].size
  conditional = (weights * y).sum(axis=(1, 2))
  mean = prob @ conditional
  noise = float(model.noise_sd) ** 2 * (prob @ (weights**2).sum(axis=(1, 2)))
  return mean, prob @ (conditional - mean) ** 2 + noise


VARIANCES = {
  "3 clusters": (3, 1, [(0.2, 0.5), (0.5, 0.5), (0.9, 0.0)]),
  "units, two operators": (6, 2, [(0.1, 0.3, 0.6), (0.6, 0.0, 0.25)]),
}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("case", VARIANCES)
def test_variance_equals_enumeration(x64, case, nested):
  rng = np.random.default_rng(9)
  clusters, hops, share_sets = VARIANCES[case]
  operators = tuple(random_operator(rng, 6, 2) for _ in range(hops))
  model = random_model(rng, 6, math.sqrt(0.3))
  for shares in share_sets if nested else share_sets[:1]:  # 2^18 roll-outs a set
    design = make_design(shares, 6, np.arange(6) * clusters // 6, nested=nested)
    # Blocks of 4 leave a part of the last one empty, for 3 clusters and for 6.
    found = moment_statistics(operators, model, design, block=4)
    expected = enumerated_moment_estimator(operators, model, design)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_variance_of_inverse_probability_weights_in_one_stage(x64):
  # Without an exposure the moment estimator of one stage is sum (z - p) y / (N p (1 - p)).
  rng = np.random.default_rng(11)
  design = make_design((0.3,), 6)
  model = random_model(rng, 6, 0.5)
  prob, z = every_rollout(design)
  weights = (z[:, 0] - 0.3) / (6 * 0.21)
  values = (weights * (np.asarray(model.intercept) + z[:, 0] @ dense_effects(model).T)).sum(axis=1)
  mean, variance = moment_statistics((), model, design, block=4)
  np.testing.assert_allclose(mean, prob @ values, atol=1e-10)
  np.testing.assert_allclose(mean, np.mean(np.asarray(model.direct)), atol=1e-10)
  expected = prob @ (values - prob @ values) ** 2 + 0.25 * (prob @ (weights**2).sum(axis=1))
  np.testing.assert_allclose(variance, expected, rtol=1e-10)


def dense_variance(
  operators: Sequence[Graph], model: LinearInterference, design: RolloutDesign
) -> float:
  """The variance by N x N algebra, moments of the scores summed over the intervals of u."""
  of_cluster, s = indicator(design.cluster), covariance(design)
  shares, nodes = np.asarray(design.shares), len(of_cluster)
  effects, intercept = dense_effects(model), np.asarray(model.intercept)
  stack = [np.eye(nodes), *(dense(op) for op in operators)]
  m = np.array([[np.trace(p @ s @ q.T) / nodes for q in stack] for p in stack])
  ones = np.ones(len(stack))
  gram = np.mean(shares * (1 - shares)) * m + np.var(shares) * np.outer(ones, ones)
  alpha = np.linalg.solve(gram, ones)
  h = sum(a * p for a, p in zip(alpha, stack, strict=True))
  beta = of_cluster.T @ h.T @ effects @ of_cluster
  own = np.diag(beta)
  crossed = np.sum(np.triu(beta + beta.T, 1) ** 2)
  shift = (shares - shares.mean()) * alpha.sum()
  u = [
    of_cluster.T @ (h.T @ (intercept + p * effects.sum(axis=1)) + c * effects.sum(axis=0))
    for p, c in zip(shares, shift, strict=True)
  ]
  total = 0.0
  for i, p in enumerate(shares):
    for j, r in enumerate(shares):
      if i != j and not design.nested:
        continue
      ends = np.array([0.0, min(p, r), max(p, r), 1.0])
      middle, width = (ends[1:] + ends[:-1]) / 2, np.diff(ends)
      z, w = (middle < p) - p, (middle < r) - r
      total += (width @ (z * w)) * (u[i] @ u[j]) + (width @ (z * w)) ** 2 * crossed
      total += (width @ (z * w**2)) * (u[i] @ own) + (width @ (z**2 * w)) * (u[j] @ own)
      total += (width @ (z**2 * w**2) - (width @ z**2) * (width @ w**2)) * (own @ own)
  q = shares * (1 - shares)
  noise = float(model.noise_sd) ** 2 * np.sum(nodes * shift**2 + q * np.trace(h @ s @ h.T))
  return (total + noise) / (nodes * len(shares)) ** 2


def test_variance_equals_dense_algebra(x64):
  rng = np.random.default_rng(12)
  design = make_design((0.02, 0.1, 0.5), 500, clusters_of(500, 230))
  operators = (random_operator(rng, 500, 8),)
  model = random_model(rng, 500, 0.4)
  _, variance = moment_statistics(operators, model, design, block=64)
  expected = dense_variance(operators, model, design)
  np.testing.assert_allclose(variance, expected, rtol=1e-8)


SHARE_SETS = [(0.5,), (0.25, 0.5), (0.0, 0.5), (0.02, 0.05, 0.1, 0.25, 0.5)]


@jax.jit
def of_share_sets(moments: theory.BiasMoments, design: RolloutDesign) -> theory.BiasReport:
  """Reports of SHARE_SETS; a set that is repeated with one score has the moments of the set."""
  shares = jnp.asarray([np.tile(shares, 10 // len(shares)) for shares in SHARE_SETS])
  return jax.vmap(lambda p: theory.merged_bias(moments, design.replace(shares=p)))(shares)


def test_closed_forms_at_unit_level(x64):
  rng = np.random.default_rng(13)
  operator, model = random_operator(rng, 600, 6), random_model(rng, 600, 0.1)
  matrix, gamma = dense(operator), dense(model.spillover)
  gamma_bar, w = gamma.sum() / 600, np.sum(matrix**2) / 600
  kappa = np.sum(matrix * gamma) / 600
  within = np.array([np.mean(np.multiply(p, np.subtract(1, p))) for p in SHARE_SETS])
  between = np.array([np.var(p) for p in SHARE_SETS])
  mean = np.array([np.mean(p) for p in SHARE_SETS])
  design = make_design((0.5,), 600)

  means = bias_moments((), model, design)
  report = of_share_sets(means, design)
  np.testing.assert_allclose(report.single, -gamma_bar, atol=1e-12)
  factor = 1 - between / (mean * (1 - mean))
  np.testing.assert_allclose(report.merged, -gamma_bar * factor, atol=1e-12)

  report = of_share_sets(bias_moments((operator,), model, design), design)
  np.testing.assert_allclose(report.design.within, within, atol=1e-12)
  np.testing.assert_allclose(report.design.between, between, atol=1e-12)
  np.testing.assert_allclose(report.design.leverage, 1 + 1 / w, rtol=1e-12)
  np.testing.assert_allclose(report.single, kappa / w - gamma_bar, atol=1e-12)
  expected = (kappa / w - gamma_bar) / (1 + between / within * (1 + 1 / w))
  np.testing.assert_allclose(report.merged, expected, atol=1e-12)

  # Merged with a stage without treatment: (1 - p) / (1 - p / 2), and its derivative in p.
  @jax.jit
  @jax.vmap
  @jax.value_and_grad
  def pair(p: jax.Array) -> jax.Array:
    return theory.merged_bias(means, design.replace(shares=jnp.stack([0 * p, p]))).merged

  p = np.array([0.02, 0.1, 0.25, 0.5])
  value, slope = pair(jnp.asarray(p))
  np.testing.assert_allclose(value, -gamma_bar * (1 - p) / (1 - p / 2), atol=1e-12)
  np.testing.assert_allclose(slope, gamma_bar * 0.5 / (1 - p / 2) ** 2, atol=1e-12)


def test_difference_in_means_keeps_spillover_that_leaves_the_cluster(x64):
  rng = np.random.default_rng(14)
  cluster, model = clusters_of(10, 4), random_model(rng, 10, 0.1)
  cut = cluster[:, None] != cluster[None, :]
  expected = -np.sum(dense(model.spillover) * cut) / 10
  report, _ = theory_and_gram((), model, make_design((0.1, 0.4), 10, cluster))
  np.testing.assert_allclose(report.single, expected, atol=1e-12)
  np.testing.assert_allclose(report.merged, expected * (1 - 0.0225 / 0.1875), atol=1e-12)


@pytest.mark.parametrize(("randomisation", "nodes"), [("bernoulli", 10), ("complete", 9)])
def test_the_right_model_has_no_bias(x64, randomisation, nodes):
  rng = np.random.default_rng(15)
  operator = random_operator(rng, nodes, 3)
  scaled = operator.replace(weights=0.7 * operator.weights)
  intercept, direct = jnp.asarray(rng.normal(0, 1, nodes)), jnp.asarray(np.full(nodes, 1.3))
  model = LinearInterference(intercept, direct, scaled, jnp.asarray(0.1))
  design = make_design((0.0, 0.25, 0.5), nodes, clusters_of(nodes, 4), randomisation=randomisation)
  report, _ = theory_and_gram((operator,), model, design)
  np.testing.assert_allclose(report.tau, 2.0, atol=1e-12)
  np.testing.assert_allclose([report.single, report.merged, report.finite], 0, atol=1e-11)


def block_network(rng: np.random.Generator) -> tuple[np.ndarray, Graph, np.ndarray]:
  """Blocks of a random graph, 30 of 20 nodes with degree about 14, and its row mean, twice."""
  block = np.arange(600) // 20
  chance = np.where(block[:, None] == block[None, :], 0.4, 0.011)
  edges = np.triu(rng.random((600, 600)) < chance, 1)
  edges |= np.eye(600, k=1, dtype=bool)  # nobody is left alone
  edges |= edges.T
  receivers, senders = np.nonzero(edges)
  return block, from_edges(senders, receivers, 600), edges / edges.sum(axis=1, keepdims=True)


def monte_carlo_ols(
  rng: np.random.Generator,
  matrix: np.ndarray,
  effects: np.ndarray,
  cluster: np.ndarray,
  shares: Sequence[float],
  replications: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Mean and standard error of the differences in means and of the regression, nested stages."""
  score = rng.random((replications, 1, cluster.max() + 1))
  z = (score < np.asarray(shares)[None, :, None])[:, :, cluster].astype(float)
  z = z.reshape(-1, cluster.size)  # one product for all replications
  y = 1 + z @ effects.T + 0.1 * rng.normal(size=z.shape)
  z, e, y = (v.reshape(replications, -1) for v in (z, z @ matrix.T, y))
  z, e, y = (v - v.mean(axis=1, keepdims=True) for v in (z, e, y))
  x = np.stack([z, e], axis=-1)
  gram, cross = np.einsum("rnf,rng->rfg", x, x), np.einsum("rnf,rn->rf", x, y)
  regression = np.linalg.solve(gram, cross[..., None])[..., 0].sum(axis=1)
  found = np.stack([cross[:, 0] / gram[:, 0, 0], regression])
  return found.mean(axis=1), found.std(axis=1, ddof=1) / math.sqrt(replications)


def test_bias_of_least_squares_by_monte_carlo(x64):
  rng = np.random.default_rng(16)
  block, graph, matrix = block_network(rng)
  second = matrix @ matrix
  np.fill_diagonal(second, 0)
  gamma = matrix + 0.5 * second
  receivers, senders = np.nonzero(gamma)
  model = LinearInterference(
    jnp.ones(600),
    jnp.ones(600),
    from_edges(senders, receivers, 600, gamma[receivers, senders], normalise=False),
    jnp.asarray(0.1),
  )
  effects = np.eye(600) + gamma
  unit = make_design((0.5,), 600)
  reports = [
    of_share_sets(bias_moments(operators, model, unit), unit) for operators in ((), (graph,))
  ]
  expected = np.stack([report.tau + report.merged for report in reports], axis=1)
  for i, shares in enumerate(SHARE_SETS):
    mean, error = monte_carlo_ols(rng, matrix, effects, np.arange(600), shares, 250)
    assert np.all(np.abs(mean - expected[i]) <= 3 * error + 0.01), (shares, mean, error)

  report = of_share_sets(bias_moments((graph,), model, make_design((0.5,), 600, block)), unit)
  for i in (0, 3):
    mean, error = monte_carlo_ols(rng, matrix, effects, block, SHARE_SETS[i], 1200)
    bias = mean[1] - float(report.tau[i])
    assert 3 * error[1] < 0.03 * abs(bias)  # or the next lines would say little
    assert abs(float(report.finite[i]) - bias) <= 0.1 * abs(bias)
    assert abs(float(report.merged[i]) - bias) > abs(float(report.finite[i]) - bias)


BOUNDS = {
  "clusters": (7, "bernoulli", 3),
  "complete": (7, "complete", 3),
  "every unit sees every cluster": (2, "bernoulli", 20),
  "treatment only": (7, "bernoulli", 0),
}


@jax.jit
def bounds_and_biases(
  operators: tuple[Graph, ...], design: RolloutDesign, support: Graph, spillovers: Graph
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The bound for any interference and for the support, and the bias of each of `spillovers`."""
  nodes = jnp.ones(support.num_nodes)

  def bias(spillover: Graph) -> jax.Array:
    model = LinearInterference(0 * nodes, nodes, spillover, jnp.zeros(()))
    return theory.bias_theory(operators, model, design).merged

  free = theory.bias_bound(operators, design, 1.7)
  return free, theory.bias_bound(operators, design, 1.7, support), jax.vmap(bias)(spillovers)


@pytest.mark.parametrize("case", BOUNDS)
def test_bias_bound_is_attained_and_not_passed(x64, case):
  clusters, randomisation, per_row = BOUNDS[case]
  rng, nodes = np.random.default_rng(17), 24
  # The last cluster holds one unit, which nobody else there can affect.
  cluster = np.arange(nodes) * (clusters - 1) // (nodes - 1)
  design = make_design((0.1, 0.5), nodes, cluster, randomisation=randomisation)
  operators = (random_operator(rng, nodes, per_row),) if per_row else ()
  anybody = rng.integers(0, nodes, nodes)
  support = from_edges(  # its diagonal is no interference
    np.concatenate([anybody, np.arange(nodes), (np.arange(nodes) + 9) % nodes]),
    np.tile(np.arange(nodes), 3),
    nodes,
  )
  s = covariance(design)
  stack = [np.eye(nodes), *(dense(op) for op in operators)]
  m = np.array([[np.trace(p @ s @ q.T) / nodes for q in stack] for p in stack])
  alpha = np.linalg.solve(m, np.ones(len(stack)))
  coefficient = sum(a * p @ s for a, p in zip(alpha, stack, strict=True)) - 1
  # The class: one entry of size 1.7 a row. First the worst choice of each row, then any choice.
  everybody, senders, weights = np.arange(nodes), [], []
  others = ~np.eye(nodes, dtype=bool)
  for allowed in (others, others & (dense(support) != 0)):
    worst = np.where(allowed, np.abs(coefficient), -1.0).argmax(axis=1)
    anybody = np.array([rng.choice(np.flatnonzero(row)) for row in allowed])
    senders += [worst, anybody]
    weights += [1.7 * np.sign(coefficient[everybody, chosen]) for chosen in senders[-2:]]
  spillovers = Graph(
    jnp.asarray(np.array(senders), jnp.int32),
    jnp.asarray(np.tile(everybody, (4, 1)), jnp.int32),
    jnp.asarray(np.array(weights)),
    nodes,
  )
  *bounds, biases = bounds_and_biases(operators, design, support, spillovers)
  np.testing.assert_allclose(biases[::2], bounds, rtol=1e-10)
  assert np.all(np.abs(biases[1::2]) < np.array(bounds) * (1 + 1e-12))


def test_stages_that_treat_everybody_or_nobody(x64):
  rng = np.random.default_rng(18)
  operators, model = (random_operator(rng, 6, 2),), random_model(rng, 6, 0.5)
  design = make_design((0.0, 1.0), 6, clusters_of(6, 3))
  report = bias_theory(operators, model, design)
  # The difference of two means of 6 outcomes, without bias.
  np.testing.assert_array_equal([report.merged, report.finite], 0)
  np.testing.assert_allclose(report.noise_variance, 2 * 0.25 / 6, rtol=1e-12)
  assert np.isinf(report.design.shrinkage)
  found = moment_statistics(operators, model, design, block=4)
  np.testing.assert_allclose(found, [report.tau, 2 * 0.25 / 6], rtol=1e-12)

  nothing = bias_theory(operators, model, design.replace(shares=jnp.zeros(2)))
  assert np.isnan(nothing.merged)
  assert np.isnan(nothing.design.ratio)
  repeated = bias_theory(operators, model, design.replace(shares=jnp.full(2, 0.3)))
  np.testing.assert_allclose(repeated.merged, repeated.single, rtol=1e-12)
  np.testing.assert_allclose(repeated.design.shrinkage, 1, rtol=1e-12)


def largest_array(jaxpr) -> int:
  """Entries of the largest array that a program makes."""
  largest = 0
  for equation in jaxpr.eqns:
    largest = max([largest, *(v.aval.size for v in equation.outvars)])
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          largest = max(largest, largest_array(inner))
  return largest


def test_large_graph_in_float32():
  rng = np.random.default_rng(19)
  nodes, per_row, clusters = 50_000, 4, 2000  # more nodes than the root of the largest int32
  receivers = np.repeat(np.arange(nodes), per_row)
  senders = (receivers + rng.integers(1, nodes, receivers.size)) % nodes
  graph = from_edges(senders, receivers, nodes)
  cluster = np.arange(nodes) // 25
  design = make_design((0.0, 0.5), nodes, cluster, randomisation="complete")
  everybody = np.arange(nodes)
  far = (everybody + 137) % nodes
  spillover = from_edges(far, everybody, nodes, rng.uniform(0, 1, nodes), normalise=False)
  model = LinearInterference(jnp.ones(nodes), jnp.ones(nodes), spillover, jnp.asarray(0.1))
  report = bias_theory((graph,), model, design)
  assert report.merged.dtype == jnp.float32

  of_cluster = sparse.csr_array((np.ones(nodes), (np.arange(nodes), cluster)))
  gamma = sparse_matrix(spillover)
  parts = [of_cluster, sparse_matrix(graph) @ of_cluster, of_cluster + gamma @ of_cluster]
  joint = np.array([[p.multiply(q).sum() for q in parts] for p in parts]) / nodes
  totals = np.stack([p.sum(axis=1) for p in parts])
  joint = (joint - totals @ totals.T / (nodes * clusters)) * clusters / (clusters - 1)
  alpha = np.linalg.solve(joint[:2, :2], np.ones(2))
  single = alpha @ joint[:2, 2] - (1 + gamma.sum() / nodes)
  np.testing.assert_allclose(report.design.leverage, alpha.sum(), rtol=1e-4)
  np.testing.assert_allclose(report.single, single, rtol=1e-3)
  # v_w = 1/8 and v_b = 1/16.
  np.testing.assert_allclose(report.merged, single / (1 + alpha.sum() / 2), rtol=1e-3)


def test_memory_is_linear_in_edges():
  rng = np.random.default_rng(20)
  nodes, per_row = 20_000, 10
  receivers = np.repeat(np.arange(nodes), per_row)
  graph = from_edges((receivers + rng.integers(1, nodes, receivers.size)) % nodes, receivers, nodes)
  model = LinearInterference(jnp.ones(nodes), jnp.ones(nodes), graph, jnp.asarray(0.1))
  design = make_design((0.0, 0.5), nodes)
  edges = 2 * receivers.size + 2 * nodes
  for function, arguments, width in (
    (theory.design_report, ((graph,), design), 4),
    (theory.bias_theory, ((graph,), model, design), 9),
    (theory.bias_bound, ((graph,), design, 1.0, graph), 4),
    (lambda *a: theory.moment_statistics(*a, block=8), ((graph,), model, design), 9),
  ):
    assert largest_array(jax.make_jaxpr(function)(*arguments).jaxpr) <= width * edges < nodes**2
  report = jax.jit(theory.design_report)((graph,), design)
  # A neighbour drawn twice counts twice: its weights add up before they are squared.
  exact = sparse_matrix(graph).power(2).sum() / nodes
  np.testing.assert_allclose(report.gram, [[1, 0], [0, exact]], rtol=1e-4, atol=1e-7)


def test_operator_whose_rows_are_no_means():
  theory.check_operator(from_edges(np.array([1, 2, 0]), np.array([0, 1, 2]), 3))
  with pytest.raises(ValueError, match=r"row 2 .* sums to 0 .*drop nodes.*known_gram"):
    theory.check_operator(from_edges(np.array([1, 0]), np.array([0, 1]), 3))
  nodes, weights = np.array([0, 1]), np.array([1.0, 0.5])
  half = from_edges(nodes[::-1], nodes, 2, weights, normalise=False)
  with pytest.raises(ValueError, match=r"row 1 .* sums to 0\.5 \(1 such"):
    theory.check_operator(half)


def test_bad_input_is_named():
  rng = np.random.default_rng(22)
  operator, model = random_operator(rng, 24, 3), random_model(rng, 24, 0.3)
  design = make_design((0.1, 0.5), 24, clusters_of(24, 5))
  dynamic = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), operator)
  small = make_design((0.1, 0.5), 20)
  with pytest.raises(ValueError, match=r"operators\[1\] .*stage axis.*each stage's graph"):
    theory.design_report((operator, dynamic), design)
  with pytest.raises(ValueError, match=r"operator .*stage axis"):
    theory.check_operator(dynamic)
  with pytest.raises(ValueError, match=r"operators\[0\] has 24 nodes and the design 20"):
    theory.known_gram((operator,), small)
  with pytest.raises(ValueError, match=r"model.spillover has 24 nodes and the design 20"):
    theory.bias_theory((), model, small)
  with pytest.raises(ValueError, match=r"model.direct has shape \(\).*each of the 24 units"):
    theory.bias_theory((operator,), model.replace(direct=np.ones(())), design)
  with pytest.raises(ValueError, match=r"support has 24 nodes and the design 20"):
    theory.bias_bound((), small, 1.0, operator)
  single = make_design((0.5,), 24, np.zeros(24, int), randomisation="complete")
  with pytest.raises(ValueError, match=r"num_clusters = 1 with complete.*2 or more"):
    theory.design_report((), single)
  complete = make_design((0.2,), 24, clusters_of(24, 5), randomisation="complete")
  with pytest.raises(ValueError, match=r"randomisation = 'complete'.*for 'bernoulli'"):
    theory.moment_statistics((operator,), model, complete)
  with pytest.raises(ValueError, match="block = 0; expected 1 or more"):
    theory.moment_statistics((operator,), model, design, block=0)
