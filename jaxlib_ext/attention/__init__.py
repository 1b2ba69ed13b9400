"""Attention over dense, paged, shared and moved caches of keys and values; see `api`."""

from jaxlib_ext.attention.api import (
  Choice,
  decode_attention,
  explain,
  flash_attention,
  packet_attention,
  ragged_paged_attention,
  shared_prefix_attention,
  update_kv_pages,
  verify_attention,
)
from jaxlib_ext.attention.rope import Rope, rotate
from jaxlib_ext.attention.state import AttnState, finalize, merge, merge_states

__all__ = [
  "AttnState",
  "Choice",
  "Rope",
  "decode_attention",
  "explain",
  "finalize",
  "flash_attention",
  "merge",
  "merge_states",
  "packet_attention",
  "ragged_paged_attention",
  "rotate",
  "shared_prefix_attention",
  "update_kv_pages",
  "verify_attention",
]
