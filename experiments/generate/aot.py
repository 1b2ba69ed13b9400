"""A decoding step of Qwen3-8B in `:paper`, for compiling ahead of time: tests/aot/compile_entry.py.

The shape is that of Qwen3-8B's config.json; the weights are not needed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.generate.config import get_config
from models.transformer import (
  SamplingConfig,
  Transformer,
  TransformerConfig,
  cache_shardings,
  param_shardings,
)
from models.transformer.generate import decode, prefill

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "A100", "H200")

QWEN3_8B = TransformerConfig(
  vocab_size=151_936,
  num_layers=36,
  hidden_size=4096,
  mlp_size=12_288,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  rope_theta=1e6,
  norm_eps=1e-6,
  qk_norm=True,
  max_positions=40_960,
  scan_layers=True,
  dtype="bfloat16",
)
_PROMPT = 1024


def tensor_parallel(mesh: Mesh) -> Mesh:
  """The same devices, all on the axis "model": a batch is not split."""
  return Mesh(np.reshape(mesh.devices, (1, -1)), mesh.axis_names, axis_types=mesh.axis_types)


def param_shapes(config: TransformerConfig, mesh: Mesh) -> Any:
  """Shapes of the parameters in the model's type, where they lie on the mesh."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shapes = jax.eval_shape(
    Transformer(config).init, jax.eval_shape(lambda: jax.random.key(0)), tokens
  )
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, config.dtype, sharding=sharding),
    shapes,
    param_shardings(shapes, config, mesh),
  )


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers one token of every answer, the caches full.

  Args:
    mesh: axes ("data", "model"); heads, MLP width and vocabulary are spread over all its devices.
  """
  preset = get_config("paper")
  mesh = tensor_parallel(mesh)
  config, rows = QWEN3_8B, preset.copies
  sampling = SamplingConfig(preset.temperature, max_new_tokens=preset.max_new_tokens)
  params = param_shapes(config, mesh)
  everywhere = NamedSharding(mesh, PartitionSpec())

  def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
  keys = keys.update(sharding=everywhere)
  state = jax.eval_shape(
    lambda *args: prefill(
      *args, config=config, sampling=sampling, capacity=_PROMPT + sampling.max_new_tokens
    ),
    *(params, array(rows, _PROMPT), array(rows), None, keys),
  )
  cache = jax.tree.map(
    lambda x, sharding: x.update(sharding=sharding),
    state.cache,
    cache_shardings(state.cache, config, mesh),
  )
  state = jax.tree.map(lambda x: x.update(sharding=everywhere), state).replace(cache=cache)
  return decode.lower(params, state, None, keys, config=config, sampling=sampling, num_steps=1)
