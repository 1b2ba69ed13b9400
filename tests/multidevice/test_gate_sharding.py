"""GATE replications over 8 devices, and stages with units over 8 devices, equal one device."""

import pytest


@pytest.mark.multidevice
def test_sharded_replications_equal_one_device(on_eight_devices):
  on_eight_devices(__file__)


def main() -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType
  from jax.sharding import PartitionSpec as P

  from algorithms.gate import design, estimators, features, gnn, moments, outcomes
  from models import graph as graph_lib

  assert jax.device_count() == 8
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  rng = np.random.default_rng(0)
  # A ring with chords, so that no node is isolated.
  a = np.concatenate([np.arange(48), rng.integers(0, 48, 40)])
  b = np.concatenate([(np.arange(48) + 1) % 48, (a[48:] + rng.integers(2, 46, 40)) % 48])
  pairs = np.unique(np.sort(np.stack([a, b]), axis=0), axis=1)
  senders, receivers = np.concatenate([pairs, pairs[::-1]], axis=1)
  graph = graph_lib.from_edges(senders, receivers, 48)
  ramp = design.make_design((0.1, 0.3, 0.5), 48, np.arange(48) // 4, randomisation="complete")
  init, basis, apply_fn = graph_lib.build_gnn("cheb", 4)
  params = jax.tree.map(lambda w: w.astype(float), init(jax.random.key(0), 2))
  model = outcomes.OutcomeConfig("sqrt")

  def replicate(graph, ramp, params, key):
    z_key, graph_key, y_key = jax.random.split(key, 3)
    z = design.draw_rollout(z_key, ramp)
    grown = outcomes.draw_dynamic_graphs(graph_key, graph, 3, 2)
    e = features.exposures((grown,), z)
    y = outcomes.simulate_outcome(y_key, model, graph, z, e[..., 0])
    x = features.design_matrix("quadratic", z, e)
    contrast = features.contrast("quadratic", (grown,), 48)
    found = estimators.ols(x, y, contrast, ramp.cluster, ramp.num_clusters)

    def inputs(graph, z):
      return basis(graph, jnp.stack([z, graph_lib.degree(graph)], axis=-1))

    ends = [inputs(graph, jnp.full(48, end)) for end in (1.0, 0.0)]
    stages = jax.vmap(inputs)(grown, z)
    # The parameters are shared by all devices, and so would be their gradients.
    network = gnn.gnn_gate(params, apply_fn, stages, y, *ends, gnn.GNNConfig(epochs=10))
    weighted = estimators.horvitz_thompson(y, z, ramp.shares)
    return found, network, weighted, x, y

  def mapped(graph, ramp, params, keys):
    return jax.lax.map(lambda key: replicate(graph, ramp, params, key), keys)

  def assert_close(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), first, second)

  keys = jax.random.split(jax.random.key(1), 16)
  expected = jax.jit(mapped)(graph, ramp, params, keys)
  sharded = jax.shard_map(
    mapped, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P("data")
  )
  got = jax.jit(sharded)(graph, ramp, params, keys)
  assert_close(got, expected)
  estimate, (taus, _), weighted, x, y = expected
  for values in (estimate.tau, taus, weighted):
    assert np.all(np.isfinite(values))
    assert np.unique(values).size == 16  # a device that used another's key would show

  # Units of one replication on different devices: sums of stages, then the regression.
  contrast, stages = jnp.ones(x.shape[-1]), jnp.asarray([0.0, 1.0, 1.0])

  def merged(x, y, axis_name=None):
    summed = moments.stage_moments(x, y, axis_name)
    return summed, moments.ols_from_moments(summed, stages, contrast)

  by_unit = jax.shard_map(
    lambda x, y: merged(x, y, "data"), mesh=mesh, in_specs=P(None, "data"), out_specs=P()
  )
  expected = jax.jit(merged)(x[0], y[0])
  assert_close(jax.jit(by_unit)(x[0], y[0]), expected)
  # One device's units alone have other means.
  assert np.abs(np.asarray(x[0])[:, :6].mean(axis=1) - expected[0].mean_x).max() > 1e-3
  print("all checks passed")


if __name__ == "__main__":
  main()
