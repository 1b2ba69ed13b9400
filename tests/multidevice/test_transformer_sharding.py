"""Heads, MLP and vocabulary over 4 devices and rows over 2 equal one device; also in training."""

import pytest


@pytest.mark.multidevice
def test_sharded_forward_generation_and_training_equal_one_device(on_eight_devices):
  on_eight_devices(__file__)


def main() -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType

  from algorithms import language_modeling as lm
  from models.transformer import (
    SamplingConfig,
    Transformer,
    TransformerConfig,
    generate,
    param_shardings,
  )

  assert jax.device_count() == 8
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  config = TransformerConfig(
    vocab_size=48,
    num_layers=2,
    hidden_size=32,
    mlp_size=64,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    dtype="float64",
  )
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (4, 12)), jnp.int32)
  params = Transformer(config).init(jax.random.key(0), tokens)
  params = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params)
  run = jax.jit(lambda params, tokens: Transformer(config).apply(params, tokens).logits)
  expected = run(params, tokens)
  shardings = param_shardings(params, config, mesh)
  placed = jax.device_put(params, shardings)
  kernel = placed["params"]["layers_0"]["attention"]["k"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (32, 8)  # one of four key heads
  rows = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
  np.testing.assert_allclose(run(placed, rows), expected, atol=1e-6)
  prompts = np.asarray(tokens)[:, :5].tolist()
  sampling = SamplingConfig(max_new_tokens=8)
  np.testing.assert_array_equal(
    generate(placed, config, prompts, sampling).tokens,
    generate(params, config, prompts, sampling).tokens,
  )
  settings = lm.LMConfig(4, learning_rate=1e-2, warmup_steps=1)
  batches, weights = jnp.stack([tokens] * 4), jnp.ones((4, *tokens.shape), jnp.float64)

  def apply_fn(params: dict, tokens: jax.Array) -> jax.Array:
    return Transformer(config).apply(params, tokens).logits

  @jax.jit
  def train(params: dict, *batch: jax.Array) -> tuple:
    return lm.run(lm.init(params, settings), apply_fn, *batch, settings)

  state, metrics = train(params, batches, weights)
  by_row = jax.NamedSharding(mesh, jax.P(None, "data"))
  other, other_metrics = train(placed, *jax.device_put((batches, weights), by_row))
  np.testing.assert_allclose(other_metrics["loss"], metrics["loss"], rtol=1e-6)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), other.params, state.params)
  # Three key heads do not divide four devices: they stay whole.
  odd = config.replace(num_heads=6, num_kv_heads=3)
  spec = param_shardings(params, odd, mesh)["params"]["layers_0"]["attention"]["k"]["kernel"].spec
  assert tuple(spec) == (None, None)
  print("all checks passed")


if __name__ == "__main__":
  main()
