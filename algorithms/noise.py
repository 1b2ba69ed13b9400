"""Class-conditional label noise: transitions, draws and estimators.

A discrete variable with K values is observed through a channel that depends on nothing but its
clean value: `T[i, k] = P(noisy = k | clean = i)`, independent of the features given the clean
value. Then the noisy prior is `q = T' pi`, so `pi = T^-T q` recovers the clean one.

Sources: Patrini et al. 2017, "Making Deep Neural Networks Robust to Label Noise" (transition
matrices, anchor estimator); Northcutt et al. 2021, "Confident Learning" (confident joint).
"""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

__all__ = [
  "TransitionMatrix",
  "estimate_anchor",
  "estimate_confident_joint",
  "flip",
  "implied_prior",
  "validate_rates",
  "validate_transition",
]

# Masses and priors are differences of nearly equal sums once they are multiplied by T^-T, which
# the bfloat16 and TF32 defaults of TPUs and GPUs do not survive.
_PRECISION = jax.lax.Precision.HIGHEST


@flax.struct.dataclass
class TransitionMatrix:
  """Noise channel of a variable with K values.

  The constructors accept traced rates, so `jax.vmap(TransitionMatrix.symmetric)(rates)` is a grid
  of channels. Nothing is checked here: call `validate_transition` once on concrete values.

  Attributes:
    matrix: `[K, K]`, row i = P(noisy | clean = i); rows sum to 1.
  """

  matrix: jax.Array

  @property
  def num_classes(self) -> int:
    """K."""
    return self.matrix.shape[-1]

  @property
  def det(self) -> jax.Array:
    """`[]` determinant; 0 means that the clean distribution cannot be identified."""
    return jnp.linalg.det(self.matrix)

  @property
  def inverse(self) -> jax.Array:
    """`[K, K]` inverse of `matrix`."""
    if self.num_classes == 2:
      # Closed form: no LAPACK or cuSOLVER call inside a vmapped training loop.
      m = self.matrix
      adjugate = jnp.array([[m[1, 1], -m[0, 1]], [-m[1, 0], m[0, 0]]])
      return adjugate / (m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0])
    return jnp.linalg.inv(self.matrix)

  @staticmethod
  def identity(num_classes: int) -> TransitionMatrix:
    """The noiseless channel."""
    return TransitionMatrix(jnp.eye(num_classes))

  @staticmethod
  def symmetric(rate: ArrayLike, num_classes: int = 2) -> TransitionMatrix:
    """Keeps a value with probability `1 - rate`, else moves to any other value alike.

    Args:
      rate: `[]` probability of a flip.
      num_classes: K.
    """
    diagonal = jnp.eye(num_classes, dtype=bool)
    return TransitionMatrix(jnp.where(diagonal, 1.0 - rate, rate / (num_classes - 1)))

  @staticmethod
  def binary(rate_01: ArrayLike, rate_10: ArrayLike) -> TransitionMatrix:
    """Two values with their own flip rates.

    Args:
      rate_01: `[]` P(noisy = 1 | clean = 0).
      rate_10: `[]` P(noisy = 0 | clean = 1).
    """
    return TransitionMatrix(jnp.array([[1.0 - rate_01, rate_01], [rate_10, 1.0 - rate_10]]))


def validate_transition(
  matrix: TransitionMatrix | ArrayLike,
  name: str = "transition",
  min_abs_det: float = 0.05,
) -> None:
  """Checks on the host that a channel is a channel and can be inverted.

  Args:
    matrix: `[K, K]` concrete values, or the `TransitionMatrix` that holds them.
    name: what to call the argument in messages.
    min_abs_det: smallest `|det|` that counts as identifiable. The variance of every corrected
      quantity grows like `det^-2`.

  Raises:
    ValueError: if the matrix is not square, not finite, has entries outside [0, 1], has rows that
      do not sum to 1 within 1e-6 (1e-5 in float32), or `|det| < min_abs_det`.
  """
  values = np.asarray(matrix.matrix if isinstance(matrix, TransitionMatrix) else matrix)
  tolerance = 1e-5 if values.dtype.itemsize <= 4 else 1e-6
  values = values.astype(np.float64)
  if values.ndim != 2 or values.shape[0] != values.shape[1] or values.shape[0] < 2:
    raise ValueError(
      f"{name} has shape {values.shape} (expected [K, K] with K >= 2); row i is "
      "P(noisy | clean = i)."
    )
  if not np.all(np.isfinite(values)):
    raise ValueError(f"{name} holds NaN or infinity (expected probabilities); got {values}.")
  if np.any(values < 0.0) or np.any(values > 1.0):
    row, column = np.argwhere((values < 0.0) | (values > 1.0))[0]
    raise ValueError(
      f"{name}[{row}, {column}] is {values[row, column]:.6g} (expected a probability in [0, 1]); "
      "check the flip rates it was built from."
    )
  sums = values.sum(axis=1)
  wrong = np.flatnonzero(np.abs(sums - 1.0) > tolerance)
  if wrong.size:
    raise ValueError(
      f"{name} row {wrong[0]} sums to {sums[wrong[0]]:.6g} (expected 1); row i is "
      "P(noisy | clean = i): divide each row by its sum, or transpose the matrix if its columns "
      "sum to 1."
    )
  det = np.linalg.det(values)
  if abs(det) < min_abs_det:
    raise ValueError(
      f"{name} has determinant {det:.4g} (expected |det| >= {min_abs_det}): noisy values say next "
      "to nothing about clean ones, so the correction is unidentifiable. Use lower flip rates, a "
      "less noisy source, or lower min_abs_det if the sample is large enough to pay for a variance "
      "that grows like 1/det^2."
    )


def implied_prior(noisy_prior: jax.Array, transition: TransitionMatrix) -> jax.Array:
  """Clean prior that a noisy prior implies, `pi = T^-T q`.

  Args:
    noisy_prior: `[K]` q, shares of the noisy values.
    transition: the channel, K values.

  Returns:
    `[K]` pi; sums to the sum of q. An entry below 0 says that q and the rates disagree.
  """
  return jnp.matmul(noisy_prior, transition.inverse, precision=_PRECISION)


def validate_rates(
  noisy_prior: ArrayLike, transition: TransitionMatrix, name: str = "transition"
) -> None:
  """Checks on the host that flip rates can have produced the observed shares.

  Args:
    noisy_prior: `[K]` q, observed shares of the noisy values.
    transition: assumed channel, K values, identifiable.
    name: what to call the channel in messages.

  Raises:
    ValueError: if an implied clean share is not positive; names the group and, for K = 2, the
      flip rates that q allows.
  """
  prior = np.asarray(noisy_prior, dtype=np.float64)
  matrix = np.asarray(transition.matrix, dtype=np.float64)
  if prior.shape != matrix.shape[:1]:
    raise ValueError(
      f"noisy_prior has shape {prior.shape} (expected {matrix.shape[:1]}, one share for each value "
      f"of {name})."
    )
  clean = np.linalg.solve(matrix.T, prior)
  wrong = np.flatnonzero(clean <= 0.0)
  if not wrong.size:
    return
  group = wrong[0]
  message = (
    f"{name} implies a clean share of {clean[group]:.4g} for group {group} (expected > 0): the "
    f"rates cannot have produced the observed shares {np.round(prior, 4).tolist()}. "
  )
  if prior.size == 2:
    rate, other = matrix[1 - group, group], 1 - group
    bound = f"< {prior[group]:.4g}" if np.linalg.det(matrix) > 0 else f"> {prior[group]:.4g}"
    message += (
      f"P(noisy = {group} | clean = {other}) is {rate:.4g} and must be {bound}, the observed share "
      f"of group {group}. "
    )
  raise ValueError(message + "Lower the assumed rates, or estimate them from data.")


def flip(key: jax.Array, values: jax.Array, transition: TransitionMatrix) -> jax.Array:
  """Draws noisy values.

  Inverts the row's distribution function at one uniform number a value, so draws under one key
  and different rates are coupled: for two values, a larger flip rate flips a superset.

  Args:
    key: typed PRNG key, consumed.
    values: `[...]` int, clean values in 0..K-1.
    transition: the channel, K values.

  Returns:
    `[...]` int32 noisy values.
  """
  cumulative = jnp.cumsum(transition.matrix, axis=1)[:, :-1][values]
  uniform = jax.random.uniform(key, values.shape, dtype=cumulative.dtype)
  return jnp.sum(uniform[..., None] >= cumulative, axis=-1, dtype=jnp.int32)


def estimate_anchor(probs: jax.Array, percentile: float = 97.0) -> TransitionMatrix:
  """Reads the channel off examples that surely belong to one class.

  The anchor of class i is the example at the given percentile of `P(noisy = i | x)`; at it
  `P(noisy | x)` is row i of the channel. Needs an example of (almost) sure membership in every
  class. Source: Patrini et al. 2017, section 4; its use here for unknown rates is inferred.

  Args:
    probs: `[N, K]` a model's P(noisy | x), calibrated.
    percentile: in [0, 100]; 100 takes the most confident example, less is robust to outliers.

  Returns:
    The estimated channel; rows are renormalised.
  """
  position = jnp.round(percentile / 100.0 * (probs.shape[0] - 1)).astype(jnp.int32)
  anchors = jnp.argsort(probs, axis=0)[position]
  rows = probs[anchors]
  return TransitionMatrix(rows / jnp.sum(rows, axis=1, keepdims=True))


def estimate_confident_joint(probs: jax.Array, noisy: jax.Array) -> TransitionMatrix:
  """Counts confident disagreements between the noisy value and the model.

  An example counts as clean class j if j is the most probable of the classes whose probability
  reaches the mean that they have among examples noisily of that class. The counts are scaled to
  the noisy class sizes, then normalised for each clean class. A noisy class without a confident
  example is taken as clean; a clean class that nothing is assigned to keeps its identity row.
  Source: Northcutt et al. 2021, section 3.1; its use here for unknown rates is inferred.

  Args:
    probs: `[N, K]` a model's P(noisy | x), predicted out of sample.
    noisy: `[N]` int, observed noisy values in 0..K-1.

  Returns:
    The estimated channel.
  """
  num_classes = probs.shape[1]
  identity = jnp.eye(num_classes, dtype=probs.dtype)
  observed = jax.nn.one_hot(noisy, num_classes, dtype=probs.dtype)
  sizes = jnp.sum(observed, axis=0)
  confidence = jnp.sum(observed * probs, axis=0) / jnp.maximum(sizes, 1.0)
  threshold = jnp.where(sizes > 0, confidence, jnp.inf)

  reaches = probs >= threshold[None, :]
  likely = jnp.argmax(jnp.where(reaches, probs, -jnp.inf), axis=1)
  counted = jnp.any(reaches, axis=1).astype(probs.dtype)
  assigned = jax.nn.one_hot(likely, num_classes, dtype=probs.dtype) * counted[:, None]
  counts = jnp.matmul(observed.T, assigned, precision=_PRECISION)

  row_sums = jnp.sum(counts, axis=1, keepdims=True)
  by_noisy = jnp.where(row_sums > 0, counts / jnp.maximum(row_sums, 1.0), identity)
  joint = by_noisy * sizes[:, None]
  column_sums = jnp.sum(joint, axis=0, keepdims=True)
  assigned_any = column_sums > 0
  by_clean = jnp.where(assigned_any, joint / jnp.where(assigned_any, column_sums, 1.0), identity)
  return TransitionMatrix(by_clean.T)
