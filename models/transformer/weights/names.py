"""Hugging Face's names of a decoder's tensors, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer.config import TransformerConfig

_PROJECTIONS = {
  "q": ("attention", "self_attn.q_proj"),
  "k": ("attention", "self_attn.k_proj"),
  "v": ("attention", "self_attn.v_proj"),
  "o": ("attention", "self_attn.o_proj"),
  "gate": ("mlp", "mlp.gate_proj"),
  "up": ("mlp", "mlp.up_proj"),
  "down": ("mlp", "mlp.down_proj"),
}


def _layer_entries(config: TransformerConfig) -> Iterator[tuple[tuple[str, ...], str, tuple, bool]]:
  """`(path in ours, name in theirs, shape in ours, transposed)` of one layer."""
  d, m = config.hidden_size, config.mlp_size
  q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  shapes = {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d)}
  shapes |= {"gate": (d, m), "up": (d, m), "down": (m, d)}
  for name, (group, theirs) in _PROJECTIONS.items():
    yield (group, name, "kernel"), f"{theirs}.weight", shapes[name], True
    if config.attention_bias and name in "qkv":
      yield (group, name, "bias"), f"{theirs}.bias", shapes[name][1:], False
  yield ("attention_norm", "scale"), "input_layernorm.weight", (d,), False
  yield ("mlp_norm", "scale"), "post_attention_layernorm.weight", (d,), False
  if config.qk_norm:
    for name in "qk":
      path = ("attention", f"{name}_norm", "scale")
      yield path, f"self_attn.{name}_norm.weight", (config.head_dim,), False


def _top_entries(config: TransformerConfig) -> Iterator[tuple[tuple[str, ...], str, tuple, bool]]:
  v, d = config.vocab_size, config.hidden_size
  yield ("embedding",), "model.embed_tokens.weight", (v, d), False
  yield ("norm", "scale"), "model.norm.weight", (d,), False
  if not config.tied_embeddings:
    yield ("head", "kernel"), "lm_head.weight", (d, v), True


def from_tensors(
  config: TransformerConfig, get: Callable[[str], np.ndarray], dtype: str = "float32"
) -> dict[str, Any]:
  """Parameters from tensors under Hugging Face's names, one at a time.

  Args:
    config: the model.
    get: name -> array, `[out, in]` for projections; KeyError if there is none.
    dtype: of the parameters.

  Returns:
    `{"params": ...}` for `Transformer(config).apply`.

  Raises:
    ValueError: a tensor is missing, has another shape, or holds NaN or infinity.
  """

  def load(name: str, shape: tuple[int, ...], transposed: bool) -> np.ndarray:
    try:
      array = get(name)
    except KeyError:
      raise ValueError(
        f"the weights have no tensor {name!r}; expected one of shape {shape}"
      ) from None
    expected = shape[::-1] if transposed else shape
    if tuple(array.shape) != expected:
      raise ValueError(f"tensor {name!r} has shape {tuple(array.shape)}; expected {expected}")
    array = np.asarray(array.T if transposed else array).astype(jnp.dtype(dtype))
    if not np.isfinite(array.astype(np.float32)).all():
      raise ValueError(f"tensor {name!r} holds NaN or infinity; expected finite weights")
    return np.ascontiguousarray(array)

  params: dict[str, Any] = {}
  for path, name, shape, transposed in _top_entries(config):
    _put(params, path, jnp.asarray(load(name, shape, transposed)))
  for path, name, shape, transposed in _layer_entries(config):
    layers = [load(f"model.layers.{i}.{name}", shape, transposed) for i in range(config.num_layers)]
    if config.scan_layers:
      _put(params, ("layers", *path), jnp.asarray(np.stack(layers)))
    else:
      for i, array in enumerate(layers):
        _put(params, (f"layers_{i}", *path), jnp.asarray(array))
  return {"params": params}


def to_tensors(config: TransformerConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
  """The inverse of `from_tensors`."""
  tree = params["params"]
  tensors = {}
  for path, name, _, transposed in _top_entries(config):
    array = np.asarray(_get(tree, path))
    tensors[name] = np.ascontiguousarray(array.T if transposed else array)
  for path, name, _, transposed in _layer_entries(config):
    for i in range(config.num_layers):
      if config.scan_layers:
        array = np.asarray(_get(tree, ("layers", *path))[i])
      else:
        array = np.asarray(_get(tree, (f"layers_{i}", *path)))
      tensors[f"model.layers.{i}.{name}"] = np.ascontiguousarray(array.T if transposed else array)
  return tensors


def stack_layers(config: TransformerConfig, params: dict[str, Any]) -> dict[str, Any]:
  """Parameters of a model without `scan_layers` for one with it."""
  tree = dict(params["params"])
  layers = [tree.pop(f"layers_{i}") for i in range(config.num_layers)]
  return {"params": tree | {"layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers)}}


def unstack_layers(config: TransformerConfig, params: dict[str, Any]) -> dict[str, Any]:
  """The inverse of `stack_layers`."""
  tree = dict(params["params"])
  stacked = tree.pop("layers")
  layers = {
    f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.num_layers)
  }
  return {"params": tree | layers}


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = value


def _get(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
  for name in path:
    tree = tree[name]
  return tree
