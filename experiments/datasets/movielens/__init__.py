"""Who rated the same films in MovieLens 100K, fetched on first use."""

from experiments.datasets.movielens.builder import Movielens, load

__all__ = ["Movielens", "load"]
