"""Checkpoints by themselves; what a killed run does with them is in test_resume.py."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.checkpoint import KEEP, Checkpoints
from launch.files import WorkdirError


def state(value):
  return {
    "params": {"w": jnp.full((2, 3), float(value)), "b": jnp.arange(3)},
    "key": jax.random.key(int(value)),
    "step": jnp.int32(value),
  }


def test_gives_back_the_newest_and_keeps_the_last_two(tmp_path):
  checkpoints = Checkpoints(tmp_path / "c")
  assert checkpoints.restore(state(0)) is None
  for step in (1, 2, 3):
    checkpoints.save(step, state(step))
  checkpoints.close()
  assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()) == ["2", "3"]
  assert KEEP == 2

  step, found = Checkpoints(tmp_path / "c").restore(state(0))
  assert step == 3
  np.testing.assert_array_equal(found["params"]["w"], np.full((2, 3), 3.0))
  np.testing.assert_array_equal(found["params"]["b"], [0, 1, 2])
  assert found["params"]["w"].dtype == jnp.float32
  assert jnp.issubdtype(found["key"].dtype, jax.dtypes.prng_key)
  np.testing.assert_array_equal(
    jax.random.key_data(found["key"]), jax.random.key_data(jax.random.key(3))
  )


def test_another_tree_names_what_differs(tmp_path):
  checkpoints = Checkpoints(tmp_path / "c")
  checkpoints.save(4, state(1))
  like = state(0)
  like["params"]["w"] = jnp.zeros((2, 5))
  like["params"]["new"] = like["params"].pop("b")
  with pytest.raises(WorkdirError) as caught:
    checkpoints.restore(like)
  text = str(caught.value)
  assert "the checkpoint at step 4" in text
  for line in (
    "params.w has shape [2, 3] in the checkpoint, [2, 5] here",
    "params.b is only in the checkpoint",
    "params.new is missing from the checkpoint",
  ):
    assert line in text
  assert "step has" not in text
  checkpoints.close()


def test_delete_leaves_nothing(tmp_path):
  checkpoints = Checkpoints(tmp_path / "c")
  checkpoints.save(1, state(1))
  checkpoints.delete()
  assert not (tmp_path / "c").exists()
  assert checkpoints.restore(state(0)) is None


def test_saving_the_same_step_again_replaces_it(tmp_path):
  checkpoints = Checkpoints(tmp_path / "c")
  for value in (1, 2):
    checkpoints.save(7, state(value))
  assert int(checkpoints.restore(state(0))[1]["step"]) == 2
  checkpoints.close()


def test_after_save_is_called_after_every_save(tmp_path):
  calls = []
  checkpoints = Checkpoints(tmp_path / "c", after_save=lambda: calls.append(1))
  for step in (1, 2):
    checkpoints.save(step, state(step))
  checkpoints.close()
  assert len(calls) == 2


PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from launch.checkpoint import Checkpoints
from launch.mesh import make_mesh

folder, task = pathlib.Path(sys.argv[1]), sys.argv[2]
mesh = make_mesh({"data": -1, "model": 2 if jax.device_count() > 1 else 1})
split = NamedSharding(mesh, PartitionSpec("data", "model"))
rows = np.arange(16 * 4, dtype=np.float32).reshape(16, 4)
checkpoints = Checkpoints(folder)
if task == "save":
  state = {"w": jax.device_put(rows, split), "key": jax.random.key(5)}
  assert len(state["w"].addressable_shards) == 8
  checkpoints.save(3, state)
else:
  like = {"w": jax.device_put(jnp.zeros((16, 4)), split), "key": jax.random.key(0)}
  step, state = checkpoints.restore(like)
  assert step == 3
  assert state["w"].sharding == split
  np.testing.assert_array_equal(np.asarray(state["w"]), rows)
  assert (jax.random.key_data(state["key"]) == jax.random.key_data(jax.random.key(5))).all()
checkpoints.close()
"""


@pytest.mark.multidevice
def test_restores_onto_another_number_of_devices(root, tmp_path):
  for task, devices in (("save", 8), ("restore", 1), ("restore", 2), ("restore", 8)):
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
      [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), task],
      cwd=root,
      env={**os.environ, "XLA_FLAGS": flags},
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
