"""The device mesh and how processes find each other."""

import jax
import pytest
from jax.sharding import AxisType

from launch.config import UsageError
from launch.distributed import Processes, settings
from launch.mesh import make_mesh, mesh_shape


@pytest.mark.parametrize(
  ("sizes", "devices", "shape"),
  [
    ({"data": -1, "model": 1}, 8, (8, 1)),
    ({"data": -1}, 8, (8, 1)),
    ({"data": 2, "model": -1}, 8, (2, 4)),
    ({"model": 4, "data": 2}, 8, (2, 4)),
    ({}, 1, (1, 1)),
  ],
)
def test_mesh_shape(sizes, devices, shape):
  assert mesh_shape(sizes, devices) == shape


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"dta": 2}, "config.mesh.dta: a mesh has the axes data and model; did you mean data?"),
    ({"data": -1, "model": -1}, "only one of data and model may be -1"),
    ({"data": 0}, "expected >= 1 or -1"),
    ({"data": -2}, "expected >= 1 or -1"),
    ({"data": 3}, "asks for {'data': 3, 'model': 1} but there are 8 devices"),
    ({"data": -1, "model": 3}, "asks for {'data': -1, 'model': 3} but there are 8 devices"),
  ],
)
def test_mesh_errors(sizes, message):
  with pytest.raises(UsageError) as caught:
    mesh_shape(sizes, 8)
  assert message in str(caught.value)


def test_mesh_axes_are_auto():
  mesh = make_mesh({"data": -1, "model": 1}, jax.devices()[:1])
  assert mesh.axis_names == ("data", "model")
  assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


ENVIRONMENT = {
  "REPRISE_COORDINATOR": "env:1",
  "REPRISE_NUM_PROCESSES": "4",
  "REPRISE_PROCESS_ID": "3",
}
POD = {"TPU_WORKER_HOSTNAMES": "a,b"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
  ("flags", "environ", "expected"),
  [
    ((None, None, None), {}, None),
    (("flag:1", 2, 0), {}, Processes("flag:1", 2, 0)),
    (("flag:1", 2, 0), ENVIRONMENT | POD, Processes("flag:1", 2, 0)),
    ((None, None, None), ENVIRONMENT | POD, Processes("env:1", 4, 3)),
    (("flag:1", None, 1), ENVIRONMENT, Processes("flag:1", 4, 1)),
    ((None, None, None), POD, Processes(detect=True)),
    ((None, None, None), {"TPU_WORKER_HOSTNAMES": "alone"}, None),
    ((None, None, None), SLURM, Processes(detect=True)),
    ((None, None, None), SLURM | {"SLURM_NTASKS": "1"}, None),
    ((None, None, None), {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
    ((None, None, None), {"JAX_COORDINATOR_ADDRESS": "h:1"}, Processes(detect=True)),
  ],
)
def test_settings(flags, environ, expected):
  assert settings(*flags, environ) == expected


@pytest.mark.parametrize(
  ("flags", "environ", "message"),
  [
    (("h:1", None, None), {}, "also needs --num_processes and --process_id"),
    ((None, 2, None), {}, "also needs --coordinator and --process_id"),
    ((None, None, None), {"REPRISE_PROCESS_ID": "0"}, "also needs --coordinator and"),
    (("h:1", 2, 2), {}, "--process_id=2: expected 0 to 1"),
    (("h:1", 2, -1), {}, "--process_id=-1: expected 0 to 1"),
    ((None, None, None), {"REPRISE_NUM_PROCESSES": "two"}, "REPRISE_NUM_PROCESSES='two'"),
  ],
)
def test_settings_errors(flags, environ, message):
  with pytest.raises(UsageError) as caught:
    settings(*flags, environ)
  assert message in str(caught.value)
