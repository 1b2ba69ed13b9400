"""The Pallas kernels at the shapes of every family of decoders, in float32 and bfloat16."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxlib_ext import attention

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "A100", "H200")

# Query heads, heads of keys, head size: SmolLM2-135M, Llama 3.2 1B, Qwen2.5 0.5B, Qwen3 8B.
FAMILIES = ((9, 3, 64), (32, 8, 64), (14, 2, 64), (32, 8, 128))
_ROWS, _SLOTS, _PAGE = 2, 512, 16


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers prefill, decode over pages and over a dense cache, and packets, on one device.

  GPUs have no kernel here; their XLA programs are compiled.
  """
  device = mesh.devices.flat[0]
  implementation = "pallas_tpu" if device.platform == "tpu" else "xla"
  place = SingleDeviceSharding(device)

  def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  columns = _SLOTS // _PAGE
  common = {"implementation": implementation}
  calls, arrays = [], []
  lengths, starts, table = array(_ROWS), array(_ROWS + 1), array(_ROWS, columns)
  for heads, kv_heads, size in FAMILIES:
    for dtype in (jnp.float32, jnp.bfloat16):
      shaped = functools.partial(array, dtype=dtype)
      rope = attention.Rope.from_theta(1e6, size)
      dense = [shaped(_ROWS, _SLOTS, kv_heads, size)] * 2
      pages = [shaped(_ROWS * columns, _PAGE, kv_heads, size)] * 2
      calls += [
        functools.partial(attention.flash_attention, **common),
        functools.partial(attention.decode_attention, **common),
        functools.partial(attention.ragged_paged_attention, **common),
        functools.partial(attention.packet_attention, rope=rope, **common),
      ]
      arrays += [
        (shaped(_ROWS, _SLOTS, heads, size), *dense, lengths, lengths),
        (shaped(_ROWS, 1, heads, size), *dense, lengths),
        (shaped(64, heads, size), *pages, table, lengths, starts),
        (shaped(_ROWS, heads, size), *pages, table, table, lengths, starts),
      ]

  def run(arrays: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
    return [call(*args) for call, args in zip(calls, arrays, strict=True)]

  return jax.jit(run).lower(arrays)
