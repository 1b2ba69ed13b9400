"""Bank Marketing, from a file that the user downloads."""

from experiments.datasets.bank.builder import Bank, BankAdditional

__all__ = ["Bank", "BankAdditional"]
