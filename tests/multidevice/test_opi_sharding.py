"""States over 8 devices give the solution of one device, whether or not they divide."""

import pytest


@pytest.mark.multidevice
def test_sharded_solves_equal_one_device(on_eight_devices):
  on_eight_devices(__file__)


def main() -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType

  from algorithms import opi

  assert jax.device_count() == 8
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  rng = np.random.default_rng(0)

  def sparse(states):
    shape = (states, 3, 4)
    return opi.SparseMDP(
      jnp.asarray(rng.normal(size=shape[:2])),
      jnp.asarray(rng.integers(0, states, shape), jnp.int32),
      jnp.asarray(rng.dirichlet(np.ones(4), shape[:2])),
      0.95,
      jnp.asarray(rng.random(shape[:2]) > 0.3) | (jnp.arange(3) == 0)[None],
    )

  # Rewards far from 0, so that the states that fill up a device would show in the bounds.
  dense = opi.TabularMDP(
    jnp.asarray(5 + rng.normal(size=(37, 3))),
    jnp.asarray(rng.dirichlet(np.ones(37), (37, 3))),
    0.9,
  )
  configs = (opi.OPIConfig(), opi.OPIConfig((1, 5), 2, 0.7, stopping="norm"))
  for mdp, axis in ((sparse(64), "data"), (sparse(101), ("data", "model")), (dense, "data")):
    for config in configs:
      one = opi.solve(mdp, config)
      many = opi.solve_sharded(mdp, mesh, config, axis=axis)
      for name in ("value", "lower", "upper", "span"):
        difference = np.max(abs(getattr(many, name) - getattr(one, name)))
        assert difference <= 1e-10, (name, difference)
      np.testing.assert_array_equal(many.policy, one.policy)
      assert int(many.num_iterations) == int(one.num_iterations)
      assert many.converged
  # Inside jit, with rows that lie on the devices already.
  rows = jax.NamedSharding(mesh, jax.P("data"))
  mdp = sparse(64)
  placed = jax.tree.map(lambda x: jax.device_put(x, rows) if jnp.ndim(x) else x, mdp)
  with jax.set_mesh(mesh):
    found = jax.jit(lambda model: opi.solve_sharded(model, mesh).value)(placed)
  np.testing.assert_allclose(found, opi.solve(mdp).value, atol=1e-10)
  for call, message in (
    (lambda: opi.solve_sharded(mdp, mesh, axis="rows"), "expected axes of the mesh"),
    (lambda: opi.solve_sharded(mdp, mesh, opi.OPIConfig(None)), "is not sharded"),
    (lambda: opi.solve_sharded(opi.OperatorMDP(abs, abs, 0.9, 2, 2), mesh), "matrix-free"),
  ):
    with pytest.raises(ValueError, match=message):
      call()
  print("all checks passed")


if __name__ == "__main__":
  main()
