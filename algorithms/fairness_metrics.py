"""Quality and parity of a scored test set, in one jit-able call.

Accuracy and the thresholded gap alone cannot tell a fair classifier from one that predicts a
single class for everybody, so `evaluate` gives what can: the rate of positive predictions,
balanced accuracy, AUC, the gap of the scores, and the gap at a matched positive rate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["DEGENERATE_RATE", "evaluate", "weighted_auc"]

# A predictor that gives (almost) everybody one class is reported as degenerate.
DEGENERATE_RATE = 0.01

_THRESHOLD = 0.5


def weighted_auc(scores: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
  """Area under the ROC curve by ranks; a tied pair counts one half.

  Args:
    scores: `[N]`.
    labels: `[N]` int in {0, 1}.
    weights: `[N]` non-negative.

  Returns:
    `[]` area; NaN if a class has no weight.
  """
  positive = weights * (labels == 1)
  negative = weights * (labels == 0)
  order = jnp.argsort(scores)
  ranked = scores[order]
  below = jnp.concatenate([jnp.zeros(1, negative.dtype), jnp.cumsum(negative[order])])
  strictly = below[jnp.searchsorted(ranked, scores, side="left")]
  at_most = below[jnp.searchsorted(ranked, scores, side="right")]
  wins = jnp.sum(positive * (strictly + at_most)) / 2.0
  return wins / (jnp.sum(positive) * jnp.sum(negative))


def _share(values: jax.Array, weights: jax.Array) -> jax.Array:
  return jnp.sum(values * weights) / jnp.sum(weights)


def _gap(values: jax.Array, member: jax.Array) -> jax.Array:
  """Range over groups with weight of the mean of `[N]` values; member is `[K, N]` weights."""
  totals = jnp.sum(member, axis=1)
  sums = jnp.sum(member * values[None, :], axis=1)
  means = sums / jnp.where(totals > 0, totals, 1.0)
  high = jnp.max(jnp.where(totals > 0, means, -jnp.inf))
  low = jnp.min(jnp.where(totals > 0, means, jnp.inf))
  return high - low


def evaluate(
  scores: jax.Array,
  labels: jax.Array,
  attribute: jax.Array,
  weights: jax.Array | None = None,
  num_groups: int = 2,
) -> dict[str, jax.Array]:
  """Scores against clean labels and clean groups.

  Args:
    scores: `[N]` predicted P(Y = 1 | x); vmappable with the other arguments shared.
    labels: `[N]` int, clean labels in {0, 1}.
    attribute: `[N]` int, clean groups in 0..K-1.
    weights: `[N]` non-negative, 0 marks a padding row; all ones if left out.
    num_groups: K.

  Returns:
    `[]` each. Predictions are `score > 0.5` unless said otherwise; gaps are the range over groups.
      accuracy, balanced_accuracy: the latter is the mean over the classes that occur.
      auc: NaN if a class does not occur.
      base_rate: share of positive labels.
      positive_rate: share of positive predictions.
      soft_gap: gap in mean score. hard_gap: gap in positive rate.
      matched_gap: gap in positive rate at the highest threshold that makes the positive rate at
        least the base rate. matched_positive_rate: that rate, above the base rate if scores tie.
      degenerate: bool, positive_rate below 1% or above 99%.
  """
  weights = jnp.ones_like(scores) if weights is None else weights.astype(scores.dtype)
  member = (attribute[None, :] == jnp.arange(num_groups)[:, None]) * weights[None, :]
  positive = labels == 1
  predicted = scores > _THRESHOLD
  correct = predicted == positive
  base_rate = _share(positive, weights)
  positive_rate = _share(predicted, weights)

  class_weights = jnp.stack([jnp.sum(weights * ~positive), jnp.sum(weights * positive)])
  class_hits = jnp.stack(
    [jnp.sum(weights * (correct & ~positive)), jnp.sum(weights * (correct & positive))]
  )
  recalls = class_hits / jnp.where(class_weights > 0, class_weights, 1.0)

  order = jnp.argsort(-scores)
  reached = jnp.cumsum(weights[order]) / jnp.sum(weights)
  # Rounding in the cumulative sum must not push the threshold past the row that attains the rate.
  slack = 8 * jnp.finfo(scores.dtype).eps
  threshold = scores[order][jnp.argmax(reached >= base_rate * (1.0 - slack))]
  matched = scores >= threshold

  return {
    "accuracy": _share(correct, weights),
    "balanced_accuracy": jnp.sum(recalls) / jnp.sum(class_weights > 0),
    "auc": weighted_auc(scores, labels, weights),
    "base_rate": base_rate,
    "positive_rate": positive_rate,
    "soft_gap": _gap(scores, member),
    "hard_gap": _gap(predicted, member),
    "matched_gap": _gap(matched, member),
    "matched_positive_rate": _share(matched, weights),
    "degenerate": (positive_rate < DEGENERATE_RATE) | (positive_rate > 1.0 - DEGENERATE_RATE),
  }
