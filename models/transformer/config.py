"""Shape of a decoder, and its reading from Hugging Face and GGUF descriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

FAMILIES = ("llama", "qwen2", "qwen3")

# Beyond these no real decoder exists, and a damaged file asks for more memory than there is.
_LIMITS = {
  "vocab_size": 2_000_000,
  "num_layers": 1_000,
  "hidden_size": 65_536,
  "mlp_size": 524_288,
  "num_heads": 1_024,
  "num_kv_heads": 1_024,
  "head_dim": 1_024,
  "max_positions": 100_000_000,
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's stretching of rotary frequencies for longer contexts.

  Wavelengths above `original_max_positions / low_freq_factor` are stretched by `factor`, those
  below `original_max_positions / high_freq_factor` are kept, those between are blended.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """A decoder of the Llama family: Llama, SmolLM2, Qwen2.5, Qwen3.

  Attributes:
    vocab_size: rows of the embedding.
    num_layers: blocks.
    hidden_size: width.
    mlp_size: width inside the gated MLP.
    num_heads: query heads.
    num_kv_heads: key and value heads; divides `num_heads`.
    head_dim: size of a head.
    rope_theta: base of the rotary frequencies.
    rope_scaling: see `RopeScaling`; None for none.
    norm_eps: of the RMS norms.
    qk_norm: RMS norm of each query and key head before rotation (Qwen3).
    attention_bias: biases of the query, key and value projections (Qwen2.5).
    tied_embeddings: logits by the embedding instead of a head of their own.
    max_positions: context length.
    scan_layers: parameters of all layers stacked and scanned over: compiles once whatever the
      depth. On CPU every step of the scan copies a layer's weights, so decoding is faster without.
    remat: recompute activations in the backward pass.
    dtype: of activations and of the cache.

  Raises:
    ValueError: a size that is not positive or absurd, or heads that do not divide.
  """

  vocab_size: int
  num_layers: int
  hidden_size: int
  mlp_size: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  qk_norm: bool = False
  attention_bias: bool = False
  tied_embeddings: bool = False
  max_positions: int = 2048
  scan_layers: bool = False
  remat: bool = False
  dtype: str = "float32"

  def __post_init__(self):
    for name, limit in _LIMITS.items():
      value = getattr(self, name)
      if not isinstance(value, int) or not 1 <= value <= limit:
        raise ValueError(f"{name} = {value!r}; expected an integer in 1..{limit}")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads = {self.num_heads}, num_kv_heads = {self.num_kv_heads}; expected a multiple"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim = {self.head_dim}; expected an even size, rotated in pairs")
    if not self.rope_theta > 0 or not self.norm_eps > 0:
      raise ValueError(
        f"rope_theta = {self.rope_theta}, norm_eps = {self.norm_eps}; expected positive numbers"
      )
    if self.dtype not in ("float32", "bfloat16", "float64"):
      raise ValueError(f"dtype = {self.dtype!r}; expected float32, bfloat16 or float64")

  @property
  def activation_dtype(self) -> Any:
    return jnp.dtype(self.dtype)

  @property
  def num_parameters(self) -> int:
    """Number of parameters, the embedding counted once if tied."""
    heads = (self.num_heads * 2 + self.num_kv_heads * 2) * self.head_dim
    layer = heads * self.hidden_size + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
    if self.qk_norm:
      layer += 2 * self.head_dim
    if self.attention_bias:
      layer += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    embedding = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
    return embedding + self.num_layers * layer + self.hidden_size

  def replace(self, **changes: Any) -> TransformerConfig:
    return dataclasses.replace(self, **changes)


def from_huggingface(fields: Mapping[str, Any]) -> TransformerConfig:
  """Reads the fields of a Hugging Face `config.json`.

  Raises:
    ValueError: another family, a missing field, or a variant that is not implemented (sliding
      windows, other rotary scalings, other activations).
  """
  family = fields.get("model_type")
  if family not in FAMILIES:
    raise ValueError(f"model_type = {family!r}; expected one of {', '.join(FAMILIES)}")
  if fields.get("hidden_act", "silu") != "silu":
    raise ValueError(f"hidden_act = {fields['hidden_act']!r}; expected 'silu'")
  if fields.get("use_sliding_window"):
    raise ValueError("use_sliding_window is set; expected full attention, which is what is here")
  if fields.get("mlp_bias") or (family != "qwen2" and fields.get("attention_bias")):
    # Llama's attention_bias also puts one on the output projection.
    raise ValueError("mlp_bias or attention_bias is set; expected neither in this family")
  try:
    heads = fields["num_attention_heads"]
    rope = dict(fields.get("rope_parameters") or {})
    scaling = dict(fields.get("rope_scaling") or rope)
    return TransformerConfig(
      vocab_size=fields["vocab_size"],
      num_layers=fields["num_hidden_layers"],
      hidden_size=fields["hidden_size"],
      mlp_size=fields["intermediate_size"],
      num_heads=heads,
      num_kv_heads=fields.get("num_key_value_heads") or heads,
      head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
      rope_theta=float(fields.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
      rope_scaling=_scaling(scaling),
      norm_eps=float(fields["rms_norm_eps"]),
      qk_norm=family == "qwen3",
      attention_bias=family == "qwen2",
      tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
      max_positions=fields["max_position_embeddings"],
    )
  except KeyError as error:
    raise ValueError(
      f"the model's config has no {error}; expected a complete config.json"
    ) from None
  except (TypeError, ZeroDivisionError) as error:
    raise ValueError(f"the model's config does not make sense: {error}") from None


def _scaling(fields: Mapping[str, Any]) -> RopeScaling | None:
  kind = fields.get("rope_type") or fields.get("type") or "default"
  if kind == "default":
    return None
  if kind != "llama3":
    raise ValueError(f"rope_scaling of type {kind!r}; expected 'llama3' or none")
  return RopeScaling(
    factor=float(fields["factor"]),
    low_freq_factor=float(fields["low_freq_factor"]),
    high_freq_factor=float(fields["high_freq_factor"]),
    original_max_positions=int(fields["original_max_position_embeddings"]),
  )


def family_of(config: TransformerConfig) -> str:
  """The family whose options a config has."""
  if config.qk_norm:
    return "qwen3"
  return "qwen2" if config.attention_bias else "llama"


def to_huggingface(config: TransformerConfig) -> dict[str, Any]:
  """Fields of a `config.json` that `from_huggingface` and transformers read back."""
  family = family_of(config)
  fields = {
    "model_type": family,
    "architectures": [f"{family.capitalize()}ForCausalLM"],
    "vocab_size": config.vocab_size,
    "num_hidden_layers": config.num_layers,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.mlp_size,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "rope_theta": config.rope_theta,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied_embeddings,
    "max_position_embeddings": config.max_positions,
    "hidden_act": "silu",
  }
  if config.rope_scaling is not None:
    scaling = config.rope_scaling
    fields["rope_scaling"] = {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low_freq_factor,
      "high_freq_factor": scaling.high_freq_factor,
      "original_max_position_embeddings": scaling.original_max_positions,
    }
  return fields


def from_gguf(metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> TransformerConfig:
  """Reads the metadata of a GGUF file.

  Args:
    metadata: keys and values.
    vocab_size: rows of the embedding tensor.
    tied: whether the file has no output head.

  Raises:
    ValueError: another architecture, a missing key, or a scaling that is not implemented.
  """
  family = metadata.get("general.architecture")
  if family not in FAMILIES:
    raise ValueError(f"general.architecture = {family!r}; expected one of {', '.join(FAMILIES)}")
  kind = metadata.get(f"{family}.rope.scaling.type", "none")
  if kind not in ("none", ""):
    raise ValueError(f"{family}.rope.scaling.type = {kind!r}; expected none")

  def get(key: str, default: Any = None) -> Any:
    value = metadata.get(f"{family}.{key}", default)
    if value is None:
      raise ValueError(f"the file's metadata has no {family}.{key}; expected a complete file")
    return value

  heads = get("attention.head_count")
  width = get("embedding_length")
  if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
    raise ValueError(f"head_count = {heads!r}, embedding_length = {width!r}; expected integers")
  return TransformerConfig(
    vocab_size=vocab_size,
    num_layers=get("block_count"),
    hidden_size=width,
    mlp_size=get("feed_forward_length"),
    num_heads=heads,
    num_kv_heads=get("attention.head_count_kv", heads),
    head_dim=get("attention.key_length", width // heads),
    rope_theta=float(get("rope.freq_base", 10_000.0)),
    norm_eps=float(get("attention.layer_norm_rms_epsilon")),
    qk_norm=family == "qwen3",
    attention_bias=family == "qwen2",
    tied_embeddings=tied,
    max_positions=get("context_length"),
  )
