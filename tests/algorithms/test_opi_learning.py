"""Learning from returns and linear values against closed forms and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algorithms import opi

pytestmark = pytest.mark.usefixtures("x64")

FOLLOWING = np.array([[1, 0], [0, 0]])
BEST = np.array([[24.0, 30.0], [30.0, 28.0]])


def counterexample():
  reward = jnp.array([[-3.0, 3.0], [3.0, 1.0]])
  return opi.TabularMDP(reward, jnp.asarray(np.eye(2)[FOLLOWING]), 0.9)


def random_model(seed, states=3, actions=2):
  rng = np.random.default_rng(seed)
  return opi.TabularMDP(
    jnp.asarray(rng.normal(size=(states, actions))),
    jnp.asarray(rng.dirichlet(np.ones(states), (states, actions))),
    0.8,
  )


def closed_form(ratio):
  """The smaller root of (x + c)(30 - x) = rho^2 (x - c)(24 - x), by bisection between c and 24."""
  c = 0.3 / 0.19
  low, high = c, 24.0

  def gap(x):
    return (x + c) * (30 - x) - ratio**2 * (x - c) * (24 - x)

  grid = np.linspace(low, high, 100_001)
  crossing = np.flatnonzero(np.diff(np.sign(gap(grid))))[0]
  return grid[crossing : crossing + 2].mean()


def rates(ratio):
  def frequency(policy):
    other = jnp.arange(2)[None] != policy[:, None]
    share = jnp.where(other, ratio, 1.0) / (1 + ratio)
    return jnp.where((jnp.arange(2) == 0)[:, None], share, 0.5)

  return frequency


def start(ratio):
  def draw(key, policy):
    state_key, action_key = jax.random.split(key)
    state = jax.random.randint(state_key, (), 0, 2)
    other = jax.random.uniform(action_key) < jnp.where(state == 0, ratio / (1 + ratio), 0.5)
    return state, jnp.where(other, 1 - policy[state], policy[state])

  return draw


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0, 5.0, 10.0, 20.0])
def test_the_mean_field_rests_at_the_derived_point(ratio):
  begin = jnp.array([[0.0, -1.0], [0.0, 0.0]])
  last, trace = opi.mean_field(counterexample(), rates(ratio), begin, 0.001, 150_000, 1000)
  np.testing.assert_allclose(last[0], closed_form(ratio), atol=0.02)
  assert trace.shape == (150, 2, 2)


def test_the_mean_field_of_uniform_updates_reaches_the_optimum():
  last, _ = opi.mean_field(counterexample(), rates(1.0), jnp.zeros((2, 2)), 0.1, 2000)
  np.testing.assert_allclose(last, BEST, atol=1e-9)


@pytest.mark.slow
def test_learning_is_stuck_without_the_repair_and_free_with_it():
  mdp, ratio = counterexample(), 10.0
  sampler = opi.table_sampler(mdp)
  begin = jnp.array([[0.0, -1.0], [0.0, 0.0]])

  def learn(key, uniformise):
    config = opi.MonteCarloConfig(0.01, uniformise=uniformise, horizon=70)
    return opi.mc_run(key, sampler, start(ratio), 0.9, config, begin, 20_000, 100)[1]

  keys = jax.random.split(jax.random.key(0), 4)
  stuck = jax.jit(jax.vmap(lambda key: learn(key, False)))(keys)
  np.testing.assert_allclose(stuck[:, -100:, 0, 0].mean(axis=1), closed_form(ratio), atol=0.3)
  free = jax.jit(jax.vmap(lambda key: learn(key, True)))(keys)
  assert np.max(abs(free[:, -1] - BEST[None])) < 0.05


def test_rollouts_of_a_deterministic_model_are_geometric_sums():
  mdp = counterexample()
  policy = jnp.array([1, 0], jnp.int32)
  episode = opi.rollout(jax.random.key(0), opi.table_sampler(mdp), policy, 0, 0, 0.9, 5)
  np.testing.assert_array_equal(episode.states, [0, 1, 0, 0, 0])
  np.testing.assert_array_equal(episode.actions, [0, 0, 1, 1, 1])
  rewards = np.array([-3.0, 3, 3, 3, 3])
  expected = [sum(0.9 ** (k - h) * rewards[k] for k in range(h, 5)) for h in range(5)]
  np.testing.assert_allclose(episode.returns, expected)


@pytest.mark.parametrize("listed", [False, True])
def test_the_sampler_draws_with_the_tables_frequencies(listed):
  probability = jnp.array([[[0.2, 0.0, 0.8]], [[0.0, 1.0, 0.0]], [[0.5, 0.5, 0.0]]])
  mdp = opi.TabularMDP(jnp.arange(3.0)[:, None], probability, 0.9)
  if listed:
    successors = jnp.broadcast_to(jnp.array([2, 1, 0], jnp.int32), (3, 1, 3))
    mdp = opi.SparseMDP(mdp.reward, successors, probability[..., ::-1], 0.9)
  step = opi.table_sampler(mdp)
  keys = jax.random.split(jax.random.key(1), 20_000)
  for state in range(3):
    following, reward = jax.vmap(lambda key, s=state: step(key, jnp.int32(s), jnp.int32(0)))(keys)
    share = np.bincount(following, minlength=3) / 20_000
    np.testing.assert_allclose(share, probability[state, 0], atol=4 * 0.5 / 20_000**0.5)
    assert np.all((share > 0) == (np.asarray(probability[state, 0]) > 0))
    assert np.all(reward == state)


def test_returns_average_to_the_policys_action_values():
  mdp = random_model(0)
  policy = jnp.array([1, 0, 1], jnp.int32)
  exact = opi.policy_q(mdp, policy)
  rows = np.asarray(mdp.transition)[np.arange(3), policy]
  value = np.linalg.solve(np.eye(3) - 0.8 * rows, np.asarray(mdp.reward)[np.arange(3), policy])
  np.testing.assert_allclose(exact, mdp.reward + 0.8 * np.asarray(mdp.transition) @ value)
  keys = jax.random.split(jax.random.key(2), 4000)
  sampler = opi.table_sampler(mdp)
  returns = jax.vmap(lambda key: opi.rollout(key, sampler, policy, 2, 0, 0.8, 80).returns[0])(keys)
  error = abs(returns.mean() - exact[2, 0]) / (returns.std() / 4000**0.5)
  assert error < 4


def test_an_update_by_hand():
  config = opi.MonteCarloConfig(lambda n: 1 / (n + 1.0))
  state = opi.mc_init(jnp.zeros((2, 3)))
  for value in (4.0, 8.0):
    state = opi.mc_update(state, 1, 2, value, config)
  assert state.q[1, 2] == 6.0  # sample averages
  np.testing.assert_array_equal(state.counts[1], [[0, 0, 1], [0, 0, 0], [0, 0, 1]])
  repaired = opi.MonteCarloConfig(0.1, uniformise=True)
  state = opi.mc_init(jnp.array([[1.0, 0.0, -jnp.inf]]))
  for action in (0, 0, 0, 1):
    state = opi.mc_update(state, 0, action, 0.0, repaired)
  # Shares 1, 1, 1 of action 0, then 1/4 of action 1, of two feasible actions.
  np.testing.assert_allclose(state.q[0, 0], (1 - 0.1 / 2) ** 3)
  state = opi.mc_update(state, 0, 1, 10.0, repaired)
  np.testing.assert_allclose(state.q[0, 1], 10 * 0.1 / (2 * 2 / 5))


def test_first_visit_updates_equal_a_loop():
  rng = np.random.default_rng(3)
  states = rng.integers(0, 3, 12)
  actions, returns = rng.integers(0, 2, 12), rng.normal(size=12)
  config = opi.MonteCarloConfig(0.3, update="first", horizon=12)
  episode = opi.Episode(jnp.asarray(states), jnp.asarray(actions), jnp.asarray(returns))
  q = rng.normal(size=(3, 2))
  found = opi.mc_update_first(opi.mc_init(jnp.asarray(q)), episode, config)
  expected, seen = q.copy(), set()
  for s, a, value in zip(states[:6], actions[:6], returns[:6], strict=True):
    if (s, a) not in seen:
      expected[s, a] += 0.3 * (value - expected[s, a])
      seen.add((s, a))
  np.testing.assert_allclose(found.q, expected)
  assert int(found.counts.sum()) == len(seen)


def test_synchronous_learning_approaches_the_optimum():
  mdp = random_model(1)
  best = opi.solve(mdp).value
  value, trace = jax.jit(
    lambda key: opi.mc_sync_run(
      key, mdp, opi.table_sampler(mdp), lambda t: (t + 1.0) ** -0.8, jnp.zeros(3), 3000, 40
    )
  )(jax.random.key(0))
  assert trace.shape == (3000, 3)
  assert np.max(abs(value - best)) < 0.1
  assert np.max(abs(value - best)) < np.max(abs(trace[20] - best))


def test_learning_is_reproducible_and_maps_over_seeds():
  mdp = random_model(2)
  config = opi.MonteCarloConfig(0.1, horizon=20)

  def learn(key):
    begin = jnp.zeros((3, 2))
    draw = start(1.0)
    return opi.mc_run(key, opi.table_sampler(mdp), draw, 0.8, config, begin, 50, 10)[0].q

  keys = jax.random.split(jax.random.key(0), 2)
  both = jax.vmap(learn)(keys)
  np.testing.assert_allclose(both[1], learn(keys[1]), rtol=1e-12)
  assert np.any(both[0] != both[1])


def test_linear_values_diverge_and_are_bounded_by_the_product():
  """phi = (1, 2), both states fitted: theta' = 6/5 g theta, delta = 6/5, by hand."""
  mdp = opi.TabularMDP(
    jnp.array([[0.0, -1.0], [0.0, 0.0]]),
    jnp.asarray(np.eye(2)[np.array([[1, 0], [1, 1]])]),
    0.95,
  )
  phi, sampled = jnp.array([[1.0], [2.0]]), jnp.arange(2)
  one = opi.linear_step(mdp, phi, sampled, jnp.ones(1), 1)
  np.testing.assert_allclose(one, [6 / 5 * 0.95])
  run = opi.linear_run(mdp, phi, sampled, jnp.ones(1), 1, 1, 300)
  np.testing.assert_allclose(run.delta, 1.2)
  np.testing.assert_allclose(run.product, 1.2 * 0.95)
  np.testing.assert_allclose(run.theta[0], 1.14**300, rtol=1e-10)
  assert run.diverged
  for sweeps, lookahead in ((4, 1), (2, 3), (1, 4)):
    run = opi.linear_run(mdp, phi, sampled, jnp.ones(1), sweeps, lookahead, 300)
    np.testing.assert_allclose(run.product, 1.2 * 0.95**4)
    assert run.product < 1
    assert not run.diverged
    assert run.value_norms[-1] < 1


def linear_run(num_iterations, **fields):
  mdp, sampled = counterexample(), jnp.arange(2)
  return opi.linear_run(mdp, jnp.eye(2), sampled, jnp.zeros(2), 1, 1, num_iterations, **fields)


def test_a_full_basis_is_the_table_and_gradient_steps_reach_the_fit():
  mdp = random_model(4, states=5)
  phi, sampled = jnp.eye(5), jnp.arange(5)
  run = opi.linear_run(mdp, phi, sampled, jnp.zeros(5), 5, 1, 60)
  np.testing.assert_allclose(run.theta, opi.solve(mdp).value, atol=1e-6)
  phi = jnp.asarray(np.random.default_rng(5).normal(size=(5, 2)))
  theta = jnp.array([0.3, -0.2])
  fitted = opi.linear_step(mdp, phi, sampled, theta, 2, 2)
  descended = opi.linear_step(mdp, phi, sampled, theta, 2, 2, gradient_steps=5000, step_size=0.2)
  np.testing.assert_allclose(descended, fitted, atol=1e-8)
  value = np.asarray(phi @ theta)
  q = np.asarray(mdp.reward) + 0.8 * np.asarray(mdp.transition) @ value
  q = np.asarray(mdp.reward) + 0.8 * np.asarray(mdp.transition) @ q.max(axis=1)
  rows = np.asarray(mdp.transition)[np.arange(5), q.argmax(axis=1)]
  target = np.asarray(mdp.reward)[np.arange(5), q.argmax(axis=1)] + 0.8 * rows @ q.max(axis=1)
  np.testing.assert_allclose(fitted, np.linalg.lstsq(np.asarray(phi), target)[0])


@pytest.mark.parametrize("uniformise", [False, True])
@pytest.mark.parametrize("reward_type", [jnp.float32, jnp.float64, int])
def test_schedules_of_optax_and_mixed_types_run(reward_type, uniformise):
  reward = jnp.array([[0, 1], [2, 0]], reward_type)
  rows = jnp.eye(2, dtype=int)[FOLLOWING]
  mdp = opi.TabularMDP(reward, rows, jnp.float64(0.5))
  for step_size in (optax.constant_schedule(0.5), optax.polynomial_schedule(0.5, 0.1, 1.0, 50)):
    config = opi.MonteCarloConfig(step_size, uniformise=uniformise, horizon=40)
    begin = jnp.zeros((2, 2), jnp.float32)
    sampler = opi.table_sampler(mdp)
    state, _ = opi.mc_run(jax.random.key(0), sampler, start(1.0), mdp.discount, config, begin, 400)
    # Deterministic: state 0 goes to 1 for 0 or stays for 1; state 1 goes to 0 for 2.
    optimal = opi.policy_q(mdp, opi.solve(mdp).policy)
    np.testing.assert_allclose(state.q, optimal, atol=0.05)


def test_the_mean_field_leaves_infeasible_actions_out():
  mask = jnp.array([[True, False], [True, True]])
  mdp = counterexample().replace(mask=mask)
  last, _ = opi.mean_field(mdp, rates(1.0), jnp.zeros((2, 2), jnp.float32), 0.1, 2000)
  assert last.dtype == mdp.dtype
  assert last[0, 1] == -jnp.inf
  np.testing.assert_allclose(last[mask], opi.policy_q(mdp, opi.solve(mdp).policy)[mask], atol=1e-5)


@pytest.mark.parametrize("phi", [np.eye(3, dtype=np.float32), np.eye(3, dtype=int)])
def test_linear_values_take_the_model_s_type(phi):
  mdp = random_model(6)
  run = opi.linear_run(mdp, jnp.asarray(phi), jnp.arange(3), jnp.zeros(3, jnp.float32), 5, 1, 60)
  assert run.theta.dtype == jnp.float64
  np.testing.assert_allclose(run.theta, opi.solve(mdp).value, atol=1e-6)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: opi.MonteCarloConfig(0.0), "step_size = 0.0"),
    (lambda: opi.MonteCarloConfig(update="every"), "update = 'every'"),
    (lambda: opi.MonteCarloConfig(horizon=0), "horizon = 0"),
    (lambda: opi.mc_init(jnp.zeros(3)), "q is float64 of shape"),
    (lambda: opi.mc_init(jnp.zeros((2, 2), int)), "expected floats"),
    (
      lambda: opi.table_sampler(opi.OperatorMDP(abs, abs, 0.9, 2, 2)),
      "expected a TabularMDP or SparseMDP",
    ),
    (
      lambda: opi.mean_field(counterexample(), rates(1), jnp.zeros((2, 2)), 0.1, 10, 3),
      "num_steps = 10, trace_every = 3",
    ),
    (
      lambda: opi.contraction_product(jnp.ones((3, 2)), jnp.arange(3), 0.9, 1),
      "rank 1; expected 2",
    ),
    (lambda: opi.contraction_product(jnp.eye(3), jnp.array([0, 3]), 0.9, 1), r"sampled\[1\] = 3"),
    (lambda: opi.contraction_product(jnp.eye(3), jnp.arange(3), 0.9, 0), "num_sweeps = 0"),
    (lambda: opi.contraction_product(jnp.ones(3), jnp.arange(3), 0.9, 1), "phi has shape"),
    (
      lambda: opi.linear_step(
        counterexample(), jnp.eye(2), jnp.arange(2), jnp.zeros(2), 1, gradient_steps=0
      ),
      "gradient_steps = 0",
    ),
    (lambda: linear_run(1, gradient_steps=0), "gradient_steps = 0"),
    (lambda: linear_run(1, gradient_steps=1, step_size=-1.0), "step_size = -1.0"),
    (lambda: linear_run(0), "num_iterations = 0"),
  ],
)
def test_bad_input_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
