"""Exposures of a roll-out and the regression features made from them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from models import graph as graph_lib
from models.graph import Graph

FEATURES = ("treatment", "linear", "quadratic", "spline")


def exposures(operators: Sequence[Graph], z: jax.Array) -> jax.Array:
  """Exposures `e_h = W_h z` of every stage.

  Args:
    operators: H operators, such as the mean over neighbours; those whose leaves have a leading
      stage axis differ by stage (a dynamic graph).
    z: `[L, N]` treatments.

  Returns:
    `[L, N, H]`.

  Raises:
    ValueError: an operator on another number of nodes or stages than z.
  """
  for h, operator in enumerate(operators):
    # Indexing with a node beyond the last row would give the last row, not an error.
    stages = operator.weights.shape[0] if operator.weights.ndim == 2 else z.shape[0]
    if (stages, operator.num_nodes) != z.shape:
      raise ValueError(
        f"z has shape {z.shape}, operators[{h}] {stages} stages and {operator.num_nodes} nodes; "
        "expected the same of both: select an operator's stages together with those of z"
      )

  def one(operator: Graph) -> jax.Array:
    if operator.weights.ndim == 2:
      return jax.vmap(graph_lib.apply)(operator, z)
    # Stages as columns: a row of them is summed at once.
    return graph_lib.apply(operator, z.T).T

  if not operators:
    return jnp.zeros((*z.shape, 0), z.dtype)
  return jnp.stack([one(operator) for operator in operators], axis=-1)


def design_matrix(
  kind: str, z: jax.Array, e: jax.Array, knots: jax.Array | None = None
) -> jax.Array:
  """Features of the pooled regression, without the intercept.

  "treatment" is `z` alone: difference in means. "linear" adds the exposures. "quadratic" adds
  `z e` and `e^2` (inferred; needs three distinct shares). "spline" adds to "linear" the hinges
  `max(e - knot, 0)`, for piecewise linear interference (inferred).

  Args:
    kind: one of FEATURES.
    z: `[..., N]` treatments.
    e: `[..., N, H]` exposures.
    knots: `[Q]` for "spline", by habit the shares between the smallest and the largest.

  Returns:
    `[..., N, F]`.

  Raises:
    ValueError: unknown kind, shapes that do not agree, or a spline without knots.
  """
  if kind not in FEATURES:
    raise ValueError(f"features = {kind!r}; expected one of {', '.join(FEATURES)}")
  if e.shape[:-1] != z.shape:
    raise ValueError(
      f"z has shape {z.shape} and e {e.shape}; expected the shape of z and one more axis, over "
      "exposures"
    )
  parts = [z[..., None]]
  if kind != "treatment":
    parts.append(e)
  if kind == "quadratic":
    parts += [z[..., None] * e, e**2]
  if kind == "spline":
    if knots is None or knots.size == 0:
      raise ValueError("features = 'spline' needs knots: give the shares between the extremes")
    hinges = jnp.maximum(e[..., None] - jnp.reshape(knots, (1,) * e.ndim + (-1,)), 0)
    parts.append(hinges.reshape(*z.shape, -1))
  return jnp.concatenate(parts, axis=-1)


def feature_names(kind: str, num_exposures: int, num_knots: int = 0) -> list[str]:
  """Names of the columns of `design_matrix`, for tables and messages."""
  exposures = ["e"] if num_exposures == 1 else [f"e{h + 1}" for h in range(num_exposures)]
  extra = {
    "quadratic": [f"z {e}" for e in exposures] + [f"{e}^2" for e in exposures],
    "spline": [f"max({e} - knot {q + 1}, 0)" for e in exposures for q in range(num_knots)],
  }
  return ["z"] + (exposures if kind != "treatment" else []) + extra.get(kind, [])


def contrast(
  kind: str, operators: Sequence[Graph], num_nodes: int, knots: jax.Array | None = None
) -> jax.Array:
  """Mean features with everybody treated minus with nobody treated.

  For operators whose rows sum to 1 the linear contrast is (1, ..., 1); else, as for a second hop,
  it is the mean over units of what full treatment gives each.

  Args:
    kind: one of FEATURES.
    operators: as for `exposures`; of a dynamic graph the mean over stages counts.
    num_nodes: N.
    knots: as for `design_matrix`.

  Returns:
    `[F]`.
  """
  stages = max([1, *(op.weights.shape[0] for op in operators if op.weights.ndim == 2)])
  dtype = operators[0].weights.dtype if operators else jnp.zeros(()).dtype
  ones = jnp.ones((stages, num_nodes), dtype)

  def mean(z: jax.Array) -> jax.Array:
    return design_matrix(kind, z, exposures(operators, z), knots).mean(axis=(0, 1))

  return mean(ones) - mean(jnp.zeros_like(ones))
