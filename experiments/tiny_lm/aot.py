"""The training step of `:paper`, for compiling ahead of time: see tests/aot/compile_entry.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from algorithms import language_modeling as lm
from experiments.tiny_lm.config import get_config
from experiments.tiny_lm.run import decoder_config, lm_config
from models.transformer import Transformer, param_shardings, tokenizer

CHIPS = ("v5e:2x2", "H200")


def lower(mesh: Mesh) -> jax.stages.Lowered:
  """Lowers one update on a batch.

  Args:
    mesh: axes ("data", "model"); rows over the first, heads and MLP width over the second.
  """
  config = get_config("paper")
  model_config = decoder_config(config, tokenizer.byte_tokenizer().vocab_size)
  settings = lm_config(config)
  model = Transformer(model_config)
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), tokens)
  place = param_shardings(params, model_config, mesh)
  params = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), params, place)
  # Moments lie where their parameters lie.
  state = jax.jit(lambda p: lm.init(p, settings)).eval_shape(params)
  rows = NamedSharding(mesh, PartitionSpec("data"))

  def batch(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((config.train.batch, config.length), dtype, sharding=rows)

  def apply_fn(params: Any, tokens: jax.Array) -> jax.Array:
    return model.apply(params, tokens).logits

  update = jax.jit(lambda state, *batch: lm.step(state, apply_fn, *batch, settings))
  return update.lower(state, batch(jnp.int32), batch(jnp.float32))
