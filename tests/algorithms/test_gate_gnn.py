"""The network estimator against Adam written out in NumPy, and against what it must learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms.gate.gnn import GNNConfig, gnn_gate

STAGES, NODES = 3, 20


def linear(params, inputs):
  return inputs @ params["slope"] + params["intercept"]


class Data:
  """Two replications of stages with own treatment, exposure and degree as inputs."""

  def __init__(self):
    rng = np.random.default_rng(0)
    shares = np.array([[0.1], [0.3], [0.5]])
    z = (rng.random((2, STAGES, NODES)) < shares).astype(float)
    e = shares + 0.1 * rng.normal(size=z.shape)
    degree = rng.integers(1, 6, NODES).astype(float)
    self.inputs = np.stack([z, e, np.broadcast_to(degree, z.shape)], axis=-1)
    self.treated = np.stack([np.ones(NODES), np.ones(NODES), degree], axis=-1)
    self.control = np.stack([np.zeros(NODES), np.zeros(NODES), degree], axis=-1)
    self.y = 1 + z + 2 * e - 0.1 * degree + 0.2 * rng.normal(size=z.shape)
    self.slope, self.intercept = rng.normal(size=3), rng.normal()


@pytest.fixture(scope="module")
def data() -> Data:
  return Data()


def adam(inputs, y, theta, rate, epochs):
  """Steps on the stages in order; constants of Kingma and Ba (2015). Returns theta and losses."""
  first, second, losses = np.zeros(4), np.zeros(4), []
  theta, count = theta.copy(), 0
  for _ in range(epochs):
    of_epoch = []
    for x, target in zip(inputs, y, strict=True):
      rows = np.column_stack([x, np.ones(len(x))])
      error = rows @ theta - target
      of_epoch.append((error**2).mean())
      gradient = 2 * rows.T @ error / len(x)
      count += 1
      first = 0.9 * first + 0.1 * gradient
      second = 0.999 * second + 0.001 * gradient**2
      step = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
      theta = theta - rate * step
    losses.append(np.mean(of_epoch))
  return theta, losses


def test_training_equals_adam_in_numpy_for_every_replication(x64, data):
  config = GNNConfig(learning_rate=0.03, epochs=5)
  params = {"slope": jnp.asarray(data.slope), "intercept": jnp.asarray(data.intercept)}
  fit = jax.vmap(gnn_gate, (None, None, 0, 0, None, None, None))
  taus, losses = jax.jit(fit, static_argnums=(1, 6))(
    params,
    linear,
    jnp.asarray(data.inputs),
    jnp.asarray(data.y),
    jnp.asarray(data.treated),
    jnp.asarray(data.control),
    config,
  )
  assert losses.shape == (2, 5)
  start = np.array([*data.slope, data.intercept])
  for r in range(2):
    theta, expected = adam(data.inputs[r], data.y[r], start, 0.03, 5)
    np.testing.assert_allclose(losses[r], expected, rtol=1e-9)
    # Everybody treated: own treatment and exposure go from 0 to 1, the degree stays.
    np.testing.assert_allclose(taus[r], theta[0] + theta[1], rtol=1e-9)
    # Other orders of the stages end elsewhere: the test sees the order of the steps.
    other, _ = adam(data.inputs[r, ::-1], data.y[r, ::-1], start, 0.03, 5)
    assert abs(other[:2].sum() - float(taus[r])) > 1e-4


def test_a_curve_is_learned_and_read_at_both_ends():
  """y = 1 + z + 2 e^2 without noise; the model is that family, so the GATE is 3."""
  rng = np.random.default_rng(1)
  z = (rng.random((4, 50)) < np.array([[0.0], [0.25], [0.5], [0.75]])).astype(np.float32)
  e = np.clip(z.mean(axis=1, keepdims=True) + 0.1 * rng.normal(size=z.shape), 0, 1)
  inputs = jnp.asarray(np.stack([z, e], axis=-1), jnp.float32)
  y = jnp.asarray(1 + z + 2 * e**2, jnp.float32)

  def curve(params, x):
    return params[0] + params[1] * x[:, 0] + params[2] * x[:, 1] + params[3] * x[:, 1] ** 2

  ends = jnp.ones((50, 2)), jnp.zeros((50, 2))
  fit = jax.jit(gnn_gate, static_argnums=(1, 6))
  tau, losses = fit(jnp.zeros(4), curve, inputs, y, *ends, GNNConfig(0.02, 3000))
  assert tau.dtype == losses.dtype == jnp.float32
  np.testing.assert_allclose(tau, 3, atol=0.02)
  assert losses[-1] < 1e-4 * losses[0]


def test_bad_arguments_are_refused(data):
  for rate, epochs in ((0.0, 4), (float("nan"), 4), (0.1, 0)):
    with pytest.raises(ValueError, match=f"learning_rate = {rate}, epochs = {epochs}"):
      GNNConfig(rate, epochs)
  inputs, y = jnp.asarray(data.inputs[0]), jnp.asarray(data.y[0])
  params = {"slope": jnp.zeros(3), "intercept": jnp.zeros(())}
  with pytest.raises(ValueError, match=r"inputs have shape \(3, 20, 3\) and y \(2, 20\)"):
    gnn_gate(params, linear, inputs, y[:2], inputs[0], inputs[0], GNNConfig())
