"""How far a corrected gap can be from the truth in a finite sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from algorithms.jrf.gap import group_means
from algorithms.noise import TransitionMatrix, implied_prior

__all__ = ["gap_confidence", "gap_scale", "required_samples"]


def _mean_operator(prior: jax.Array, transition: TransitionMatrix, mode: str) -> jax.Array:
  """`[K, K]` matrix that maps observed group means to clean ones, given the observed shares."""
  columns = jnp.eye(prior.shape[0], dtype=prior.dtype)
  to_means = jax.vmap(lambda mean: group_means(mean * prior, prior, transition, mode)[0])
  return to_means(columns).T


def gap_scale(
  noisy_prior: jax.Array, transition: TransitionMatrix, mode: str = "exact"
) -> jax.Array:
  """Factor kappa from the observed gap of two groups to the clean one.

  `exact`: `q0 q1 / (pi0 pi1 |det T|)`. `paper`: `1 / |1 - r01 - r10|`, which is the same only if
  `q0 q1 = pi0 pi1`. A plain penalty with `kappa * lambda` is the corrected penalty with lambda.

  Args:
    noisy_prior: `[2]` q.
    transition: channel of the attribute, 2 values.
    mode: `exact` or `paper`.

  Returns:
    `[]` kappa; infinite where the implied clean share of a group is not positive.

  Raises:
    ValueError: for another mode, or if there are not 2 groups.
  """
  if transition.num_classes != 2:
    raise ValueError(
      f"transition has {transition.num_classes} values (expected 2); gaps of more groups have no "
      "single scale, use gap_confidence."
    )
  scale = 1.0 / jnp.abs(transition.det)
  if mode == "paper":
    return scale
  if mode != "exact":
    raise ValueError(f"mode is {mode!r} (expected 'exact' or 'paper').")
  clean_prior = implied_prior(noisy_prior, transition)
  possible = jnp.all(clean_prior > 0)
  ratio = jnp.prod(noisy_prior) / jnp.where(possible, jnp.prod(clean_prior), 1.0)
  return jnp.where(possible, ratio * scale, jnp.inf)


def gap_confidence(
  counts: jax.Array,
  transition: TransitionMatrix,
  delta: float = 0.05,
  mode: str = "exact",
  prior: jax.Array | None = None,
) -> jax.Array:
  """Half-width of a confidence interval for the clean gap of one fixed predictor.

  Holds for scores in [0, 1], independent rows and a known channel, and for every pair of the K
  groups at once: with probability at least `1 - delta` the estimate is within the half-width.

  Observed shares known (`prior` given, or mode `paper`, which does not use them): clean means are
  a fixed matrix M times observed ones, each within `h_k = sqrt(log(2 K / delta) / (2 n_k))` of its
  mean, so the half-width is `max_jl sum_k |M_jk - M_lk| h_k`. For two groups that is
  `kappa (h_0 + h_1)` with the kappa of `gap_scale`.

  Observed shares estimated (mode `exact`, no `prior`): the error of group j is
  `mean_i[w_j(An_i) (f_i - mu_j)] / pi_hat_j` with `w_j(k) = (T^-1)_kj`, a centred mean of bounded
  terms that already holds the error of the shares. Its size is at most
  `R_j sqrt(log(2 K / delta) / (2 n)) / pi_hat_j`, `R_j = max(0, max_k w_j) - min(0, min_k w_j)`;
  the half-width is the sum of the two largest.

  A predictor that was trained on the same rows needs more (twice kappa times the Rademacher
  complexity a group): use rows that training has not seen. Derived; the scaling in kappa is the
  paper's.

  Args:
    counts: `[K]` rows observed in each group.
    transition: channel of the attribute, K values.
    delta: probability of a miss.
    mode: `exact` or `paper`.
    prior: `[K]` true observed shares q, if known.

  Returns:
    `[]` half-width; infinite where a group is empty or its implied clean share is not positive.

  Raises:
    ValueError: if the mode is unknown, or is `paper` and K is not 2.
  """
  if mode not in ("exact", "paper"):
    raise ValueError(f"mode is {mode!r} (expected 'exact' or 'paper').")
  num_groups = transition.num_classes
  counts = jnp.asarray(counts, dtype=transition.matrix.dtype)
  total = jnp.sum(counts)
  shares = counts / jnp.maximum(total, 1.0) if prior is None else prior
  log_term = jnp.log(2.0 * num_groups / delta)
  possible = jnp.all(counts > 0)

  if mode == "paper" or prior is not None:
    operator = _mean_operator(shares, transition, mode)
    deviation = jnp.sqrt(log_term / (2.0 * jnp.maximum(counts, 1.0)))
    contrast = jnp.abs(operator[:, None, :] - operator[None, :, :])
    width = jnp.max(jnp.sum(contrast * deviation[None, None, :], axis=-1))
  else:
    weights = transition.inverse
    reach = jnp.maximum(jnp.max(weights, axis=0), 0) - jnp.minimum(jnp.min(weights, axis=0), 0)
    deviation = jnp.sqrt(log_term / (2.0 * jnp.maximum(total, 1.0)))
    clean_prior = implied_prior(shares, transition)
    width = jnp.sum(jnp.sort(reach * deviation / jnp.where(clean_prior > 0, clean_prior, 1.0))[-2:])
  if mode == "exact":
    possible &= jnp.all(implied_prior(shares, transition) > 0)
  return jnp.where(possible, width, jnp.inf)


def required_samples(epsilon: float, delta: float, kappa: float | jax.Array) -> jax.Array:
  """Rows for a half-width epsilon: `n >= 4 kappa^2 log(4 / delta) / epsilon^2`.

  Two observed groups of equal size with known shares; quadratic in the inverse determinant.

  Args:
    epsilon: wanted half-width, in units of the score.
    delta: probability of a miss.
    kappa: from `gap_scale`.

  Returns:
    Rows in total, not rounded.
  """
  return 4.0 * jnp.square(kappa) * jnp.log(4.0 / delta) / epsilon**2
