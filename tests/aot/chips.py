"""Slices and cards that programs are compiled for ahead of time, as XLA sees them.

Sources: memory of the TPU slices is the limit that the compiler itself states when it refuses a
program; the figures of the cards are NVIDIA's data sheets as XLA's own target descriptions give
them (openxla/xla, `xla/backends/gpu/target_config/specs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

_GIB = 2**30

# A GpuTargetConfigProto in text form. Only what the compiler reads for code generation is given.
_CARD = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_optin}
  shared_memory_per_core: {shared_memory_core}
  core_count: {cores}
  fpus_per_core: {fpus}
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_bytes}
  device_memory_size: {memory_bytes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  cuda_compute_capability {{ {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{description}"
"""

# JAX's own pool on a card, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_CARD_SHARE = 0.75
_A100_BYTES = 42_331_013_120
_H200_BYTES = 151_397_597_184


@dataclasses.dataclass(frozen=True)
class Chip:
  """One slice or one host of cards.

  Attributes:
    kind: environment that can compile for it, "tpu" or "gpu".
    topology: shape in XLA's words; slices x hosts x cards for GPUs.
    num_devices: how many devices that is.
    memory_bytes: memory of one device that a program may use.
    accelerator_type: TPUs, name of the slice for the TPU compiler's start-up.
    target: GPUs, the card as a GpuTargetConfigProto in text form.
  """

  kind: str
  topology: str
  num_devices: int
  memory_bytes: int
  accelerator_type: str = ""
  target: str = ""


CHIPS = {
  "v5e:2x2": Chip("tpu", "v5e:2x2", 4, int(15.75 * _GIB), accelerator_type="v5litepod-4"),
  "v5p:2x2x1": Chip("tpu", "v5p:2x2x1", 4, int(95.74 * _GIB), accelerator_type="v5p-8"),
  "v6e:2x2": Chip("tpu", "v6e:2x2", 4, int(31.25 * _GIB), accelerator_type="v6e-4"),
  # The smaller of the two A100s: what fits its 40 GB fits the 80 GB card.
  "A100": Chip(
    "gpu",
    "1x1x8",
    8,
    int(_CARD_SHARE * _A100_BYTES),
    target=_CARD.format(
      shared_memory_optin=166_912,
      shared_memory_core=167_936,
      cores=108,
      fpus=64,
      clock_ghz=1.41,
      bandwidth=1_555_200_000_000,
      l2_bytes=41_943_040,
      memory_bytes=_A100_BYTES,
      capability="major: 8 minor: 0",
      description="NVIDIA A100-SXM4-40GB",
    ),
  ),
  "H200": Chip(
    "gpu",
    "1x1x8",
    8,
    int(_CARD_SHARE * _H200_BYTES),
    target=_CARD.format(
      shared_memory_optin=232_448,
      shared_memory_core=233_472,
      cores=132,
      fpus=128,
      clock_ghz=1.98,
      bandwidth=4_800_000_000_000,
      l2_bytes=52_428_800,
      memory_bytes=_H200_BYTES,
      capability="major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
      description="NVIDIA H200 141GB HBM3e",
    ),
  ),
}


def find(name: str) -> Chip:
  """The chip of that name.

  Raises:
    ValueError: if it is not described here.
  """
  if name not in CHIPS:
    raise ValueError(
      f"chip is {name!r} (expected one of {', '.join(CHIPS)}); describe it in tests/aot/chips.py."
    )
  return CHIPS[name]


def make_mesh(name: str, chip: Chip) -> Mesh:
  """Mesh of the described devices, all of them on the axis "data"."""
  if chip.kind == "tpu":
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
  else:
    topology = topologies.get_topology_desc(
      name, "cuda", topology=chip.topology, target_config=chip.target
    )
  return _data_mesh(topology.devices)


def make_cpu_mesh() -> Mesh:
  """The same of all CPU devices."""
  return _data_mesh(jax.devices("cpu"))


def _data_mesh(devices: Sequence[jax.Device]) -> Mesh:
  axis_types = (AxisType.Auto, AxisType.Auto)
  return Mesh(np.array(devices).reshape(-1, 1), ("data", "model"), axis_types=axis_types)
