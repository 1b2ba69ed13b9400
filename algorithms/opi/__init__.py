"""OPI, read as optimistic policy iteration.

The list of methods that this project follows names "OPI" without a definition. In dynamic
programming and reinforcement learning the letters stand for optimistic policy iteration (Bertsekas
and Tsitsiklis 1996; Tsitsiklis, JMLR 3, 2002; the "OPI" solvers of QuantEcon's lectures), which is
what is implemented; that the list means it is our reading.

A Markov decision process is solved by alternating a *partial* evaluation of the present policy
with greedy improvement. With `T` the Bellman operator and `T_mu` that of a policy,

  mu_k greedy for v_k,   v_{k+1} = T_mu_k^m v_k,

which is value iteration at m = 1 and Howard's policy iteration at m = infinity.

- `model`: dense, indexed-sparse and matrix-free models and their operators.
- `planning`: `solve` with a known model, bounds on the error, lookahead, lambda returns;
  `solve_sharded` over a mesh; `optimal_value` with gradients.
- `evaluation`: `evaluate_policy`, exact, by Krylov methods on products only.
- `monte_carlo`: the same from sampled returns, where convergence can fail and be repaired.
- `linear`: linear values, which can diverge, with the number that rules it out.

Not here: average reward, undiscounted shortest paths, and games or robust models, where the naive
iteration can cycle (arXiv 2508.06661).

Sources: Puterman and Shin (1978); Puterman, *Markov Decision Processes*, sections 6.5 and 6.6;
Tsitsiklis (2002); Efroni et al., arXiv 1809.01843; Winnicki et al., arXiv 2109.13419; arXiv
2606.10580 and 2606.15247.
"""

from algorithms.opi.evaluation import METHODS, Evaluation, evaluate_policy
from algorithms.opi.linear import LinearResult, contraction_product, linear_run, linear_step
from algorithms.opi.model import (
  MDP,
  OperatorMDP,
  SparseMDP,
  TabularMDP,
  bellman_q,
  check_mdp,
  greedy,
  policy_backup,
  policy_rows,
)
from algorithms.opi.monte_carlo import (
  UPDATES,
  EnvStep,
  Episode,
  MonteCarloConfig,
  MonteCarloState,
  mc_init,
  mc_run,
  mc_sync_run,
  mc_update,
  mc_update_first,
  mean_field,
  policy_q,
  rollout,
  table_sampler,
)
from algorithms.opi.planning import (
  STOPPING,
  OPIConfig,
  OPIResult,
  OPIState,
  Trace,
  init,
  optimal_value,
  solve,
  solve_sharded,
  solve_trace,
  step,
)

__all__ = [
  "MDP",
  "METHODS",
  "STOPPING",
  "UPDATES",
  "EnvStep",
  "Episode",
  "Evaluation",
  "LinearResult",
  "MonteCarloConfig",
  "MonteCarloState",
  "OPIConfig",
  "OPIResult",
  "OPIState",
  "OperatorMDP",
  "SparseMDP",
  "TabularMDP",
  "Trace",
  "bellman_q",
  "check_mdp",
  "contraction_product",
  "evaluate_policy",
  "greedy",
  "init",
  "linear_run",
  "linear_step",
  "mc_init",
  "mc_run",
  "mc_sync_run",
  "mc_update",
  "mc_update_first",
  "mean_field",
  "optimal_value",
  "policy_backup",
  "policy_q",
  "policy_rows",
  "rollout",
  "solve",
  "solve_sharded",
  "solve_trace",
  "step",
  "table_sampler",
]
