"""The GATE experiment from the command line: smoke, kill and resume, devices, logs, mistakes."""

import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

SMALL = (
  "--config.lfr.num_nodes=160",
  "--config.replications=8",
  "--config.coverage_replications=8",
  "--config.gnn.epochs=3",
  "--config.gnn.merged=(1,2)",
  "--config.gnn.outcomes=('linear',)",
  "--config.outcome.names=('linear','two_hop')",
)


def results(workdir: pathlib.Path) -> dict:
  found = json.loads((workdir / "results.json").read_text())
  found.pop("environment")
  return found


def _run(root: pathlib.Path, *flags: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "launch.py", *flags]
  return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, root) -> pathlib.Path:
  """Workdir of an unbroken smoke run."""
  workdir = tmp_path_factory.mktemp("gate") / "run"
  done = _run(root, "--config=gate:smoke", f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  return workdir


@pytest.mark.slow
def test_smoke_leaves_everything_a_person_looks_at(smoke):
  found = results(smoke)
  assert found["status"] == "complete"
  assert set(found["figures"]) == {"bias_rmse", "theory", "coverage", "network"}
  ids = {claim["id"] for claim in found["claims"]}
  assert {
    "merging-helps-ols-two_hop",
    "theory-unit",
    "authors-table",
    "interval-covers-unit-linear",
  } <= ids
  report = (smoke / "report.html").read_text()
  for claim in found["claims"]:
    assert claim["verdict"] in report
  designs = found["tables"]["The designs"]["rows"]
  assert {"v_w", "v_b", "h", "1 + rho h", "condition", "bias bound"} <= designs[0].keys()
  # A single stage has nothing to merge; all stages of a ramp-up do.
  by_name = {row["stages"]: row for row in designs}
  assert by_name["unit, last 1"]["1 + rho h"] == 1
  assert by_name["unit, last 5"]["1 + rho h"] > 2


@pytest.mark.slow
def test_smoke_needs_no_tensorflow_or_torch(root, smoke, tmp_path):
  # A copy, whose kept units make this quick: everything is imported, nothing is drawn again.
  copy = shutil.copytree(smoke, tmp_path / "copy")
  code = (
    "import sys, launch\n"
    f"launch.run_experiment(launch.load_config('gate:smoke'), {str(copy)!r})\n"
    "print({'tensorflow', 'torch'} & set(sys.modules))"
  )
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().splitlines()[-1] == "set()"


@pytest.mark.slow
def test_killed_smoke_resumes_to_the_same_results(smoke, launch, tmp_path):
  workdir = tmp_path / "killed"
  arguments = ("--config=gate:smoke", f"--workdir={workdir}")
  process = launch.start(*arguments)
  process.wait_until(lambda: len(list((workdir / "units").glob("*.msgpack"))) >= 4)
  time.sleep(random.Random(3).uniform(0, 2))
  process.send_signal(signal.SIGKILL)
  assert process.finish().returncode == -signal.SIGKILL
  resumed = launch(*arguments)
  assert resumed.returncode == 0, resumed.stderr
  assert results(workdir) == results(smoke)


@pytest.mark.slow
def test_eight_devices_equal_one(launch, tmp_path):
  means = {}
  for devices in (1, 8):
    workdir = tmp_path / f"on-{devices}"
    flags = (*SMALL, f"--config.cpu_devices={devices}", f"--workdir={workdir}")
    done = launch("--config=gate:smoke", *flags)
    assert done.returncode == 0, done.stderr
    means[devices] = {name: m["mean"] for name, m in results(workdir)["metrics"].items()}
  assert means[1].keys() == means[8].keys()
  assert any("gnn" in name for name in means[1])
  for name, value in means[1].items():
    # The network is trained in float32; everything else is in float64.
    tolerance = 1e-3 if "gnn" in name else 1e-9
    assert abs(means[8][name] - value) <= tolerance, name


# A log of the reader's own.

NODES = 60


def write_log(folder: pathlib.Path, spillover: float = 1.0) -> tuple[str, str, str]:
  """A graph of ten circles of six nodes, joined; clusters are the circles. GATE 1 + spillover."""
  rng = np.random.default_rng(0)
  edges = [(6 * k + i, 6 * k + (i + 1) % 6) for k in range(10) for i in range(6)]
  edges += [(int(a), int(b)) for a, b in rng.integers(0, NODES, (40, 2)) if a != b]
  edges = sorted({(min(e), max(e)) for e in edges})
  neighbours = [[] for _ in range(NODES)]
  for a, b in edges:
    neighbours[a].append(b)
    neighbours[b].append(a)
  graph, log, clusters = folder / "edges.csv", folder / "log.csv", folder / "clusters.csv"
  graph.write_text("source,target\n" + "".join(f"n{a},n{b}\n" for a, b in edges))
  clusters.write_text("node,cluster\n" + "".join(f"n{i},c{i // 6}\n" for i in range(NODES)))
  score = rng.permutation(10)
  lines = ["node,stage,share,z,y"]
  for stage, share in enumerate((0.0, 0.2, 0.5)):
    z = (score < round(10 * share))[np.arange(NODES) // 6].astype(int)
    for i in range(NODES):
      e = np.mean([z[j] for j in neighbours[i]])
      lines.append(f"n{i},{stage},{share},{z[i]},{2 + z[i] + spillover * e + 0.01 * (i % 5)}")
  log.write_text("\n".join(lines) + "\n")
  return str(graph), str(log), str(clusters)


def analyse(launch, folder: pathlib.Path, files: tuple[str, str, str], *flags: str):
  graph, log, clusters = files
  return launch(
    "--config=gate",
    f"--config.graph={graph}",
    f"--config.log={log}",
    f"--config.clusters={clusters}",
    "--config.features=('treatment','linear')",
    f"--workdir={folder / 'run'}",
    *flags,
  )


@pytest.mark.slow
def test_a_log_gives_its_gate_and_says_what_it_rests_on(launch, tmp_path):
  done = analyse(launch, tmp_path, write_log(tmp_path))
  assert done.returncode == 0, done.stderr
  found = results(tmp_path / "run")
  rows = {row["name"]: row for row in found["tables"]["Estimates of the GATE"]["rows"]}
  merged = rows["ols, linear, all stages"]
  # Outcomes follow the features up to 0.04, so the regression finds the effect of 2.
  assert abs(merged["estimate"] - 2) < 0.05
  assert merged["low"] < merged["estimate"] < merged["high"]
  assert rows["ols, treatment, all stages"]["estimate"] < 1.9
  design = found["tables"]["The design"]["rows"][0]
  shares = np.array([0, 0.2, 0.5])
  np.testing.assert_allclose(design["v_w"], np.mean(shares * (1 - shares)))
  np.testing.assert_allclose(design["v_b"], np.var(shares))
  assert design["bias bound"] > 0
  assert "bias bound" in done.stderr
  assert any("10 randomisation units are few" in text for text in found["warnings"])
  assert any("trend in time" in text for text in found["warnings"])
  assert set(found["figures"]) == {"estimates", "means", "network"}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("change", "words"),
  [
    (("log", "n3,1,0.2,", "n3,1,0.3,"), ["line", "share"]),
    (("log", "n5,0,0.0,0,", "n5,0,0.0,1,"), ["line 7", "z is 1"]),
    (("log", "n7,2,", "stranger,2,"), ["line 129", "'stranger' is not in the graph"]),
    (("clusters", "n9,c1\n", ""), ["'n9'", "no cluster"]),
    (("graph", "source,target\n", "source,target\nn1\n"), ["line 2"]),
  ],
)
def test_a_broken_file_is_refused_by_its_line(launch, tmp_path, change, words):
  files = write_log(tmp_path)
  which, old, new = change
  path = pathlib.Path(dict(zip(("graph", "log", "clusters"), files, strict=True))[which])
  assert old in path.read_text()
  path.write_text(path.read_text().replace(old, new, 1))
  done = analyse(launch, tmp_path, files)
  assert done.returncode == 1
  error = done.stderr[done.stderr.index("error: ") :]
  for word in words:
    assert word in error
  assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_field_experiment_runs_without_a_download(launch, tmp_path):
  done = launch(
    "--config=gate:social_insure", f"--workdir={tmp_path / 'run'}", REPRISE_CACHE=str(tmp_path)
  )
  assert done.returncode == 0, done.stderr
  rows = results(tmp_path / "run")["tables"]["Effects on second-round take-up"]["rows"]
  found = {row["name"]: row for row in rows}
  # Means by arm, from the committed table.
  from experiments.datasets import social_insure

  columns = social_insure.load(tmp_path / "again")
  takeup, default = columns["takeup_survey"], columns["default"]
  expected = takeup[default == 1].mean() - takeup[default == 0].mean()
  np.testing.assert_allclose(
    found["default to buy, own natural village"]["estimate"], expected, rtol=1e-6
  )


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (("--config.graph=nowhere.mtx",), ["nowhere.mtx", "is no file", "wiki"]),
    (("--config.graph=lfr", "--config.shares=(0.1,50)"), ["shares", "0 to 1"]),
    (("--config.graph=lfr", "--config.randomisation=coin"), ["randomisation", "bernoulli"]),
    (("--config.study=ramp",), ["config.study", "'ramp_up'"]),
  ],
)
def test_bad_settings_are_refused_in_plain_words(launch, tmp_path, flags, words):
  done = launch("--config=gate:smoke", *flags, f"--workdir={tmp_path / 'run'}")
  assert done.returncode == 1
  for word in words:
    assert word in done.stderr
  assert "Traceback" not in done.stderr
