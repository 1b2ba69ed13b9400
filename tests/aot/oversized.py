"""A program that fits no chip: shows that the check for memory has teeth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CHIPS = ("v5e:2x2", "H200")

_SIDE = 2**18  # 256 GiB of float32 on every device


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers the doubling of an array with 256 GiB on every device of the mesh."""
  rows = NamedSharding(mesh, PartitionSpec("data"))
  shape = (_SIDE * mesh.shape["data"], _SIDE)
  return jax.jit(lambda x: 2.0 * x).lower(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows))
