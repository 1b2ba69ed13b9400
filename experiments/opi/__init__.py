"""Optimistic policy iteration on tables, structural models and sampled returns."""
