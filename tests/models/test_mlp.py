"""The MLP against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.mlp import build_mlp


@pytest.mark.parametrize(("hidden", "num_outputs"), [((), 1), ((8,), 1), ((8, 4), 3)])
def test_forward_pass(hidden, num_outputs):
  init, apply_fn = build_mlp(5, hidden, num_outputs)
  params = init(jax.random.key(0))
  features = np.asarray(jax.random.normal(jax.random.key(1), (7, 5)))
  activations = features
  for layer in range(len(hidden) + 1):
    dense = params["params"][f"Dense_{layer}"]
    activations = activations @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    if layer < len(hidden):
      activations = np.maximum(activations, 0.0)
  expected = activations[:, 0] if num_outputs == 1 else activations
  logits = apply_fn(params, jnp.asarray(features))
  assert logits.shape == ((7,) if num_outputs == 1 else (7, num_outputs))
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_same_key_same_weights():
  init, _ = build_mlp(5, (8,))
  again, _ = build_mlp(5, (8,))
  same = jax.tree.map(jnp.array_equal, init(jax.random.key(3)), again(jax.random.key(3)))
  assert jax.tree.all(same)
  other = jax.tree.map(jnp.array_equal, init(jax.random.key(3)), again(jax.random.key(4)))
  assert not jax.tree.all(other)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((0,), "num_features"),
    ((5, (8, 0)), "hidden"),
    ((5, (), 0), "num_outputs"),
    ((5, (), 1, "zeros"), "initial"),
  ],
)
def test_bad_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    build_mlp(*arguments)


def test_uniform_initial_weights_are_pytorchs():
  init, _ = build_mlp(400, (300,), initial="uniform")
  params = init(jax.random.key(0))["params"]
  for layer, fan_in in (("Dense_0", 400), ("Dense_1", 300)):
    for name, values in params[layer].items():
      bound = fan_in**-0.5
      assert np.all(np.abs(values) <= bound), (layer, name)
    kernel = np.asarray(params[layer]["kernel"])
    # A uniform number within b has variance b^2 / 3; its fourth moment gives the standard error.
    standard_error = bound**2 * np.sqrt((1 / 5 - 1 / 9) / kernel.size)
    assert abs(np.mean(kernel**2) - bound**2 / 3) < 4 * standard_error
