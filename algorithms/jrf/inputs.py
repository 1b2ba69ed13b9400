"""Checks of training data on the host, before anything is traced."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike

from algorithms.noise import TransitionMatrix, validate_rates, validate_transition

__all__ = ["validate_inputs"]


def _check_features(features: np.ndarray) -> None:
  if features.ndim != 2:
    raise ValueError(f"features has shape {features.shape} (expected [N, D]).")
  bad = ~np.isfinite(features)
  if bad.any():
    columns = np.flatnonzero(bad.any(axis=0))
    listed = ", ".join(f"column {c}: {bad[:, c].sum()}" for c in columns[:5])
    more = f" and {columns.size - 5} more columns" if columns.size > 5 else ""
    raise ValueError(
      f"features holds NaN or infinity ({listed}{more}; expected finite numbers); impute or drop "
      "these rows."
    )


def _check_codes(codes: np.ndarray, name: str, num_values: int, num_rows: int) -> None:
  if codes.shape != (num_rows,):
    raise ValueError(
      f"{name} has shape {codes.shape} (expected ({num_rows},), one for each row of features)."
    )
  valid = np.isin(codes, np.arange(num_values))
  if not valid.all():
    found = np.unique(codes[~valid])[:5].tolist()
    raise ValueError(
      f"{name} holds {found} in {(~valid).sum()} rows (expected integers 0..{num_values - 1}); "
      "encode the values or drop these rows."
    )


def _sensitive_column(features: np.ndarray, attribute: np.ndarray, num_groups: int) -> int | None:
  """First column that varies, and does so only between groups."""
  groups = [features[attribute == group] for group in range(num_groups)]
  within = np.max([group.max(axis=0) - group.min(axis=0) for group in groups], axis=0)
  overall = features.max(axis=0) - features.min(axis=0)
  columns = np.flatnonzero((overall > 0) & (within <= 1e-6 * overall))
  return int(columns[0]) if columns.size else None


def validate_inputs(
  features: ArrayLike,
  labels: ArrayLike,
  attribute: ArrayLike,
  *,
  num_groups: int = 2,
  label_transition: TransitionMatrix | None = None,
  attribute_transition: TransitionMatrix | None = None,
  fairness_weight: ArrayLike = 0.0,
  forbid_sensitive: bool = False,
) -> None:
  """Refuses training data that would train to nonsense, with the reason.

  Args:
    features: `[N, D]`.
    labels: `[N]` observed labels.
    attribute: `[N]` observed groups. For `forbid_sensitive` pass them as recorded, before
      simulated flips hide the match.
    num_groups: K.
    label_transition: channel of the label; also checked against the observed label shares.
    attribute_transition: channel of the attribute; also checked against the observed group shares.
    fairness_weight: lambda, any shape.
    forbid_sensitive: refuse a feature that is a function of the attribute alone: the attribute,
      its complement, an indicator of one group, or a scaling of these.

  Raises:
    ValueError: for NaN or infinity in features, labels other than 0 and 1, groups outside 0..K-1,
      a group without rows, a channel that is invalid, unidentifiable or at odds with the observed
      shares, a negative or non-finite lambda, or a forbidden sensitive column.
  """
  features = np.asarray(features)
  labels, attribute = np.asarray(labels), np.asarray(attribute)
  _check_features(features)
  _check_codes(labels, "labels", 2, features.shape[0])
  _check_codes(attribute, "attribute", num_groups, features.shape[0])

  counts = np.bincount(attribute.astype(int), minlength=num_groups)
  empty = np.flatnonzero(counts == 0)
  if empty.size:
    raise ValueError(
      f"attribute has no row of group {empty[0]} (counts {counts.tolist()}; expected every group "
      "in the training set); merge groups, or lower num_groups."
    )
  if forbid_sensitive:
    column = _sensitive_column(features, attribute, num_groups)
    if column is not None:
      raise ValueError(
        f"features column {column} is a function of the sensitive attribute (expected none with "
        "forbid_sensitive=True); drop the column."
      )

  weight = np.asarray(fairness_weight)
  if not np.all(np.isfinite(weight)) or np.any(weight < 0):
    raise ValueError(f"fairness_weight is {weight} (expected finite and >= 0).")

  for name, transition, codes, size in (
    ("label_transition", label_transition, labels, 2),
    ("attribute_transition", attribute_transition, attribute, num_groups),
  ):
    if transition is None:
      continue
    validate_transition(transition, name)
    if transition.num_classes != size:
      raise ValueError(
        f"{name} has {transition.num_classes} values (expected {size}, as many as the data)."
      )
    validate_rates(np.bincount(codes.astype(int), minlength=size) / codes.size, transition, name)
