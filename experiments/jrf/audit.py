"""What an auditor can say who sees only noisy groups, held against the clean truth.

The groups of the test rows are flipped too, and the gap of a trained model is estimated from
them; its interval should cover the gap on the clean groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from algorithms import jrf
from algorithms.noise import TransitionMatrix, estimate_anchor, estimate_confident_joint, flip
from experiments.datasets.tabular import Tabular
from experiments.jrf.arms import Arm
from experiments.jrf.training import Training, noise_keys, noisy_rows, split
from launch.run import Run
from models.mlp import build_mlp

DELTA = 0.05


def audit(
  run: Run,
  data: Tabular,
  arms: Sequence[Arm],
  scores: np.ndarray,
  assumed_rates: Sequence[float],
  config: ml_collections.ConfigDict,
  training: Training,
) -> dict[str, Any]:
  """Audits the JRF model of every seed from flipped groups, and estimates the flip rates.

  Args:
    run: for keys.
    data: the data set.
    arms: arms of the main table.
    scores: `[S, A, N]` scores of the main table on the test rows.
    assumed_rates: R rates for the sensitivity curve, all possible.
    config: of the experiment.
    training: of the main table.

  Returns:
    `[S]` arrays: "clean_gap", "estimate" and "half_width" of the gap of the JRF model,
    "noisy_gap" without correction; `[S, R]` "sensitivity" of the estimate to the assumed rate and
    `[S]` "worst_case" over them; "rates": for each estimator `[S', 2]` off-diagonal rates.
  """
  index = next(i for i, arm in enumerate(arms) if arm.method == "jrf")
  channel = TransitionMatrix.binary(*arms[index].attribute)
  rates = jnp.asarray(assumed_rates, jnp.float32)
  results: dict[str, list[Any]] = {}
  for seed in range(scores.shape[0]):
    test = split(data, run.key(f"split/seed={seed}"), training)["test"]
    noisy = flip(run.key(f"audit/seed={seed}"), jnp.asarray(test.attribute), channel)
    found = _audit(jnp.asarray(scores[seed, index]), jnp.asarray(test.attribute), noisy, rates)
    found |= _estimate(jnp.asarray(scores[seed, index]), noisy, channel)
    for name, value in found.items():
      results.setdefault(name, []).append(np.asarray(value))
  audited: dict[str, Any] = {name: np.stack(values) for name, values in results.items()}
  audited["rates"] = _estimated_rates(run, data, arms[index], config, training)
  return audited


@jax.jit
def _audit(
  scores: jax.Array, clean: jax.Array, noisy: jax.Array, rates: jax.Array
) -> dict[str, jax.Array]:
  ones = jnp.ones_like(scores)
  identity = TransitionMatrix.identity(2)
  mass, prior = jrf.group_mass(scores, noisy, ones, 2)
  channels = jax.vmap(TransitionMatrix.symmetric)(rates)
  return {
    "clean_gap": jrf.mirl_gap(*jrf.group_mass(scores, clean, ones, 2), identity),
    "noisy_gap": jrf.mirl_gap(mass, prior, identity),
    "sensitivity": jrf.sensitivity_sweep(mass, prior, rates),
    "worst_case": jrf.worst_case_gap(mass, prior, channels)[0],
  }


@jax.jit
def _estimate(
  scores: jax.Array, noisy: jax.Array, channel: TransitionMatrix
) -> dict[str, jax.Array]:
  mass, prior = jrf.group_mass(scores, noisy, jnp.ones_like(scores), 2)
  counts = jnp.bincount(noisy, length=2)
  return {
    "estimate": jrf.mirl_gap(mass, prior, channel),
    "half_width": jrf.gap_confidence(counts, channel, DELTA),
  }


def _estimated_rates(
  run: Run, data: Tabular, arm: Arm, config: ml_collections.ConfigDict, training: Training
) -> dict[str, np.ndarray]:
  """Flip rates of labels and groups, estimated from a plain model of the noisy values.

  The model is fitted on the training rows and read on the validation rows.
  """
  if training.validation_fraction == 0:
    return {}
  init, apply_fn = build_mlp(data.features.shape[1], training.hidden, initial=training.initial)
  problem = jrf.JRFProblem(
    TransitionMatrix.identity(2), TransitionMatrix.identity(2), jnp.zeros(())
  )

  @jax.jit
  def probabilities(key, train, train_target, held_out, held_out_target):
    batch, validation = (
      jrf.Batch(x, target, target, jnp.ones(target.shape))
      for x, target in ((train, train_target), (held_out, held_out_target))
    )
    state = jrf.init(init(key), training.jrf_config("exact", None))
    state, _ = jrf.run(
      state, apply_fn, batch, problem, training.jrf_config("exact", None), 60, validation, 10
    )
    positive = jax.nn.sigmoid(apply_fn(state.best_params, held_out))
    return jnp.stack([1 - positive, positive], axis=1)

  found: dict[str, list[Any]] = {}
  for seed in range(config.sweeps.seeds):
    parts = split(data, run.key(f"split/seed={seed}"), training)
    train_key, held_out_key = noise_keys(run, seed)
    train, _ = noisy_rows(parts["train"], arm, train_key)
    held_out, _ = noisy_rows(parts["validation"], arm, held_out_key)
    for what in ("labels", "attribute"):
      target, held_out_target = getattr(train, what), getattr(held_out, what)
      probs = probabilities(
        run.key(f"rates/{what}/seed={seed}"),
        parts["train"].features,
        target,
        parts["validation"].features,
        held_out_target,
      )
      for name, estimated in (
        ("anchor", estimate_anchor(probs)),
        ("confident joint", estimate_confident_joint(probs, held_out_target)),
      ):
        matrix = np.asarray(estimated.matrix)
        found.setdefault(f"{what}, {name}", []).append([matrix[0, 1], matrix[1, 0]])
  return {name: np.asarray(values) for name, values in found.items()}
