"""A field experiment with spill-overs: rice insurance in villages (Cai, de Janvry, Sadoulet 2015).

The 1,410 households of the second round live in 166 natural villages of 44 administrative ones. In
the first round a coin for each natural village made buying or not buying the default on the form;
in the second round households were sent to intensive or simple information sessions. Whether a
household takes up insurance depends on what others in the village did: spill-over is the subject.
The rows are second-round households that were told the first-round take-up (inferred).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_collections
import numpy as np

from algorithms import gate
from experiments.datasets import social_insure as data
from experiments.gate import figures
from launch.claims import Estimate
from launch.run import Run
from models import graph as graph_lib
from models.graph import Graph


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  """Three questions to the experiment: the default, the sessions, and what passes between."""
  columns = data.load()
  hamlet = np.unique(columns["address"], return_inverse=True)[1]
  village = np.unique(columns["village"], return_inverse=True)[1]
  takeup = np.asarray(columns["takeup_survey"], np.float64)
  default = np.asarray(columns["default"], np.float64)
  intensive = np.asarray(columns["intensive"], np.float64)
  before = np.asarray(columns["pre_takeup_rate"], np.float64)
  run.say(
    f"{takeup.size:,} households, {hamlet.max() + 1} natural villages (the units of the default), "
    f"{village.max() + 1} administrative villages; take-up {takeup.mean():.3f}"
  )

  rows = []
  own = _regress(np.arange(takeup.size), None, default, takeup, hamlet)
  rows.append(_row("default to buy, own natural village", own))
  first = _regress(np.arange(takeup.size), None, default, before, hamlet)
  rows.append(_row("default to buy, on first-round take-up", first))
  near, kept = _others(village, hamlet)
  wide = _regress(kept, near, default, takeup, hamlet)
  rows.append(_row("default to buy, with other natural villages", wide))
  alone = _regress(np.arange(takeup.size), None, intensive, takeup, hamlet)
  rows.append(_row("intensive session, own", alone))
  neighbours, kept_near = _others(hamlet, None)
  together = _regress(kept_near, neighbours, intensive, takeup, hamlet)
  rows.append(_row("intensive session, with neighbours' sessions", together))
  passed = _wald(default, before, takeup, hamlet)
  rows.append(_row("first-round take-up, default as instrument", passed))

  run.table(
    "Effects on second-round take-up",
    rows,
    "Probabilities; 95% intervals by natural village. With others: own treatment plus the share of "
    "treated among them, both moved from none to all. The last row is per unit of first-round "
    "take-up rate.",
  )
  for row in rows:
    run.metric(f"effect/{row['name']}", row["estimate"], "probability")
  run.warn(
    "a single stage: v_b = 0, so nothing is merged, and interference that the rows above do not "
    "name biases them"
  )
  _claims(run, int(hamlet.max()) + 1, own, first, together, passed)
  title = "Rice insurance: effects on second-round take-up"
  figures.draw_estimates(
    run, rows, title, "effect (probability; last row per unit of take-up rate)"
  )


def _others(group: np.ndarray, subgroup: np.ndarray | None) -> tuple[Graph, np.ndarray]:
  """Mean over the other households of a group, or those of other subgroups; and who has any.

  Households without such others are left out.
  """
  same = group[:, None] == group[None, :]
  same &= (
    ~np.eye(group.size, dtype=bool)
    if subgroup is None
    else (subgroup[:, None] != subgroup[None, :])
  )
  kept = np.flatnonzero(same.any(axis=1))
  receivers, senders = np.nonzero(same[np.ix_(kept, kept)])
  return graph_lib.from_edges(senders, receivers, kept.size), kept


def _regress(
  kept: np.ndarray,
  graph: Graph | None,
  z: np.ndarray,
  y: np.ndarray,
  cluster: np.ndarray,
) -> tuple[float, float, float, float]:
  """Effect of treating everybody, its standard error, and the ends of its interval."""
  operators = () if graph is None else (graph,)
  kind = "treatment" if graph is None else "linear"
  units = np.unique(cluster[kept], return_inverse=True)[1]
  treated, outcome = jnp.asarray(z[kept])[None], jnp.asarray(y[kept])[None]
  x = gate.design_matrix(kind, treated, gate.exposures(operators, treated))
  gate.check_features(x, gate.feature_names(kind, len(operators)))
  num_units = int(units.max()) + 1
  contrast = gate.contrast(kind, operators, kept.size)
  found = gate.ols(x, outcome, contrast, jnp.asarray(units), num_units)
  low, high = gate.interval(found, num_units)
  return float(found.tau), float(found.se), float(low), float(high)


def _wald(
  instrument: np.ndarray, treatment: np.ndarray, outcome: np.ndarray, cluster: np.ndarray
) -> tuple[float, float, float, float]:
  """Effect per unit of treatment with one instrument; the interval by the delta method.

  It is an effect of the treatment only if the instrument acts on the outcome through it alone.
  """
  everyone = np.arange(outcome.size)
  first = _regress(everyone, None, instrument, treatment, cluster)[0]
  ratio = _regress(everyone, None, instrument, outcome, cluster)[0] / first
  # The instrument's effect on this has mean zero, and its error is the ratio's times `first`.
  _, error, *_ = _regress(everyone, None, instrument, outcome - ratio * treatment, cluster)
  from scipy import stats

  half = float(stats.t.ppf(0.975, np.unique(cluster).size - 1)) * error / abs(first)
  return ratio, error / abs(first), ratio - half, ratio + half


def _row(name: str, found: tuple[float, float, float, float]) -> dict[str, Any]:
  return dict(zip(("name", "estimate", "se", "low", "high"), (name, *found), strict=True))


def _claims(
  run: Run,
  units: int,
  own: tuple[float, float, float, float],
  first: tuple[float, float, float, float],
  together: tuple[float, float, float, float],
  passed: tuple[float, float, float, float],
) -> None:
  def said(found: tuple[float, float, float, float]) -> dict[str, Any]:
    value = Estimate(found[0], (found[2], found[3]), units)
    return {"value": value, "measured": f"{value}"}

  run.claim(
    "default-spills-over",
    "A default to buy in the first round raises take-up of the second-round households of the "
    "natural village",
    source="ours",
    criteria={"the 95% interval is above 0": own[2] > 0},
    **said(own),
  )
  run.claim(
    "default-moves-first-round",
    "The default to buy raised first-round take-up of the natural village",
    source="ours",
    criteria={"the 95% interval is above 0": first[2] > 0},
    **said(first),
  )
  run.claim(
    "takeup-passes-on",
    "Second-round households follow the first-round take-up of their natural village (default as "
    "instrument, which is assumed to act through it alone)",
    source="ours",
    criteria={"the 95% interval is above 0": passed[2] > 0},
    **said(passed),
  )
  run.claim(
    "sessions-raise-takeup",
    "Sending everybody of the second round to an intensive session, own effect and neighbours' "
    "together, raises take-up",
    source="ours",
    criteria={"the 95% interval is above 0": together[2] > 0},
    **said(together),
  )
