"""Tiny: an experiment of the tests, complete as a contributor's own would be."""

import ml_collections

PRESETS = ("default", "smoke")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.seeds = 2
  config.steps = 12
  config.save_every = 2
  config.model = {"rate": 0.1, "widths": (3, 4), "name": "walk"}
  if preset == "smoke":
    config.seeds, config.steps = 2, 2
  return config
