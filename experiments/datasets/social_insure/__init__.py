"""The rice insurance field experiment in Chinese villages, committed with the project."""

from experiments.datasets.social_insure.builder import SocialInsure, load

__all__ = ["SocialInsure", "load"]
