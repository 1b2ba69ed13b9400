"""The language-model loss and step against NumPy and optax by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algorithms import language_modeling as lm


def test_the_loss_is_a_weighted_mean_of_negative_log_probabilities():
  rng = np.random.default_rng(0)
  logits, tokens = rng.normal(size=(2, 5, 7)), rng.integers(0, 7, (2, 5))
  weights = rng.random((2, 5))
  total, mass = 0.0, 0.0
  for b in range(2):
    for t in range(1, 5):
      row = logits[b, t - 1]
      total -= weights[b, t] * (row[tokens[b, t]] - np.log(np.exp(row).sum()))
      mass += weights[b, t]
  found = lm.loss(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(weights))
  np.testing.assert_allclose(found, total / mass, rtol=1e-5)
  assert lm.loss(jnp.asarray(logits), jnp.asarray(tokens), jnp.zeros((2, 5))) == 0


def test_a_bigram_model_learns_a_cycle_and_only_matrices_decay():
  config = lm.LMConfig(200, learning_rate=0.1, warmup_steps=5, weight_decay=0.0)
  params = {"table": jnp.zeros((6, 6)), "bias": jnp.zeros(6)}

  def apply_fn(params, tokens):
    return params["table"][tokens] + params["bias"][None, None]

  tokens = jnp.broadcast_to(jnp.arange(12) % 6, (200, 2, 12))
  weights = jnp.ones(tokens.shape)
  state, metrics = jax.jit(lambda state, *batch: lm.run(state, apply_fn, *batch, config))(
    lm.init(params, config), tokens, weights
  )
  np.testing.assert_allclose(metrics["loss"][0], np.log(6), rtol=1e-5)
  assert metrics["loss"][-1] < 0.05
  assert int(state.step) == 200
  np.testing.assert_array_equal(state.params["table"].argmax(axis=1), (np.arange(6) + 1) % 6)

  decaying = lm.LMConfig(10, learning_rate=0.5, warmup_steps=0, weight_decay=0.5)
  ones = {"table": jnp.ones((6, 6)), "bias": jnp.ones(6)}
  optimizer = lm.make_optimizer(decaying)
  zero = jax.tree.map(jnp.zeros_like, ones)
  updates, _ = optimizer.update(zero, optimizer.init(ones), ones)
  after = optax.apply_updates(ones, updates)
  np.testing.assert_allclose(after["table"], 0.75)
  np.testing.assert_array_equal(after["bias"], 1)


@pytest.mark.parametrize(
  "fields",
  [
    {"num_steps": 0},
    {"num_steps": 5, "warmup_steps": 6},
    {"num_steps": 500, "learning_rate": 0.0},
    {"num_steps": 500, "final_fraction": 2.0},
    {"num_steps": 500, "beta2": 1.0},
  ],
)
def test_bad_settings_are_named(fields):
  with pytest.raises(ValueError, match=list(fields)[-1]):
    lm.LMConfig(**fields)
