"""Rotary position embedding, in halves: entry i is paired with entry i + D/2."""

from __future__ import annotations

import numpy as np

from models.transformer.config import TransformerConfig


def frequencies(config: TransformerConfig) -> np.ndarray:
  """`[D/2]` float64 angles a position, with Llama 3's scaling if the config has it."""
  exponent = np.arange(0, config.head_dim, 2) / config.head_dim
  base = config.rope_theta**-exponent
  scaling = config.rope_scaling
  if scaling is None:
    return base
  wavelength = 2 * np.pi / base
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = (scaling.original_max_positions / wavelength - low) / (high - low)
  kept = np.clip(kept, 0, 1)
  return kept * base + (1 - kept) * base / scaling.factor
