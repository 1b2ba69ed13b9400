"""A small JRF table on a fiftieth of Adult, for comparing meshes."""

from experiments.jrf import config as jrf_config


def get_config(preset: str = "default"):
  config = jrf_config.get_config("smoke")
  config.dataset.fraction = 0.02
  config.train.steps = 20
  return config
