"""Law students and their first bar examination, fetched on first use."""

from experiments.datasets.law_school.builder import LawSchool

__all__ = ["LawSchool"]
