"""The device mesh of a run."""

from __future__ import annotations

import contextlib
import math
import os

import jax
from jax.sharding import AxisType, Mesh

from launch import environment
from launch.config import UsageError, nearest

AXES = ("data", "model")


def split_cpu(count: int) -> None:
  """Lets the CPU count as `count` devices, -1 for one a core; call it before JAX is used.

  Where JAX has started already, as in a notebook, or XLA_FLAGS sets the number, it stays as it is.
  """
  if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    return
  count = environment.cpu_count() if count == -1 else count
  with contextlib.suppress(RuntimeError):  # "should be updated before backends are initialized"
    jax.config.update("jax_num_cpu_devices", count)


def mesh_shape(sizes: dict[str, int], num_devices: int) -> tuple[int, int]:
  """Sizes of the axes ("data", "model"), with one -1 filled from the number of devices.

  Raises:
    UsageError: unknown axis, more than one -1, or sizes that do not multiply to `num_devices`.
  """
  for axis in sizes:
    if axis not in AXES:
      raise UsageError(
        f"config.mesh.{axis}: a mesh has the axes data and model; {nearest(axis, AXES)}"
      )
  shape = [int(sizes.get(axis, 1)) for axis in AXES]
  if shape.count(-1) > 1:
    raise UsageError("config.mesh: only one of data and model may be -1 (filled from the devices)")
  if any(size < 1 and size != -1 for size in shape):
    raise UsageError(
      f"config.mesh: sizes are {dict(zip(AXES, shape, strict=True))}; expected >= 1 or -1"
    )
  given = math.prod(size for size in shape if size != -1)
  if -1 in shape and num_devices % given == 0:
    shape[shape.index(-1)] = num_devices // given
  if math.prod(shape) != num_devices:
    raise UsageError(
      f"config.mesh asks for {dict(zip(AXES, shape, strict=True))} but there are {num_devices} "
      "devices; let the sizes multiply to that number, or set one of them to -1."
    )
  return shape[0], shape[1]


def make_mesh(sizes: dict[str, int], devices: list[jax.Device] | None = None) -> Mesh:
  """The mesh over `devices` (all by default) with axes ("data", "model") of type Auto.

  Auto is asked for because the default type differs between JAX versions.
  """
  devices = jax.devices() if devices is None else devices
  shape = mesh_shape(sizes, len(devices))
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
