"""The global average treatment effect (GATE) under network interference, from merged stages.

In an A/B test on a network a unit's outcome depends on the treatment of others. The effect asked
for is that of treating everybody:

  GATE = mean outcome with everybody treated - mean outcome with nobody treated.

A stage with share p shows neither. The paper's remedy costs nothing: run the ramp-up that is run in
any case (2%, 5%, ... 50%), pool the rows of all stages, and regress with *one* intercept,

  y_is = a + theta_z z_is + theta_e e_is + error,   e = W z the share of treated neighbours,
  GATE = theta_z + theta_e,

or fit a graph network and contrast its means at full and at no treatment. Interference that the
features miss biases a single stage; between stages every unit's expected features move together,
from p_s to p_t, as they would under full treatment, so that variation is free of the bias.
`theory` has the exact formula: merging divides the bias by `1 + rho h`.

- `design`: shares, units or clusters, Bernoulli or complete, nested or fresh (`draw_rollout`).
- `features`: exposures of any operators and regression features (`exposures`, `design_matrix`).
- `estimators`: `ols` with cluster-robust errors, `moment`, `horvitz_thompson`, `hajek`,
  `polynomial_rollout`; `moments` for many merges of the same stages at once.
- `gnn`: the network estimator (`gnn_gate`).
- `theory`: `design_report`, `bias_theory`, `bias_bound`, `moment_statistics`.
- `outcomes`, `interference`: the authors' simulations and the linear model of the theory.
- `diagnostics`: what to tell the reader of an estimate (`warnings`).

An interval holds noise, not bias: print `bias_bound` beside it. Where the features miss
interference it holds too little of the noise as well.

Sources: the paper's abstract and introduction (problem, merging, regression), the authors' code
(network, designs, simulated outcomes). The bias and variance formulas, the bound and the intervals
are derived here; quadratic and spline features are inferred extensions.
"""

from algorithms.gate.design import RANDOMISATIONS, RolloutDesign, draw_rollout, make_design
from algorithms.gate.diagnostics import warnings
from algorithms.gate.estimators import (
  GateEstimate,
  check_features,
  check_mergeable,
  check_randomised,
  hajek,
  horvitz_thompson,
  interval,
  moment,
  ols,
  ols_weights,
  polynomial_rollout,
  polynomial_weights,
  stage_hajek,
  stage_horvitz_thompson,
)
from algorithms.gate.features import FEATURES, contrast, design_matrix, exposures, feature_names
from algorithms.gate.gnn import GNNConfig, gnn_gate
from algorithms.gate.interference import LinearInterference, total_effect
from algorithms.gate.moments import StageMoments, ols_from_moments, pool, stage_moments
from algorithms.gate.outcomes import (
  OUTCOMES,
  OutcomeConfig,
  as_linear,
  draw_dynamic_graphs,
  mean_outcome,
  simulate_outcome,
  true_gate,
)
from algorithms.gate.theory import (
  BiasMoments,
  BiasReport,
  DesignReport,
  bias_bound,
  bias_moments,
  bias_theory,
  check_operator,
  design_report,
  known_gram,
  merged_bias,
  moment_statistics,
)

__all__ = [
  "FEATURES",
  "OUTCOMES",
  "RANDOMISATIONS",
  "BiasMoments",
  "BiasReport",
  "DesignReport",
  "GNNConfig",
  "GateEstimate",
  "LinearInterference",
  "OutcomeConfig",
  "RolloutDesign",
  "StageMoments",
  "as_linear",
  "bias_bound",
  "bias_moments",
  "bias_theory",
  "check_features",
  "check_mergeable",
  "check_operator",
  "check_randomised",
  "contrast",
  "design_matrix",
  "design_report",
  "draw_dynamic_graphs",
  "draw_rollout",
  "exposures",
  "feature_names",
  "gnn_gate",
  "hajek",
  "horvitz_thompson",
  "interval",
  "known_gram",
  "make_design",
  "mean_outcome",
  "merged_bias",
  "moment",
  "moment_statistics",
  "ols",
  "ols_from_moments",
  "ols_weights",
  "polynomial_rollout",
  "polynomial_weights",
  "pool",
  "simulate_outcome",
  "stage_hajek",
  "stage_horvitz_thompson",
  "stage_moments",
  "total_effect",
  "true_gate",
  "warnings",
]
