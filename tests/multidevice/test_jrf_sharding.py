"""JRF with rows sharded over 8 devices equals one device."""

import pytest


@pytest.mark.multidevice
def test_sharded_training_equals_one_device(on_eight_devices):
  on_eight_devices(__file__)


def main() -> None:
  import dataclasses

  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  from algorithms import jrf
  from algorithms.noise import TransitionMatrix
  from models.mlp import build_mlp

  assert jax.device_count() == 8
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  init, apply_fn = build_mlp(5, (8,))
  params = jax.tree.map(lambda leaf: leaf.astype(float), init(jax.random.key(0)))

  def make_batch(seed: int, num_groups: int) -> jrf.Batch:
    rng = np.random.default_rng(seed)
    # Sorted by group: devices hold different groups, and some none of one.
    attribute = np.sort(rng.integers(0, num_groups, 8 * 40))
    features = rng.normal(size=(320, 5)) + 0.4 * attribute[:, None]
    labels = (features[:, 0] + rng.normal(size=320) > 0.5).astype(int)
    weights = (rng.random(320) < 0.8).astype(float)
    return jrf.Batch(*map(jnp.asarray, (features, labels, attribute, weights)))

  def assert_close(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), first, second)

  configs = [
    jrf.JRFConfig(),
    jrf.JRFConfig(mode="paper", ema_decay=0.9),
    jrf.JRFConfig(criterion="equalised_odds", penalty="smooth"),
    jrf.JRFConfig(num_groups=3, reduction="max"),
  ]
  for config in configs:
    sharded_config = dataclasses.replace(config, axis_name="data")
    batch, held_out = make_batch(1, config.num_groups), make_batch(2, config.num_groups)
    problem = jrf.JRFProblem(
      TransitionMatrix.symmetric(jnp.asarray(0.1)),
      TransitionMatrix.symmetric(jnp.asarray(0.1), config.num_groups),
      jnp.asarray(2.0),
    )
    state = jrf.init(params, config)

    def loss_and_grad(state, batch, problem, config):
      return jax.value_and_grad(jrf.jrf_loss, has_aux=True)(
        state.params, apply_fn, batch, problem, config, state.ema
      )

    def train(state, batch, held_out, problem, config):
      return jrf.run(state, apply_fn, batch, problem, config, 20, held_out, eval_every=5)

    expected = jax.jit(loss_and_grad, static_argnums=3)(state, batch, problem, config)
    assert expected[0][1][0]["gap"] > 1e-3
    got = jax.jit(
      jax.shard_map(
        lambda s, b, p: loss_and_grad(s, b, p, sharded_config),  # noqa: B023
        mesh=mesh,
        in_specs=(P(), P("data"), P()),
        out_specs=P(),
        check_vma=True,
      )
    )(state, batch, problem)
    assert_close(got, expected)
    if config not in configs[:2]:
      continue

    expected = jax.jit(train, static_argnums=4)(state, batch, held_out, problem, config)
    got = jax.jit(
      jax.shard_map(
        lambda s, b, v, p: train(s, b, v, p, sharded_config),  # noqa: B023
        mesh=mesh,
        in_specs=(P(), P("data"), P("data"), P()),
        out_specs=P(),
        check_vma=True,
      )
    )(state, batch, held_out, problem)
    assert_close(got, expected)

    # The same by compiler partitioning, without an axis name.
    rows = NamedSharding(mesh, P("data"))
    placed = jax.device_put((batch, held_out), (rows, rows))
    got = jax.jit(train, static_argnums=4)(state, *placed, problem, config)
    assert_close(got, expected)

  # What the sum before the non-linear gap is for: the mean of per-device gaps is another number.
  config, batch = configs[0], make_batch(1, 2)
  order = np.random.default_rng(3).permutation(320)
  shuffled = jax.tree.map(lambda leaf: leaf[order], batch)
  channel = TransitionMatrix.symmetric(0.1)

  def gap(batch, axis_name):
    scores = jax.nn.sigmoid(apply_fn(params, batch.features))
    mass, prior = jrf.group_mass(scores, batch.attribute, batch.weights, 2, axis_name)
    return jrf.mirl_gap(mass, prior, channel)

  def on_devices(function):
    return jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P())(shuffled)

  right = on_devices(lambda rows: gap(rows, "data"))
  wrong = on_devices(lambda rows: jax.lax.pmean(gap(rows, None), "data"))
  np.testing.assert_allclose(right, gap(shuffled, None), rtol=1e-9)
  assert abs(wrong - right) > 0.1 * right, (wrong, right)
  print("all checks passed")


if __name__ == "__main__":
  main()
