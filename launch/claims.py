"""Statistics of claims, and verdicts computed from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SOURCES = ("paper", "authors' code", "derived", "ours")
REPRODUCED, PARTLY = "reproduced", "partly"
NOT_REPRODUCED, NOT_TESTED = "not reproduced", "not tested"
VERDICTS = (REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_TESTED)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over seeds with its 95% Student interval.

  ci95: `(low, high)`; None when there is a single value.
  """

  mean: float
  ci95: tuple[float, float] | None
  n: int

  def __str__(self) -> str:
    if self.ci95 is None:
      return f"{self.mean:.4g} (n = {self.n})"
    return f"{self.mean:.4g} [{self.ci95[0]:.4g}, {self.ci95[1]:.4g}]"


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
  """Mean and 95% interval of one number a seed.

  Raises:
    ValueError: no values, or a value that is not finite.
  """
  values = np.asarray(values, dtype=np.float64).reshape(-1)
  if values.size == 0 or not np.all(np.isfinite(values)):
    raise ValueError(f"values = {values}: expected at least one number, all of them finite")
  mean = float(values.mean())
  if values.size == 1:
    return Estimate(mean, None, 1)
  from scipy import stats

  half = float(stats.t.ppf(0.975, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
  return Estimate(mean, (mean - half, mean + half), int(values.size))


def paired_t(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
  """Student's t of the paired differences `a - b`; infinite when they are one constant.

  Raises:
    ValueError: fewer than two pairs, or unequal lengths.
  """
  a, b = np.asarray(a, np.float64).reshape(-1), np.asarray(b, np.float64).reshape(-1)
  if a.shape != b.shape or a.size < 2:
    raise ValueError(f"paired_t got {a.size} and {b.size} values; expected two or more pairs")
  difference = a - b
  mean, spread = difference.mean(), difference.std(ddof=1)
  if spread == 0:
    return float(math.copysign(math.inf, mean)) if mean else 0.0
  return float(mean / (spread / math.sqrt(a.size)))


def verdict(criteria: Mapping[str, bool | None]) -> str:
  """The verdict on a claim from its criteria.

  Args:
    criteria: text of each criterion and whether it held; None when it could not be tested.

  Returns:
    "reproduced" when every criterion held, "not reproduced" when none did, "not tested" when
    none could be tested, otherwise "partly".
  """
  tested = [bool(held) for held in criteria.values() if held is not None]
  if not tested:
    return NOT_TESTED
  if all(tested):
    return REPRODUCED if len(tested) == len(criteria) else PARTLY
  return PARTLY if any(tested) else NOT_REPRODUCED


def claim_row(
  id: str,
  statement: str,
  *,
  source: str,
  criteria: Mapping[str, bool | None],
  measured: str,
  paper_value: str = "",
  value: Estimate | None = None,
  n: int | None = None,
) -> dict[str, Any]:
  """The entry of a claim in results.json.

  Args:
    id: short name, unique in the experiment.
    statement: the sentence that is judged.
    source: where the sentence comes from, one of SOURCES.
    criteria: the decision rule; see `verdict`.
    measured: what was measured, in words and figures computed by the run.
    paper_value: what the paper prints, "" when it prints nothing.
    value: the main statistic with its interval.
    n: number of seeds, when there is no `value`.

  Raises:
    ValueError: unknown source, or no criterion.
  """
  if source not in SOURCES:
    raise ValueError(f"claim {id}: source = {source!r}; expected one of {', '.join(SOURCES)}")
  if not criteria:
    raise ValueError(f"claim {id} has no criteria; give at least one with its outcome")
  mark = {True: "held", False: "failed", None: "not tested"}
  return {
    "id": id,
    "statement": statement,
    "source": source,
    "paper_value": paper_value,
    "measured": measured,
    "value": None if value is None else value.mean,
    "ci95": None if value is None or value.ci95 is None else list(value.ci95),
    "n": value.n if value is not None else n,
    "test": "; ".join(
      f"{text}: {mark[None if held is None else bool(held)]}" for text, held in criteria.items()
    ),
    "verdict": verdict(criteria),
  }
