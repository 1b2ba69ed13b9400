"""Default of credit card clients, fetched on first use."""

from experiments.datasets.credit_default.builder import CreditDefault

__all__ = ["CreditDefault"]
