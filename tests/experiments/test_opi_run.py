"""The OPI experiment from the command line: smoke, kill and resume, a user's model, mistakes."""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest

from algorithms import opi
from experiments.opi import models, study

SMALL = (
  "--config.tables=('inventory',)",
  "--config.sweeps=(1,20)",
  "--config.random_models=1",
  "--config.counterexample.updates=600",
  "--config.uniform.models=4",
  "--config.uniform.updates=200",
)


def results(workdir: pathlib.Path) -> dict:
  found = json.loads((workdir / "results.json").read_text())
  found.pop("environment")
  return found


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken(launch, tmp_path):
  flags = ("--config=opi:smoke", *SMALL)
  whole = launch(*flags, f"--workdir={tmp_path / 'whole'}")
  assert whole.returncode == 0, whole.stderr
  found = results(tmp_path / "whole")
  assert found["status"] == "complete"
  assert {"convergence", "flow", "simulations"} <= set(found["figures"])
  ids = {claim["id"]: claim["verdict"] for claim in found["claims"]}
  assert ids["opi-exact"] == ids["opi-bounds"] == ids["opi-linear-condition"] == "reproduced"
  report = (tmp_path / "whole" / "report.html").read_text()
  assert all(claim["verdict"] in report for claim in found["claims"])

  workdir = tmp_path / "killed"
  process = launch.start(*flags, f"--workdir={workdir}")
  process.wait_until(lambda: any((workdir / "units").glob("investment*")))
  process.send_signal(signal.SIGKILL)
  process.wait()
  resumed = launch(*flags, f"--workdir={workdir}")
  assert resumed.returncode == 0, resumed.stderr
  assert results(workdir) == found


def save(path: pathlib.Path, **changes) -> pathlib.Path:
  """A model of two states in an npz file: stay, or go on and be paid."""
  arrays = {
    "reward": np.array([[0.0, 1.0], [0.0, 2.0]]),
    "next_state": np.array([[[0], [1]], [[1], [0]]]),
    "probability": np.ones((2, 2, 1)),
    "discount": 0.5,
  }
  arrays = {k: v for k, v in (arrays | changes).items() if v is not None}
  np.savez(path, **arrays)
  return path


@pytest.mark.slow
def test_a_users_model_is_solved(launch, tmp_path):
  workdir = tmp_path / "run"
  flags = ("--config=opi:mdp", f"--config.file={save(tmp_path / 'my.npz')}")
  done = launch(*flags, f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  with np.load(workdir / "solution.npz") as found:
    # v0 = 1 + v1 / 2, v1 = 2 + v0 / 2.
    np.testing.assert_allclose(found["value"], [8 / 3, 10 / 3], atol=1e-6)
    np.testing.assert_array_equal(found["policy"], [1, 1])
    assert np.all(found["lower"] <= found["upper"])
  assert launch(*flags, f"--workdir={workdir}", "--fresh").returncode == 0

  bad = save(tmp_path / "bad.npz", probability=np.full((2, 2, 1), 0.7))
  refused = launch("--config=opi:mdp", f"--config.file={bad}", f"--workdir={tmp_path / 'bad'}")
  assert refused.returncode == 1
  assert "sum of probabilities of state 0, action 0 is" in refused.stderr
  assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"reward": None}, "has the keys"),
    ({"rewards": np.ones(2)}, "has the keys"),
    ({"transition": np.ones((2, 2, 2)) / 2}, "has the keys"),
    ({"next_state": np.ones((2, 2, 1))}, r"next_state in .* is float64; expected integers"),
    ({"next_state": np.full((2, 2, 1), 2**40)}, "expected a state"),
    ({"discount": np.ones(2)}, r"discount in .* has shape"),
    ({"reward": np.array([[{}, 1], [1, 1]], object)}, "is not an npz file of plain arrays"),
  ],
)
def test_bad_files_are_named(tmp_path, changes, message):
  path = save(tmp_path / "model.npz", **changes)
  with pytest.raises(ValueError, match=message):
    models.from_file(str(path))


def test_what_is_no_file_or_factory_is_named(tmp_path):
  text = tmp_path / "model.npz"
  text.write_text("reward")
  for path in (text, tmp_path / "none.npz"):
    with pytest.raises(ValueError, match="is not an npz file"):
      models.from_file(str(path))
  code = tmp_path / "mine.py"
  code.write_text("from experiments.opi import models\nbuild = models.counterexample\nfive = int\n")
  assert models.from_factory(f"{code}:build").num_states == 2
  for name in (f"{code}:other", f"{tmp_path / 'none.py'}:build", "nowhere.at_all:build", "text"):
    with pytest.raises(ValueError, match=r"expected file\.py:function"):
      models.from_factory(name)
  with pytest.raises(ValueError, match="returns a int"):
    models.from_factory(f"{code}:five")


@pytest.mark.usefixtures("x64")
class TestModels:
  def test_tables_are_models_and_ends_pay_nothing(self):
    for name in ("frozenlake", "taxi", "cliff"):
      mdp = models.table(name)
      opi.check_mdp(mdp)
      np.testing.assert_allclose(opi.solve(mdp).value[-1], 0, atol=1e-6)

  def test_known_solutions_of_the_grid_worlds(self):
    # Along the cliff's edge: 13 steps of -1, discounted.
    cliff = opi.solve(models.table("cliff"), opi.OPIConfig(epsilon=1e-9))
    np.testing.assert_allclose(cliff.value[36], -sum(0.99**k for k in range(13)), atol=1e-8)
    # Undiscounted FrozenLake 8x8 reaches the goal surely; its discounted value is below 1.
    lake = opi.solve(models.table("frozenlake")).value
    assert 0 < lake[0] < 1
    # The two cells beside the goal; ice lets nobody reach it surely in a step.
    assert int(lake[:64].argmax()) in (55, 62)
    assert lake[:64].max() < 0.99

  def test_the_published_policy_of_the_car_rental(self):
    moves = np.asarray(opi.solve(models.car_rental()).policy).reshape(21, 21) - 5
    assert (moves.min(), moves.max()) == (-4, 5)
    # Corners of the figure of example 4.2: many at the first place are moved, the most when the
    # second is empty.
    assert (moves[20, 0], moves[0, 20], moves[0, 0], moves[20, 20]) == (5, -4, 0, 0)

  def test_the_inventory_policy_orders_below_a_level_only(self):
    policy = np.asarray(opi.solve(models.inventory()).policy)
    level = int(np.flatnonzero(policy == 0)[0])
    assert 0 < level < 10
    assert np.all(policy[:level] > 0)
    assert np.all(policy[level:] == 0)

  def test_tauchens_chain(self):
    grid, transition = models.tauchen(101, 0.9, 1.0)
    np.testing.assert_allclose(transition.sum(axis=1), 1)
    np.testing.assert_allclose(transition[50] @ grid, 0, atol=1e-12)
    np.testing.assert_allclose(transition[70] @ grid, 0.9 * grid[70], atol=0.02)
    quantecon = pytest.importorskip("quantecon")
    other = quantecon.tauchen(101, 0.9, 1.0)
    np.testing.assert_allclose(other.state_values, grid, atol=1e-12)
    np.testing.assert_allclose(other.P, transition, atol=1e-12)

  def test_the_investment_operators_are_those_of_a_table(self):
    mdp = models.investment(4, 3)
    outputs = np.linspace(0, 20, 4)
    shocks, transition = models.tauchen(3, 0.9, 1.0)
    value = np.random.default_rng(0).normal(size=12)
    q = np.zeros((12, 4))
    for i, y in enumerate(outputs):
      for j, z in enumerate(shocks):
        for k, new in enumerate(outputs):
          paid = (10 - y + z - 1) * y - 25 * (new - y) ** 2
          q[3 * i + j, k] = paid + transition[j] @ value[3 * k : 3 * k + 3] / 1.01
    np.testing.assert_allclose(opi.bellman_q(mdp, value), q)
    policy = np.random.default_rng(1).integers(0, 4, 12)
    found = opi.policy_backup(mdp, jax.numpy.asarray(policy), jax.numpy.asarray(value))
    np.testing.assert_allclose(found, q[np.arange(12), policy])

  def test_quantecon_agrees_on_a_sparse_model(self):
    pytest.importorskip("quantecon")
    mdp = models.random_sparse(jax.random.key(0), 300, 4, 5, 0.95)
    theirs = study.quantecon_model(mdp).solve(method="policy_iteration")
    ours = opi.solve(mdp, opi.OPIConfig(epsilon=1e-10))
    np.testing.assert_array_equal(ours.policy, theirs.sigma)
    np.testing.assert_allclose(ours.value, theirs.v, atol=1e-9)

  def test_the_fixed_point_exists_above_a_ratio_only(self):
    assert models.sliding_point(1.39) is None
    assert models.sliding_point(1.40) is not None
    # Both sides of the condition at the point.
    x, c = models.sliding_point(3.0), 0.3 / 0.19
    assert abs((x + c) * (30 - x) - 9 * (x - c) * (24 - x)) < 1e-9
