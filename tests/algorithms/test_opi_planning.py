"""Planning against NumPy's policy iteration with dense solves, closed forms and quantecon."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import opi

pytestmark = pytest.mark.usefixtures("x64")


FLIP = np.array([[0, 1], [0, 1]])


def dense(seed, states, actions, discount=0.9, masked=False):
  rng = np.random.default_rng(seed)
  mask = None
  if masked:
    mask = rng.random((states, actions)) > 0.4
    mask[np.arange(states), rng.integers(0, actions, states)] = True
  return opi.TabularMDP(
    jnp.asarray(rng.normal(size=(states, actions))),
    jnp.asarray(rng.dirichlet(np.ones(states), (states, actions))),
    discount,
    None if mask is None else jnp.asarray(mask),
  )


def deterministic(following, reward, discount=0.9):
  following = np.asarray(following)
  return opi.TabularMDP(
    jnp.asarray(reward, float), jnp.asarray(np.eye(len(following))[following]), discount
  )


def chain(states, discount):
  """State i leads to i - 1 and pays 1; state 0 stays and pays nothing: v(i) is a partial sum."""
  following = np.maximum(np.arange(states) - 1, 0)[:, None]
  reward = (np.arange(states) > 0).astype(float)[:, None]
  value = np.array([sum(discount**k for k in range(i)) for i in range(states)])
  return deterministic(following, reward, discount), value


def as_sparse(mdp, padding=2):
  """The same model with listed successors, padded by arbitrary ones of probability 0."""
  states, actions = mdp.reward.shape
  successors = np.broadcast_to(np.arange(states), (states, actions, states))
  extra = np.random.default_rng(0).integers(0, states, (states, actions, padding))
  zeros = np.zeros((states, actions, padding))
  return opi.SparseMDP(
    mdp.reward,
    jnp.asarray(np.concatenate([successors, extra], axis=2), jnp.int32),
    jnp.asarray(np.concatenate([mdp.transition, zeros], axis=2)),
    mdp.discount,
    mdp.mask,
  )


def as_operator(mdp):
  return opi.OperatorMDP(
    jax.tree_util.Partial(opi.bellman_q, mdp),
    jax.tree_util.Partial(opi.policy_backup, mdp),
    mdp.discount,
    *mdp.reward.shape,
  )


def reference(mdp):
  """Value by policy iteration in NumPy."""
  reward, transition = np.asarray(mdp.reward), np.asarray(mdp.transition)
  mask = np.ones(reward.shape, bool) if mdp.mask is None else np.asarray(mdp.mask)
  states, policy = np.arange(len(reward)), mask.argmax(axis=1)
  for _ in range(200):
    matrix = np.eye(len(reward)) - mdp.discount * transition[states, policy]
    value = np.linalg.solve(matrix, reward[states, policy])
    q = np.where(mask, reward + mdp.discount * transition @ value, -np.inf)
    if (q.max(axis=1) <= value + 1e-11).all():
      return value
    policy = q.argmax(axis=1)
  raise AssertionError


# Made inside a test, in float64.
MODELS = {
  "small": lambda: dense(0, 4, 3),
  "masked": lambda: dense(1, 30, 5, 0.95, masked=True),
  "patient": lambda: dense(2, 20, 2, 0.99),
  "myopic": lambda: dense(3, 6, 3, 0.0),
  "one state": lambda: dense(4, 1, 3),
  "one action": lambda: dense(5, 7, 1),
  "counterexample": lambda: deterministic([[1, 0], [0, 0]], [[-3, 3], [3, 1]]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sweeps", [1, (1, 2, 30), None])
def test_value_bounds_and_policy_are_those_of_policy_iteration(name, sweeps):
  mdp = MODELS[name]()
  best = reference(mdp)
  for lookahead, lam, stopping in ((1, None, "span"), (3, 0.5, "norm")):
    config = opi.OPIConfig(sweeps, lookahead, lam, epsilon=1e-8, stopping=stopping)
    result = opi.solve(mdp, config)
    assert result.converged
    assert np.all(result.lower <= best)
    assert np.all(best <= result.upper)
    assert np.max(abs(result.value - best)) <= 1e-8
    assert np.max(abs(result.value - best)) <= np.max(result.upper - result.lower) / 2
    lost = best - np.asarray(opi.evaluate_policy(mdp, result.policy, method="dense").value)
    assert lost.max() <= 1e-8


def test_bounds_hold_at_every_iteration():
  mdp = MODELS["masked"]()
  best = reference(mdp)
  for lookahead, lam in ((1, None), (2, None), (1, 0.7)):
    config = opi.OPIConfig(4, lookahead, lam)
    state = opi.init(mdp, config)
    for _ in range(6):
      gain = mdp.discount / (1 - mdp.discount)
      assert np.all(state.improved + gain * state.low <= best + 1e-12)
      assert np.all(best <= state.improved + gain * state.high + 1e-12)
      state = opi.step(mdp, state, config)


def test_one_sweep_is_value_iteration_and_exact_evaluation_is_howards():
  mdp = MODELS["patient"]()
  value = np.zeros(20)
  config = opi.OPIConfig(1)
  state = opi.init(mdp, config)
  for _ in range(5):
    np.testing.assert_allclose(state.base, value, atol=1e-13)
    value = (mdp.reward + mdp.discount * mdp.transition @ value).max(axis=1)
    state = opi.step(mdp, state, config)
  howard = opi.OPIConfig(None)
  state = opi.step(mdp, opi.init(mdp, howard), howard)
  first = np.asarray(mdp.reward).argmax(axis=1)
  rows = np.asarray(mdp.transition)[np.arange(20), first]
  expected = np.linalg.solve(
    np.eye(20) - mdp.discount * rows, np.asarray(mdp.reward)[np.arange(20), first]
  )
  np.testing.assert_allclose(state.base, expected, rtol=1e-11)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_lambda_weights_powers_of_the_policy_operator(lam):
  mdp, sweeps = MODELS["small"](), 4
  config = opi.OPIConfig(sweeps, lam=lam)
  first = opi.init(mdp, config)
  power, terms = first.improved, [np.asarray(first.improved)]
  for _ in range(sweeps - 1):
    power = opi.policy_backup(mdp, first.policy, power)
    terms.append(np.asarray(power))
  weights = [(1 - lam) * lam**i for i in range(sweeps - 1)] + [lam ** (sweeps - 1)]
  expected = sum(w * t for w, t in zip(weights, terms, strict=True))
  np.testing.assert_allclose(opi.step(mdp, first, config).base, expected, rtol=1e-12)


def test_sparse_and_matrix_free_models_equal_the_table():
  mdp = MODELS["masked"]()
  expected = opi.solve(mdp)
  for other in (as_sparse(mdp), as_operator(mdp)):
    found = opi.solve(other)
    np.testing.assert_allclose(found.value, expected.value, atol=1e-10)
    np.testing.assert_array_equal(found.policy, expected.policy)
    assert int(found.num_iterations) == int(expected.num_iterations)


def test_masked_rewards_may_be_anything():
  mdp = MODELS["masked"]()
  for junk in (-np.inf, np.nan, 1e30):
    changed = mdp.replace(reward=jnp.where(mdp.mask, mdp.reward, junk))
    found = opi.solve(changed)
    np.testing.assert_allclose(found.value, reference(mdp), atol=1e-6)
    assert np.all(np.asarray(mdp.mask)[np.arange(30), found.policy])


def test_ties_take_the_first_action():
  mdp = deterministic([[0, 0, 0], [0, 0, 0]], [[1, 1, 0], [0, 2, 2]])
  np.testing.assert_array_equal(opi.solve(mdp).policy, [0, 1])


def test_the_start_does_not_matter_and_a_low_one_rises():
  mdp = MODELS["patient"]()
  best = reference(mdp)
  for start in (1e4, -1e4):
    found = opi.solve(mdp, initial_value=jnp.full(20, start))
    np.testing.assert_allclose(found.value, best, atol=1e-6)
  config = opi.OPIConfig(5)
  state = opi.init(mdp, config, jnp.full(20, -1e3))
  for _ in range(20):
    following = opi.step(mdp, state, config)
    assert np.all(following.base >= state.base - 1e-9)
    state = following


def test_more_sweeps_take_fewer_iterations():
  mdp, best = chain(60, 0.99)
  counts = []
  for sweeps in (1, 5, 20):
    result = opi.solve(mdp, opi.OPIConfig(sweeps))
    np.testing.assert_allclose(result.value, best, atol=1e-8)
    counts.append(int(result.num_iterations))
  assert counts[0] >= 3 * counts[1] >= 6 * counts[2] > 0


@pytest.mark.parametrize("method", opi.METHODS)
@pytest.mark.parametrize("kind", ["chain", "ring", "two rings", "random", "zero"])
def test_evaluation_equals_closed_form_or_solve(kind, method):
  if kind == "chain":
    mdp, expected = chain(50, 0.99)
  else:
    states = 40
    following = (np.arange(states) + 1) % states
    if kind == "two rings":
      following = np.where(np.arange(states) % 20 == 19, np.arange(states) - 19, following)
    reward = np.zeros((states, 1)) if kind == "zero" else np.eye(states)[:, :1]
    mdp = deterministic(following[:, None], reward, 0.97)
    if kind == "random":
      mdp = dense(7, states, 1, 0.97)
    matrix = np.eye(states) - 0.97 * np.asarray(mdp.transition)[:, 0]
    expected = np.linalg.solve(matrix, np.asarray(mdp.reward)[:, 0])
  found = opi.evaluate_policy(mdp, jnp.zeros(mdp.num_states, int), method=method)
  assert found.converged
  np.testing.assert_allclose(found.value, expected, rtol=1e-11, atol=1e-11)


def test_krylov_takes_fewer_products_than_sweeps_on_a_patient_model():
  mdp = dense(8, 200, 1, 0.9999)
  policy = jnp.zeros(200, int)
  krylov = opi.evaluate_policy(mdp, policy)
  sweeps = opi.evaluate_policy(
    mdp, policy, method="iterate", tolerance=float(krylov.residual) + 1e-9
  )
  assert krylov.converged
  assert int(krylov.num_iterations) * 100 * 10 < int(sweeps.num_iterations)


def test_gradients_equal_finite_differences():
  mdp = dense(9, 5, 3)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=5))

  def loss(model):
    return weights @ opi.optimal_value(model, opi.OPIConfig(epsilon=1e-12))

  gradient = jax.grad(loss)(mdp)

  def numeric(change):
    h = 1e-5
    up, down = (reference(change(s * h)) for s in (1, -1))
    return float(weights @ (up - down) / (2 * h))

  for s, a in ((0, 1), (3, int(opi.solve(mdp).policy[3]))):
    slope = numeric(lambda e, s=s, a=a: mdp.replace(reward=mdp.reward.at[s, a].add(e)))
    np.testing.assert_allclose(gradient.reward[s, a], slope, atol=1e-6)
    slope = numeric(lambda e, s=s, a=a: mdp.replace(transition=mdp.transition.at[s, a, 2].add(e)))
    np.testing.assert_allclose(gradient.transition[s, a, 2], slope, atol=1e-5)
  slope = numeric(lambda e: mdp.replace(discount=mdp.discount + e))
  np.testing.assert_allclose(gradient.discount, slope, rtol=1e-6)
  through_sparse = jax.grad(loss, allow_int=True)(as_sparse(mdp))
  np.testing.assert_allclose(through_sparse.reward, gradient.reward, atol=1e-9)
  through_operator = jax.grad(lambda model: loss(as_operator(model)))(mdp)
  np.testing.assert_allclose(through_operator.reward, gradient.reward, atol=1e-9)


def test_jit_and_vmap_over_models():
  models = [dense(seed, 6, 3) for seed in range(4)]
  batch = jax.tree.map(lambda *x: jnp.stack(x), *models)
  found = jax.jit(jax.vmap(lambda model: opi.solve(model)))(batch)
  for i, mdp in enumerate(models):
    np.testing.assert_allclose(found.value[i], reference(mdp), atol=1e-6)
  slopes = jax.vmap(jax.grad(lambda model: opi.optimal_value(model).sum()))(batch)
  alone = jax.grad(lambda model: opi.optimal_value(model).sum())(models[1])
  np.testing.assert_allclose(slopes.reward[1], alone.reward, atol=1e-6)


def test_trace_is_the_history_of_the_solver():
  mdp = MODELS["patient"]()
  best = reference(mdp)
  config = opi.OPIConfig(3)
  result = opi.solve(mdp, config)
  last, trace = opi.solve_trace(mdp, config, int(result.num_iterations), reference=best)
  np.testing.assert_allclose(last.value, result.value, atol=1e-12)
  assert trace.span.shape == (int(result.num_iterations),)
  assert np.all(trace.error <= trace.bound + 1e-12)
  np.testing.assert_allclose(trace.span[-1], result.span)


def test_a_cap_is_kept_and_said_once():
  mdp = MODELS["patient"]()
  with pytest.warns(UserWarning, match="raise max_iterations") as caught:
    result = opi.solve(mdp, opi.OPIConfig(1, max_iterations=3))
  assert len(caught) == 1
  assert not result.converged
  assert int(result.num_iterations) == 3
  assert np.all(result.lower <= reference(mdp))
  assert np.all(reference(mdp) <= result.upper)
  with pytest.warns(UserWarning, match="raise max_iterations") as caught:
    found = opi.evaluate_policy(
      mdp, jnp.zeros(20, int), method="iterate", max_iterations=2, tolerance=1e-9
    )
  assert len(caught) == 1
  assert not found.converged


def test_the_default_cap_always_suffices():
  for mdp in (dense(11, 10, 2, 0.999), chain(40, 0.999)[0], MODELS["counterexample"]()):
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      for config in (
        opi.OPIConfig(1),
        opi.OPIConfig(1, stopping="norm"),
        opi.OPIConfig(2, lam=0.2),
      ):
        assert opi.solve(mdp, config).converged


@pytest.mark.parametrize("name", ["patient", "masked", "counterexample", "one state"])
def test_the_default_accuracy_suits_the_type(name):
  mdp = MODELS[name]()
  best = reference(mdp)
  assert np.max(abs(opi.solve(mdp).value - best)) < 1e-6

  def cast(model, dtype):
    return jax.tree.map(
      lambda x: x if jnp.result_type(x) == jnp.bool_ else jnp.asarray(x, dtype), model
    )

  single = cast(mdp, jnp.float32)
  # Rounding the model moves its solution: the reference is of the rounded one.
  best = reference(cast(single, jnp.float64))
  found = opi.solve(single)
  assert found.converged
  assert found.value.dtype == jnp.float32
  assert np.all(found.lower <= best)
  assert np.all(best <= found.upper)
  assert np.max(abs(found.value - best)) < 1e-4 * max(1, np.max(abs(best)))


def test_epsilon_below_the_type_is_refused_with_a_number_that_works():
  mdp = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), MODELS["patient"]())
  with pytest.raises(ValueError, match="enable float64") as caught:
    opi.solve(mdp, opi.OPIConfig(epsilon=1e-7))
  enough = float(str(caught.value).rsplit(" ", 1)[1])
  assert opi.solve(mdp, opi.OPIConfig(epsilon=enough)).converged
  with pytest.raises(ValueError, match="raise epsilon to"):
    opi.solve(MODELS["patient"](), opi.OPIConfig(epsilon=1e-16))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"discount": 1.0}, "discount = 1.0; expected one number in"),
    ({"discount": -0.1}, "discount = -0.1"),
    ({"discount": float("nan")}, "discount = nan"),
    ({"reward": (2, 1, np.nan)}, "reward of state 2, action 1 is nan"),
    ({"reward": (0, 0, -np.inf)}, "mark infeasible actions by mask=False"),
    ({"transition": (3, 2, 0, -0.5)}, "probability of state 3, action 2, successor 0 is -0.5"),
    ({"transition": (1, 0, 3, np.nan)}, "probability of state 1, action 0, successor 3"),
    ({"transition": (3, 2, 1, 7.0)}, "sum of probabilities of state 3, action 2"),
    ({"mask": False}, "state 2 has no feasible action"),
  ],
)
def test_bad_models_are_named(change, message):
  mdp = dense(0, 4, 3)
  (name, value), *_ = change.items()
  if name == "mask":
    changed = mdp.replace(mask=jnp.ones((4, 3), bool).at[2].set(False))
  elif name == "discount":
    changed = mdp.replace(discount=value)
  else:
    *index, new = value
    changed = mdp.replace(**{name: getattr(mdp, name).at[tuple(index)].set(new)})
  for call in (opi.solve, opi.optimal_value, opi.check_mdp):
    with pytest.raises(ValueError, match=message):
      call(changed)


def test_bad_sparse_models_are_named():
  mdp = as_sparse(dense(0, 4, 3))
  with pytest.raises(ValueError, match="next_state of state 1, action 2, successor 0 is 4"):
    opi.solve(mdp.replace(next_state=mdp.next_state.at[1, 2, 0].set(4)))
  with pytest.raises(ValueError, match="next_state has shape"):
    opi.solve(mdp.replace(next_state=mdp.next_state[..., :2]))
  with pytest.raises(ValueError, match="expected int32"):
    opi.solve(mdp.replace(next_state=mdp.next_state.astype(float)))
  with pytest.raises(ValueError, match="transition has shape"):
    opi.solve(dense(0, 4, 3).replace(transition=jnp.ones((4, 3, 5)) / 5))
  with pytest.raises(ValueError, match="expected a TabularMDP"):
    opi.solve(None)
  wrong = opi.OperatorMDP(lambda v: v, lambda p, v: v, 0.9, 4, 3)
  with pytest.raises(ValueError, match="backup returns shape"):
    opi.solve(wrong)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_sweeps": 0}, "num_sweeps = 0"),
    ({"num_sweeps": (3, 0)}, "num_sweeps"),
    ({"num_sweeps": ()}, "num_sweeps"),
    ({"num_sweeps": 2.5}, "num_sweeps"),
    ({"lookahead": 0}, "lookahead = 0"),
    ({"lam": 1.5}, "lam = 1.5"),
    ({"epsilon": 0.0}, "epsilon = 0.0"),
    ({"epsilon": float("nan")}, "epsilon = nan"),
    ({"stopping": "sup"}, "stopping = 'sup'"),
    ({"max_iterations": 0}, "max_iterations = 0"),
  ],
)
def test_bad_settings_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    opi.OPIConfig(**fields)
  assert dataclasses.replace(opi.OPIConfig(), num_sweeps=3).num_sweeps == 3


def test_bad_starts_and_policies_are_named():
  mdp = MODELS["masked"]()
  with pytest.raises(ValueError, match="the initial value has shape"):
    opi.solve(mdp, initial_value=jnp.zeros(3))
  with pytest.raises(ValueError, match="state 4 is not finite"):
    opi.solve(mdp, initial_value=jnp.zeros(30).at[4].set(jnp.nan))
  state, action = np.argwhere(~np.asarray(mdp.mask))[0]
  policy = opi.solve(mdp).policy.at[state].set(int(action))
  with pytest.raises(ValueError, match=f"action {action} in state {state}"):
    opi.evaluate_policy(mdp, policy)
  with pytest.raises(ValueError, match="policy is float64"):
    opi.evaluate_policy(mdp, jnp.zeros(30))
  with pytest.raises(ValueError, match="method = 'lu'"):
    opi.evaluate_policy(mdp, policy, method="lu")


def test_a_model_may_be_a_constant_of_a_jitted_function():
  mdp = dense(3, 5, 2)
  plain = np.asarray(opi.solve(mdp).value)
  policy = jnp.zeros(5, jnp.int32)
  calls = {
    "solve": lambda: opi.solve(mdp).value,
    "start": lambda: opi.solve(mdp, initial_value=np.ones(5)).value,
    "trace": lambda: opi.solve_trace(mdp, opi.OPIConfig(), 40)[0].value,
    "optimal": lambda: opi.optimal_value(mdp),
  }
  for name, call in calls.items():
    scaled = jax.jit(lambda scale, call=call: scale * call())(2.0)
    np.testing.assert_allclose(scaled, 2 * plain, atol=1e-5, err_msg=name)
  scaled = jax.jit(lambda scale: scale * opi.evaluate_policy(mdp, policy).value)(2.0)
  np.testing.assert_allclose(scaled, 2 * opi.evaluate_policy(mdp, policy).value, rtol=1e-9)


def test_a_change_that_rounds_to_zero_proves_no_epsilon():
  """Rewards 2e-7 apart at a value of 100, whose neighbours in float32 are 8e-6 away."""
  mdp = opi.TabularMDP(
    jnp.array([[1.0, 1 + 2e-7]], jnp.float32), jnp.ones((1, 2, 1), jnp.float32), 0.99
  )
  config = opi.OPIConfig(epsilon=1e-6)
  with pytest.raises(ValueError, match="below what float32 resolves"):
    opi.solve(mdp, config, initial_value=jnp.array([100.0]))
  inside = jax.jit(lambda m: opi.solve(m, config, initial_value=jnp.array([100.0])))(mdp)
  assert not inside.converged
  for epsilon in (1e-37, 1e-60):
    with pytest.raises(ValueError, match="below what float32 resolves"):
      opi.solve(mdp, opi.OPIConfig(epsilon=epsilon))


def test_a_start_far_too_large_does_not_hide_what_the_actions_differ_in():
  mdp = opi.TabularMDP(jnp.array([[0.0, 0.05]], jnp.float32), jnp.ones((1, 2, 1), jnp.float32), 0.9)
  result = opi.solve(mdp, initial_value=jnp.array([1e7], jnp.float32))
  assert result.converged
  assert result.policy[0] == 1
  assert result.lower[0] <= 0.5 <= result.upper[0]


def test_a_cap_is_not_taken_for_an_epsilon_too_small():
  with pytest.warns(UserWarning, match="raise max_iterations"):
    opi.solve(dense(0, 4, 2), opi.OPIConfig(num_sweeps=1, max_iterations=2))
  with pytest.warns(UserWarning, match="raise max_iterations"):
    opi.optimal_value(dense(0, 4, 2), opi.OPIConfig(num_sweeps=1, max_iterations=2))
  with pytest.raises(ValueError, match="below what float64 resolves"):
    opi.optimal_value(dense(0, 4, 2), opi.OPIConfig(epsilon=1e-17))


def test_types_may_differ():
  cases = [
    (jnp.float32, jnp.float64, 0.9),
    (jnp.float32, jnp.float32, np.float64(0.9)),
    (jnp.float64, jnp.float32, jnp.float32(0.9)),
    (int, int, jnp.float64(0.9)),
    (int, int, 0),
  ]
  for reward_type, row_type, discount in cases:
    following = jnp.eye(2, dtype=row_type)[FLIP]
    mdp = opi.TabularMDP(jnp.array([[0, 1], [2, 0]], reward_type), following, discount)
    result = opi.solve(mdp)
    assert result.value.dtype == mdp.dtype
    # The best way is around: state 0 pays 1 and leads to 1, which pays 2 and leads to 0.
    g = float(discount)
    best = np.array([1 + 2 * g, 2 + g]) / (1 - g**2)
    np.testing.assert_allclose(result.value, best, rtol=1e-5)
    np.testing.assert_allclose(opi.evaluate_policy(mdp, result.policy).value, best, rtol=1e-5)


def test_a_discount_that_rounds_to_one_is_refused():
  mdp = opi.TabularMDP(jnp.ones((1, 1), jnp.float32), jnp.ones((1, 1, 1), jnp.float32), 1 - 1e-9)
  with pytest.raises(ValueError, match="is 1 when rounded to float32"):
    opi.solve(mdp)


def test_operators_of_another_shape_or_type_are_named():
  def backup(v):
    return jnp.stack([v, v], 1)

  with pytest.raises(ValueError, match="policy_backup returns shape"):
    opi.solve(opi.OperatorMDP(backup, lambda policy, v: v[:1], 0.9, 2, 2))
  with pytest.raises(ValueError, match="policy_backup returns float32"):
    opi.solve(opi.OperatorMDP(backup, lambda policy, v: v.astype(jnp.float32), 0.9, 2, 2))
