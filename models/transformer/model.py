"""The decoder: embedding, blocks of attention and gated MLP, norm, head."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxlib_ext import attention
from models.transformer.cache import KVCache, write
from models.transformer.config import TransformerConfig
from models.transformer.rope import frequencies


@struct.dataclass
class Output:
  """What a forward pass gives.

  Attributes:
    logits: `[B, T, V]` float32, or `[B, V]` at the last token with `last_only`.
    cache: the cache with the new tokens, if one was given.
    hidden: `[L + 1, B, T, d]`, the embedding and the output of each block, if asked for.
  """

  logits: jax.Array
  cache: KVCache | None = None
  hidden: jax.Array | None = None


class RMSNorm(nn.Module):
  """`x / sqrt(mean(x^2) + eps) * scale`, in float32 or wider."""

  eps: float

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)
    return normed * jnp.expand_dims(scale.astype(x.dtype), range(x.ndim - 1))


class Projection(nn.Module):
  """`x W (+ b) (+ scale (x A) B)`, the last part when a low-rank adapter is given.

  Attributes:
    features: width of the output.
    use_bias: adds b.
  """

  features: int
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, lora: dict[str, jax.Array] | None = None) -> jax.Array:
    shape = (x.shape[-1], self.features)
    kernel = self.param("kernel", nn.initializers.normal(0.02), shape)
    y = x @ kernel.astype(x.dtype)
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
      y = y + jnp.expand_dims(bias, range(x.ndim - 1))
    if lora is not None:
      y = y + (x @ lora["a"].astype(x.dtype)) @ lora["b"].astype(x.dtype)
    return y


class Attention(nn.Module):
  """Attention with grouped key and value heads and rotary positions."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer_cache: tuple[jax.Array, jax.Array] | None,
    start: jax.Array,
    lora: dict[str, Any] | None,
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    config = self.config
    batch, num_tokens, _ = x.shape
    lora = lora or {}

    def heads(name: str, count: int) -> jax.Array:
      project = Projection(count * config.head_dim, config.attention_bias, name=name)
      return project(x, lora.get(name)).reshape(batch, num_tokens, count, config.head_dim)

    q, k, v = (
      heads("q", config.num_heads),
      heads("k", config.num_kv_heads),
      heads("v", config.num_kv_heads),
    )
    if config.qk_norm:
      q = RMSNorm(config.norm_eps, name="q_norm")(q)
      k = RMSNorm(config.norm_eps, name="k_norm")(k)
    q, k = rotate(q, positions, config), rotate(k, positions, config)
    if layer_cache is None:
      out = attention.flash_attention(q, k, v, lengths, lengths)
    else:
      layer_cache = (write(layer_cache[0], k, start), write(layer_cache[1], v, start))
      out = attention.flash_attention(
        q, *layer_cache, q_len=lengths, kv_len=start + lengths, q_offset=start
      )
    out = out.astype(x.dtype).reshape(batch, num_tokens, config.num_heads * config.head_dim)
    return Projection(config.hidden_size, name="o")(out, lora.get("o")), layer_cache


class MLP(nn.Module):
  """`down(silu(gate(x)) * up(x))`."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array, lora: dict[str, Any] | None) -> jax.Array:
    lora = lora or {}
    gate = Projection(self.config.mlp_size, name="gate")(x, lora.get("gate"))
    up = Projection(self.config.mlp_size, name="up")(x, lora.get("up"))
    return Projection(self.config.hidden_size, name="down")(nn.silu(gate) * up, lora.get("down"))


class Block(nn.Module):
  """A layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    layer_cache: tuple[jax.Array, jax.Array] | None,
    lora: dict[str, Any] | None,
    positions: jax.Array,
    lengths: jax.Array,
    start: jax.Array,
  ) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    eps = self.config.norm_eps
    lora = lora or {}
    normed = RMSNorm(eps, name="attention_norm")(x)
    update, layer_cache = Attention(self.config, name="attention")(
      normed, positions, lengths, layer_cache, start, lora.get("attention")
    )
    x = x + update
    x = x + MLP(self.config, name="mlp")(RMSNorm(eps, name="mlp_norm")(x), lora.get("mlp"))
    return x, (layer_cache, x)


class Transformer(nn.Module):
  """A decoder; `apply` is a pure function of parameters, tokens, cache and adapter."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array | None = None,
    *,
    embeddings: jax.Array | None = None,
    lengths: jax.Array | None = None,
    cache: KVCache | None = None,
    lora: dict[str, Any] | None = None,
    last_only: bool = False,
    return_hidden: bool = False,
  ) -> Output:
    """Runs new tokens, after those of the cache if there is one.

    Args:
      tokens: `[B, T]` ids, or None with `embeddings`.
      embeddings: `[B, T, d]` in place of ids (soft tokens).
      lengths: `[B]` int32 real tokens of each row; the rest is padding on the right, which changes
        nothing for others. All T when None.
      cache: tokens before. It is not changed: the result holds a new one.
      lora: a low-rank adapter, see `models.transformer.lora`; None switches it off.
      last_only: logits of each row's last real token only.
      return_hidden: the residual stream too.

    Returns:
      An `Output`. Logits of padding are of no meaning.

    Raises:
      ValueError: neither or both of tokens and embeddings, or more tokens than the cache has slots.
    """
    config = self.config
    if (tokens is None) == (embeddings is None):
      raise ValueError("expected either tokens [B, T] or embeddings [B, T, d]")
    table = self.param(
      "embedding", nn.initializers.normal(0.02), (config.vocab_size, config.hidden_size)
    )
    x = table[tokens] if embeddings is None else embeddings
    x = x.astype(config.activation_dtype)
    batch, num_tokens, _ = x.shape
    if cache is not None and num_tokens > cache.capacity:
      raise ValueError(f"{num_tokens} new tokens, but the cache has {cache.capacity} slots")
    if lengths is None:
      lengths = jnp.full(batch, num_tokens, jnp.int32)
    start = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
    positions = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]

    x, layers, streams = self._blocks(x, cache, lora, positions, lengths, start, return_hidden)
    if cache is not None:
      cache = KVCache(layers[0], layers[1], start + lengths)
    if last_only:
      last = jnp.maximum(lengths - 1, 0)[:, None, None]
      x = jnp.take_along_axis(x, last, axis=1)[:, 0]
    x = RMSNorm(config.norm_eps, name="norm")(x)
    if config.tied_embeddings:
      logits = jnp.einsum(
        "...d,vd->...v", x, table.astype(x.dtype), preferred_element_type=_wide(x)
      )
    else:
      logits = Projection(config.vocab_size, name="head")(x)
    return Output(logits.astype(_wide(x)), cache, streams)

  def _blocks(
    self,
    x: jax.Array,
    cache: KVCache | None,
    lora: dict[str, Any] | None,
    positions: jax.Array,
    lengths: jax.Array,
    start: jax.Array,
    return_hidden: bool,
  ) -> tuple[jax.Array, tuple[Any, Any], jax.Array | None]:
    config = self.config
    block = nn.remat(Block) if config.remat else Block
    context = (positions, lengths, start)
    if config.scan_layers:
      scanned = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, 0, nn.broadcast, nn.broadcast, nn.broadcast),
        length=config.num_layers,
      )
      layer_cache = None if cache is None else (cache.k, cache.v)
      first = x
      x, (layers, outputs) = scanned(config, name="layers")(
        x, layer_cache, None if lora is None else lora["layers"], *context
      )
      streams = jnp.concatenate([first[None], outputs]) if return_hidden else None
      return x, layers or (None, None), streams
    keys, values, streams = [], [], [x]
    for i in range(config.num_layers):
      layer_cache = None if cache is None else (cache.k[i], cache.v[i])
      layer_lora = None if lora is None else lora[f"layers_{i}"]
      x, (layer_cache, _) = block(config, name=f"layers_{i}")(x, layer_cache, layer_lora, *context)
      streams.append(x)
      if layer_cache is not None:
        keys.append(layer_cache[0])
        values.append(layer_cache[1])
    return x, (tuple(keys), tuple(values)), jnp.stack(streams) if return_hidden else None


def rotate(x: jax.Array, positions: jax.Array, config: TransformerConfig) -> jax.Array:
  """Rotates heads `x [B, T, H, D]` to `positions [B, T]`; angles in float32 or wider."""
  wide = _wide(x)
  angle = positions[..., None].astype(wide) * jnp.asarray(frequencies(config), wide)[None, None]
  cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  first, second = jnp.split(x.astype(wide), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def _wide(x: jax.Array) -> Any:
  return jnp.promote_types(x.dtype, jnp.float32)
