"""Noise channels against NumPy, and their estimators on simulated data with a known channel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import noise
from algorithms.noise import TransitionMatrix


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def random_channel(rng: np.random.Generator, num_classes: int, min_det: float = 0.1) -> np.ndarray:
  while True:
    matrix = 0.5 * np.eye(num_classes) + 0.5 * rng.dirichlet(np.ones(num_classes), num_classes)
    if abs(np.linalg.det(matrix)) > min_det:
      return matrix


def test_constructors():
  np.testing.assert_array_equal(TransitionMatrix.identity(3).matrix, np.eye(3))
  np.testing.assert_allclose(TransitionMatrix.symmetric(0.3).matrix, [[0.7, 0.3], [0.3, 0.7]])
  np.testing.assert_allclose(
    TransitionMatrix.symmetric(0.3, 4).matrix, np.full((4, 4), 0.1) + 0.6 * np.eye(4), rtol=1e-6
  )
  np.testing.assert_allclose(TransitionMatrix.binary(0.1, 0.4).matrix, [[0.9, 0.1], [0.4, 0.6]])
  assert TransitionMatrix.symmetric(0.3, 4).num_classes == 4


def test_constructors_accept_traced_rates():
  rates = jnp.array([0.0, 0.1, 0.4])
  channels = jax.jit(jax.vmap(TransitionMatrix.symmetric))(rates)
  assert channels.matrix.shape == (3, 2, 2)
  np.testing.assert_array_equal(channels.matrix[:, 0, 1], rates)
  channels = jax.vmap(TransitionMatrix.binary)(rates, rates[::-1])
  np.testing.assert_array_equal(channels.matrix[:, 1, 0], rates[::-1])


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_inverse_and_det(x64, num_classes):
  matrix = random_channel(np.random.default_rng(num_classes), num_classes)
  channel = TransitionMatrix(jnp.asarray(matrix))
  np.testing.assert_allclose(channel.inverse, np.linalg.inv(matrix), atol=1e-12)
  np.testing.assert_allclose(channel.det, np.linalg.det(matrix), atol=1e-12)


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_implied_prior_inverts_the_channel(x64, num_classes):
  rng = np.random.default_rng(10 + num_classes)
  matrix, clean = random_channel(rng, num_classes), rng.dirichlet(np.ones(num_classes))
  noisy = [sum(clean[i] * matrix[i, k] for i in range(num_classes)) for k in range(num_classes)]
  implied = noise.implied_prior(jnp.asarray(noisy), TransitionMatrix(jnp.asarray(matrix)))
  np.testing.assert_allclose(implied, clean, atol=1e-12)


@pytest.mark.parametrize(
  ("matrix", "message"),
  [
    ([[0.7, 0.3]], "shape"),
    ([[np.nan, 1.0], [0.0, 1.0]], "NaN"),
    ([[1.2, -0.2], [0.3, 0.7]], r"\[0, 0\] is 1.2"),
    ([[0.7, 0.3], [0.6, 0.7]], "row 1 sums to 1.3"),
    ([[0.7, 0.3], [0.3, 0.7 + 5e-6]], "row 1 sums"),
    ([[0.52, 0.48], [0.48, 0.52]], "unidentifiable"),
  ],
)
def test_invalid_channels_are_refused(matrix, message):
  with pytest.raises(ValueError, match=message) as error:
    noise.validate_transition(np.array(matrix), "attribute_transition")
  assert "attribute_transition" in str(error.value)


def test_valid_channels_are_accepted():
  noise.validate_transition(TransitionMatrix.symmetric(0.3))
  noise.validate_transition(TransitionMatrix.symmetric(0.45, 3), min_abs_det=0.01)
  noise.validate_transition(np.array([[0.7, 0.3], [0.3, 0.7 + 5e-6]], np.float32))
  # Labels that are mostly wrong still say which is which.
  noise.validate_transition(TransitionMatrix.symmetric(0.9))


def test_rates_at_odds_with_observed_shares_are_refused():
  with pytest.raises(ValueError, match="group 1") as error:
    noise.validate_rates([0.75, 0.25], TransitionMatrix.symmetric(0.3), "attribute_transition")
  message = str(error.value)
  assert "attribute_transition" in message
  assert "P(noisy = 1 | clean = 0) is 0.3 and must be < 0.25" in message
  with pytest.raises(ValueError, match=r"P\(noisy = 0 \| clean = 1\) is 0.4 and must be < 0.35"):
    noise.validate_rates([0.35, 0.65], TransitionMatrix.binary(0.1, 0.4))
  with pytest.raises(ValueError, match=r"must be > 0\.75"):
    noise.validate_rates([0.25, 0.75], TransitionMatrix.symmetric(0.7))
  with pytest.raises(ValueError, match="group 2"):
    noise.validate_rates([0.5, 0.4, 0.1], TransitionMatrix.symmetric(0.4, 3))
  with pytest.raises(ValueError, match="shape"):
    noise.validate_rates([0.5, 0.3, 0.2], TransitionMatrix.symmetric(0.3))


def test_stated_bound_on_rates_is_the_boundary():
  noise.validate_rates([0.75, 0.25], TransitionMatrix.binary(0.249, 0.3))
  with pytest.raises(ValueError, match="implies a clean share"):
    noise.validate_rates([0.75, 0.25], TransitionMatrix.binary(0.251, 0.3))


def test_flip_identity_changes_nothing():
  values = jax.random.randint(jax.random.key(0), (50, 20), 0, 3)
  flipped = noise.flip(jax.random.key(1), values, TransitionMatrix.identity(3))
  assert flipped.dtype == jnp.int32
  np.testing.assert_array_equal(flipped, values)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_flip_frequencies(num_classes):
  matrix = random_channel(np.random.default_rng(num_classes), num_classes)
  num_rows = 40_000
  values = jnp.repeat(jnp.arange(num_classes), num_rows)
  flipped = noise.flip(jax.random.key(2), values, TransitionMatrix(jnp.asarray(matrix)))
  counts = np.stack(
    [
      np.bincount(row, minlength=num_classes)
      for row in np.asarray(flipped).reshape(num_classes, num_rows)
    ]
  )
  standard_error = np.sqrt(matrix * (1 - matrix) / num_rows)
  assert np.all(np.abs(counts / num_rows - matrix) < 4 * standard_error)


def test_larger_rate_flips_a_superset():
  values = jax.random.bernoulli(jax.random.key(3), 0.4, (5000,)).astype(jnp.int32)
  changed = [
    noise.flip(jax.random.key(4), values, TransitionMatrix.symmetric(rate)) != values
    for rate in (0.1, 0.3)
  ]
  assert jnp.all(changed[1] | ~changed[0])
  assert jnp.sum(changed[1]) > jnp.sum(changed[0])


def simulate(num_rows: int, channel: np.ndarray, seed: int):
  """Well separated classes, noisy values, and the true P(noisy | x) of every row."""
  rng = np.random.default_rng(seed)
  num_classes = channel.shape[0]
  clean = rng.choice(
    num_classes, num_rows, p=np.arange(1, num_classes + 1) / (num_classes * (num_classes + 1) / 2)
  )
  # Log odds of +-6 around the own class: few rows are ambiguous.
  logits = 12.0 * np.eye(num_classes)[clean] + rng.normal(size=(num_rows, num_classes))
  posterior = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  noisy = np.array([rng.choice(num_classes, p=channel[c]) for c in clean])
  return jnp.asarray(posterior @ channel, jnp.float32), jnp.asarray(noisy)


CHANNELS = {
  "symmetric": np.array([[0.7, 0.3], [0.3, 0.7]]),
  "asymmetric": np.array([[0.9, 0.1], [0.4, 0.6]]),
  "three": np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.0, 0.3, 0.7]]),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_anchor_recovers_the_channel(name):
  channel = CHANNELS[name]
  probs, _ = simulate(6000, channel, seed=5)
  for percentile in (97.0, 100.0):
    estimate = jax.jit(noise.estimate_anchor)(probs, percentile).matrix
    # Anchors belong to their class with odds above e^8, so only that is left of the error.
    np.testing.assert_allclose(estimate, channel, atol=2e-3)


@pytest.mark.parametrize("name", CHANNELS)
def test_confident_joint_recovers_the_channel(name):
  channel = CHANNELS[name]
  probs, noisy = simulate(6000, channel, seed=6)
  estimate = jax.jit(noise.estimate_confident_joint)(probs, noisy).matrix
  # The smallest class has 1,000 to 2,000 rows: four standard errors of a share are below 0.06.
  np.testing.assert_allclose(estimate, channel, atol=0.06)
  np.testing.assert_allclose(np.sum(estimate, axis=1), 1.0, atol=1e-5)


def test_confident_joint_matches_a_direct_count():
  rng = np.random.default_rng(7)
  probs = rng.dirichlet([1.0, 1.0, 1.0], 200)
  noisy = rng.integers(0, 3, 200)
  threshold = [probs[noisy == k, k].mean() for k in range(3)]
  counts = np.zeros((3, 3))
  for row, k in zip(probs, noisy, strict=True):
    eligible = [j for j in range(3) if row[j] >= threshold[j]]
    if eligible:
      counts[k, max(eligible, key=lambda j: row[j])] += 1
  joint = counts / counts.sum(1, keepdims=True) * np.bincount(noisy)[:, None]
  expected = (joint / joint.sum(0)).T
  with jax.enable_x64(True):
    estimate = noise.estimate_confident_joint(jnp.asarray(probs), jnp.asarray(noisy)).matrix
  np.testing.assert_allclose(estimate, expected, atol=1e-12)


def test_confident_joint_with_a_class_never_observed():
  probs = jnp.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
  estimate = noise.estimate_confident_joint(probs, jnp.array([0, 1, 0, 1])).matrix
  np.testing.assert_allclose(estimate, np.eye(3))
