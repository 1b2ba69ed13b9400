"""Corrected group gaps (the matrix-inverse robust loss) and their relatives.

Everything works on two vectors over observed groups, the joint mass `s_k = E[f 1(An = k)]` of a
score f and the share `q_k = P(An = k)`. Both are plain means over rows, so they add up over
devices and minibatches; the gap is not linear in them and does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from algorithms.noise import TransitionMatrix, implied_prior

__all__ = [
  "MODES",
  "PENALTIES",
  "REDUCTIONS",
  "equal_opportunity_gap",
  "equalised_odds_gap",
  "group_mass",
  "group_means",
  "joint_group_mass",
  "joint_transition",
  "mirl_gap",
  "penalise",
  "reweighting",
  "sensitivity_sweep",
  "worst_case_gap",
]

MODES = ("exact", "paper", "paper_v2")
REDUCTIONS = ("binary", "max", "pairwise")
PENALTIES = ("abs", "squared", "smooth")

# Constants of the authors' code.
_PAPER_MIN_DET = 0.05
_PAPER_PLAIN_RATE = 0.01

# Rounds the corner of |gap| below gaps of about its square root, 0.001.
_SMOOTH_EPSILON = 1e-6

_PRECISION = jax.lax.Precision.HIGHEST


def group_mass(
  scores: jax.Array,
  attribute: jax.Array,
  weights: jax.Array,
  num_groups: int,
  axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Joint mass of the scores and share of the rows in each observed group.

  Args:
    scores: `[B]` f in [0, 1].
    attribute: `[B]` int, observed group in 0..K-1.
    weights: `[B]` non-negative; 0 marks a padding row.
    num_groups: K.
    axis_name: mesh axis that the rows are sharded on inside `jax.shard_map`; sums are added over
      it before the division, so that every device gets the global answer.

  Returns:
    `(mass, prior)`, each `[K]`: `s_k = sum w f 1(a = k) / sum w`, `q_k = sum w 1(a = k) / sum w`.

  Raises:
    ValueError: if the three arrays differ in shape.
  """
  if not scores.shape == attribute.shape == weights.shape:
    raise ValueError(
      f"scores, attribute and weights have shapes {scores.shape}, {attribute.shape} and "
      f"{weights.shape} (expected one [B] for all); drop trailing axes of size 1."
    )
  member = jax.nn.one_hot(attribute, num_groups, dtype=scores.dtype)
  weights = weights.astype(scores.dtype)
  rows = jnp.stack([weights * scores, weights])
  sums = jnp.matmul(rows, member, precision=_PRECISION)
  if axis_name is not None:
    sums = jax.lax.psum(sums, axis_name)
  total = jnp.sum(sums[1])
  sums = sums / jnp.where(total > 0, total, 1.0)
  return sums[0], sums[1]


def group_means(
  mass: jax.Array, prior: jax.Array, transition: TransitionMatrix, mode: str = "exact"
) -> tuple[jax.Array, jax.Array]:
  """Mean score of each clean group, estimated from observed groups.

  `exact`: `t = T^-T s`, `pi = T^-T q`, `mu_j = t_j / pi_j`; true for any K, priors and invertible
  T. `paper`: the authors' code mixes observed group means instead of masses,
  `mu0_hat = [(1 - r10) mu0 - r01 mu1] / D`, `mu1_hat = [(1 - r01) mu1 - r10 mu0] / D`. With equal
  rates e, `D = max(1 - 2 e, 0.05)` and no correction at all for `e <= 0.01`; with different rates
  `D = 1 - r01 - r10`, its size floored at 0.05 and its sign kept. `paper_v2`: the same with r01
  and r10 exchanged in the off-diagonal terms, as in the authors' benchmark script; it is wrong
  unless the rates are equal and serves only to reproduce their table.

  Args:
    mass: `[K]` s.
    prior: `[K]` q.
    transition: channel of the attribute, K values.
    mode: one of `MODES`.

  Returns:
    `(means, present)`, each `[K]`. A group is absent where nothing was observed in it or, in mode
    `exact`, where its implied clean share is not positive; its mean is then 0, with gradient 0.

  Raises:
    ValueError: if the mode is unknown, or is a paper mode and K is not 2.
  """
  if mode not in MODES:
    raise ValueError(f"mode is {mode!r} (expected one of {MODES}).")
  if mode == "exact":
    clean_mass = implied_prior(mass, transition)
    clean_prior = implied_prior(prior, transition)
    present = (prior > 0) & (clean_prior > 0)
    means = jnp.where(present, clean_mass / jnp.where(present, clean_prior, 1.0), 0.0)
    return means, present

  if transition.num_classes != 2:
    raise ValueError(
      f"mode {mode!r} is defined for 2 groups only and transition has {transition.num_classes}; "
      "use mode 'exact'."
    )
  present = prior > 0
  observed = jnp.where(present, mass / jnp.where(present, prior, 1.0), 0.0)
  rate_01, rate_10 = transition.matrix[0, 1], transition.matrix[1, 0]
  symmetric = rate_01 == rate_10
  det = 1.0 - rate_01 - rate_10
  sign = jnp.where(det < 0, -1.0, 1.0)
  det = jnp.where(
    symmetric,
    jnp.maximum(det, _PAPER_MIN_DET),
    sign * jnp.maximum(jnp.abs(det), _PAPER_MIN_DET),
  )
  mixed_01, mixed_10 = (rate_01, rate_10) if mode == "paper" else (rate_10, rate_01)
  corrected = jnp.stack(
    [
      ((1.0 - rate_10) * observed[0] - mixed_01 * observed[1]) / det,
      ((1.0 - rate_01) * observed[1] - mixed_10 * observed[0]) / det,
    ]
  )
  plain = symmetric & (rate_01 <= _PAPER_PLAIN_RATE)
  return jnp.where(plain, observed, corrected), present


def _reduce(means: jax.Array, present: jax.Array, reduction: str) -> jax.Array:
  """Turns `[K]` means of the present groups into one gap, 0 if fewer than two are present."""
  if reduction not in REDUCTIONS:
    raise ValueError(f"reduction is {reduction!r} (expected one of {REDUCTIONS}).")
  num_groups = means.shape[0]
  if reduction == "binary":
    if num_groups != 2:
      raise ValueError(
        f"reduction 'binary' is for 2 groups and there are {num_groups}; use 'max' or 'pairwise'."
      )
    return jnp.where(jnp.all(present), jnp.abs(means[1] - means[0]), 0.0)
  if reduction == "max":
    high = jnp.max(jnp.where(present, means, -jnp.inf))
    low = jnp.min(jnp.where(present, means, jnp.inf))
    return jnp.where(jnp.any(present), high - low, 0.0)
  first, second = jnp.triu_indices(num_groups, k=1)
  both = present[first] & present[second]
  differences = jnp.where(both, jnp.abs(means[first] - means[second]), 0.0)
  return jnp.sum(differences) / jnp.maximum(jnp.sum(both), 1)


def mirl_gap(
  mass: jax.Array,
  prior: jax.Array,
  transition: TransitionMatrix,
  mode: str = "exact",
  reduction: str = "binary",
) -> jax.Array:
  """Demographic-parity gap of the clean groups, estimated from the observed ones.

  Args:
    mass: `[K]` s, from `group_mass`.
    prior: `[K]` q, from `group_mass`.
    transition: channel of the attribute, K values; the identity gives the uncorrected gap.
    mode: see `group_means`.
    reduction: `binary` is `|mu_1 - mu_0|`, `max` the range over present groups, `pairwise` the
      mean absolute difference over pairs of present groups (the last two inferred).

  Returns:
    `[]` gap, in units of the score. 0 where fewer than two groups are present.

  Raises:
    ValueError: for an unknown mode or reduction, or one that is binary when K is not 2.
  """
  means, present = group_means(mass, prior, transition, mode)
  return _reduce(means, present, reduction)


def penalise(gap: jax.Array, penalty: str = "abs") -> jax.Array:
  """Shape of the penalty: `abs` (the authors'), `squared`, or `smooth`.

  `smooth` is `sqrt(gap^2 + eps) - sqrt(eps)` with eps = 1e-6 (inferred): no jump in the gradient
  at a gap of 0, and the same slope as `abs` away from it.

  Args:
    gap: `[]` non-negative.
    penalty: one of `PENALTIES`.

  Raises:
    ValueError: if the penalty is unknown.
  """
  if penalty == "abs":
    return gap
  if penalty == "squared":
    return jnp.square(gap)
  if penalty == "smooth":
    return jnp.sqrt(jnp.square(gap) + _SMOOTH_EPSILON) - _SMOOTH_EPSILON**0.5
  raise ValueError(f"penalty is {penalty!r} (expected one of {PENALTIES}).")


def joint_transition(attribute: TransitionMatrix, label: TransitionMatrix) -> TransitionMatrix:
  """Channel of the cell (attribute, label) when the two are flipped independently (inferred).

  Args:
    attribute: K values.
    label: 2 values.

  Returns:
    Channel over 2K cells, cell `(a, y)` at index `2 a + y`.
  """
  return TransitionMatrix(jnp.kron(attribute.matrix, label.matrix))


def joint_group_mass(
  scores: jax.Array,
  attribute: jax.Array,
  labels: jax.Array,
  weights: jax.Array,
  num_groups: int,
  axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`group_mass` over the 2K observed cells (attribute, label), cell `(a, y)` at `2 a + y`.

  Args:
    scores: `[B]` f in [0, 1].
    attribute: `[B]` int, observed group in 0..K-1.
    labels: `[B]` int, observed label in {0, 1}.
    weights: `[B]` non-negative; 0 marks a padding row.
    num_groups: K.
    axis_name: see `group_mass`.

  Returns:
    `(mass, prior)`, each `[2K]`.
  """
  return group_mass(scores, 2 * attribute + labels, weights, 2 * num_groups, axis_name)


def equal_opportunity_gap(
  mass: jax.Array, prior: jax.Array, transition: TransitionMatrix, reduction: str = "binary"
) -> jax.Array:
  """Gap in mean score between clean groups among clean positives (inferred extension).

  Args:
    mass: `[2K]` from `joint_group_mass`.
    prior: `[2K]` from `joint_group_mass`.
    transition: joint channel, from `joint_transition`.
    reduction: see `mirl_gap`.

  Returns:
    `[]` gap, in units of the score.
  """
  means, present = group_means(mass, prior, transition, "exact")
  return _reduce(means[1::2], present[1::2], reduction)


def equalised_odds_gap(
  mass: jax.Array, prior: jax.Array, transition: TransitionMatrix, reduction: str = "binary"
) -> jax.Array:
  """Larger of the gaps among clean positives and among clean negatives (inferred extension).

  Arguments and result are those of `equal_opportunity_gap`.
  """
  means, present = group_means(mass, prior, transition, "exact")
  return jnp.maximum(
    _reduce(means[0::2], present[0::2], reduction), _reduce(means[1::2], present[1::2], reduction)
  )


def worst_case_gap(
  mass: jax.Array,
  prior: jax.Array,
  transitions: TransitionMatrix,
  mode: str = "exact",
  reduction: str = "binary",
) -> tuple[jax.Array, jax.Array]:
  """Largest corrected gap over a set of channels that the user holds possible (inferred).

  A channel that the observed shares rule out (an implied clean share is not positive) counts as 0.

  Args:
    mass: `[K]` s.
    prior: `[K]` q.
    transitions: R channels, `matrix` is `[R, K, K]`; `jax.vmap(TransitionMatrix.symmetric)(rates)`
      makes one from an interval of rates.
    mode: see `group_means`.
    reduction: see `mirl_gap`.

  Returns:
    `(gap, index)`: `[]` gap and `[]` int32 index of the channel that attains it.
  """
  gaps = jax.vmap(lambda transition: mirl_gap(mass, prior, transition, mode, reduction))(
    transitions
  )
  index = jnp.argmax(gaps).astype(jnp.int32)
  return gaps[index], index


def sensitivity_sweep(
  mass: jax.Array,
  prior: jax.Array,
  rates: jax.Array,
  mode: str = "exact",
  reduction: str = "binary",
) -> jax.Array:
  """Corrected gap under each of several assumed symmetric flip rates.

  Args:
    mass: `[K]` s.
    prior: `[K]` q.
    rates: `[R]` assumed rates.
    mode: see `group_means`.
    reduction: see `mirl_gap`.

  Returns:
    `[R]` gaps; 0 where the observed shares rule the rate out.
  """
  num_groups = mass.shape[0]

  def corrected(rate: jax.Array) -> jax.Array:
    return mirl_gap(mass, prior, TransitionMatrix.symmetric(rate, num_groups), mode, reduction)

  return jax.vmap(corrected)(rates)


def reweighting(attribute: jax.Array, labels: jax.Array, num_groups: int = 2) -> jax.Array:
  """Inverse-probability weights over observed cells, the authors' baseline.

  Args:
    attribute: `[B]` int, observed group in 0..K-1.
    labels: `[B]` int, observed label in {0, 1}.
    num_groups: K.

  Returns:
    `[B]` weights `n / (2 K n_ay)`; they sum to n if no cell is empty.
  """
  cell = 2 * attribute + labels
  counts = jnp.bincount(cell, length=2 * num_groups)
  share = attribute.shape[0] / (2 * num_groups)
  return (share / jnp.maximum(counts, 1))[cell]
