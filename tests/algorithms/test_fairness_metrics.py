"""Test-set metrics against scikit-learn, fairlearn and direct NumPy."""

import fairlearn.metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from algorithms.fairness_metrics import evaluate, weighted_auc


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def make_data(seed: int, num_rows: int = 600, num_groups: int = 2):
  rng = np.random.default_rng(seed)
  attribute = rng.integers(0, num_groups, num_rows)
  labels = (rng.random(num_rows) < 0.2 + 0.15 * attribute).astype(int)
  # Two decimals: many tied scores.
  scores = np.round(np.clip(0.3 * labels + 0.1 * attribute + rng.random(num_rows) * 0.6, 0, 1), 2)
  weights = rng.integers(0, 4, num_rows).astype(float)
  return scores, labels, attribute, weights


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighted", [False, True])
def test_against_sklearn_and_fairlearn(x64, seed, weighted):
  scores, labels, attribute, weights = make_data(seed)
  given = weights if weighted else None
  metrics = jax.jit(evaluate)(
    jnp.asarray(scores),
    jnp.asarray(labels),
    jnp.asarray(attribute),
    None if given is None else jnp.asarray(given),
  )
  predicted = (scores > 0.5).astype(int)
  expected = {
    "accuracy": sklearn.metrics.accuracy_score(labels, predicted, sample_weight=given),
    "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(
      labels, predicted, sample_weight=given
    ),
    "auc": sklearn.metrics.roc_auc_score(labels, scores, sample_weight=given),
    "hard_gap": fairlearn.metrics.demographic_parity_difference(
      labels, predicted, sensitive_features=attribute, sample_weight=given
    ),
    "positive_rate": np.average(predicted, weights=given),
    "base_rate": np.average(labels, weights=given),
    "soft_gap": np.ptp(
      [
        np.average(scores[attribute == a], weights=None if given is None else given[attribute == a])
        for a in range(2)
      ]
    ),
  }
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, atol=1e-12, err_msg=name)
  assert not metrics["degenerate"]


def test_more_groups_match_fairlearn(x64):
  scores, labels, attribute, _ = make_data(7, num_groups=4)
  metrics = evaluate(*map(jnp.asarray, (scores, labels, attribute)), num_groups=4)
  expected = fairlearn.metrics.demographic_parity_difference(
    labels, (scores > 0.5).astype(int), sensitive_features=attribute
  )
  np.testing.assert_allclose(metrics["hard_gap"], expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_matched_threshold_against_search(x64, seed):
  scores, labels, attribute, _ = make_data(seed)
  threshold = max(t for t in np.unique(scores) if np.mean(scores >= t) >= np.mean(labels) - 1e-12)
  predicted = scores >= threshold
  metrics = evaluate(*map(jnp.asarray, (scores, labels, attribute)))
  np.testing.assert_allclose(metrics["matched_positive_rate"], predicted.mean(), atol=1e-12)
  expected = abs(predicted[attribute == 1].mean() - predicted[attribute == 0].mean())
  np.testing.assert_allclose(metrics["matched_gap"], expected, atol=1e-12)


def test_matched_rate_is_the_base_rate_without_ties():
  rng = np.random.default_rng(0)
  labels = (rng.random(5000) < 0.24).astype(int)
  scores = rng.permutation(5000) / 5000.0
  metrics = evaluate(
    jnp.asarray(scores, jnp.float32), jnp.asarray(labels), jnp.asarray(rng.integers(0, 2, 5000))
  )
  np.testing.assert_allclose(metrics["matched_positive_rate"], labels.mean(), atol=1e-6)


@pytest.mark.parametrize("level", [0.1, 0.9])
def test_constant_predictor_is_flagged(level):
  _, labels, attribute, _ = make_data(0)
  metrics = evaluate(jnp.full(600, level), jnp.asarray(labels), jnp.asarray(attribute))
  assert metrics["degenerate"]
  np.testing.assert_allclose(metrics["balanced_accuracy"], 0.5, atol=1e-6)
  np.testing.assert_allclose(metrics["auc"], 0.5, atol=1e-6)
  np.testing.assert_allclose(metrics["soft_gap"], 0.0, atol=1e-6)
  # Its matched rate gives it away: all scores tie.
  np.testing.assert_allclose(metrics["matched_positive_rate"], 1.0, atol=1e-6)


def test_absent_class_and_group():
  scores = jnp.array([0.2, 0.8, 0.6])
  metrics = evaluate(scores, jnp.array([1, 1, 1]), jnp.array([0, 0, 0]))
  assert jnp.isnan(metrics["auc"])
  np.testing.assert_allclose(metrics["balanced_accuracy"], 2 / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["soft_gap"], 0.0)


def test_vmap_over_scores_equals_loop():
  scores, labels, attribute, _ = make_data(3)
  labels, attribute = jnp.asarray(labels), jnp.asarray(attribute)
  stacked = jnp.stack([jnp.asarray(scores), jnp.asarray(scores) ** 2, 1 - jnp.asarray(scores)])
  together = jax.vmap(evaluate, (0, None, None))(stacked, labels, attribute)
  for arm in range(3):
    alone = evaluate(stacked[arm], labels, attribute)
    for name, value in alone.items():
      np.testing.assert_allclose(together[name][arm], value, rtol=1e-6, err_msg=name)


def test_padding_rows_do_not_count():
  scores, labels, attribute, _ = make_data(4)
  padded = [jnp.pad(jnp.asarray(values), (0, 50)) for values in (scores, labels, attribute)]
  weights = jnp.concatenate([jnp.ones(600), jnp.zeros(50)])
  plain = evaluate(*map(jnp.asarray, (scores, labels, attribute)))
  masked = evaluate(*padded, weights)
  for name, value in plain.items():
    np.testing.assert_allclose(masked[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_auc_of_perfect_ranking():
  auc = weighted_auc(jnp.array([0.1, 0.2, 0.8, 0.9]), jnp.array([0, 0, 1, 1]), jnp.ones(4))
  np.testing.assert_allclose(auc, 1.0)
