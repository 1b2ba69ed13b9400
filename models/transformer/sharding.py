"""Which axis of which parameter lies on which mesh axis.

Parameters have logical axes; `RULES` maps these to the mesh. With the rules here heads, MLP width
and vocabulary are split over "model" (tensor parallel: one all-reduce after each block's second
projection) and the batch over "data".
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.transformer.cache import KVCache
from models.transformer.config import TransformerConfig

RULES = {
  "batch": "data",
  "vocab": "model",
  "heads": "model",
  "kv_heads": "model",
  "mlp": "model",
  "embed": None,
  "layers": None,
}

# By the last names of a parameter's path; without entry, and for norms: replicated.
LOGICAL_AXES = {
  ("embedding",): ("vocab", "embed"),
  ("head", "kernel"): ("embed", "vocab"),
  ("q", "kernel"): ("embed", "heads"),
  ("k", "kernel"): ("embed", "kv_heads"),
  ("v", "kernel"): ("embed", "kv_heads"),
  ("q", "bias"): ("heads",),
  ("k", "bias"): ("kv_heads",),
  ("v", "bias"): ("kv_heads",),
  ("o", "kernel"): ("heads", "embed"),
  ("gate", "kernel"): ("embed", "mlp"),
  ("up", "kernel"): ("embed", "mlp"),
  ("down", "kernel"): ("mlp", "embed"),
}


def param_shardings(params: Any, config: TransformerConfig, mesh: Mesh) -> Any:
  """A `NamedSharding` for each parameter.

  An axis that its mesh axis does not divide is replicated: 3 key and value heads stay whole on 2
  devices.
  """

  def place(path: tuple, leaf: Any) -> NamedSharding:
    names = tuple(str(entry.key) for entry in path)
    axes = LOGICAL_AXES.get(names[-2:]) or LOGICAL_AXES.get(names[-1:]) or ()
    if "layers" in names and axes:
      axes = ("layers", *axes)
    spec = [_rule(axis, config, mesh) for axis in axes]
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(place, params)


def cache_shardings(cache: KVCache, config: TransformerConfig, mesh: Mesh) -> KVCache:
  """Rows over "data", key and value heads over "model" where they divide."""
  rows, heads = RULES["batch"], _rule("kv_heads", config, mesh)
  lead = (None,) if config.scan_layers else ()
  slots = NamedSharding(mesh, PartitionSpec(*lead, rows, None, heads))
  return KVCache(
    jax.tree.map(lambda _: slots, cache.k),
    jax.tree.map(lambda _: slots, cache.v),
    NamedSharding(mesh, PartitionSpec(rows)),
  )


def _rule(axis: str, config: TransformerConfig, mesh: Mesh) -> str | None:
  # Whole heads only: half a head on a device would split rotary pairs.
  counts = {
    "vocab": config.vocab_size,
    "heads": config.num_heads,
    "kv_heads": config.num_kv_heads,
    "mlp": config.mlp_size,
  }
  name = RULES[axis]
  if name is None or name not in mesh.shape or counts[axis] % mesh.shape[name]:
    return None
  return name
