"""JRF against enumerated populations, closed forms and finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import jrf
from algorithms.noise import TransitionMatrix


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def random_channel(rng: np.random.Generator, num_classes: int) -> np.ndarray:
  while True:
    matrix = 0.4 * np.eye(num_classes) + 0.6 * rng.dirichlet(np.ones(num_classes), num_classes)
    if abs(np.linalg.det(matrix)) > 0.1:
      return matrix


class Population:
  """Finite population: 6 values of x with a score each, a group, and every flip enumerated."""

  def __init__(self, rng: np.random.Generator, prior: np.ndarray, channel: np.ndarray):
    num_groups = len(prior)
    self.channel = TransitionMatrix(jnp.asarray(channel))
    scores = rng.random(6)
    given_group = rng.dirichlet(np.ones(6), num_groups)
    self.clean_means = given_group @ scores
    mass, noisy = np.zeros(num_groups), np.zeros(num_groups)
    for x in range(6):
      for clean in range(num_groups):
        for observed in range(num_groups):
          share = prior[clean] * given_group[clean, x] * channel[clean, observed]
          mass[observed] += share * scores[x]
          noisy[observed] += share
    self.mass, self.prior = jnp.asarray(mass), jnp.asarray(noisy)

  def gap(self, mode: str, reduction: str = "binary") -> float:
    return float(jrf.mirl_gap(self.mass, self.prior, self.channel, mode, reduction))


# ---- Algebra (acceptance 1) ------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_exact_gap_is_the_clean_gap(x64, num_groups, seed):
  rng = np.random.default_rng(100 * num_groups + seed)
  population = Population(
    rng, rng.dirichlet(np.full(num_groups, 2.0)), random_channel(rng, num_groups)
  )
  means, present = jrf.group_means(population.mass, population.prior, population.channel)
  assert jnp.all(present)
  np.testing.assert_allclose(means, population.clean_means, atol=1e-12)
  clean = population.clean_means
  expected_max = clean.max() - clean.min()
  pairs = [abs(clean[i] - clean[j]) for i in range(num_groups) for j in range(i)]
  np.testing.assert_allclose(population.gap("exact", "max"), expected_max, atol=1e-12)
  np.testing.assert_allclose(population.gap("exact", "pairwise"), np.mean(pairs), atol=1e-12)
  if num_groups == 2:
    np.testing.assert_allclose(population.gap("exact"), pairs[0], atol=1e-12)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.4])
def test_paper_gap_is_the_clean_gap_only_when_balanced_and_symmetric(x64, rate):
  rng = np.random.default_rng(int(100 * rate))
  balanced, skewed = np.array([0.5, 0.5]), np.array([0.332, 0.668])
  symmetric = np.array([[1 - rate, rate], [rate, 1 - rate]])
  asymmetric = np.array([[0.9, 0.1], [0.4, 0.6]])
  cases = [(balanced, symmetric, True), (skewed, symmetric, False), (balanced, asymmetric, False)]
  for prior, channel, equal in cases:
    population = Population(rng, prior, channel)
    clean = abs(population.clean_means[1] - population.clean_means[0])
    error = abs(population.gap("paper") - clean)
    assert error < 1e-12 if equal else error > 1e-3 * clean
    np.testing.assert_allclose(population.gap("exact"), clean, atol=1e-12)


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.4, 0.4), (0.1, 0.4), (0.25, 0.05), (0.7, 0.8)])
def test_paper_gap_is_the_observed_gap_times_a_factor(x64, rates):
  rng = np.random.default_rng(3)
  prior, means = np.array([0.3, 0.7]), rng.random(2)
  gap = jrf.mirl_gap(
    jnp.asarray(prior * means), jnp.asarray(prior), TransitionMatrix.binary(*rates), "paper"
  )
  expected = abs(means[1] - means[0]) / abs(1 - sum(rates))
  np.testing.assert_allclose(gap, expected, atol=1e-12)


def test_paper_constants(x64):
  prior, means = np.array([0.3, 0.7]), np.array([0.2, 0.5])
  mass = jnp.asarray(prior * means)

  def gap(rate_01: float, rate_10: float) -> float:
    channel = TransitionMatrix.binary(rate_01, rate_10)
    return float(jrf.mirl_gap(mass, jnp.asarray(prior), channel, "paper"))

  # Equal rates up to 0.01 are left alone; then the factor is 1 / max(1 - 2 e, 0.05).
  np.testing.assert_allclose(gap(0.01, 0.01), 0.3, atol=1e-12)
  np.testing.assert_allclose(gap(0.02, 0.02), 0.3 / 0.96, atol=1e-12)
  np.testing.assert_allclose(gap(0.49, 0.49), 0.3 * 0.02 / 0.05 / 0.02, atol=1e-12)
  # Different rates keep the sign of the determinant when its size is floored.
  means_hat, _ = jrf.group_means(
    mass, jnp.asarray(prior), TransitionMatrix.binary(0.5, 0.52), "paper"
  )
  expected = np.array([0.48 * 0.2 - 0.5 * 0.5, 0.5 * 0.5 - 0.52 * 0.2]) / -0.05
  np.testing.assert_allclose(means_hat, expected, atol=1e-12)


def test_paper_v2_expression(x64):
  rng = np.random.default_rng(4)
  for rate_01, rate_10 in ((0.1, 0.4), (0.3, 0.05), (0.2, 0.2)):
    prior, (mu0, mu1) = np.array([0.4, 0.6]), rng.random(2)
    channel = TransitionMatrix.binary(rate_01, rate_10)
    mass = jnp.asarray(prior * np.array([mu0, mu1]))
    gap = jrf.mirl_gap(mass, jnp.asarray(prior), channel, "paper_v2")
    expected = ((1 - rate_01 + rate_10) * mu1 - (1 + rate_01 - rate_10) * mu0) / (
      1 - rate_01 - rate_10
    )
    np.testing.assert_allclose(gap, abs(expected), atol=1e-12)


def test_paper_v2_penalises_fair_constant_predictors(x64):
  prior = jnp.array([0.4, 0.6])
  channel = TransitionMatrix.binary(0.1, 0.4)
  for constant in (0.1, 0.5):
    gap = jrf.mirl_gap(constant * prior, prior, channel, "paper_v2")
    np.testing.assert_allclose(gap, 1.2 * constant, atol=1e-12)
    for mode in ("exact", "paper"):
      np.testing.assert_allclose(
        jrf.mirl_gap(constant * prior, prior, channel, mode), 0.0, atol=1e-12
      )


@pytest.mark.parametrize(
  ("clean_share", "rates", "exact", "paper"),
  [(0.668, (0.3, 0.3), 2.77, 2.5), (0.668, (0.1, 0.4), 2.22, 2.0), (0.02, (0.3, 0.3), 27.2, 2.5)],
)
def test_gap_scale(x64, clean_share, rates, exact, paper):
  channel = TransitionMatrix.binary(*rates)
  observed = rates[0] * (1 - clean_share) + (1 - rates[1]) * clean_share
  prior = jnp.array([1 - observed, observed])
  np.testing.assert_allclose(jrf.gap_scale(prior, channel), exact, atol=0.005 * exact)
  np.testing.assert_allclose(jrf.gap_scale(prior, channel, "paper"), paper, atol=1e-12)
  # By its definition: covariance of A and An over the variance of An, inverted.
  covariance = clean_share * (1 - rates[1]) - clean_share * observed
  kappa = observed * (1 - observed) / covariance
  np.testing.assert_allclose(jrf.gap_scale(prior, channel), kappa, rtol=1e-12)
  means = np.array([0.3, 0.4])
  gap = jrf.mirl_gap(prior * means, prior, channel)
  np.testing.assert_allclose(gap, 0.1 * kappa, rtol=1e-10)


def test_gap_scale_where_rates_rule_a_group_out():
  assert jnp.isinf(jrf.gap_scale(jnp.array([0.8, 0.2]), TransitionMatrix.symmetric(0.3)))


# ---- Masses, penalties, criteria -------------------------------------------------------------


def test_group_mass_against_a_loop(x64):
  rng = np.random.default_rng(5)
  scores, attribute, weights = rng.random(40), rng.integers(0, 3, 40), rng.integers(0, 3, 40)
  mass, prior = np.zeros(3), np.zeros(3)
  for score, group, weight in zip(scores, attribute, weights, strict=True):
    mass[group] += weight * score / weights.sum()
    prior[group] += weight / weights.sum()
  got = jrf.group_mass(jnp.asarray(scores), jnp.asarray(attribute), jnp.asarray(weights), 3)
  np.testing.assert_allclose(got[0], mass, atol=1e-14)
  np.testing.assert_allclose(got[1], prior, atol=1e-14)


def test_trailing_axes_are_refused():
  with pytest.raises(ValueError, match="drop trailing axes"):
    jrf.group_mass(jnp.ones((4, 1)), jnp.zeros(4, int), jnp.ones(4), 2)
  with pytest.raises(ValueError, match="let apply_fn drop"):
    jrf.forward_bce(jnp.ones((4, 1)), jnp.zeros(4, int), TransitionMatrix.identity(2))


def test_unknown_names_and_binary_forms_are_refused():
  vector, channel = jnp.full(3, 0.3), TransitionMatrix.identity(3)
  with pytest.raises(ValueError, match="mode is 'best'"):
    jrf.mirl_gap(vector, vector, channel, "best")
  with pytest.raises(ValueError, match="2 groups only"):
    jrf.mirl_gap(vector, vector, channel, "paper", "max")
  with pytest.raises(ValueError, match="use 'max' or 'pairwise'"):
    jrf.mirl_gap(vector, vector, channel)
  with pytest.raises(ValueError, match="reduction is 'sum'"):
    jrf.mirl_gap(vector, vector, channel, "exact", "sum")
  with pytest.raises(ValueError, match="penalty is 'cubed'"):
    jrf.penalise(jnp.array(0.1), "cubed")
  with pytest.raises(ValueError, match="gap_confidence"):
    jrf.gap_scale(vector, channel)


def test_penalty_shapes(x64):
  gaps = np.array([0.0, 1e-3, 0.2])
  for name, expected in (
    ("abs", gaps),
    ("squared", gaps**2),
    ("smooth", np.sqrt(gaps**2 + 1e-6) - 1e-3),
  ):
    got = jrf.penalise(jnp.asarray(gaps), name)
    np.testing.assert_allclose(got, expected, atol=1e-14)
  assert jax.grad(lambda g: jrf.penalise(g, "smooth"))(0.0) == 0.0


@pytest.mark.parametrize("num_groups", [2, 3])
def test_label_dependent_criteria_on_an_enumerated_population(x64, num_groups):
  rng = np.random.default_rng(6 + num_groups)
  cells = rng.dirichlet(np.full(2 * num_groups, 3.0)).reshape(num_groups, 2)
  means = rng.random((num_groups, 2))
  attribute, label = random_channel(rng, num_groups), random_channel(rng, 2)
  mass, prior = np.zeros(2 * num_groups), np.zeros(2 * num_groups)
  for a in range(num_groups):
    for y in range(2):
      for a_noisy in range(num_groups):
        for y_noisy in range(2):
          share = cells[a, y] * attribute[a, a_noisy] * label[y, y_noisy]
          mass[2 * a_noisy + y_noisy] += share * means[a, y]
          prior[2 * a_noisy + y_noisy] += share
  channel = jrf.joint_transition(
    TransitionMatrix(jnp.asarray(attribute)), TransitionMatrix(jnp.asarray(label))
  )
  arguments = (jnp.asarray(mass), jnp.asarray(prior), channel, "max")
  positives, negatives = np.ptp(means[:, 1]), np.ptp(means[:, 0])
  np.testing.assert_allclose(jrf.equal_opportunity_gap(*arguments), positives, atol=1e-11)
  np.testing.assert_allclose(
    jrf.equalised_odds_gap(*arguments), max(positives, negatives), atol=1e-11
  )


def test_joint_group_mass_orders_cells_by_group_then_label():
  scores = jnp.array([0.1, 0.2, 0.3, 0.4])
  attribute, labels = jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 0, 1])
  mass, prior = jrf.joint_group_mass(scores, attribute, labels, jnp.ones(4), 2)
  np.testing.assert_allclose(mass, scores / 4, rtol=1e-6)
  np.testing.assert_allclose(prior, 0.25)


def test_unknown_rates(x64):
  prior, means = np.array([0.45, 0.55]), np.array([0.3, 0.4])
  mass, prior_array = jnp.asarray(prior * means), jnp.asarray(prior)
  rates = np.array([0.1, 0.3, 0.2, 0.44, 0.46])

  def expected(rate: float) -> float:
    pi1 = (prior[1] - rate) / (1 - 2 * rate)
    if not 0 < pi1 < 1:
      return 0.0
    return 0.1 * prior[0] * prior[1] / (pi1 * (1 - pi1) * (1 - 2 * rate))

  gaps = [expected(rate) for rate in rates]
  # 0.46 is more than the share of observed zeros: ruled out.
  assert gaps[4] == 0.0
  sweep = jrf.sensitivity_sweep(mass, prior_array, jnp.asarray(rates))
  np.testing.assert_allclose(sweep, gaps, atol=1e-12)
  grid = jax.vmap(TransitionMatrix.symmetric)(jnp.asarray(rates))
  worst, index = jrf.worst_case_gap(mass, prior_array, grid)
  assert int(index) == 3
  np.testing.assert_allclose(worst, max(gaps), atol=1e-12)
  np.testing.assert_allclose(
    jrf.sensitivity_sweep(mass, prior_array, jnp.asarray(rates[:3]), "paper"),
    0.1 / (1 - 2 * rates[:3]),
    atol=1e-12,
  )


def test_reweighting_against_counts():
  rng = np.random.default_rng(8)
  attribute, labels = rng.integers(0, 3, 90), rng.integers(0, 2, 90)
  weights = jrf.reweighting(jnp.asarray(attribute), jnp.asarray(labels), 3)
  expected = [
    90 / (6 * np.sum((attribute == a) & (labels == y)))
    for a, y in zip(attribute, labels, strict=True)
  ]
  np.testing.assert_allclose(weights, expected, rtol=1e-6)
  np.testing.assert_allclose(jnp.sum(weights), 90.0, rtol=1e-5)


# ---- Confidence ------------------------------------------------------------------------------


def test_half_width_with_known_shares_is_kappa_times_two_hoeffding_terms(x64):
  counts, rates, delta = np.array([400, 900]), (0.1, 0.4), 0.05
  prior = np.array([0.45, 0.55])
  channel = TransitionMatrix.binary(*rates)
  pi1 = (prior[1] - rates[0]) / 0.5
  hoeffding = np.sum(np.sqrt(np.log(4 / delta) / (2 * counts)))
  for mode, kappa in (("exact", prior.prod() / (pi1 * (1 - pi1) * 0.5)), ("paper", 2.0)):
    width = jrf.gap_confidence(counts, channel, delta, mode, jnp.asarray(prior))
    np.testing.assert_allclose(width, kappa * hoeffding, rtol=1e-10)


def test_half_width_with_estimated_shares(x64):
  counts = np.array([400, 900])
  channel = TransitionMatrix.symmetric(0.3)
  prior = counts / 1300
  pi1 = (prior[1] - 0.3) / 0.4
  # Weights 0.7 / 0.4 and -0.3 / 0.4: their range is 1 / 0.4.
  expected = 2.5 * np.sqrt(np.log(4 / 0.05) / 2600) * (1 / pi1 + 1 / (1 - pi1))
  np.testing.assert_allclose(jrf.gap_confidence(counts, channel), expected, rtol=1e-10)


def test_half_width_is_infinite_without_information():
  assert jnp.isinf(jrf.gap_confidence(jnp.array([0, 100]), TransitionMatrix.symmetric(0.1)))
  assert jnp.isinf(jrf.gap_confidence(jnp.array([80, 20]), TransitionMatrix.symmetric(0.3)))
  with pytest.raises(ValueError, match="mode is 'paper_v2'"):
    jrf.gap_confidence(jnp.array([80, 20]), TransitionMatrix.symmetric(0.3), mode="paper_v2")


def test_required_samples_attain_the_half_width(x64):
  channel = TransitionMatrix.symmetric(0.3)
  prior = jnp.array([0.5, 0.5])
  num_rows = jrf.required_samples(0.05, 0.1, jrf.gap_scale(prior, channel))
  width = jrf.gap_confidence(num_rows * prior, channel, 0.1, "exact", prior)
  np.testing.assert_allclose(width, 0.05, rtol=1e-10)


# ---- Forward loss ----------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.3, 0.3), (0.1, 0.4), (0.0, 0.2)])
def test_forward_bce_and_its_gradient_in_closed_form(x64, rates):
  rate_01, rate_10 = rates
  logits = np.linspace(-8, 8, 33)
  f = 1 / (1 + np.exp(-logits))
  forward = (1 - rate_10) * f + rate_01 * (1 - f)
  for label in (0, 1):
    labels = jnp.full(33, label)
    observed = forward if label else 1 - forward
    channel = TransitionMatrix.binary(rate_01, rate_10)
    loss = jrf.forward_bce(jnp.asarray(logits), labels, channel)
    np.testing.assert_allclose(loss, -np.log(observed), atol=1e-10)
    gradient = jax.grad(lambda x: jnp.sum(jrf.forward_bce(x, labels, channel)))(  # noqa: B023
      jnp.asarray(logits)
    )
    damping = (1 - rate_01 - rate_10) * f * (1 - f) / (forward * (1 - forward))
    np.testing.assert_allclose(gradient, damping * (forward - label), atol=1e-6)


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.0, 0.3), (0.3, 0.3)])
def test_forward_bce_survives_extreme_logits_and_zero_rates(rates):
  logits = jnp.array([-300.0, -90.0, 0.0, 90.0, 300.0])
  channel = TransitionMatrix.binary(*rates)
  for label in (0, 1):
    labels = jnp.full(5, label)

    def total(logits, matrix, labels=labels):
      return jnp.sum(jrf.forward_bce(logits, labels, TransitionMatrix(matrix)))

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(logits, channel.matrix)
    assert jnp.isfinite(value)
    assert all(jnp.all(jnp.isfinite(g)) for g in gradients)
  # Without noise a wrong sure answer costs its logit.
  wrong = jrf.forward_bce(jnp.array([300.0]), jnp.array([0]), TransitionMatrix.identity(2))
  np.testing.assert_allclose(wrong, 300.0)


# ---- Bad input (acceptance 9) ----------------------------------------------------------------


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(mode="exac"), "did you mean 'exact'"),
    (dict(criterion="equalized_odds"), "did you mean 'equalised_odds'"),
    (dict(reduction="zzz"), "reduction is 'zzz'"),
    (dict(penalty="square"), "did you mean 'squared'"),
    (dict(num_groups=1), "num_groups is 1"),
    (dict(learning_rate=0.0), "learning_rate is 0"),
    (dict(weight_decay=-1.0), "weight_decay is -1"),
    (dict(ema_decay=1.0), "ema_decay is 1"),
    (dict(mode="paper_v2"), "paper_bug_compat=True"),
    (dict(mode="paper", num_groups=3, reduction="max"), "use 'exact'"),
    (dict(mode="paper", criterion="equalised_odds"), "use mode 'exact'"),
    (dict(num_groups=3), "use 'max' or 'pairwise'"),
  ],
)
def test_config_errors(arguments, message):
  with pytest.raises(ValueError, match=message):
    jrf.JRFConfig(**arguments)


def test_config_is_static():
  again = dataclasses.replace(jrf.JRFConfig(mode="paper"), mode="exact")
  assert again == jrf.JRFConfig()
  assert hash(again) == hash(jrf.JRFConfig())
  assert jrf.JRFConfig(mode="paper_v2", paper_bug_compat=True).mode == "paper_v2"


def make_inputs() -> dict:
  rng = np.random.default_rng(24)
  return dict(
    features=rng.normal(size=(100, 3)),
    labels=np.arange(100) % 2,
    attribute=(np.arange(100) % 5 > 2).astype(int),
  )


def test_good_inputs_are_accepted():
  jrf.validate_inputs(
    **make_inputs(),
    label_transition=TransitionMatrix.symmetric(0.3),
    attribute_transition=TransitionMatrix.binary(0.1, 0.4),
    fairness_weight=jnp.array([0.0, 0.3]),
    forbid_sensitive=True,
  )


def set_rows(name: str, rows, value):
  def change(inputs: dict) -> None:
    inputs[name] = inputs[name].astype(float)
    inputs[name][rows] = value

  return change


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (set_rows("features", (slice(0, 4), 1), np.nan), "column 1: 4"),
    (set_rows("features", (7, 2), np.inf), "column 2: 1"),
    (set_rows("labels", slice(0, 3), 2), r"labels holds \[2.0\] in 3 rows"),
    (set_rows("labels", 0, 0.5), r"labels holds \[0.5\]"),
    (set_rows("attribute", slice(0, 2), -1), r"attribute holds \[-1.0\] in 2 rows"),
    (set_rows("attribute", slice(None), 0), "no row of group 1"),
    (lambda d: d.update(labels=d["labels"][:, None]), "labels has shape"),
    (lambda d: d.update(features=d["features"][:, 0]), "features has shape"),
    (lambda d: d.update(fairness_weight=-0.1), "fairness_weight is -0.1"),
    (lambda d: d.update(fairness_weight=np.nan), "fairness_weight is nan"),
    (
      lambda d: d.update(label_transition=TransitionMatrix(jnp.array([[0.7, 0.3], [0.6, 0.7]]))),
      "label_transition row 1 sums to 1.3",
    ),
    (
      lambda d: d.update(attribute_transition=TransitionMatrix.symmetric(0.49)),
      "attribute_transition .*unidentifiable",
    ),
    (
      lambda d: d.update(attribute_transition=TransitionMatrix.symmetric(0.42)),
      r"group 1 .*must be < 0.4",
    ),
    (
      lambda d: d.update(attribute_transition=TransitionMatrix.symmetric(0.1, 3)),
      "has 3 values",
    ),
  ],
)
def test_bad_inputs_are_refused(change, message):
  inputs = make_inputs()
  change(inputs)
  with pytest.raises(ValueError, match=message):
    jrf.validate_inputs(**inputs)


@pytest.mark.parametrize("scale", [1.0, -1.0, 2.7])
def test_sensitive_column_is_refused_on_request(scale):
  inputs = make_inputs()
  inputs["features"][:, 2] = scale * inputs["attribute"] + 0.4
  jrf.validate_inputs(**inputs)
  with pytest.raises(ValueError, match="column 2 is a function of the sensitive attribute"):
    jrf.validate_inputs(**inputs, forbid_sensitive=True)


def test_indicator_of_one_of_three_groups_is_a_sensitive_column():
  inputs = make_inputs()
  inputs["attribute"] = np.arange(100) % 3
  inputs["features"][:, 0] = inputs["attribute"] == 1
  with pytest.raises(ValueError, match="column 0"):
    jrf.validate_inputs(**inputs, num_groups=3, forbid_sensitive=True)
