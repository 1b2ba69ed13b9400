"""The measurements: planning on known models, learning from returns, linear values."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from algorithms import opi
from experiments.opi import models
from launch.run import Run

LAMBDAS = (None, 0.0, 0.5, 0.9)
LOOKAHEADS = (1, 3)
# What the sweep over m on the investment model stops at: largest |T v - v| below 1e-5.
INVESTMENT_NORM = 1e-5


def exact_solution(mdp: opi.TabularMDP | opi.SparseMDP) -> tuple[np.ndarray, np.ndarray]:
  """Value and policy by Howard's policy iteration with dense solves in NumPy: the reference."""
  reward, discount = np.asarray(mdp.reward, np.float64), float(mdp.discount)
  num_states, num_actions = reward.shape
  if isinstance(mdp, opi.SparseMDP):
    transition = np.zeros((num_states, num_actions, num_states))
    s, a, _ = np.indices(mdp.next_state.shape)
    np.add.at(transition, (s, a, np.asarray(mdp.next_state)), np.asarray(mdp.probability))
  else:
    transition = np.asarray(mdp.transition, np.float64)
  allowed = np.ones(reward.shape, bool) if mdp.mask is None else np.asarray(mdp.mask)
  states = np.arange(num_states)
  policy = np.argmax(allowed, axis=1)
  for _ in range(1000):
    matrix = np.eye(num_states) - discount * transition[states, policy]
    value = np.linalg.solve(matrix, reward[states, policy])
    q = np.where(allowed, reward + discount * transition @ value, -np.inf)
    better = q.max(axis=1) > value + 1e-10 * np.maximum(1, np.abs(value))
    if not better.any():
      return value, policy
    policy = np.where(better, q.argmax(axis=1), policy)
  raise RuntimeError("policy iteration did not settle in 1,000 iterations")


def policy_loss(mdp: Any, policy: jax.Array, best: np.ndarray) -> float:
  """How much less than the optimum a policy is worth, in its worst state."""
  return float(np.max(best - np.asarray(opi.evaluate_policy(mdp, policy).value)))


def planning(config: ml_collections.ConfigDict, run: Run) -> list[dict[str, Any]]:
  """Every table solved for several m, lookaheads and lambdas, against dense policy iteration."""
  rows = []
  for name in run.progress(tuple(config.tables), "tables"):
    rows += run.unit(f"table {name}", functools.partial(_table_rows, config, name))
  return rows


def _table_rows(config: ml_collections.ConfigDict, name: str) -> list[dict[str, Any]]:
  mdp = models.table(name)
  best, _ = exact_solution(mdp)
  variants = [(m, 1, None) for m in (*config.sweeps, None)]
  variants += [(config.sweeps[-1], h, None) for h in LOOKAHEADS[1:]]
  variants += [(config.sweeps[-1], 1, lam) for lam in LAMBDAS[1:]]
  return [{"model": name, **_solved(mdp, best, *variant)} for variant in variants]


def _solved(
  mdp: Any, best: np.ndarray, sweeps: int | None, lookahead: int, lam: float | None
) -> dict[str, Any]:
  result = opi.solve(mdp, opi.OPIConfig(sweeps, lookahead, lam, epsilon=1e-8))
  value, lower, upper = (np.asarray(x) for x in (result.value, result.lower, result.upper))
  # The reference has rounding of its own.
  slack = 1e-12 * max(1.0, float(np.abs(best).max())) / (1 - float(mdp.discount))
  return {
    "sweeps": "exact" if sweeps is None else sweeps,
    "lookahead": lookahead,
    "lambda": 1.0 if lam is None else lam,
    "iterations": int(result.num_iterations),
    "error": float(np.abs(value - best).max()),
    "policy loss": policy_loss(mdp, result.policy, best),
    "bounds hold": bool((lower <= best + slack).all() and (best - slack <= upper).all()),
    "converged": bool(result.converged),
  }


def random_models(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Random models of 2 to 200 states, in all combinations of m, lookahead and lambda."""
  rng = np.random.default_rng(config.seed)
  rows = []
  for _ in range(config.random_models):
    # Three sizes, so that few programs are compiled.
    size = int(rng.choice([10, 50, 200]))
    mdp = models.random_dense(rng, size, 4, float(rng.choice([0.8, 0.95, 0.99])))
    best, _ = exact_solution(mdp)
    for sweeps in config.sweeps:
      for lookahead in LOOKAHEADS:
        for lam in LAMBDAS[1:]:
          rows.append(_solved(mdp, best, sweeps, lookahead, lam))
  return {
    "solved": len(rows),
    "error": np.array([row["error"] for row in rows]),
    "policy loss": np.array([row["policy loss"] for row in rows]),
    "bounds hold": np.array([row["bounds hold"] for row in rows]),
    "converged": np.array([row["converged"] for row in rows]),
  }


def investment(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Iterations, curves and seconds of the investment model for each m."""
  mdp = models.investment(config.investment.num_outputs, config.investment.num_shocks)
  # norm rule: 2 max|d| < epsilon (1 - g) / g.
  epsilon = 2 * INVESTMENT_NORM * mdp.discount / (1 - mdp.discount)
  best = opi.solve(mdp, opi.OPIConfig(100, epsilon=1e-8)).value
  rows, curves = [], {}
  for sweeps in config.investment.sweeps:
    settings = opi.OPIConfig(sweeps, epsilon=epsilon, stopping="norm")
    solver = jax.jit(opi.solve, static_argnums=1)
    result = jax.block_until_ready(solver(mdp, settings))
    began = time.perf_counter()
    jax.block_until_ready(solver(mdp, settings))
    seconds = time.perf_counter() - began
    count = int(result.num_iterations)
    _, trace = opi.solve_trace(mdp, settings, count, reference=best)
    rows.append({"sweeps": sweeps, "iterations": count, "seconds": seconds})
    curves[str(sweeps)] = {
      "error": np.asarray(trace.error),
      "span": np.asarray(trace.span),
      "sweeps": np.arange(1, count + 1) * sweeps,
      "seconds": np.linspace(seconds / count, seconds, count),
    }
  return {"rows": rows, "curves": curves}


def sparse(config: ml_collections.ConfigDict, run: Run) -> dict[str, Any]:
  """The random sparse model, beside quantecon's modified policy iteration where it is installed."""
  mdp = models.random_sparse(run.key("sparse"), **config.sparse)
  found: dict[str, Any] = {"iterations": {}}
  for sweeps in (1, 20):
    result = opi.solve(mdp, opi.OPIConfig(sweeps))
    found["iterations"][str(sweeps)] = int(result.num_iterations)
  result = opi.solve(mdp, opi.OPIConfig(20, epsilon=1e-9))
  found["agreement"] = found["value_span"] = None
  try:
    peer = quantecon_model(mdp)
  except ImportError:
    return found
  theirs = peer.solve(method="modified_policy_iteration", epsilon=1e-9, k=20, max_iter=10_000)
  difference = np.asarray(result.value) - theirs.v
  found["agreement"] = float(np.mean(np.asarray(result.policy) == theirs.sigma))
  found["value_span"] = float(difference.max() - difference.min())
  return found


def quantecon_model(mdp: opi.SparseMDP) -> Any:
  """The same model as a `DiscreteDP` of quantecon, in its state-action pair form."""
  import scipy.sparse
  from quantecon.markov import DiscreteDP

  num_states, num_actions, width = mdp.next_state.shape
  pairs = num_states * num_actions
  row = np.repeat(np.arange(pairs), width)
  entries = (np.asarray(mdp.probability).ravel(), (row, np.asarray(mdp.next_state).ravel()))
  transition = scipy.sparse.csr_matrix(entries, shape=(pairs, num_states))
  state, action = np.divmod(np.arange(pairs), num_actions)
  return DiscreteDP(np.asarray(mdp.reward).ravel(), transition, float(mdp.discount), state, action)


def mean_field(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Where the counterexample's mean field comes to rest, beside the closed form."""
  mdp, start = models.counterexample(), jnp.array([[0.0, -1.0], [0.0, 0.0]])
  # The slowest rate is 1 / (2 (1 + rho)); the field chatters across the tie by dt times its size.
  steps, dt = 300_000, 0.002
  found = {}
  for ratio in config.counterexample.ratios:
    flow = jax.jit(
      functools.partial(
        opi.mean_field, mdp, models.update_rates(ratio), dt=dt, num_steps=steps, trace_every=500
      )
    )
    last, trace = flow(start)
    found[str(ratio)] = {
      "limit": np.asarray(last),
      "trace": np.asarray(trace[:, 0]),
      "root": models.sliding_point(ratio),
    }
  return found


def simulation(config: ml_collections.ConfigDict, run: Run, mode: str) -> np.ndarray:
  """Monte Carlo on the counterexample at every rho and seed side by side.

  Returns:
    q after every 300th part of the updates, `[ratios, seeds, trace, 2, 2]`.
  """
  settings = config.counterexample
  mdp = models.counterexample()
  sampler = opi.table_sampler(mdp)
  first = jnp.array([[0.0, -1.0], [0.0, 0.0]])
  # First visits take episodes twice as long, see `MonteCarloConfig`.
  updates = settings.updates // (2 if mode == "first visit" else 1)
  every = trace_every(updates)
  horizon = settings.horizon
  step = settings.step_size
  mc_config = {
    "plain": opi.MonteCarloConfig(step, horizon=horizon),
    "repaired": opi.MonteCarloConfig(step, uniformise=True, horizon=horizon),
    "first visit": opi.MonteCarloConfig(step, update="first", horizon=2 * horizon),
  }.get(mode)

  def learn(ratio: jax.Array, key: jax.Array) -> jax.Array:
    start = models.biased_start(ratio)
    if mc_config is None:
      return _cumulative_repair(key, sampler, start, mdp, settings, first, every)
    return opi.mc_run(key, sampler, start, mdp.discount, mc_config, first, updates, every)[1]

  ratios = jnp.asarray(settings.simulated)
  keys = jax.random.split(run.key("counterexample"), (ratios.size, settings.seeds))
  return np.asarray(jax.jit(jax.vmap(jax.vmap(learn, (None, 0))))(ratios, keys))


MODES = ("plain", "repaired", "cumulative repair", "first visit")


def trace_every(updates: int) -> int:
  """Updates between two entries of a trace."""
  return max(1, updates // 300)


def _cumulative_repair(
  key: jax.Array,
  sampler: opi.EnvStep,
  start: Any,
  mdp: opi.TabularMDP,
  settings: Mapping[str, Any],
  first: jax.Array,
  every: int,
) -> jax.Array:
  """The repair with counts of all time, which mix the two greedy policies of a tie."""

  def update(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
    q, counts = carry
    start_key, episode_key = jax.random.split(key)
    policy, _ = opi.greedy(q)
    s, a = start(start_key, policy)
    episode = opi.rollout(episode_key, sampler, policy, s, a, mdp.discount, settings.horizon)
    counts = counts.at[s, a].add(1)
    share = counts[s, a] / counts[s].sum()
    step = jnp.minimum(1, settings.step_size / (q.shape[1] * share))
    return (q.at[s, a].add(step * (episode.returns[0] - q[s, a])), counts), None

  def chunk(carry: tuple, keys: jax.Array) -> tuple[tuple, jax.Array]:
    carry, _ = jax.lax.scan(update, carry, keys)
    return carry, carry[0]

  keys = jax.random.split(key, (settings.updates // every, every))
  return jax.lax.scan(chunk, (first, jnp.zeros(first.shape)), keys)[1]


def uniform(config: ml_collections.ConfigDict, run: Run) -> dict[str, Any]:
  """Actions updated uniformly within states, states at frequencies over a decade: 2606.10580."""
  settings = config.uniform
  rng = np.random.default_rng(config.seed + 1)
  shapes = [(2, 2), (3, 2), (3, 3), (4, 3)]
  errors = []
  for i in range(settings.models):
    mdp = models.random_dense(rng, *shapes[i % len(shapes)], 0.9)
    rate = jnp.asarray(10 ** rng.uniform(-1, 0, (mdp.num_states, 1)))
    best = _optimal_q(mdp)
    last = _uniform_flow(mdp, jnp.broadcast_to(rate, best.shape))
    errors.append(float(np.abs(np.asarray(last) - best).max()))
  mdp = models.random_dense(rng, 4, 3, 0.9)
  frequency = 10 ** rng.uniform(-1, 0, 4)
  frequency /= frequency.sum()

  def start(key: jax.Array, policy: jax.Array) -> tuple[jax.Array, jax.Array]:
    state_key, action_key = jax.random.split(key)
    state = jax.random.choice(state_key, 4, p=jnp.asarray(frequency))
    return state.astype(jnp.int32), jax.random.randint(action_key, (), 0, 3, policy.dtype)

  # Robbins-Monro: sums diverge, squares' sums do not.
  mc_config = opi.MonteCarloConfig(lambda n: (n + 1.0) ** -0.7, horizon=100)
  every = max(1, settings.updates // 50)
  best = _optimal_q(mdp)

  def learn(key: jax.Array) -> jax.Array:
    zeros = jnp.zeros(best.shape)
    sampler = opi.table_sampler(mdp)
    return opi.mc_run(key, sampler, start, mdp.discount, mc_config, zeros, settings.updates, every)[
      1
    ]

  keys = jax.random.split(run.key("uniform"), settings.seeds)
  trace = np.asarray(jax.jit(jax.vmap(learn))(keys))
  sampled = np.abs(trace - best[None, None]).max(axis=(2, 3))
  return {"mean_field": np.array(errors), "sampled": sampled, "every": every}


@jax.jit
def _uniform_flow(mdp: opi.TabularMDP, rates: jax.Array) -> jax.Array:
  return opi.mean_field(mdp, lambda policy: rates, jnp.zeros(rates.shape), 0.5, 1000, 1000)[0]


def _optimal_q(mdp: opi.TabularMDP) -> np.ndarray:
  value, _ = exact_solution(mdp)
  return np.asarray(mdp.reward) + mdp.discount * np.asarray(mdp.transition) @ value


def linear() -> dict[str, Any]:
  """Features phi = (1, 2) on two states: fitted one-step targets grow without bound, longer do not.

  State 0 leads to state 1, which stays; all rewards of going on are 0 and staying in 0 costs 1.
  The example is Tsitsiklis and Van Roy's (1996).
  """
  mdp = opi.TabularMDP(
    jnp.array([[0.0, -1.0], [0.0, 0.0]]),
    jnp.asarray(np.eye(2)[np.array([[1, 0], [1, 1]])]),
    0.95,
  )
  phi, sampled = jnp.array([[1.0], [2.0]]), jnp.arange(2)
  found = []
  for sweeps, lookahead in ((1, 1), (2, 1), (5, 1), (1, 5), (3, 3)):
    run = opi.linear_run(mdp, phi, sampled, jnp.ones(1), sweeps, lookahead, 300)
    found.append(
      {
        "sweeps": sweeps,
        "lookahead": lookahead,
        "delta": float(run.delta),
        "product": float(run.product),
        "last value": float(run.value_norms[-1]),
        "diverged": bool(run.diverged),
      }
    )
  return {"rows": found}
