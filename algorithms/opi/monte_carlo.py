"""Optimistic policy iteration from sampled returns: Monte Carlo control with exploring starts.

One noisy return of the *present* greedy policy moves one action value (or one value a state), and
the next return already follows the changed policy. Convergence hangs on how often each action is
updated (Tsitsiklis, 2002; arXiv 2606.10580 and 2606.15247): with

  dq(s, a)/dt = D(s, a; mu) (q^mu(s, a) - q(s, a)),   mu greedy for q,

actions of one state have to be updated at equal rates D; states may differ. `mean_field` follows
this equation; `uniformise` restores equal rates when the data do not have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from algorithms.opi.model import MDP, OperatorMDP, SparseMDP, bellman_q, greedy, policy_rows

UPDATES = ("initial", "first")

EnvStep = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
StepSize = float | Callable[[jax.Array], jax.Array]


@struct.dataclass
class MonteCarloConfig:
  """How returns move action values; all fields are static.

  Attributes:
    step_size: a number in (0, 1], or an optax schedule of the number of earlier updates of the
      pair. With `uniformise` the schedule gets the state's updates divided by its actions.
    update: "initial" moves the pair that the episode started with; "first" every pair at its first
      visit within the first half of the episode (the second half completes its return). No
      guarantee is known for "first" (arXiv 2606.15247).
    uniformise: divide the step by the action's share of the state's updates, so that all actions
      of a state move at one rate. The share is counted among the updates made while the present
      greedy action was greedy (inferred; see `MonteCarloState.counts`).
    horizon: length H of an episode; the return leaves out at most `g^H max|r| / (1 - g)`.

  Raises:
    ValueError: a field outside its range.
  """

  step_size: StepSize = struct.field(pytree_node=False, default=0.05)
  update: str = struct.field(pytree_node=False, default="initial")
  uniformise: bool = struct.field(pytree_node=False, default=False)
  horizon: int = struct.field(pytree_node=False, default=200)

  def __post_init__(self):
    if not callable(self.step_size) and not 0 < self.step_size <= 1:
      raise ValueError(f"step_size = {self.step_size}; expected (0, 1] or an optax schedule")
    if self.update not in UPDATES:
      raise ValueError(f"update = {self.update!r}; expected one of {', '.join(UPDATES)}")
    smallest = 1 if self.update == "initial" else 2
    if self.horizon < smallest:
      raise ValueError(f"horizon = {self.horizon}; expected {smallest} or more")


@struct.dataclass
class MonteCarloState:
  """What learning keeps.

  Attributes:
    q: `[S, A]` action values, -inf where an action is infeasible.
    counts: `[S, A, A]`: `counts[s, b, a]` updates of `(s, a)` made while b was greedy in s. How
      often an action is updated depends on which one is greedy, and q near a tie switches between
      them; counts of all time mix the two and correct neither.
    step: updates made, or episodes with "first".
  """

  q: jax.Array
  counts: jax.Array
  step: jax.Array


@struct.dataclass
class Episode:
  """Attributes: `states [H]`, `actions [H]`, and `returns [H]`, discounted from each step on."""

  states: jax.Array
  actions: jax.Array
  returns: jax.Array


def table_sampler(mdp: MDP) -> EnvStep:
  """An environment that samples from a tabular or sparse model.

  Returns:
    `env_step(key, state, action) -> (next_state, reward)`, the reward being the expected one.
  """
  if isinstance(mdp, OperatorMDP):
    raise ValueError("mdp is matrix-free; expected a TabularMDP or SparseMDP to sample from")
  rows = mdp.probability if isinstance(mdp, SparseMDP) else mdp.transition

  def env_step(key: jax.Array, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    cumulative = jnp.cumsum(rows[state, action].astype(mdp.dtype))
    # Below the last sum, so that rounding never falls off the end or on a successor of chance 0.
    draw = jax.random.uniform(key, dtype=cumulative.dtype) * cumulative[-1]
    place = jnp.searchsorted(cumulative, draw, side="right").astype(jnp.int32)
    place = jnp.minimum(place, cumulative.size - 1)
    successor = mdp.next_state[state, action, place] if isinstance(mdp, SparseMDP) else place
    return successor, mdp.reward[state, action].astype(mdp.dtype)

  return env_step


def rollout(
  key: jax.Array,
  env_step: EnvStep,
  policy: jax.Array,
  state: jax.Array,
  action: jax.Array,
  discount: jax.Array | float,
  horizon: int,
) -> Episode:
  """Plays `action` in `state`, then the policy `[S]`, for `horizon` steps."""

  def body(carry: tuple, key: jax.Array) -> tuple:
    state, action = carry
    successor, reward = env_step(key, state, action)
    successor = jnp.asarray(successor, state.dtype)
    return (successor, policy[successor]), (state, action, reward)

  start = (jnp.asarray(state, jnp.int32), jnp.asarray(action, policy.dtype))
  _, (states, actions, rewards) = jax.lax.scan(body, start, jax.random.split(key, horizon))
  rewards = rewards.astype(jnp.result_type(rewards, discount, float))

  def add(later: jax.Array, reward: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = reward + discount * later
    return total, total

  _, returns = jax.lax.scan(add, jnp.zeros_like(rewards[0]), rewards, reverse=True)
  return Episode(states, actions, returns)


def mc_init(q: jax.Array) -> MonteCarloState:
  """Starts from action values `q [S, A]`; -inf marks infeasible actions.

  Raises:
    ValueError: q is not `[S, A]`.
  """
  q = jnp.asarray(q)
  if q.ndim != 2 or not jnp.issubdtype(q.dtype, jnp.floating):
    raise ValueError(f"q is {q.dtype} of shape {q.shape}; expected floats [S, A]")
  num_states, num_actions = q.shape
  counts = jnp.zeros((num_states, num_actions, num_actions), jnp.int32)
  return MonteCarloState(q, counts, jnp.int32(0))


def mc_update(
  state: MonteCarloState,
  s: jax.Array,
  a: jax.Array,
  ret: jax.Array,
  config: MonteCarloConfig,
) -> MonteCarloState:
  """`q(s, a) += step (ret - q(s, a))` for one pair.

  Args:
    state: see `MonteCarloState`.
    s: state.
    a: feasible action.
    ret: discounted return of playing a in s and the greedy policy after it.
    config: see `MonteCarloConfig`.
  """
  best = jnp.argmax(state.q[s])
  counts = state.counts.at[s, best, a].add(1)
  step = _step_size(counts[s], state.q[s], best, a, config)
  q = state.q.at[s, a].add(step * (ret - state.q[s, a]))
  return MonteCarloState(q, counts, state.step + 1)


def mc_update_first(
  state: MonteCarloState, episode: Episode, config: MonteCarloConfig
) -> MonteCarloState:
  """Moves every pair that an episode visits in its first half, by the return of its first visit."""
  num_states, num_actions = state.q.shape
  length = max(1, episode.states.size // 2)
  flat = episode.states[:length] * num_actions + episode.actions[:length]
  first = jnp.full(num_states * num_actions, length, jnp.int32)
  first = first.at[flat].min(jnp.arange(length, dtype=jnp.int32)).reshape(num_states, num_actions)
  visited = first < length
  returns = episode.returns[jnp.minimum(first, length - 1)].astype(state.q.dtype)
  best = jnp.argmax(state.q, axis=1)
  counts = state.counts.at[jnp.arange(num_states), best].add(visited.astype(jnp.int32))
  every_action = jax.vmap(_step_size, in_axes=(None, None, None, 0, None))
  every_state = jax.vmap(every_action, in_axes=(0, 0, 0, None, None))
  step = every_state(counts, state.q, best, jnp.arange(num_actions), config)
  q = jnp.where(visited, state.q + step * (returns - state.q), state.q)
  return MonteCarloState(q, counts, state.step + 1)


def mc_run(
  key: jax.Array,
  env_step: EnvStep,
  start: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
  discount: jax.Array | float,
  config: MonteCarloConfig,
  q: jax.Array,
  num_updates: int,
  trace_every: int = 1,
) -> tuple[MonteCarloState, jax.Array]:
  """Monte Carlo optimistic policy iteration, an episode after the other.

  Args:
    key: PRNG key; `jax.vmap` over keys runs seeds side by side.
    env_step: `(key, state, action) -> (next_state, reward)`; absorbing states pay 0.
    start: `(key, policy [S]) -> (s, a)`, the exploring start; may look at the greedy policy.
    discount: in [0, 1).
    config: see `MonteCarloConfig`.
    q: `[S, A]` start, -inf for infeasible actions.
    num_updates: episodes, a multiple of `trace_every`.
    trace_every: episodes between two entries of the trace.

  Returns:
    `(state, trace)`, the trace being q after each `trace_every` episodes,
    `[num_updates // trace_every, S, A]`.

  Raises:
    ValueError: `num_updates` is not a multiple of `trace_every`, or q is not `[S, A]`.
  """
  if trace_every < 1 or num_updates < 1 or num_updates % trace_every:
    raise ValueError(
      f"num_updates = {num_updates}, trace_every = {trace_every}; expected a multiple of it"
    )

  def update(state: MonteCarloState, key: jax.Array) -> tuple[MonteCarloState, None]:
    start_key, episode_key = jax.random.split(key)
    policy, _ = greedy(state.q)
    s, a = start(start_key, policy)
    episode = rollout(episode_key, env_step, policy, s, a, discount, config.horizon)
    if config.update == "first":
      return mc_update_first(state, episode, config), None
    return mc_update(state, s, a, episode.returns[0].astype(state.q.dtype), config), None

  def chunk(state: MonteCarloState, keys: jax.Array) -> tuple[MonteCarloState, jax.Array]:
    state, _ = jax.lax.scan(update, state, keys)
    return state, state.q

  keys = jax.random.split(key, (num_updates // trace_every, trace_every))
  return jax.lax.scan(chunk, mc_init(q), keys)


def mc_sync_run(
  key: jax.Array,
  mdp: MDP,
  env_step: EnvStep,
  step_size: StepSize,
  value: jax.Array,
  num_updates: int,
  horizon: int,
) -> tuple[jax.Array, jax.Array]:
  """Tsitsiklis' synchronous version: one return of the greedy policy from *every* state a step.

  `v(s) += a_t (G_t(s) - v(s))`, greedy by the model. Converges with probability 1 for steps whose
  sum is infinite and whose squares' is not (Tsitsiklis 2002).

  Args:
    key: PRNG key.
    mdp: the model that the greedy step uses.
    env_step: samples next states and rewards.
    step_size: a number, or an optax schedule of t = 0, 1, ...
    value: `[S]` start.
    num_updates: steps.
    horizon: length of an episode.

  Returns:
    `(value [S], trace [num_updates, S])`.
  """

  def update(value: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
    count, key = inputs
    policy, _ = greedy(bellman_q(mdp, value))
    states = jnp.arange(value.size, dtype=jnp.int32)
    keys = jax.random.split(key, value.size)

    def sample(key: jax.Array, state: jax.Array) -> jax.Array:
      episode = rollout(key, env_step, policy, state, policy[state], mdp.discount, horizon)
      return episode.returns[0]

    returns = jax.vmap(sample)(keys, states)
    step = step_size(count) if callable(step_size) else step_size
    value = (value + step * (returns - value)).astype(value.dtype)
    return value, value

  inputs = (jnp.arange(num_updates), jax.random.split(key, num_updates))
  return jax.lax.scan(update, jnp.asarray(value, mdp.dtype), inputs)


def policy_q(mdp: MDP, policy: jax.Array) -> jax.Array:
  """`q^mu [S, A]` of a small model, by a dense solve of the policy's system."""
  reward, expect = policy_rows(mdp, policy)
  identity = jnp.eye(mdp.num_states, dtype=reward.dtype)
  matrix = identity - jax.vmap(expect, in_axes=1, out_axes=1)(identity)
  return bellman_q(mdp, jnp.linalg.solve(matrix, reward))


def mean_field(
  mdp: MDP,
  frequency: Callable[[jax.Array], jax.Array],
  q: jax.Array,
  dt: float,
  num_steps: int,
  trace_every: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Euler steps of `dq/dt = D(mu) (q^mu - q)`, what learning does when steps are small.

  Args:
    mdp: a small model.
    frequency: `policy [S] -> D [S, A]`, rate of updates of each pair under a greedy policy.
    q: `[S, A]` start; infeasible actions are set to -inf.
    dt: step; `dt * D` must stay below 1.
    num_steps: Euler steps, a multiple of `trace_every`.
    trace_every: steps between two entries of the trace.

  Returns:
    `(q [S, A], trace [num_steps // trace_every, S, A])`.
  """
  if trace_every < 1 or num_steps < 1 or num_steps % trace_every:
    raise ValueError(
      f"num_steps = {num_steps}, trace_every = {trace_every}; expected a multiple of it"
    )

  def euler(_: int, q: jax.Array) -> jax.Array:
    policy, _ = greedy(q)
    # An infeasible action's difference is -inf - -inf.
    change = jnp.where(feasible, policy_q(mdp, policy) - q, 0)
    return q + dt * frequency(policy) * change

  def chunk(q: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
    q = jax.lax.fori_loop(0, trace_every, euler, q)
    return q, q

  feasible = bellman_q(mdp, jnp.zeros(mdp.num_states, mdp.dtype)) > -jnp.inf
  q = jnp.where(feasible, jnp.asarray(q, mdp.dtype), -jnp.inf)
  return jax.lax.scan(chunk, q, None, length=num_steps // trace_every)


def _step_size(
  counts: jax.Array, q: jax.Array, best: jax.Array, a: jax.Array, config: MonteCarloConfig
) -> jax.Array:
  """Step of action a in a state with `counts [A, A]`, the present update counted, and `q [A]`."""

  def base(earlier: jax.Array) -> jax.Array:
    step = config.step_size(earlier) if callable(config.step_size) else config.step_size
    return jnp.asarray(step, q.dtype)

  if not config.uniformise:
    return base(counts[:, a].sum() - 1)
  num_actions = jnp.isfinite(q).sum()
  share = counts[best, a] / counts[best].sum()
  step = base((counts.sum() - 1) // num_actions) / (num_actions * share)
  return jnp.minimum(1, step).astype(q.dtype)
