"""States over two processes of two devices each give the solution of one."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.multiprocess
def test_two_processes_equal_one(root):
  with contextlib.closing(socket.socket()) as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "PYTHONPATH": str(root),
  }
  started = [
    subprocess.Popen(
      [sys.executable, __file__, str(port), str(i)],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(2)
  ]
  try:
    for process in started:
      said, _ = process.communicate(timeout=120)
      assert process.returncode == 0, said
      assert "all checks passed" in said
  finally:
    for process in started:
      process.kill()


def main(port: str, index: str) -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.experimental import multihost_utils
  from jax.sharding import AxisType

  from algorithms import opi

  jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
  assert jax.device_count() == 4
  rng = np.random.default_rng(0)
  shape = (101, 3, 4)
  mdp = opi.SparseMDP(
    jnp.asarray(rng.normal(size=shape[:2])),
    jnp.asarray(rng.integers(0, 101, shape), jnp.int32),
    jnp.asarray(rng.dirichlet(np.ones(4), shape[:2])),
    0.95,
  )
  one = opi.solve(mdp)
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  many = opi.solve_sharded(mdp, mesh)
  value = multihost_utils.process_allgather(many.value, tiled=True)
  policy = multihost_utils.process_allgather(many.policy, tiled=True)
  assert np.max(abs(value - np.asarray(one.value))) <= 1e-10
  np.testing.assert_array_equal(policy, one.policy)
  print("all checks passed")


if __name__ == "__main__":
  main(*sys.argv[1:])
