"""The linear interference model: what the theory of `algorithms.gate` is about."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from models import graph as graph_lib
from models.graph import Graph


@struct.dataclass
class LinearInterference:
  """Potential outcomes `y = a + B z + noise` with `B = diag(direct) + spillover`.

  Any operator may stand for the spill-over, also one that reaches beyond the neighbours. The noise
  is independent over units and stages.

  Attributes:
    intercept: `[N]`, a, outcomes when nobody is treated.
    direct: `[N]`, effect of a unit's own treatment.
    spillover: Gamma, an operator with zero diagonal; its rows need not sum to 1.
    noise_sd: standard deviation of the noise, a scalar.
  """

  intercept: jax.Array
  direct: jax.Array
  spillover: Graph
  noise_sd: jax.Array


def total_effect(model: LinearInterference) -> jax.Array:
  """The GATE: mean outcome with everybody treated minus mean outcome with nobody treated."""
  ones = jnp.ones_like(model.direct)
  return jnp.mean(model.direct + graph_lib.apply(model.spillover, ones))
