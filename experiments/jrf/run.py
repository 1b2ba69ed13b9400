"""Trains the tables of the JRF study, judges its claims and draws its figures."""

from __future__ import annotations

import dataclasses

import ml_collections
import numpy as np

from algorithms import jrf
from algorithms.noise import TransitionMatrix, implied_prior
from experiments.datasets import tabular
from experiments.jrf import arms as arms_lib
from experiments.jrf import audit, fairlearn_peer, figures, judge
from experiments.jrf.arms import Arm
from experiments.jrf.training import Training, train_table
from launch.run import Run

MAIN_METHODS = (
  "none",
  "naive",
  "naive_scaled",
  "reweight",
  "forward",
  "forward_naive",
  "mirl",
  "jrf",
  "jrf_paper",
  "oracle",
)
ASYMMETRIC_METHODS = ("naive", "naive_scaled", "forward_naive", "jrf", "jrf_paper", "oracle")
SWEPT_METHODS = ("naive", "forward_naive", "jrf", "oracle")
AUTHORS_METHODS = ("forward", "reweight", "naive", "mirl_paper", "jrf_paper")


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  """See README.md; each call below is a step of the study, kept as a unit of the run."""
  data = load(config)
  training = Training.from_config(config)
  run.say(
    f"{data.name}: {data.labels.size:,} rows, {data.features.shape[1]} features, "
    f"attribute {data.attribute_name} ({data.attribute_meaning})"
  )

  jrf.validate_inputs(
    data.features,
    data.labels,
    data.attribute,
    fairness_weight=(*config.fairness.weights, config.fairness.weight),
    forbid_sensitive=True,
  )
  possible = possible_rates(config, run, data)
  authors = authors_arms(config)
  # Whatever lambda will be, the rates are known: refuse them before time is spent on training.
  planned = sum(sweep_arms(config, 0.0, possible), main_arms(config, 0.0) + authors)
  arms_lib.validate(planned, data.labels, data.attribute)

  weight = config.fairness.weight or choose_weight(config, run, data, training)
  run.metric("fairness_weight", weight, "nats per unit of gap")
  main = main_arms(config, weight)
  table = run.unit(
    "main table",
    lambda: train_table(run, data, main, config.seeds, training, with_scores=True),
  )
  frontier, noise, assumed = sweep_arms(config, weight, possible)
  swept = frontier + noise + assumed
  sweeps = run.unit("sweeps", lambda: train_table(run, data, swept, config.sweeps.seeds, training))
  audited = run.unit(
    "audit",
    lambda: audit.audit(run, data, main, table["test_scores"], possible, config, training),
  )
  numeric = data if config.dataset.features == "numeric" else load(config, features="numeric")
  authors_table = run.unit(
    "authors' settings",
    lambda: train_table(run, numeric, authors, config.authors.seeds, authors_training(config)),
  )
  peer = fairlearn_peer.run_seeds(run, data, main[0], training, config)

  judge.record_metrics(run, "main", main, table["test"])
  judge.record_metrics(run, "authors", authors, authors_table["test"])
  judge.tables(run, main, table, authors, authors_table, peer)
  judge.claims(run, config, data, main, table, authors, authors_table, sweeps, swept, audited)
  figures.draw(run, config, frontier, noise, assumed, sweeps, audited, weight)


def load(config: ml_collections.ConfigDict, features: str | None = None) -> tabular.Tabular:
  """The data set of the config, or the first rows of it where a fraction is asked for."""
  c = config.dataset
  data = tabular.load(c.name, features=features or c.features, path=c.path or None)
  if not 0 < c.fraction <= 1:
    raise ValueError(f"config.dataset.fraction = {c.fraction}; expected more than 0, at most 1")
  kept = max(round(c.fraction * data.labels.size), 1)
  return dataclasses.replace(
    data,
    features=data.features[:kept],
    labels=data.labels[:kept],
    attribute=data.attribute[:kept],
  )


def main_arms(config: ml_collections.ConfigDict, weight: float) -> list[Arm]:
  """Arms of the main table, at the symmetric and the asymmetric flip rates of the groups."""
  label = tuple(config.noise.label)
  return [
    Arm(method, label, tuple(attribute), weight)
    for attribute, methods in (
      (config.noise.attribute, MAIN_METHODS),
      (config.noise.attribute_asymmetric, ASYMMETRIC_METHODS),
    )
    for method in methods
  ]


def choose_weight(
  config: ml_collections.ConfigDict, run: Run, data: tabular.Tabular, training: Training
) -> float:
  """The smallest lambda of the config whose clean-attribute oracle is fair enough.

  The clean groups of the validation rows are used for this only: it sets how much fairness is
  asked of every method alike, before any of them is compared.
  """
  label, attribute = tuple(config.noise.label), tuple(config.noise.attribute)
  grid = [Arm("oracle", label, attribute, weight) for weight in config.fairness.weights]
  oracle = run.unit("fairness weight", lambda: train_table(run, data, grid, config.seeds, training))
  part = "validation" if "validation" in oracle else "test"
  gaps = np.asarray(oracle[part]["soft_gap"]).mean(axis=0)
  reached = np.flatnonzero(gaps <= config.fairness.oracle_soft_gap)
  if not reached.size:
    run.warn(
      f"no fairness weight of {tuple(config.fairness.weights)} brings the oracle's soft gap to "
      f"{config.fairness.oracle_soft_gap} (smallest {gaps.min():.4f}); the largest weight is used"
    )
  index = int(reached[0]) if reached.size else len(gaps) - 1
  weight = float(config.fairness.weights[index])
  run.say(f"fairness weight {weight}: the oracle's soft gap on validation rows {gaps[index]:.4f}")
  return weight


def possible_rates(
  config: ml_collections.ConfigDict, run: Run, data: tabular.Tabular
) -> tuple[float, ...]:
  """The assumed rates that the noisy shares of the groups do not rule out.

  Raises:
    ValueError: when none is left.
  """
  shares = arms_lib.noisy_shares(data.attribute, tuple(config.noise.attribute))
  possible = tuple(
    float(rate)
    for rate in config.sweeps.assumed_rates
    if np.all(np.asarray(implied_prior(shares, TransitionMatrix.symmetric(rate))) > 0)
  )
  ruled_out = sorted(set(config.sweeps.assumed_rates) - set(possible))
  if not possible:
    raise ValueError(
      f"config.sweeps.assumed_rates = {tuple(config.sweeps.assumed_rates)}: the noisy group shares "
      f"{shares[0]:.3f} and {shares[1]:.3f} rule all of them out; expected rates below "
      f"{shares.min():.3f}"
    )
  if ruled_out:
    run.warn(
      f"assumed flip rates {ruled_out} are left out: a rate of {shares.min():.3f} or more cannot "
      "have produced the noisy group shares"
    )
  return possible


def sweep_arms(
  config: ml_collections.ConfigDict, weight: float, assumed_rates: tuple[float, ...]
) -> tuple[list[Arm], list[Arm], list[Arm]]:
  """Arms of the frontier over lambda, of the curve over noise rates, and over assumed rates."""
  label, attribute = tuple(config.noise.label), tuple(config.noise.attribute)
  frontier = [
    Arm(method, label, attribute, w) for method in SWEPT_METHODS for w in config.fairness.weights
  ]
  noise = [
    Arm(method, (rate, rate), (rate, rate), weight)
    for method in SWEPT_METHODS
    for rate in config.sweeps.noise_rates
  ]
  assumed = [
    Arm("jrf", label, attribute, weight, assumed_attribute=(rate, rate)) for rate in assumed_rates
  ]
  return frontier, noise, assumed


def authors_training(config: ml_collections.ConfigDict) -> Training:
  """The authors' code: no validation rows, no early stopping, standardised on all rows."""
  return dataclasses.replace(
    Training.from_config(config),
    hidden=tuple(config.authors.hidden),
    initial="uniform",  # their framework's default
    steps=config.authors.steps,
    weight_decay=0.0,
    early_stopping=False,
    validation_fraction=0.0,
    test_fraction=0.3,
    standardise_on="all",
    ema_decay=0.0,
    penalty="abs",
  )


def authors_arms(config: ml_collections.ConfigDict) -> list[Arm]:
  return [
    Arm(method, (rate, rate), (rate, rate), config.authors.fairness_weight)
    for rate in config.authors.noise_rates
    for method in AUTHORS_METHODS
  ]
