"""Statistics of claims against SciPy and hand-made numbers, and the verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from launch.claims import Estimate, claim_row, estimate, paired_t, verdict


@pytest.mark.parametrize("n", [2, 3, 10, 100])
def test_estimate_is_students_interval(n):
  values = np.random.default_rng(n).normal(3, 2, n)
  found = estimate(values)
  low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
  assert found.n == n
  np.testing.assert_allclose([found.mean, *found.ci95], [values.mean(), low, high], rtol=1e-12)


def test_estimate_by_hand():
  # Mean 2, standard deviation 1, standard error 1 / sqrt(3); t(0.975, 2) = 4.302653 by table.
  found = estimate([1.0, 2.0, 3.0])
  assert found.mean == 2
  np.testing.assert_allclose(found.ci95, (2 - 2.484137, 2 + 2.484137), atol=1e-5)
  assert str(found) == "2 [-0.4841, 4.484]"
  assert estimate([5.0]) == Estimate(5.0, None, 1)
  assert str(estimate([5.0])) == "5 (n = 1)"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_estimate_refuses(values):
  with pytest.raises(ValueError, match="expected at least one number, all of them finite"):
    estimate(values)


def test_paired_t_is_scipys():
  generator = np.random.default_rng(0)
  a, b = generator.normal(1, 1, 12), generator.normal(0, 1, 12)
  assert paired_t(a, b) == pytest.approx(stats.ttest_rel(a, b).statistic, rel=1e-12)
  assert paired_t(a, b) == pytest.approx(-paired_t(b, a), rel=1e-12)


def test_paired_t_of_a_constant_difference():
  assert paired_t([1, 2], [1, 2]) == 0
  assert paired_t([2, 3], [1, 2]) == math.inf
  assert paired_t([1, 2], [2, 3]) == -math.inf


@pytest.mark.parametrize(("a", "b"), [([1], [1]), ([1, 2], [1, 2, 3]), ([], [])])
def test_paired_t_refuses(a, b):
  with pytest.raises(ValueError, match=f"got {len(a)} and {len(b)} values"):
    paired_t(a, b)


@pytest.mark.parametrize(
  ("outcomes", "expected"),
  [
    ([True], "reproduced"),
    ([True, True], "reproduced"),
    ([np.True_], "reproduced"),
    ([True, False], "partly"),
    ([True, None], "partly"),
    ([True, False, None], "partly"),
    ([False], "not reproduced"),
    ([False, np.False_], "not reproduced"),
    ([False, None], "not reproduced"),
    ([None], "not tested"),
    ([None, None], "not tested"),
  ],
)
def test_verdict(outcomes, expected):
  assert verdict({f"criterion {i}": held for i, held in enumerate(outcomes)}) == expected


def test_claim_row():
  criteria = {"t > 3": np.True_, "gap < 1": False, "on a TPU": None}
  row = claim_row(
    "a", "It works", source="paper", criteria=criteria, measured="2", value=estimate([1.0, 3.0])
  )
  assert row["test"] == "t > 3: held; gap < 1: failed; on a TPU: not tested"
  assert (row["verdict"], row["value"], row["n"], row["paper_value"]) == ("partly", 2.0, 2, "")
  low, high = stats.t.interval(0.95, 1, loc=2, scale=1)
  np.testing.assert_allclose(row["ci95"], [low, high])
  row = claim_row("a", "s", source="ours", criteria={"x": True}, measured="1", n=4)
  assert (row["value"], row["ci95"], row["n"]) == (None, None, 4)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"source": "hearsay", "criteria": {"x": True}}, "source = 'hearsay'; expected one of paper,"),
    ({"source": "paper", "criteria": {}}, "claim a has no criteria"),
  ],
)
def test_claim_row_refuses(fields, message):
  with pytest.raises(ValueError, match=message):
    claim_row("a", "s", measured="", **fields)
