"""Low-rank adapters as a pytree beside the parameters: `W + (alpha / rank) A B`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.transformer.config import TransformerConfig

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """Attributes: `rank` r; `alpha`, the scale is alpha / r; `targets`, some of TARGETS.

  Raises:
    ValueError: a rank below 1 or a projection that does not exist.
  """

  rank: int = 16
  alpha: float = 32.0
  targets: tuple[str, ...] = ("q", "v")

  def __post_init__(self):
    unknown = [name for name in self.targets if name not in TARGETS]
    if self.rank < 1 or unknown or not self.targets:
      raise ValueError(
        f"rank = {self.rank}, targets = {self.targets}; expected 1 or more and some of "
        f"{', '.join(TARGETS)}"
      )


def init_lora(key: jax.Array, config: TransformerConfig, lora: LoRAConfig) -> dict[str, Any]:
  """An adapter that changes nothing yet: A is drawn, B is 0.

  A is uniform in +-1/sqrt(inputs), as in PyTorch's adapters. The scale is folded into A once, so
  that what is trained is what is applied.

  Returns:
    `{"layers_0": {"attention": {"q": {"a": [in, r], "b": [r, out]}}}}`, or the same under "layers"
    with a leading layer axis when the model scans.
  """
  q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  d, m = config.hidden_size, config.mlp_size
  shapes = {
    "attention": {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d)},
    "mlp": {"gate": (d, m), "up": (d, m), "down": (m, d)},
  }

  def layer(key: jax.Array) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for group, members in shapes.items():
      for name, (inputs, outputs) in members.items():
        key, use = jax.random.split(key)
        if name not in lora.targets:
          continue
        bound = inputs**-0.5
        a = jax.random.uniform(use, (inputs, lora.rank), jnp.float32, -bound, bound)
        made.setdefault(group, {})[name] = {
          "a": a * (lora.alpha / lora.rank),
          "b": jnp.zeros((lora.rank, outputs), jnp.float32),
        }
    return made

  keys = jax.random.split(key, config.num_layers)
  if config.scan_layers:
    return {"layers": jax.vmap(layer)(keys)}
  return {f"layers_{i}": layer(keys[i]) for i in range(config.num_layers)}


def merge_lora(params: dict[str, Any], lora: dict[str, Any]) -> dict[str, Any]:
  """Parameters with the adapter added into the kernels, for use without it."""

  def add(node: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    if "a" in update:
      return node | {
        "kernel": node["kernel"] + (update["a"] @ update["b"]).astype(node["kernel"].dtype)
      }
    return node | {name: add(node[name], part) for name, part in update.items()}

  return {"params": add(params["params"], lora)}
