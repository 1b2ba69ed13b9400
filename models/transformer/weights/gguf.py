"""GGUF files, by the `gguf` library: metadata, quantised blocks, llama.cpp's rotary row order."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np

from models.transformer.config import TransformerConfig, from_gguf
from models.transformer.weights.names import from_tensors

_LAYER_NAMES = {
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}


def read_gguf(
  path: str | pathlib.Path, *, scan_layers: bool = False, dtype: str = "float32"
) -> tuple[TransformerConfig, dict[str, Any], dict[str, Any]]:
  """Reads a decoder; quantised blocks become numbers.

  Args:
    path: the file.
    scan_layers: see `TransformerConfig`.
    dtype: of parameters and activations.

  Returns:
    `(config, params, metadata)`; the metadata holds the tokenizer.

  Raises:
    ValueError: not a GGUF file, a damaged one, or another architecture.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"{path} is not a file; expected a GGUF model")
  try:
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
  # The reader checks little: what a damaged file raises depends on where it is damaged.
  except Exception as error:
    raise ValueError(
      f"{path} is not a readable GGUF file ({type(error).__name__}: {error}); download it again"
    ) from None
  embedding = tensors.get("token_embd.weight")
  if embedding is None or len(embedding.shape) != 2:
    raise ValueError(f"{path} has no matrix token_embd.weight; expected a decoder's weights")
  config = from_gguf(metadata, int(embedding.shape[1]), "output.weight" not in tensors)
  config = config.replace(scan_layers=scan_layers, dtype=dtype)
  llama = metadata["general.architecture"] == "llama"
  heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

  def get(name: str) -> np.ndarray:
    theirs = _gguf_name(name)
    tensor = tensors[theirs]
    shape = tuple(int(n) for n in reversed(tensor.shape))
    # An absurd shape is refused here, before memory for its numbers is asked for.
    if np.prod(shape, dtype=object) > 16 * max(path.stat().st_size, 1):
      raise ValueError(f"tensor {theirs!r} claims shape {shape}, more than the file can hold")
    try:
      array = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    except Exception as error:
      raise ValueError(f"tensor {theirs!r} of {path} is damaged: {error}") from None
    kind = theirs.split(".")[-2]
    if llama and kind in heads and array.ndim == 2:
      array = _undo_interleaving(array, heads[kind])
    return array

  return config, from_tensors(config, get, dtype), metadata


def _gguf_name(name: str) -> str:
  if name in _TOP_NAMES:
    return _TOP_NAMES[name]
  _, _, layer, *middle, suffix = name.split(".")
  return f"blk.{layer}.{_LAYER_NAMES['.'.join(middle)]}.{suffix}"


def _undo_interleaving(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """llama.cpp pairs entries 2i and 2i + 1 of a head; here i and i + D/2 are a pair."""
  if rows.shape[0] % (2 * num_heads):
    return rows  # The shape is wrong; from_tensors says so.
  pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)
