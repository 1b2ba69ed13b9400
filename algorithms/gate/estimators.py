"""Estimators of the GATE from one or several stages.

`ols` is the paper's: all rows of the merged stages, one common intercept. The intercept is the
point: an intercept for each stage would take out the variation between stages, which is what
identifies the spill-over. The standard errors are robust to correlation inside a randomisation unit
within and across stages. They do not hold the bias; and where the features miss interference, units
that share neighbours have correlated residuals, which they do not see, and are too small.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class GateEstimate:
  """A regression estimate.

  Attributes:
    tau: the GATE.
    se: cluster-robust standard error of `tau`.
    theta: `[F]` coefficients of the features.
    intercept: the common intercept.
    condition: condition number of the correlation matrix of all columns.
  """

  tau: jax.Array
  se: jax.Array
  theta: jax.Array
  intercept: jax.Array
  condition: jax.Array


def ols(
  x: jax.Array,
  y: jax.Array,
  contrast: jax.Array,
  cluster: jax.Array,
  num_clusters: int,
  nuisance: jax.Array | None = None,
) -> GateEstimate:
  """Pooled least squares on merged stages, `tau = contrast @ theta`.

  The covariance is the sandwich with scores summed by randomisation unit over all stages, times
  `K / (K - 1) * (n - 1) / (n - p)` for K units, n rows and p columns with the intercept: the usual
  small-sample factor.

  Args:
    x: `[L, N, F]` features without the intercept.
    y: `[L, N]` outcomes.
    contrast: `[F]` features with everybody treated minus with nobody treated.
    cluster: `[N]` int, randomisation unit of each node.
    num_clusters: K.
    nuisance: `[L, N, C]` columns that full treatment does not change, such as covariates or a
      trend over stages.

  Raises:
    ValueError: shapes that do not agree, or a single randomisation unit.
  """
  _check_rows(x, y)
  if cluster.shape != y.shape[1:] or num_clusters < 2:
    raise ValueError(
      f"cluster has shape {cluster.shape} and num_clusters = {num_clusters}; expected {y.shape[1:]}"
      " and 2 or more. With one randomisation unit no standard error exists"
    )
  if contrast.shape != x.shape[-1:]:
    raise ValueError(
      f"contrast has shape {contrast.shape} for {x.shape[-1]} features; expected one number each"
    )
  if nuisance is not None:
    if nuisance.shape[:-1] != y.shape:
      raise ValueError(
        f"nuisance has shape {nuisance.shape}; expected {y.shape} and one more axis, over columns"
      )
    x = jnp.concatenate([x, nuisance.astype(x.dtype)], axis=-1)
    contrast = jnp.concatenate([contrast, jnp.zeros(nuisance.shape[-1], contrast.dtype)])
  stages, nodes, columns = x.shape
  mean_x, mean_y = x.mean(axis=(0, 1), keepdims=True), y.mean()
  centred, residual = x - mean_x, y - mean_y
  gram = jnp.einsum("lnf,lng->fg", centred, centred)
  scale = jnp.sqrt(jnp.diagonal(gram))
  correlation = gram / (scale[:, None] * scale[None, :])
  theta = jnp.linalg.solve(correlation, jnp.einsum("lnf,ln->f", centred, residual) / scale) / scale
  residual = residual - centred @ theta
  # tau is the sum of these weights times y, so its variance needs them only.
  weights = centred @ (jnp.linalg.solve(correlation, contrast / scale) / scale)
  scores = jax.ops.segment_sum((weights * residual).sum(axis=0), cluster, num_clusters)
  rows = stages * nodes
  factor = num_clusters / (num_clusters - 1) * (rows - 1) / (rows - columns - 1)
  return GateEstimate(
    tau=contrast @ theta,
    se=jnp.sqrt(factor * jnp.sum(scores**2)),
    theta=theta,
    intercept=mean_y - mean_x[0, 0] @ theta,
    condition=jnp.linalg.cond(correlation),
  )


def ols_weights(x: jax.Array, contrast: jax.Array) -> jax.Array:
  """Weights `l [L, N]` of the rows: given the treatments, `tau = sum(l * y)` exactly.

  So for `y = a + B z + noise` the bias given `z` is `sum(l * (a + B z)) - tau` and the variance
  `sd^2 sum(l^2)`.

  Args:
    x: `[L, N, F]` features without the intercept.
    contrast: `[F]`.
  """
  centred = x - x.mean(axis=(0, 1), keepdims=True)
  gram = jnp.einsum("lnf,lng->fg", centred, centred)
  return centred @ jnp.linalg.solve(gram, contrast)


def moment(
  x: jax.Array, mean_x: jax.Array, y: jax.Array, gram: jax.Array, contrast: jax.Array
) -> jax.Array:
  """The regression with the moments of the features that the design is known to have.

  Its bias is the formula of `algorithms.gate.theory` for every N, not only for many units.

  Args:
    x: `[L, N, F]` features.
    mean_x: `[L, N, F]` their expectations.
    y: `[L, N]` outcomes.
    gram: `[F, F]` their expected covariance, pooled over stages; see `theory.known_gram`.
    contrast: `[F]`.

  Returns:
    tau.

  Raises:
    ValueError: shapes that do not agree.
  """
  _check_rows(x, y)
  if mean_x.shape != x.shape:
    raise ValueError(f"mean_x has shape {mean_x.shape}; expected {x.shape}, the shape of x")
  # A unit's own mean over the stages: one mean for all would take intercepts of units without
  # neighbours for effects.
  cross = jnp.einsum("lnf,ln->f", x - mean_x.mean(axis=0, keepdims=True), y) / y.size
  return contrast @ jnp.linalg.solve(gram, cross)


def stage_horvitz_thompson(y: jax.Array, z: jax.Array, shares: jax.Array) -> jax.Array:
  """`[L]` inverse-probability estimates of the stages; NaN where everybody or nobody is treated.

  Args:
    y: `[L, N]` outcomes.
    z: `[L, N]` treatments.
    shares: `[L]`.

  Raises:
    ValueError: shapes that do not agree.
  """
  _check_stages(y, z, shares)
  inside = (shares > 0) & (shares < 1)
  p = jnp.where(inside, shares, 0.5)[:, None]
  found = (z * y / p - (1 - z) * y / (1 - p)).mean(axis=1)
  return jnp.where(inside, found, jnp.nan)


def stage_hajek(y: jax.Array, z: jax.Array) -> jax.Array:
  """`[L]` differences between the means of the treated and the others; NaN where one is empty.

  Arguments and errors as for `stage_horvitz_thompson`.
  """
  _check_stages(y, z)
  treated, control = z.sum(axis=1), (1 - z).sum(axis=1)
  found = (z * y).sum(axis=1) / jnp.maximum(treated, 1)
  found = found - ((1 - z) * y).sum(axis=1) / jnp.maximum(control, 1)
  return jnp.where((treated > 0) & (control > 0), found, jnp.nan)


def horvitz_thompson(y: jax.Array, z: jax.Array, shares: jax.Array) -> jax.Array:
  """Mean of the stages' Horvitz-Thompson estimates (authors' code); stages at 0 or 1 are left out.

  It is biased by the interference that leaves the randomisation unit at every share, so merging
  stages does not help it. NaN when no stage is left.
  """
  return jnp.nanmean(stage_horvitz_thompson(y, z, shares))


def hajek(y: jax.Array, z: jax.Array) -> jax.Array:
  """Mean of the stages' Hajek estimates; stages where everybody is treated alike are left out."""
  return jnp.nanmean(stage_hajek(y, z))


def polynomial_weights(shares: Sequence[float] | np.ndarray) -> np.ndarray:
  """`[L]` weights of the stage means in `polynomial_rollout`, on the host.

  Raises:
    ValueError: a share occurs twice, or there is one stage only.
  """
  shares = np.asarray(shares, np.float64)
  if shares.size < 2 or np.unique(shares).size < shares.size:
    raise ValueError(
      f"shares = {tuple(shares.tolist())}; a polynomial through the stage means needs two or more "
      "stages of different shares"
    )
  # Lagrange's polynomials of the shares at 1, less those at 0.
  weights = []
  for i, share in enumerate(shares):
    others = np.delete(shares, i)
    at_one, at_zero = (np.prod((end - others) / (share - others)) for end in (1.0, 0.0))
    weights.append(at_one - at_zero)
  return np.array(weights)


def polynomial_rollout(y: jax.Array, weights: jax.Array) -> jax.Array:
  """Extrapolates the polynomial through the stage means to shares 0 and 1 (Cortez et al. 2022).

  It needs no graph and has no bias for interference of degree below L, at a large variance.

  Args:
    y: `[L, N]` outcomes.
    weights: `[L]` from `polynomial_weights`.

  Raises:
    ValueError: a number of weights that is not the number of stages.
  """
  if weights.shape != y.shape[:1]:
    raise ValueError(f"weights have shape {weights.shape}; expected {y.shape[:1]}, one a stage")
  return weights @ y.mean(axis=1)


def interval(
  estimate: GateEstimate, num_clusters: int, level: float = 0.95
) -> tuple[jax.Array, jax.Array]:
  """Student interval with K - 1 degrees of freedom.

  It covers the mean of the estimator where the features carry the interference; where they miss
  some it is too short even for that.

  Args:
    estimate: of `ols`.
    num_clusters: K, at least 2.
    level: in (0, 1).

  Raises:
    ValueError: a single cluster, or a level outside (0, 1).
  """
  if num_clusters < 2 or not 0 < level < 1:
    raise ValueError(
      f"num_clusters = {num_clusters}, level = {level}; expected two or more clusters and a level "
      "such as 0.95"
    )
  from scipy import stats

  half = float(stats.t.ppf(0.5 + level / 2, num_clusters - 1)) * estimate.se
  return estimate.tau - half, estimate.tau + half


def check_mergeable(shares: Sequence[float] | np.ndarray) -> None:
  """Refuses to merge stages of one share, on the host.

  Raises:
    ValueError: fewer than two different shares.
  """
  shares = np.asarray(shares, np.float64)
  if np.unique(shares).size < 2:
    raise ValueError(
      f"shares = {tuple(shares.tolist())}: all stages have one treatment share, so the variance "
      "between stages v_b is 0 and merging them removes no bias, only noise. Add a stage of "
      "another share, such as the one before the experiment with share 0"
    )


def check_randomised(shares: Sequence[float] | np.ndarray) -> None:
  """Refuses to weight by inverse probabilities where none is inside (0, 1), on the host.

  Raises:
    ValueError: every stage treats everybody or nobody.
  """
  shares = np.asarray(shares, np.float64)
  if not np.any((shares > 0) & (shares < 1)):
    raise ValueError(
      f"shares = {tuple(shares.tolist())}: every stage treats everybody or nobody, so no stage "
      "compares treated units with others; expected a share between 0 and 1. Add such a stage, or "
      "use ols on stages of different shares"
    )


def check_features(x: np.ndarray, names: Sequence[str]) -> None:
  """Refuses features that are constant or collinear, on the host.

  Args:
    x: `[L, N, F]`.
    names: `[F]`, for the message.

  Raises:
    ValueError: naming the features.
  """
  flat = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
  centred = flat - flat.mean(axis=0)
  scale = np.sqrt((centred**2).mean(axis=0))
  flat_scale = 1e-12 * np.abs(flat).max(axis=0)
  constant = [n for n, s, m in zip(names, scale, flat_scale, strict=True) if s <= m]
  if constant:
    raise ValueError(
      f"the features {', '.join(constant)} are constant over all rows; the effect cannot be told "
      "from the intercept. Merge stages of different shares, or leave those features out"
    )
  values, vectors = np.linalg.eigh((centred / scale).T @ (centred / scale) / len(flat))
  if values[0] < 1e-10:
    involved = [n for n, v in zip(names, vectors[:, 0], strict=True) if abs(v) > 1e-3]
    raise ValueError(
      f"the features {', '.join(involved)} are collinear: one is a combination of the others in "
      "all rows. Merge more distinct shares, randomise units rather than whole components of the "
      "graph, or use fewer features"
    )


def _check_stages(y: jax.Array, z: jax.Array, shares: jax.Array | None = None) -> None:
  # A stage axis of length 1 would be broadcast without a word.
  if y.ndim != 2 or z.shape != y.shape:
    raise ValueError(f"y has shape {y.shape} and z {z.shape}; expected [stages, nodes] for both")
  if shares is not None and shares.shape != y.shape[:1]:
    raise ValueError(f"shares have shape {shares.shape}; expected {y.shape[:1]}, one a stage")


def _check_rows(x: jax.Array, y: jax.Array) -> None:
  if x.ndim != 3 or x.shape[:2] != y.shape:
    raise ValueError(
      f"x has shape {x.shape} and y {y.shape}; expected [stages, nodes, features] and "
      "[stages, nodes]"
    )
