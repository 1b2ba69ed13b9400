"""ProPublica's COMPAS two-year recidivism table, fetched on first use."""

from experiments.datasets.compas.builder import Compas

__all__ = ["Compas"]
