"""Fairlearn's reduction on the same noisy rows: a well-kept peer that knows of no group noise."""

from __future__ import annotations

from importlib import metadata

import ml_collections
import numpy as np

from algorithms import fairness_metrics
from experiments.datasets.tabular import Tabular
from experiments.jrf.arms import Arm
from experiments.jrf.training import Training, noise_keys, noisy_rows, split
from launch.run import Run


def run_seeds(
  run: Run, data: Tabular, arm: Arm, training: Training, config: ml_collections.ConfigDict
) -> dict[str, np.ndarray] | None:
  """Metrics `[S]` on the clean test rows; None without fairlearn.

  ExponentiatedGradient over logistic regression, demographic parity within 0.01, fitted on the
  labels and groups that the other methods see.
  """
  try:
    metadata.version("fairlearn")
  except metadata.PackageNotFoundError:
    run.warn("fairlearn is not installed, so it is not compared: pip install -e '.[peers]'")
    return None

  def fit_seed(seed: int) -> dict[str, float]:
    return fit(run, data, arm, training, config, seed)

  rows = []
  for seed in run.progress(range(config.fairlearn.seeds), "fairlearn seeds"):
    rows.append(run.unit(f"fairlearn seed={seed}", fit_seed, seed))
  return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def fit(
  run: Run,
  data: Tabular,
  arm: Arm,
  training: Training,
  config: ml_collections.ConfigDict,
  seed: int,
) -> dict[str, float]:
  """One seed: the split and flips are those of `train_table`."""
  from fairlearn.reductions import DemographicParity, ExponentiatedGradient
  from sklearn.linear_model import LogisticRegression

  parts = split(data, run.key(f"split/seed={seed}"), training)
  noisy, _ = noisy_rows(parts["train"], arm, noise_keys(run, seed)[0])
  model = ExponentiatedGradient(
    LogisticRegression(max_iter=200),
    DemographicParity(),
    eps=0.01,
    max_iter=config.fairlearn.iterations,
  )
  model.fit(
    parts["train"].features,
    np.asarray(noisy.labels),
    sensitive_features=np.asarray(noisy.attribute),
  )
  # The fitted model draws one of its classifiers for each row; this is the chance of a 1.
  scores = model._pmf_predict(parts["test"].features)[:, 1].astype(np.float32)
  metrics = fairness_metrics.evaluate(scores, parts["test"].labels, parts["test"].attribute)
  return {name: float(value) for name, value in metrics.items()}
