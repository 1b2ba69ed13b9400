"""Jointly robust fairness: parity under noisy labels and noisy sensitive attributes.

A classifier `f = sigmoid(logit(x))` is trained on observed labels Yn and groups An, which are
random flips of the clean Y and A with known rates, and should treat clean groups alike:

  L = mean BCE(f_fwd, Yn) + lambda * penalty(gap)

*Forward correction* (`forward_bce`): `f_fwd = (1 - r10) f + r01 (1 - f)` is what f predicts for
the observed label, so the loss is least at the clean posterior (Patrini et al. 2017).

*Matrix-inverse robust loss* (`mirl_gap`): let `s_k = E[f 1(An = k)]`, `t_j = E[f 1(A = j)]`,
`q = P(An)`, `pi = P(A)` and `T_jk = P(An = k | A = j)`. Then `s = T' t` and `q = T' pi`, so

  t = T^-T s,   pi = T^-T q,   mu_j = t_j / pi_j,   gap = |mu_1 - mu_0|

holds for any number of groups, any priors and any invertible T. For two groups the clean gap is
the observed one times `kappa = q0 q1 / (pi0 pi1 |1 - r01 - r10|)`.

Three modes of the correction:

- `exact` is that identity, and the default.
- `paper` is the authors' code. It inverts group means instead of masses and so scales the observed
  gap by `1 / |1 - r01 - r10|`, which is the clean gap only for balanced groups (or if the rates
  are read as P(A != An | An)); for a 2% group at rates of 0.3 it is ten times too small.
- `paper_v2` is the asymmetric formula of the authors' benchmark script, which exchanges the two
  rates. Its zero is not parity; it needs `paper_bug_compat=True` and reproduces their table only.

For two groups on a full batch both `exact` and `paper` multiply the observed gap by a constant, so
each trains the network of the uncorrected penalty with a larger lambda, from the same weights to
rounding. What the exact correction adds there is scale: a lambda, an early-stopping objective and
a reported gap in units of the clean gap. It changes the direction of the penalty for more groups
and for label-dependent criteria. A comparison at equal lambda alone measures the scale: show the
naive penalty at `kappa * lambda` (`gap_scale`) beside it.

Warning: a constant predictor has gap 0. With the authors' lambda of 15 the optimum is (nearly)
that predictor, whose accuracy is the majority rate and whose gap is 0. Neither number certifies
the method: report positive rate, balanced accuracy, AUC and the gap at a matched positive rate
too, as `algorithms.fairness_metrics.evaluate` does.

Sources: the paper's abstract, the authors' code (formulas of the two paper modes, constants),
Lamy et al. 2019 for the mutual-contamination reading. The identity for `exact` and the bounds in
`gap_confidence` are derived; estimated rates, more than two groups, label-dependent criteria and
moving averages for minibatches are inferred extensions.
"""

from algorithms.jrf.confidence import gap_confidence, gap_scale, required_samples
from algorithms.jrf.gap import (
  MODES,
  PENALTIES,
  REDUCTIONS,
  equal_opportunity_gap,
  equalised_odds_gap,
  group_mass,
  group_means,
  joint_group_mass,
  joint_transition,
  mirl_gap,
  penalise,
  reweighting,
  sensitivity_sweep,
  worst_case_gap,
)
from algorithms.jrf.inputs import validate_inputs
from algorithms.jrf.train import (
  CRITERIA,
  Batch,
  JRFConfig,
  JRFProblem,
  JRFState,
  MassEMA,
  forward_bce,
  init,
  jrf_loss,
  run,
  step,
)

__all__ = [
  "CRITERIA",
  "MODES",
  "PENALTIES",
  "REDUCTIONS",
  "Batch",
  "JRFConfig",
  "JRFProblem",
  "JRFState",
  "MassEMA",
  "equal_opportunity_gap",
  "equalised_odds_gap",
  "forward_bce",
  "gap_confidence",
  "gap_scale",
  "group_mass",
  "group_means",
  "init",
  "joint_group_mass",
  "joint_transition",
  "jrf_loss",
  "mirl_gap",
  "penalise",
  "required_samples",
  "reweighting",
  "run",
  "sensitivity_sweep",
  "step",
  "validate_inputs",
  "worst_case_gap",
]
