"""The JRF experiment from the command line: smoke, kill and resume, meshes, processes, mistakes."""

import contextlib
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

TABLE = pathlib.Path(__file__).parent / "jrf_table"


def results(workdir: pathlib.Path) -> dict:
  found = json.loads((workdir / "results.json").read_text())
  found.pop("environment")
  return found


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, root) -> pathlib.Path:
  """Workdir of an unbroken smoke run."""
  workdir = tmp_path_factory.mktemp("smoke") / "run"
  command = [sys.executable, "launch.py", "--config=jrf:smoke", f"--workdir={workdir}"]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return workdir


@pytest.mark.slow
def test_smoke_leaves_everything_a_person_looks_at(smoke):
  found = results(smoke)
  assert found["status"] == "complete"
  assert {claim["verdict"] for claim in found["claims"]} <= {
    "reproduced",
    "partly",
    "not reproduced",
    "not tested",
  }
  assert set(found["figures"]) == {"frontier", "noise", "sensitivity"}
  report = (smoke / "report.html").read_text()
  for claim in found["claims"]:
    assert claim["id"]
    assert claim["verdict"] in report
  # Every table of methods shows what certifies a classifier, and the naive penalty at both weights.
  tables = [t["rows"] for name, t in found["tables"].items() if "flip rates" in name and t["rows"]]
  methods = [rows for rows in tables if "method" in rows[0]]
  assert len(methods) == 3
  for rows in methods:
    columns = {"positive rate", "balanced accuracy", "auc", "soft gap", "matched gap", "flag"}
    assert columns <= rows[0].keys()
  for rows in methods[:2]:
    assert {"naive", "naive_scaled", "jrf", "oracle"} <= {row["method"] for row in rows}


@pytest.mark.slow
def test_smoke_needs_no_tensorflow(root, smoke, tmp_path):
  # A copy, whose kept units make this quick: everything is imported, nothing is trained again.
  copy = shutil.copytree(smoke, tmp_path / "copy")
  code = (
    "import sys, launch\n"
    f"launch.run_experiment(launch.load_config('jrf:smoke'), {str(copy)!r})\n"
    "print('tensorflow' in sys.modules)"
  )
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().splitlines()[-1] == "False"


@pytest.mark.slow
def test_killed_smoke_resumes_to_the_same_results(smoke, launch, tmp_path):
  workdir = tmp_path / "killed"
  arguments = ("--config=jrf:smoke", f"--workdir={workdir}")
  process = launch.start(*arguments)

  def has_checkpoint() -> bool:
    # One that is being written has a longer name.
    made = (workdir / "checkpoints").glob("*/*/_CHECKPOINT_METADATA")
    return any(path.parent.name.isdigit() for path in made)

  process.wait_until(has_checkpoint)
  process.send_signal(signal.SIGKILL)
  assert process.finish().returncode == -signal.SIGKILL
  resumed = launch(*arguments)
  assert resumed.returncode == 0, resumed.stderr
  assert "going on from step" in resumed.stderr
  assert results(workdir) == results(smoke)


def _table(launch, workdir: pathlib.Path, *flags: str, **env: str) -> dict[str, float]:
  done = launch(f"--config={TABLE}", f"--workdir={workdir}", *flags, **env)
  assert done.returncode == 0, done.stderr
  return _means(workdir)


def _means(workdir: pathlib.Path) -> dict[str, float]:
  metrics = results(workdir)["metrics"]
  return {name: metric["mean"] for name, metric in metrics.items()}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, root) -> dict[str, float]:
  workdir = tmp_path_factory.mktemp("one") / "run"
  flags = ("--config.cpu_devices=1", f"--config={TABLE}", f"--workdir={workdir}")
  done = subprocess.run(
    [sys.executable, "launch.py", *flags], cwd=root, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return _means(workdir)


def assert_same(found: dict[str, float], expected: dict[str, float], tolerance: float) -> None:
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert abs(found[name] - value) <= tolerance, (name, found[name], value)


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(
  ("data", "model", "tolerance"),
  [
    # Models on devices of their own: the same arithmetic, but for how sums of scores are split.
    (1, 8, 1e-6),
    # Rows over 8 or 4 devices: sums in another order, carried through 20 Adam steps. A decision at
    # a threshold may flip for a row or two of the 293 test rows.
    (8, 1, 0.01),
    (4, 2, 0.01),
  ],
)
def test_eight_devices_equal_one(launch, one_device, tmp_path, data, model, tolerance):
  found = _table(
    launch,
    tmp_path / "eight",
    "--config.cpu_devices=8",
    f"--config.mesh.data={data}",
    f"--config.mesh.model={model}",
  )
  assert_same(found, one_device, tolerance)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_equal_one(launch, one_device, tmp_path):
  with contextlib.closing(socket.socket()) as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  workdir = tmp_path / "two"
  started = [
    launch.start(
      f"--config={TABLE}",
      f"--workdir={workdir}",
      "--config.cpu_devices=1",
      "--config.mesh.data=2",
      "--config.mesh.model=1",
      f"--coordinator=127.0.0.1:{port}",
      "--num_processes=2",
      f"--process_id={i}",
    )
    for i in range(2)
  ]
  for process in started:
    done = process.finish(300)
    assert done.returncode == 0, done.stderr
  assert_same(_means(workdir), one_device, 0.01)


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--config.noise.attribute=(0.5,0.5)", ("config.noise.attribute", "unidentifiable")),
    ("--config.noise.label=(0.3,1.3)", ("config.noise.label", "probability")),
    ("--config.sweeps.assumed_rates=(0.45,)", ("config.sweeps.assumed_rates", "below 0.43")),
    ("--config.fairness.weights=(-1.0,)", ("fairness_weight", ">= 0")),
    ("--config.dataset.fraction=0.0", ("config.dataset.fraction", "more than 0")),
    ("--config.dataset.name=adlut", ("adlut", "adult")),
    ("--config.fairness.penalty=absolute", ("penalty", "abs")),
  ],
)
def test_bad_input_is_refused_in_plain_words(launch, tmp_path, flag, words):
  done = launch("--config=jrf:smoke", f"--workdir={tmp_path / 'bad'}", flag)
  assert done.returncode in (1, 2)
  message = done.stderr.partition("error: ")[2]
  assert "Traceback" not in done.stderr
  for word in words:
    assert word in message


def test_bank_without_a_file_says_where_to_get_it(launch, tmp_path):
  done = launch("--config=jrf:bank", f"--workdir={tmp_path / 'bank'}")
  assert done.returncode == 1
  assert "config.dataset.path" in done.stderr or "path" in done.stderr
  assert "UCI" in done.stderr


def test_presets_load_and_differ():
  from experiments.jrf.config import PRESETS, get_config
  from launch import config as config_lib

  hashes = {config_lib.config_hash(config_lib.complete(get_config(p))) for p in PRESETS}
  assert len(hashes) == len(PRESETS)


def test_split_and_noise_do_not_leak():
  """Parts are disjoint, standardised on training rows, and noise depends on the key only."""
  import dataclasses

  import jax

  import launch as launch_lib
  from experiments.datasets.tabular import Tabular
  from experiments.jrf.arms import Arm
  from experiments.jrf.training import Training, noisy_rows, split

  rng = np.random.default_rng(0)
  rows = 1000
  features = np.stack([np.arange(rows), rng.normal(size=rows)], axis=1).astype(np.float32)
  data = Tabular(
    features=features,
    feature_names=("id", "x"),
    labels=rng.integers(0, 2, rows).astype(np.int32),
    attribute=rng.integers(0, 2, rows).astype(np.int32),
    attribute_name="group",
    attribute_meaning="",
    label_name="y",
    name="made",
    licence="",
    provenance="simulated",
  )
  training = dataclasses.replace(
    Training.from_config(launch_lib.load_config("jrf")), standardise_on="train"
  )
  parts = split(data, jax.random.key(0), training)
  sizes = {name: part.labels.size for name, part in parts.items()}
  assert sizes == {"test": 300, "validation": 140, "train": 560}
  train = parts["train"].features
  np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(train.std(axis=0), 1, atol=1e-5)
  ids = np.concatenate([part.features[:, 0] for part in parts.values()])
  assert np.unique(np.round(ids, 4)).size == rows
  low, high = (
    noisy_rows(parts["train"], Arm("jrf", (r, r), (r, r), 0.3), jax.random.key(1))[0]
    for r in (0.1, 0.3)
  )
  flipped = [np.asarray(n.labels) != parts["train"].labels for n in (low, high)]
  assert np.all(flipped[1] >= flipped[0])
  # 560 draws at 0.3: four standard errors are 0.077.
  assert abs(flipped[1].mean() - 0.3) < 0.077
