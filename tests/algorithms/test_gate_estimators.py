"""GATE features and estimators against dense NumPy, enumeration of assignments and statsmodels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms.gate import diagnostics, estimators, features, moments
from models.graph import Graph, from_edges

STAGES, NODES, CLUSTERS = 3, 24, 8
SHARES = np.array([0.0, 0.25, 0.5])


def operator_of(matrix: np.ndarray) -> Graph:
  receivers, senders = np.nonzero(matrix)
  weights = matrix[receivers, senders]
  return from_edges(senders, receivers, len(matrix), weights, normalise=False)


def row_mean(rng: np.random.Generator, nodes: int, neighbours: int = 2) -> np.ndarray:
  """Mean over `neighbours` random others and the next node."""
  w = np.roll(np.eye(nodes), 1, axis=1)
  for i in range(nodes):
    others = np.delete(np.arange(nodes), [i, (i + 1) % nodes])
    w[i, rng.choice(others, neighbours, replace=False)] = 1
  return w / w.sum(axis=1, keepdims=True)


class Experiment:
  """Three replications of a ramp with clusters, and outcomes that no regression here fits."""

  def __init__(self):
    rng = np.random.default_rng(5)
    self.cluster = np.sort(rng.integers(0, CLUSTERS, NODES))
    self.cluster[:CLUSTERS] = np.arange(CLUSTERS)
    self.w = row_mean(rng, NODES)
    self.second = 0.5 * self.w @ self.w  # rows do not sum to 1
    drawn = rng.random((3, STAGES, CLUSTERS)) < SHARES[:, None]
    # At least one cluster a stage, so that no replication is degenerate.
    drawn[:, 1:, 0] = True
    self.z = drawn[..., self.cluster].astype(float)
    self.e = np.stack([self.z @ self.w.T, self.z @ self.second.T], axis=-1)
    unit = rng.normal(size=(3, 1, NODES)) + rng.normal(size=(3, 1, CLUSTERS))[..., self.cluster]
    self.y = 1 + 2 * self.z + self.e[..., 0] ** 2 + unit + 0.3 * rng.normal(size=self.z.shape)
    self.covariates = rng.normal(size=(3, STAGES, NODES, 2)) + self.z[..., None]


@pytest.fixture(scope="module")
def experiment() -> Experiment:
  return Experiment()


def dense_ols(x, y, contrast, cluster):
  """tau, its clustered error, coefficients: textbook formulas with an explicit intercept."""
  rows = np.column_stack([np.ones(y.size), x.reshape(y.size, -1)])
  inverse = np.linalg.inv(rows.T @ rows)
  theta = inverse @ rows.T @ y.ravel()
  residual = y.ravel() - rows @ theta
  groups = np.tile(cluster, len(y))
  found = np.unique(groups)
  scores = np.stack([rows[groups == g].T @ residual[groups == g] for g in found])
  factor = found.size / (found.size - 1) * (y.size - 1) / (y.size - rows.shape[1])
  covariance = factor * inverse @ scores.T @ scores @ inverse
  direction = np.zeros(rows.shape[1])
  direction[1 : 1 + len(contrast)] = contrast
  return direction @ theta, np.sqrt(direction @ covariance @ direction), theta


# Features.


def test_exposures_of_fixed_and_dynamic_graphs(x64, experiment):
  z = experiment.z[0]
  rng = np.random.default_rng(1)
  dynamic = np.stack([row_mean(rng, NODES) for _ in range(STAGES)])
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(operator_of, dynamic))
  operators = (operator_of(experiment.w), stacked, operator_of(experiment.second))
  got = features.exposures(operators, jnp.asarray(z))
  assert got.shape == (STAGES, NODES, 3)
  np.testing.assert_allclose(got[..., 0], z @ experiment.w.T, atol=1e-12)
  np.testing.assert_allclose(got[..., 1], np.einsum("lij,lj->li", dynamic, z), atol=1e-12)
  np.testing.assert_allclose(got[..., 2], z @ experiment.second.T, atol=1e-12)
  assert features.exposures((), jnp.asarray(z)).shape == (STAGES, NODES, 0)


def test_features_and_contrast_are_the_named_columns(x64, experiment):
  knots = np.array([0.1, 0.25])
  columns = {
    "z": lambda z, e: z,
    "e1": lambda z, e: e[..., 0],
    "e2": lambda z, e: e[..., 1],
    "z e1": lambda z, e: z * e[..., 0],
    "z e2": lambda z, e: z * e[..., 1],
    "e1^2": lambda z, e: e[..., 0] ** 2,
    "e2^2": lambda z, e: e[..., 1] ** 2,
    **{
      f"max(e{h + 1} - knot {q + 1}, 0)": lambda z, e, h=h, q=q: np.clip(
        e[..., h] - knots[q], 0, None
      )
      for h in range(2)
      for q in range(2)
    },
  }
  sizes = {"treatment": 1, "linear": 3, "quadratic": 7, "spline": 7}
  operators = (operator_of(experiment.w), operator_of(experiment.second))
  z, e = experiment.z[0], experiment.e[0]
  ones = np.ones(NODES)
  full = np.stack([experiment.w @ ones, experiment.second @ ones], axis=-1)
  for kind in features.FEATURES:
    names = features.feature_names(kind, 2, 2)
    assert len(names) == sizes[kind]
    expected = np.stack([columns[name](z, e) for name in names], axis=-1)
    got = features.design_matrix(kind, jnp.asarray(z), jnp.asarray(e), jnp.asarray(knots))
    np.testing.assert_allclose(got, expected, atol=1e-12)
    # Every column is 0 where nobody is treated.
    expected = [columns[name](ones, full).mean() for name in names]
    got = features.contrast(kind, operators, NODES, jnp.asarray(knots))
    np.testing.assert_allclose(got, expected, atol=1e-12)
  assert features.feature_names("linear", 1) == ["z", "e"]
  assert features.contrast("treatment", (), NODES).tolist() == [1.0]


def test_contrast_of_a_dynamic_graph_is_the_mean_over_stages(x64, experiment):
  pair = [0.5 * experiment.w, 2.0 * experiment.w]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(operator_of, pair))
  got = features.contrast("quadratic", (stacked,), NODES)
  # Exposures 0.5 and 2 of every unit: their mean, and the mean of their squares.
  np.testing.assert_allclose(got, [1, 1.25, 1.25, 2.125], atol=1e-12)


def test_features_refuse_what_does_not_fit(experiment):
  z, e = jnp.asarray(experiment.z[0]), jnp.asarray(experiment.e[0])
  with pytest.raises(ValueError, match="'cubic'; expected one of treatment, linear"):
    features.design_matrix("cubic", z, e)
  with pytest.raises(ValueError, match=r"spline.*knots"):
    features.design_matrix("spline", z, e)
  with pytest.raises(ValueError, match=r"z has shape \(2, 24\) and e \(3, 24, 2\)"):
    features.design_matrix("linear", z[:2], e)
  graph = operator_of(experiment.w)
  with pytest.raises(ValueError, match=r"z has shape \(3, 23\).*24 nodes"):
    features.exposures((graph,), z[:, :-1])
  stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), graph)
  with pytest.raises(ValueError, match=r"z has shape \(3, 24\), operators\[1\] 2 stages"):
    features.exposures((graph, stacked), z)


# Least squares.


@pytest.mark.parametrize("kind", ["linear", "quadratic"])
def test_ols_equals_textbook_formulas(x64, experiment, kind):
  z, e = jnp.asarray(experiment.z), jnp.asarray(experiment.e[..., :1])
  x = features.design_matrix(kind, z, e)
  contrast = jnp.asarray(np.linspace(0.5, 1.5, x.shape[-1]))
  fit = jax.vmap(estimators.ols, (0, 0, None, None, None))
  got = jax.jit(fit, static_argnums=4)(
    x, jnp.asarray(experiment.y), contrast, jnp.asarray(experiment.cluster), CLUSTERS
  )
  for r in range(3):
    tau, se, theta = dense_ols(
      np.asarray(x[r]), experiment.y[r], np.asarray(contrast), experiment.cluster
    )
    np.testing.assert_allclose(got.tau[r], tau, rtol=1e-9)
    np.testing.assert_allclose(got.se[r], se, rtol=1e-9)
    np.testing.assert_allclose(got.intercept[r], theta[0], rtol=1e-9)
    np.testing.assert_allclose(got.theta[r], theta[1:], rtol=1e-8, atol=1e-9)
    correlation = np.corrcoef(np.asarray(x[r]).reshape(-1, x.shape[-1]).T)
    np.testing.assert_allclose(got.condition[r], np.linalg.cond(correlation), rtol=1e-6)


def fit_with_nuisance(experiment: Experiment) -> tuple:
  x = np.concatenate([experiment.z[0][..., None], experiment.e[0]], axis=-1)
  contrast = np.array([1.0, 0.8, 0.5])
  got = estimators.ols(
    jnp.asarray(x),
    jnp.asarray(experiment.y[0]),
    jnp.asarray(contrast),
    jnp.asarray(experiment.cluster),
    CLUSTERS,
    jnp.asarray(experiment.covariates[0]),
  )
  return got, np.concatenate([x, experiment.covariates[0]], axis=-1), contrast


def test_nuisance_columns_are_held_fixed(x64, experiment):
  got, columns, contrast = fit_with_nuisance(experiment)
  tau, se, theta = dense_ols(columns, experiment.y[0], contrast, experiment.cluster)
  np.testing.assert_allclose([got.tau, got.se, got.intercept], [tau, se, theta[0]], rtol=1e-9)
  np.testing.assert_allclose(got.theta, theta[1:], rtol=1e-8)


def test_errors_and_interval_equal_statsmodels(x64, experiment):
  sm = pytest.importorskip("statsmodels.api")
  got, columns, contrast = fit_with_nuisance(experiment)
  rows = sm.add_constant(columns.reshape(experiment.y[0].size, -1))
  groups = np.tile(experiment.cluster, STAGES)
  fitted = sm.OLS(experiment.y[0].ravel(), rows).fit(
    cov_type="cluster", cov_kwds={"groups": groups}, use_t=True
  )
  test = fitted.t_test(np.array([0, *contrast, 0, 0]))
  np.testing.assert_allclose([got.tau, got.se], [test.effect.item(), test.sd.item()], rtol=1e-8)
  ends = estimators.interval(got, CLUSTERS, 0.9)
  np.testing.assert_allclose(np.stack(ends), test.conf_int(alpha=0.1)[0], rtol=1e-8)


def test_the_interval_is_student(x64):
  estimate = estimators.GateEstimate(*map(jnp.asarray, (1.5, 0.2, [1.0], 0.0, 1.0)))
  # Quantile 0.975 of Student's distribution with 9 degrees of freedom, from a printed table.
  low, high = estimators.interval(estimate, 10)
  np.testing.assert_allclose([low, high], [1.5 - 0.2 * 2.2622, 1.5 + 0.2 * 2.2622], atol=1e-5)


def test_the_gradient_of_ols_is_its_weights(x64, experiment):
  x = np.concatenate([experiment.z[0][..., None], experiment.e[0]], axis=-1)
  contrast = np.array([1.0, 1.0, 0.5])
  weights = estimators.ols_weights(jnp.asarray(x), jnp.asarray(contrast))
  rows = np.column_stack([np.ones(x[..., 0].size), x.reshape(-1, 3)])
  expected = rows @ np.linalg.inv(rows.T @ rows) @ np.array([0, *contrast])
  np.testing.assert_allclose(weights.ravel(), expected, atol=1e-11)

  def tau(y):
    cluster = jnp.asarray(experiment.cluster)
    return estimators.ols(jnp.asarray(x), y, jnp.asarray(contrast), cluster, CLUSTERS).tau

  np.testing.assert_allclose(jax.grad(tau)(jnp.asarray(experiment.y[0])), weights, atol=1e-11)


def test_mean_of_ols_over_all_assignments_is_the_conditional_formula(x64):
  """Stages with shares 0 and p, N = 8: every assignment of the second stage, weighted."""
  nodes, share = 8, 0.3
  rng = np.random.default_rng(2)
  w = row_mean(rng, nodes, 1)
  a, b = rng.normal(size=nodes), rng.normal(size=(nodes, nodes))
  tau = (b @ np.ones(nodes)).mean()
  assignments = np.array(list(itertools.product([0.0, 1.0], repeat=nodes)))
  size = assignments.sum(axis=1)
  probability = share**size * (1 - share) ** (nodes - size)
  z = np.stack([np.zeros_like(assignments), assignments], axis=1)
  x = np.stack([z, z @ w.T], axis=-1)
  rows = np.concatenate([np.ones((len(z), 2 * nodes, 1)), x.reshape(len(z), -1, 2)], axis=-1)
  full = np.linalg.matrix_rank(rows) == 3
  assert 200 < full.sum() < 256  # with nobody or everybody treated there is no regression
  x, z, rows, probability = x[full], z[full], rows[full], probability[full]
  y = a + z @ b.T
  taus = np.array(
    [np.linalg.lstsq(r, v.ravel(), rcond=None)[0][1:].sum() for r, v in zip(rows, y, strict=True)]
  )
  weights = jax.vmap(estimators.ols_weights, (0, None))(jnp.asarray(x), jnp.ones(2))
  bias = (np.asarray(weights) * y).sum(axis=(1, 2)) - tau
  np.testing.assert_allclose(bias, taus - tau, atol=1e-10)
  expected = probability @ (taus - tau) / probability.sum()
  np.testing.assert_allclose(probability @ bias / probability.sum(), expected, atol=1e-10)
  assert abs(expected) > 0.01


def test_ols_in_float32(experiment):
  e = experiment.e[0, ..., :1]
  x = np.concatenate([experiment.z[0][..., None], e], axis=-1)
  got = estimators.ols(
    jnp.asarray(x, jnp.float32),
    jnp.asarray(experiment.y[0], jnp.float32),
    jnp.ones(2),
    jnp.asarray(experiment.cluster),
    CLUSTERS,
  )
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}
  tau, se, _ = dense_ols(x, experiment.y[0], np.ones(2), experiment.cluster)
  np.testing.assert_allclose([got.tau, got.se], [tau, se], rtol=2e-4)


def test_any_merge_from_the_moments_of_the_stages(x64, experiment):
  x = np.concatenate([experiment.z[0][..., None], experiment.e[0, ..., :1]], axis=-1)
  summed = moments.stage_moments(jnp.asarray(x), jnp.asarray(experiment.y[0]))
  contrast = np.array([1.0, 0.7])
  merges = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
  got = jax.vmap(moments.ols_from_moments, (None, 0, None))(
    summed, jnp.asarray(merges), jnp.asarray(contrast)
  )
  for merge, found in zip(merges.astype(bool), got, strict=True):
    tau, *_ = dense_ols(x[merge], experiment.y[0, merge], contrast, experiment.cluster)
    np.testing.assert_allclose(found, tau, rtol=1e-9)


def test_interval_covers_the_mean_of_the_estimator():
  """Errors that stay with the cluster through all stages; the regression is the true model.

  The mean of tau is then the GATE, 2. Of 400 runs with 60 clusters, 95% covers 380 +- 4.4.
  """
  runs, clusters = 400, 60
  nodes = 2 * clusters
  rng = np.random.default_rng(0)
  cluster = np.repeat(np.arange(clusters), 2)
  w = row_mean(rng, nodes)
  drawn = rng.random((runs, 1, clusters)) < np.array([0.2, 0.5])[:, None]
  z = drawn[..., cluster].astype(np.float32)
  x = np.stack([z, z @ w.T.astype(np.float32)], axis=-1)
  lasting = rng.normal(size=(runs, 1, clusters))[..., cluster]
  y = (x.sum(axis=-1) + lasting + 0.5 * rng.normal(size=z.shape)).astype(np.float32)

  def ends(x, y):
    found = estimators.ols(x, y, jnp.ones(2), jnp.asarray(cluster), clusters)
    return estimators.interval(found, clusters)

  low, high = jax.jit(jax.vmap(ends))(jnp.asarray(x), jnp.asarray(y))
  covered = np.mean((low <= 2) & (high >= 2))
  # Four standard deviations of a binomial share, and 1% for a sandwich of 60 clusters.
  assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / runs) + 0.01


# Estimators with known moments or probabilities.


def test_mean_of_the_moment_estimator_over_all_assignments(x64):
  """Three clusters of two and two independent stages: 64 assignments, exact for any B.

  The mean is the GATE plus the bias of one stage over (1 + rho h), from dense matrices.
  """
  nodes, shares = 6, np.array([0.2, 0.5])
  rng = np.random.default_rng(3)
  w = row_mean(rng, nodes, 1)
  a, b = rng.normal(size=nodes), rng.normal(size=(nodes, nodes))
  cluster = np.repeat(np.arange(3), 2)
  member = np.eye(3)[cluster]
  s, one = member @ member.T, np.ones(nodes)
  operators = [np.eye(nodes), w]
  m = np.array([[np.trace(p @ s @ q.T) for q in operators] for p in operators]) / nodes
  cross = np.array([np.trace(p @ s @ b.T) for p in operators]) / nodes
  tau = (b @ one).mean()
  within, between = (shares * (1 - shares)).mean(), shares.var()
  h = np.linalg.inv(m).sum()
  single = np.linalg.solve(m, cross).sum() - tau
  expected = tau + single / (1 + between / within * h)
  assert abs(expected - tau) > 0.01

  drawn = np.array(list(itertools.product([0, 1], repeat=6))).reshape(-1, 2, 3)
  p = shares[:, None]
  probability = np.prod(np.where(drawn, p, 1 - p), axis=(1, 2))
  z = drawn[..., cluster].astype(float)
  x = np.stack([z, z @ w.T], axis=-1)
  y = a + z @ b.T
  mean_x = jnp.broadcast_to(jnp.asarray(shares)[:, None, None], (2, nodes, 2))
  gram = jnp.asarray(within * m + between)
  taus = jax.vmap(estimators.moment, (0, None, 0, None, None))(
    jnp.asarray(x), mean_x, jnp.asarray(y), gram, jnp.ones(2)
  )
  np.testing.assert_allclose(probability @ np.asarray(taus), expected, atol=1e-10)
  with pytest.raises(ValueError, match=r"mean_x has shape \(2, 1, 1\); expected \(2, 6, 2\)"):
    estimators.moment(jnp.asarray(x[0]), mean_x[:, :1, :1], jnp.asarray(y[0]), gram, jnp.ones(2))


def test_weighted_estimators_over_all_assignments(x64):
  """Unit level: every stage's Horvitz-Thompson has mean avg_i B_ii, at every share."""
  nodes, shares = 6, np.array([0.0, 0.2, 0.5, 1.0])
  rng = np.random.default_rng(4)
  a, b = rng.normal(size=nodes), rng.normal(size=(nodes, nodes))
  drawn = np.array(list(itertools.product([0.0, 1.0], repeat=nodes)))
  size = drawn.sum(axis=1)
  z = np.stack([0 * drawn, drawn, drawn, 0 * drawn + 1], axis=1)
  y = jnp.asarray(a + z @ b.T)
  by_stage = jax.vmap(estimators.stage_horvitz_thompson, (0, 0, None))(
    y, jnp.asarray(z), jnp.asarray(shares)
  )
  direct = np.trace(b) / nodes
  for stage in (1, 2):
    probability = shares[stage] ** size * (1 - shares[stage]) ** (nodes - size)
    np.testing.assert_allclose(probability @ np.asarray(by_stage[:, stage]), direct, atol=1e-10)
  assert np.isnan(by_stage[:, [0, 3]]).all()
  # The mean over stages 1 and 2, the two that compare anything.
  merged = jax.vmap(estimators.horvitz_thompson, (0, 0, None))(
    y, jnp.asarray(z), jnp.asarray(shares)
  )
  np.testing.assert_allclose(merged, np.asarray(by_stage[:, 1:3]).mean(axis=1), atol=1e-12)

  differences = jax.vmap(estimators.stage_hajek)(y, jnp.asarray(z))
  merged = jax.vmap(estimators.hajek)(y, jnp.asarray(z))
  for i in np.flatnonzero((size > 0) & (size < nodes)):
    at = drawn[i] == 1
    expected = [np.mean(v[at]) - np.mean(v[~at]) for v in np.asarray(y[i, 1:3])]
    np.testing.assert_allclose(differences[i, 1:3], expected, atol=1e-12)
    np.testing.assert_allclose(merged[i], np.mean(expected), atol=1e-12)
  assert np.isnan(differences[:, [0, 3]]).all()
  # Nobody and everybody in all stages.
  assert np.isnan(merged[np.array([0, -1])]).all()


def test_weighted_estimators_refuse_what_does_not_fit():
  y, z = jnp.ones((3, 4)), jnp.ones((3, 4))
  with pytest.raises(ValueError, match=r"y has shape \(1, 4\) and z \(3, 4\)"):
    estimators.horvitz_thompson(y[:1], z, jnp.ones(3))
  with pytest.raises(ValueError, match=r"shares have shape \(2,\); expected \(3,\)"):
    estimators.horvitz_thompson(y, z, jnp.ones(2))
  with pytest.raises(ValueError, match=r"y has shape \(1, 4\) and z \(3, 4\)"):
    estimators.hajek(y[:1], z)
  with pytest.raises(ValueError, match=r"\(0.0, 1.0\): every stage treats everybody or nobody"):
    estimators.check_randomised([0.0, 1.0])
  estimators.check_randomised([0.0, 0.5])


def test_polynomial_rollout_is_exact_for_its_degree(x64):
  shares = np.array([0.1, 0.0, 0.4, 0.25])  # in no order
  rng = np.random.default_rng(6)
  polynomial = np.polynomial.Polynomial(rng.normal(size=4))
  noise = rng.normal(size=(4, 10))
  y = polynomial(shares)[:, None] + noise - noise.mean(axis=1, keepdims=True)
  weights = estimators.polynomial_weights(shares)
  got = estimators.polynomial_rollout(jnp.asarray(y), jnp.asarray(weights))
  np.testing.assert_allclose(got, polynomial(1.0) - polynomial(0.0), rtol=1e-9)
  # Two stages: the line through both.
  np.testing.assert_allclose(estimators.polynomial_weights([0.1, 0.5]), [-2.5, 2.5], rtol=1e-12)
  for bad in ([0.5], [0.1, 0.5, 0.1]):
    with pytest.raises(ValueError, match="two or more stages of different shares"):
      estimators.polynomial_weights(bad)
  with pytest.raises(ValueError, match=r"weights have shape \(3,\); expected \(4,\)"):
    estimators.polynomial_rollout(jnp.asarray(y), jnp.ones(3))


# What is refused or warned of.


def test_ols_refuses_what_does_not_fit(experiment):
  x, y = jnp.asarray(experiment.e[0]), jnp.asarray(experiment.y[0])
  cluster = jnp.asarray(experiment.cluster)
  ones = jnp.ones(2)
  with pytest.raises(ValueError, match=r"x has shape \(3, 24, 2\) and y \(2, 24\)"):
    estimators.ols(x, y[:2], ones, cluster, CLUSTERS)
  with pytest.raises(ValueError, match=r"contrast has shape \(3,\) for 2 features"):
    estimators.ols(x, y, jnp.ones(3), cluster, CLUSTERS)
  with pytest.raises(ValueError, match=r"cluster has shape \(23,\).*expected \(24,\)"):
    estimators.ols(x, y, ones, cluster[1:], CLUSTERS)
  with pytest.raises(ValueError, match=r"num_clusters = 1; .*no standard error"):
    estimators.ols(x, y, ones, 0 * cluster, 1)
  with pytest.raises(ValueError, match=r"nuisance has shape \(3, 24\)"):
    estimators.ols(x, y, ones, cluster, CLUSTERS, y)
  estimate = estimators.GateEstimate(*map(jnp.asarray, (1.0, 1.0, [1.0], 0.0, 1.0)))
  for clusters, level in ((1, 0.95), (8, 95)):
    with pytest.raises(ValueError, match=f"num_clusters = {clusters}, level = {level}"):
      estimators.interval(estimate, clusters, level)


def test_merging_needs_two_shares():
  for shares in ([0.5], [0.5, 0.5, 0.5]):
    with pytest.raises(ValueError, match="v_b is 0"):
      estimators.check_mergeable(shares)
  estimators.check_mergeable([0.5, 0.0, 0.5])


def test_features_that_cannot_be_told_apart_are_named(experiment):
  names = ["z", "e", "z e", "e^2"]
  x = np.array(
    features.design_matrix(
      "quadratic", jnp.asarray(experiment.z[0]), jnp.asarray(experiment.e[0, ..., :1])
    )
  )
  estimators.check_features(x, names)
  with pytest.raises(ValueError, match=r"the features z, e, z e, e\^2 are constant"):
    estimators.check_features(x[:1], names)  # the stage that treats nobody
  # A graph whose components are clusters: everybody's neighbours are treated as they are.
  x[..., 1] = x[..., 0]
  with pytest.raises(ValueError, match="the features z, e are collinear"):
    estimators.check_features(x, names)
  x[..., 3] = 0.3 * x[..., 0] - 0.7 * x[..., 2] + 0.1  # not exact in float32
  x[..., 1] = np.random.default_rng(0).normal(size=x.shape[:-1])
  with pytest.raises(ValueError, match=r"the features z, z e, e\^2 are collinear"):
    estimators.check_features(x.astype(np.float32), names)


def test_warnings_name_the_weakness_of_a_design():
  hold_out = (0.02, 0.5, 0.1)
  assert diagnostics.warnings(hold_out, 60) == []

  def only(*arguments, **options) -> str:
    (found,) = diagnostics.warnings(*arguments, **options)
    return found

  assert "v_b = 0" in only((0.5, 0.5), 60)
  assert "quadratic features need three distinct shares and there are 2" in only(
    (0.1, 0.5, 0.1), 60, features="quadratic"
  )
  assert diagnostics.warnings(hold_out, 60, features="spline") == []
  assert "condition number 1e+12" in only(hold_out, 60, condition=1e12)
  assert "condition number nan" in only(hold_out, 60, condition=float("nan"))
  assert "a share of 0.01 of 60 randomisation units is less than one" in only((0.01, 0.5, 0.1), 60)
  assert "12 randomisation units are few" in only((0.1, 0.5, 0.0), 12)
  assert "3 nodes are influenced by nobody" in only(hold_out, 60, num_isolated=3)
  for shares in ((0.02, 0.1, 0.5), (0.5, 0.1, 0.1)):
    assert "cannot be told from the effect of the share" in only(shares, 60)
    assert "linked to treated ones" in only(shares, 60, trend=True)
  found = diagnostics.warnings((0.5,), 10, features="spline", condition=np.inf, num_isolated=1)
  assert len(found) == 5
  assert "v_b = 0" in found[0]
