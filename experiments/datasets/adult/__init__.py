"""Adult (Census Income), committed with the project."""

from experiments.datasets.adult.builder import Adult

__all__ = ["Adult"]
