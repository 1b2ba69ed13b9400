"""Least squares on merged stages from each stage's moments.

A stage enters the pooled regression through a handful of sums, so merging any set of stages costs
nothing once the stages have been summed up, on one machine or on many. The pooled covariance falls
into the mean of the covariances within stages and the covariance between stage means: the v_w and
v_b of `algorithms.gate.theory`, as they are found in the data.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class StageMoments:
  """Moments of the rows of each stage.

  Attributes:
    mean_x: `[L, F]` means of the features.
    mean_y: `[L]` means of the outcome.
    cov_xx: `[L, F, F]` covariances of the features within a stage, divided by N.
    cov_xy: `[L, F]` covariances of features and outcome within a stage, divided by N.
  """

  mean_x: jax.Array
  mean_y: jax.Array
  cov_xx: jax.Array
  cov_xy: jax.Array


def stage_moments(x: jax.Array, y: jax.Array, axis_name: str | None = None) -> StageMoments:
  """Moments of features `x [L, N, F]` and outcomes `y [L, N]`.

  Args:
    x: features without the intercept.
    y: outcomes.
    axis_name: mesh axis that the units are sharded over, in equal parts, inside `jax.shard_map`.
  """

  def mean(values: jax.Array) -> jax.Array:
    return values if axis_name is None else jax.lax.pmean(values, axis_name)

  mean_x, mean_y = mean(x.mean(axis=1)), mean(y.mean(axis=1))
  x, y = x - mean_x[:, None, :], y - mean_y[:, None]
  return StageMoments(
    mean_x,
    mean_y,
    mean(jnp.einsum("lnf,lng->lfg", x, x) / x.shape[1]),
    mean(jnp.einsum("lnf,ln->lf", x, y) / x.shape[1]),
  )


def pool(moments: StageMoments, stages: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Pooled covariances of merged stages, about one common mean.

  Args:
    moments: of all stages.
    stages: `[L]` weights, 1 for a stage that is merged and 0 for one that is left out.

  Returns:
    `[F, F]` covariance of the features and `[F]` covariance of features and outcome.
  """
  share = stages / stages.sum()
  x = moments.mean_x - (share @ moments.mean_x)[None, :]
  y = moments.mean_y - share @ moments.mean_y
  gram = jnp.einsum("l,lfg->fg", share, moments.cov_xx + x[:, :, None] * x[:, None, :])
  cross = jnp.einsum("l,lf->f", share, moments.cov_xy + x * y[:, None])
  return gram, cross


def ols_from_moments(moments: StageMoments, stages: jax.Array, contrast: jax.Array) -> jax.Array:
  """GATE estimate of the regression on merged stages, with one common intercept.

  It equals `algorithms.gate.ols` on the rows of those stages; standard errors need the rows.

  Args:
    moments: of all stages.
    stages: `[L]` weights, 1 for a stage that is merged and 0 for one that is left out.
    contrast: `[F]` features with everybody treated minus features with nobody treated.
  """
  gram, cross = pool(moments, stages)
  return contrast @ jnp.linalg.solve(gram, cross)
