"""What is compared: an arm is a method under flip rates, assumed rates and a fairness weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from algorithms import jrf, noise
from algorithms.noise import TransitionMatrix

Rates = tuple[float, float]

METHODS = {
  "none": "no penalty, no correction",
  "naive": "plain penalty on noisy groups at lambda",
  "naive_scaled": "plain penalty at lambda_eff, the weight that the exact correction amounts to",
  "reweight": "rows weighted by 1 / size of their noisy (group, label) cell",
  "forward": "forward correction only",
  "forward_naive": "forward correction, plain penalty on noisy groups at lambda",
  "mirl": "exact gap correction only",
  "jrf": "forward and exact gap correction",
  "jrf_paper": "forward and the authors' gap correction",
  "mirl_paper": "the authors' gap correction only",
  "oracle": "forward correction, plain penalty on clean groups",
}
_FORWARD = ("forward", "forward_naive", "jrf", "jrf_paper", "oracle")
_PENALISED = (
  "naive",
  "naive_scaled",
  "forward_naive",
  "mirl",
  "jrf",
  "jrf_paper",
  "mirl_paper",
  "oracle",
)
_CORRECTED = ("mirl", "jrf", "jrf_paper", "mirl_paper")
_PAPER_MODE = ("jrf_paper", "mirl_paper")


@dataclasses.dataclass(frozen=True)
class Arm:
  """One column of a table.

  method: a key of METHODS.
  label, attribute: flip rates `(P(1 | 0), P(0 | 1))` put on the training rows.
  fairness_weight: lambda.
  assumed_attribute: flip rates of the groups that the method is told; the true ones by default.
  """

  method: str
  label: Rates
  attribute: Rates
  fairness_weight: float
  assumed_attribute: Rates | None = None

  @property
  def mode(self) -> str:
    return "paper" if self.method in _PAPER_MODE else "exact"


def problem(arm: Arm, noisy_prior: jax.Array) -> jrf.JRFProblem:
  """The arm as the arrays that `algorithms.jrf` takes; `noisy_prior` `[2]` shares of the groups."""
  label = TransitionMatrix.binary(*arm.label)
  attribute = TransitionMatrix.binary(*(arm.assumed_attribute or arm.attribute))
  weight = arm.fairness_weight if arm.method in _PENALISED else 0.0
  if arm.method == "naive_scaled":
    weight = weight * jrf.gap_scale(noisy_prior, attribute, "exact")
  identity = TransitionMatrix.identity(2)
  return jrf.JRFProblem(
    label_transition=label if arm.method in _FORWARD else identity,
    attribute_transition=attribute if arm.method in _CORRECTED else identity,
    fairness_weight=jnp.asarray(weight, jnp.float32),
  )


def row_weights(arm: Arm, labels: jax.Array, attribute: jax.Array) -> jax.Array:
  """`[N]` weights of the training rows, mean 1."""
  if arm.method != "reweight":
    return jnp.ones(labels.shape, jnp.float32)
  weights = jrf.reweighting(attribute, labels).astype(jnp.float32)
  return weights / jnp.mean(weights)


def seen_attribute(arm: Arm, clean: jax.Array, noisy: jax.Array) -> jax.Array:
  """Groups that the arm's penalty sees."""
  return clean if arm.method == "oracle" else noisy


def validate(arms: Sequence[Arm], labels: np.ndarray, attribute: np.ndarray) -> None:
  """Refuses rates that cannot be inverted or that the data rule out, before any training.

  Raises:
    ValueError: naming the key of the config, what it holds and what is possible.
  """
  for name, clean, channels in (
    ("config.noise.label", labels, {(a.label, a.label) for a in arms}),
    (
      "config.noise.attribute",
      attribute,
      {(a.attribute, a.assumed_attribute or a.attribute) for a in arms},
    ),
  ):
    for true, assumed in sorted(channels):
      noise.validate_transition(TransitionMatrix.binary(*true), name)
      noise.validate_transition(TransitionMatrix.binary(*assumed), name)
      noise.validate_rates(noisy_shares(clean, true), TransitionMatrix.binary(*assumed), name)


def noisy_shares(clean: np.ndarray, rates: Rates) -> np.ndarray:
  """`[2]` shares to expect of values flipped at these rates."""
  shares = np.bincount(clean, minlength=2) / clean.size
  return shares @ np.asarray(TransitionMatrix.binary(*rates).matrix)
