"""A step that trains an adapter of a Qwen3-8B-shaped decoder: does it fit four chips?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from algorithms import language_modeling as lm
from experiments.generate.aot import QWEN3_8B, param_shapes, tensor_parallel
from models.transformer import LoRAConfig, Transformer, init_lora

CHIPS = ("v5e:2x2",)

_ROWS, _TOKENS = 2, 1024


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers one update of a rank-16 adapter on 2 rows of 1,024 tokens, activations recomputed."""
  mesh = tensor_parallel(mesh)
  everywhere = NamedSharding(mesh, PartitionSpec())
  config = QWEN3_8B.replace(remat=True)
  params = param_shapes(config, mesh)
  settings = lm.LMConfig(1000)

  def start() -> lm.LMState:
    return lm.init(init_lora(jax.random.key(0), config, LoRAConfig()), settings)

  def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

  state = jax.tree.map(lambda x: array(x.shape, x.dtype), jax.eval_shape(start))
  batch = array((_ROWS, _TOKENS), jnp.int32), array((_ROWS, _TOKENS), jnp.float32)

  def update(params: Any, state: lm.LMState, tokens: jax.Array, weights: jax.Array) -> Any:
    def apply_fn(lora: Any, tokens: jax.Array) -> jax.Array:
      return Transformer(config).apply(params, tokens, lora=lora).logits

    return lm.step(state, apply_fn, tokens, weights, settings)

  return jax.jit(update, donate_argnums=1).lower(params, state, *batch)
