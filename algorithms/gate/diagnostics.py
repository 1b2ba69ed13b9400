"""What the reader of an estimate should be told about its design."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEW_CLUSTERS = 50  # the claims on intervals ask for as many
ILL_CONDITIONED = 1e8


def warnings(
  shares: Sequence[float],
  num_clusters: int,
  *,
  num_isolated: int = 0,
  features: str = "linear",
  condition: float = 1.0,
  trend: bool = False,
) -> list[str]:
  """Warnings in plain words, most serious first, on the host.

  Args:
    shares: treatment shares of the merged stages, in their order in time.
    num_clusters: number of randomisation units.
    num_isolated: nodes without neighbours.
    features: kind of the regression features.
    condition: condition number of the regression.
    trend: whether a trend over the stages is a column of the regression.
  """
  shares = np.asarray(shares, np.float64)
  distinct = np.unique(shares)
  found = []
  if distinct.size == 1:
    found.append(
      f"all stages have the share {distinct[0]:g}: v_b = 0, so merging removed no bias; add the "
      "stage before the experiment (share 0) or one of another share"
    )
  if features in ("quadratic", "spline") and distinct.size < 3:
    found.append(
      f"{features} features need three distinct shares and there are {distinct.size}: the curve "
      "between the shares is not seen, and full treatment is extrapolated from a line"
    )
  if not condition < ILL_CONDITIONED:
    found.append(
      f"the regression is ill-conditioned (condition number {condition:.2g}): its features are "
      "almost combinations of each other; use fewer, or merge more distinct shares"
    )
  small = [f"{p:g}" for p in distinct if 0 < p * num_clusters < 1]
  if small:
    found.append(
      f"a share of {', '.join(small)} of {num_clusters} randomisation units is less than one: such "
      "a stage may have treated nobody, so compare the realised share with the planned one"
    )
  if num_clusters < FEW_CLUSTERS:
    found.append(
      f"{num_clusters} randomisation units are few for cluster-robust intervals, which may be too "
      "short"
    )
  if num_isolated:
    found.append(
      f"{num_isolated} nodes are influenced by nobody: their exposure is 0 at every share, so the "
      "regression's means are not those of the bias formula"
    )
  steps = np.diff(shares)
  if distinct.size > 1 and (np.all(steps >= 0) or np.all(steps <= 0)):
    if trend:
      found.append(
        "the shares only rise (or fall), so the trend over stages takes most of what merging "
        "brings; units that are neither treated nor linked to treated ones at any stage would tell "
        "the two apart"
      )
    else:
      found.append(
        "the shares only rise (or fall) from stage to stage, so a trend in time cannot be told "
        "from the effect of the share; the estimate takes it as part of the effect"
      )
  return found
