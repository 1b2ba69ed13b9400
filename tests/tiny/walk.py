"""The maths of the tiny experiment: a random walk whose key is part of its state."""

import jax
import jax.numpy as jnp


def init(key):
  return {"key": key, "x": jnp.zeros(8), "moves": jnp.int32(0)}


def step(state, rate):
  key, move = jax.random.split(state["key"])
  x = (1 - rate) * state["x"] + jax.random.normal(move, (8,))
  return {"key": key, "x": x, "moves": state["moves"] + 1}
