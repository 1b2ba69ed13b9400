"""JRF training against NumPy, finite differences and hand-written loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algorithms import jrf
from algorithms.noise import TransitionMatrix
from models.mlp import build_mlp


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


_INIT, APPLY = build_mlp(4, (6,))
LOSS = jax.jit(jrf.jrf_loss, static_argnames=("apply_fn", "config"))
STEP = jax.jit(jrf.step, static_argnames=("apply_fn", "config"))
RUN = jax.jit(jrf.run, static_argnames=("apply_fn", "config", "num_steps", "eval_every"))


def make_params(seed: int):
  params = _INIT(jax.random.key(seed))
  return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), params)


def make_problem(label=0.3, attribute=0.3, weight=0.3, num_groups=2) -> jrf.JRFProblem:
  return jrf.JRFProblem(
    TransitionMatrix.symmetric(jnp.asarray(label)),
    TransitionMatrix.symmetric(jnp.asarray(attribute), num_groups),
    jnp.asarray(weight),
  )


def make_batch(seed: int, num_rows: int = 120, num_groups: int = 2) -> jrf.Batch:
  rng = np.random.default_rng(seed)
  attribute = rng.integers(0, num_groups, num_rows)
  features = rng.normal(size=(num_rows, 4)) + 0.5 * attribute[:, None]
  labels = (features[:, 0] + rng.normal(size=num_rows) > 0.5).astype(int)
  dtype = jnp.result_type(float)
  return jrf.Batch(
    jnp.asarray(features, dtype),
    jnp.asarray(labels),
    jnp.asarray(attribute),
    jnp.asarray(rng.integers(0, 3, num_rows), dtype),
  )


def assert_trees_close(first, second, **tolerances):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), first, second)


CONFIGS = {
  "default": jrf.JRFConfig(),
  "paper": jrf.JRFConfig(mode="paper"),
  "squared": jrf.JRFConfig(penalty="squared"),
  "smooth": jrf.JRFConfig(penalty="smooth"),
  "opportunity": jrf.JRFConfig(criterion="equal_opportunity"),
  "odds": jrf.JRFConfig(criterion="equalised_odds"),
  "max": jrf.JRFConfig(num_groups=3, reduction="max"),
  "pairwise": jrf.JRFConfig(num_groups=3, reduction="pairwise", criterion="equalised_odds"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_against_finite_differences(x64, name):
  config = CONFIGS[name]
  # Low enough rates that no sampled share is impossible under them.
  problem = make_problem(0.1, 0.1, 2.0, config.num_groups)
  batch = make_batch(9, 400, config.num_groups)
  params = make_params(0)

  def loss(params):
    return LOSS(params, APPLY, batch, problem, config)[0]

  _, (metrics, _) = LOSS(params, APPLY, batch, problem, config)
  assert metrics["empty_groups"] == 0
  assert metrics["gap"] > 1e-3
  leaves, treedef = jax.tree.flatten(jax.grad(loss)(params))
  for seed in range(3):
    rng = np.random.default_rng(seed)
    direction = jax.tree.unflatten(treedef, [jnp.asarray(rng.normal(size=g.shape)) for g in leaves])
    size = 1e-6
    up = loss(jax.tree.map(lambda p, d: p + size * d, params, direction))  # noqa: B023
    down = loss(jax.tree.map(lambda p, d: p - size * d, params, direction))  # noqa: B023
    slope = sum(jnp.sum(g * d) for g, d in zip(leaves, jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(slope, (up - down) / (2 * size), rtol=1e-6, atol=1e-8)


def test_loss_against_numpy(x64):
  batch, params = make_batch(10), make_params(1)
  problem = make_problem(0.2, 0.1, 0.7)
  loss, (metrics, _) = LOSS(params, APPLY, batch, problem, jrf.JRFConfig())
  f = 1 / (1 + np.exp(-np.asarray(APPLY(params, batch.features))))
  weights, labels, attribute = map(np.asarray, (batch.weights, batch.labels, batch.attribute))
  forward = 0.8 * f + 0.2 * (1 - f)
  bce = np.average(-np.log(np.where(labels == 1, forward, 1 - forward)), weights=weights)
  q1 = np.average(attribute, weights=weights)
  pi1 = (q1 - 0.1) / 0.8
  observed = [np.average(f[attribute == a], weights=weights[attribute == a]) for a in range(2)]
  gap = abs(observed[1] - observed[0]) * q1 * (1 - q1) / (pi1 * (1 - pi1) * 0.8)
  np.testing.assert_allclose(metrics["bce"], bce, atol=1e-12)
  np.testing.assert_allclose(metrics["gap"], gap, atol=1e-12)
  np.testing.assert_allclose(loss, bce + 0.7 * gap, atol=1e-12)
  np.testing.assert_allclose(metrics["objective"], loss)


@pytest.mark.parametrize("name", ["default", "paper", "opportunity", "max"])
@pytest.mark.parametrize("empty", ["group", "batch"])
def test_batch_without_a_group_keeps_the_cross_entropy_only(name, empty):
  config = CONFIGS[name]
  batch = make_batch(11, 60, config.num_groups)
  batch = batch.replace(attribute=jnp.zeros_like(batch.attribute))
  if empty == "batch":
    batch = batch.replace(weights=jnp.zeros_like(batch.weights))
  params = make_params(2)

  def gradient(weight):
    problem = make_problem(0.3, 0.1, weight, config.num_groups)
    return jax.value_and_grad(LOSS, has_aux=True)(params, APPLY, batch, problem, config)

  (loss, (metrics, _)), grads = gradient(5.0)
  (plain, _), plain_grads = gradient(0.0)
  assert jax.tree.all(jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), grads))
  assert metrics["gap"] == 0.0
  assert metrics["empty_groups"] >= 1
  np.testing.assert_allclose(loss, plain, rtol=1e-6)
  assert_trees_close(grads, plain_grads, rtol=1e-5, atol=1e-8)


def test_moving_average_in_closed_form(x64):
  decay = 0.9
  config = jrf.JRFConfig(ema_decay=decay)
  problem, params = make_problem(0.1, 0.1, 1.0), make_params(3)
  batches = [make_batch(seed) for seed in range(5)]
  masses = []
  ema = jrf.init(params, config).ema
  for batch in batches:
    loss, (metrics, ema) = LOSS(params, APPLY, batch, problem, config, ema)
    scores = jax.nn.sigmoid(APPLY(params, batch.features))
    masses.append(jrf.group_mass(scores, batch.attribute, batch.weights, 2))
  weights = (1 - decay) * decay ** np.arange(4, -1, -1) / (1 - decay**5)
  mass = sum(w * m[0] for w, m in zip(weights, masses, strict=True))
  prior = sum(w * m[1] for w, m in zip(weights, masses, strict=True))
  assert int(ema.count) == 5
  np.testing.assert_allclose(
    metrics["gap"], jrf.mirl_gap(mass, prior, problem.attribute_transition), atol=1e-12
  )
  np.testing.assert_allclose(loss, metrics["bce"] + metrics["gap"], atol=1e-12)


def test_moving_average_passes_the_gradient_straight_through(x64):
  config = jrf.JRFConfig(ema_decay=0.9)
  problem, params = make_problem(0.1, 0.1, 1.0), make_params(3)
  _, (_, ema) = LOSS(params, APPLY, make_batch(0), problem, config, jrf.init(params, config).ema)
  batch = make_batch(1)

  def gap(params):
    return LOSS(params, APPLY, batch, problem, config, ema)[1][0]["gap"]

  def batch_mass(params):
    scores = jax.nn.sigmoid(APPLY(params, batch.features))
    return jrf.group_mass(scores, batch.attribute, batch.weights, 2)[0]

  _, (_, after) = LOSS(params, APPLY, batch, problem, config, ema)
  start = 1 - 0.9**2
  slope = jax.grad(jrf.mirl_gap)(
    after.mass / start, after.prior / start, problem.attribute_transition
  )
  _, pull_back = jax.vjp(batch_mass, params)
  assert_trees_close(jax.grad(gap)(params), pull_back(slope)[0], atol=1e-12)


def test_update_is_adamw_on_the_loss():
  config = jrf.JRFConfig(learning_rate=0.01, weight_decay=0.1)
  batch, problem, params = make_batch(12), make_problem(), make_params(4)
  state, metrics = STEP(jrf.init(params, config), APPLY, batch, problem, config)
  gradient = jax.grad(lambda p: LOSS(p, APPLY, batch, problem, config)[0])(params)
  # First step of Adam: the sign of the gradient, up to its epsilon; then the decoupled decay.
  expected = jax.tree.map(
    lambda p, g: p - 0.01 * (g / (jnp.abs(g) + 1e-8) + 0.1 * p), params, gradient
  )
  assert_trees_close(state.params, expected, rtol=1e-4, atol=1e-6)
  assert int(state.step) == 1
  before = LOSS(params, APPLY, batch, problem, config)[0]
  np.testing.assert_allclose(metrics["objective"], before, rtol=1e-6)
  # Without a validation batch the best parameters are the latest.
  assert_trees_close(state.best_params, state.params)
  assert int(state.best_step) == 1


def test_plain_adam_without_weight_decay():
  config = jrf.JRFConfig(weight_decay=0.0)
  batch, problem, params = make_batch(12), make_problem(), make_params(4)
  state, _ = RUN(jrf.init(params, config), APPLY, batch, problem, config, 5)
  optimiser = optax.adam(5e-3)
  opt_state = optimiser.init(params)
  for _ in range(5):
    gradient = jax.grad(lambda p: LOSS(p, APPLY, batch, problem, config)[0])(params)
    updates, opt_state = optimiser.update(gradient, opt_state)
    params = optax.apply_updates(params, updates)
  assert_trees_close(state.params, params, rtol=1e-4, atol=1e-6)


def test_jit_equals_no_jit(x64):
  config = jrf.JRFConfig(ema_decay=0.5)
  batch, problem = make_batch(13), make_problem()
  state = jrf.init(make_params(5), config)
  plain = jrf.step(state, APPLY, batch, problem, config, make_batch(14))
  jitted = STEP(state, APPLY, batch, problem, config, make_batch(14))
  assert_trees_close(plain, jitted, atol=1e-10)


def test_vmap_over_arms_equals_a_loop(x64):
  config = jrf.JRFConfig()
  arms = [(0.0, 0.0, 0.3), (0.3, 0.3, 0.3), (0.3, 0.0, 0.0), (0.1, 0.2, 5.0)]
  problems = [make_problem(*arm) for arm in arms]
  shared = make_batch(15)
  labels = jnp.stack([jnp.roll(shared.labels, arm) for arm in range(4)])
  states = [jrf.init(make_params(arm), config) for arm in range(4)]

  def stack(*leaves):
    return jnp.stack(leaves)

  def train(state, labels, problem):
    batch = shared.replace(labels=labels)
    return jrf.run(state, APPLY, batch, problem, config, 6, shared, eval_every=3)

  together = jax.jit(jax.vmap(train))(
    jax.tree.map(stack, *states), labels, jax.tree.map(stack, *problems)
  )
  train_one = jax.jit(train)
  alone = [train_one(*arm) for arm in zip(states, labels, problems, strict=True)]
  assert_trees_close(together, jax.tree.map(stack, *alone), atol=1e-9)


def test_run_goes_on_where_it_stopped(x64):
  config = jrf.JRFConfig(ema_decay=0.5)
  batch, problem, held_out = make_batch(16), make_problem(), make_batch(17)
  state = jrf.init(make_params(6), config)
  whole, history = RUN(state, APPLY, batch, problem, config, 12, held_out, eval_every=3)
  half, first = RUN(state, APPLY, batch, problem, config, 6, held_out, eval_every=3)
  rest, second = RUN(half, APPLY, batch, problem, config, 6, held_out, eval_every=3)
  assert_trees_close(rest, whole, atol=1e-12)
  assert history["bce"].shape == (12,)
  assert history["validation_objective"].shape == (4,)
  for name, values in history.items():
    np.testing.assert_allclose(jnp.concatenate([first[name], second[name]]), values, atol=1e-12)


@pytest.mark.parametrize("eval_every", [1, 5])
def test_early_stopping_keeps_the_best_on_noisy_validation(x64, eval_every):
  # Few rows, large steps: the objective on held-out rows falls, then rises.
  config = jrf.JRFConfig(learning_rate=0.05)
  batch, problem, held_out = make_batch(18, 40), make_problem(0.2, 0.1), make_batch(19, 400)
  state = jrf.init(make_params(7), config)
  last, history = RUN(state, APPLY, batch, problem, config, 60, held_out, eval_every)

  objectives, params = [], []
  for count in range(1, 61):
    state, _ = STEP(state, APPLY, batch, problem, config)
    if count % eval_every == 0:
      objectives.append(float(LOSS(state.params, APPLY, held_out, problem, config)[0]))
      params.append(state.params)
  best = int(np.argmin(objectives))
  assert 0 < best < len(objectives) - 1
  np.testing.assert_allclose(history["validation_objective"], objectives, atol=1e-9)
  np.testing.assert_allclose(last.best_objective, objectives[best], atol=1e-9)
  assert int(last.best_step) == (best + 1) * eval_every
  assert_trees_close(last.best_params, params[best], atol=1e-8)


def test_step_validates_after_its_update():
  config = jrf.JRFConfig()
  batch, problem, held_out = make_batch(20), make_problem(), make_batch(21)
  state, metrics = STEP(jrf.init(make_params(8), config), APPLY, batch, problem, config, held_out)
  expected = LOSS(state.params, APPLY, held_out, problem, config)[0]
  np.testing.assert_allclose(metrics["validation_objective"], expected, rtol=1e-6)
  np.testing.assert_allclose(state.best_objective, expected, rtol=1e-6)


def test_steps_must_be_a_multiple_of_evaluations():
  config = jrf.JRFConfig()
  state = jrf.init(make_params(9), config)
  with pytest.raises(ValueError, match="num_steps is 10 and eval_every 3"):
    RUN(state, APPLY, make_batch(0), make_problem(), config, 10, make_batch(1), 3)


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_binary_corrections_are_the_plain_penalty_rescaled(x64, mode):
  config = jrf.JRFConfig(mode=mode, weight_decay=0.0)
  batch, params = make_batch(22, 300), make_params(10)
  # Observed shares do not change in training, so neither does the factor of the exact mode.
  q1 = np.average(batch.attribute, weights=batch.weights)
  pi1 = (q1 - 0.3) / 0.4
  exact_factor = q1 * (1 - q1) / (pi1 * (1 - pi1) * 0.4)
  factor = 2.5 if mode == "paper" else exact_factor

  def train(problem):
    return RUN(jrf.init(params, config), APPLY, batch, problem, config, 50)[0].params

  corrected = train(make_problem(0.3, 0.3, 15.0))
  assert_trees_close(corrected, train(make_problem(0.3, 0.0, 15.0 * factor)), atol=1e-8)
  # The comparison is not empty: the same lambda on the plain penalty trains another network.
  difference = jax.tree.map(
    lambda a, b: jnp.max(jnp.abs(a - b)), corrected, train(make_problem(0.3, 0.0, 15.0))
  )
  assert max(jax.tree.leaves(difference)) > 1e-4


def test_equal_opportunity_training_lowers_its_gap():
  config = jrf.JRFConfig(criterion="equal_opportunity", learning_rate=0.02)
  batch = make_batch(23, 600)
  params = make_params(11)

  def final_gap(weight):
    problem = make_problem(0.05, 0.05, weight)
    state, _ = RUN(jrf.init(params, config), APPLY, batch, problem, config, 100)
    return LOSS(state.params, APPLY, batch, problem, config)[1][0]["gap"]

  assert final_gap(2.0) < 0.3 * final_gap(0.0)
