"""Graph operators with edges sharded over 8 devices equal one device."""

import pytest


@pytest.mark.multidevice
def test_sharded_edges_equal_one_device(on_eight_devices):
  on_eight_devices(__file__)


def main() -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType
  from jax.sharding import PartitionSpec as P

  from models import graph as graph_lib

  assert jax.device_count() == 8
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  rng = np.random.default_rng(0)
  senders, receivers = rng.integers(0, 30, (2, 101))
  # Node 30 has no edge, so that the last devices hold padding and little else.
  graph = graph_lib.from_edges(senders, receivers, 31)
  padded = graph_lib.pad(graph, 136)
  x = jnp.asarray(rng.normal(size=(31, 2)))
  target = jnp.asarray(rng.normal(size=31))

  networks = {kind: graph_lib.build_gnn(kind) for kind in graph_lib.GNN_KINDS}
  params = jax.tree.map(lambda w: w.astype(float), networks["cheb"][0](jax.random.key(0), 2))

  def results(params, graph, x, axis_name):
    def loss(params, x, kind):
      _, basis, apply_fn = networks[kind]
      return jnp.mean((apply_fn(params, basis(graph, x, axis_name)) - target) ** 2)

    return {
      "apply": graph_lib.apply(graph, x, axis_name),
      "apply_transpose": graph_lib.apply_transpose(graph, x, axis_name),
      "degree": graph_lib.degree(graph, axis_name),
      "order 4": graph_lib.chebyshev_basis(graph, x, 4, 1.8, axis_name),
      "layer": graph_lib.ChebConv(1).apply({"params": {"Dense_0": dense}}, graph, x, axis_name),
      **{
        kind: jax.value_and_grad(loss, argnums=(0, 1))(params, x, kind)
        for kind in graph_lib.GNN_KINDS
      },
    }

  dense = {"kernel": jnp.asarray(rng.normal(size=(4, 1))), "bias": jnp.zeros(1)}
  expected = jax.jit(results, static_argnums=3)(params, graph, x, None)
  sharded = jax.shard_map(
    lambda params, graph, x: results(params, graph, x, "data"),
    mesh=mesh,
    in_specs=(P(), P("data"), P()),
    out_specs=P(),
  )
  got = jax.jit(sharded)(params, padded, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, expected)
  assert np.abs(expected["cheb"][1][1]).max() > 1e-3
  print("all checks passed")


if __name__ == "__main__":
  main()
