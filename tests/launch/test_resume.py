"""A run that is killed, stopped or damaged and started again ends as one that was not."""

import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest

SLOWLY = {"TINY_PAUSE_S": "0.1"}  # 24 steps of 0.1 s: time to interrupt


@pytest.fixture(scope="module")
def unbroken(root, tiny, outcome, tmp_path_factory) -> dict:
  workdir = tmp_path_factory.mktemp("unbroken") / "run"
  subprocess.run(
    [sys.executable, "launch.py", f"--config={tiny}", f"--workdir={workdir}"], cwd=root, check=True
  )
  return outcome(workdir)


def steps(workdir: pathlib.Path, unit: str = "seed=0") -> list[int]:
  """Steps of the finished checkpoints of a unit."""
  found = (workdir / "checkpoints").glob(f"{unit}-*/*")
  return sorted(int(p.name) for p in found if p.name.isdigit())


def damage(checkpoint: pathlib.Path) -> None:
  """Cuts off its largest file and its manifest, as a crash of the machine may."""
  files = [p for p in checkpoint.rglob("*") if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  for path in {largest, *(p for p in files if "manifest" in p.name)}:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture
def stopped(launch, tiny, tmp_path) -> pathlib.Path:
  """A workdir whose run was stopped in its first unit, with two checkpoints."""
  workdir = tmp_path / "run"
  process = launch.start(f"--config={tiny}", f"--workdir={workdir}", **SLOWLY)
  process.wait_until(lambda: len(steps(workdir)) == 2)
  process.terminate()
  assert process.finish().returncode == 143
  return workdir


@pytest.mark.slow
def test_ten_kills_change_nothing(launch, tiny, unbroken, outcome, tmp_path):
  workdir, log = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
  moments, said = random.Random(0), ""
  for attempt in range(10):
    rows = log.read_bytes() if log.exists() else b""
    process = launch.start(f"--config={tiny}", f"--workdir={workdir}", TINY_PAUSE_S="0.15")
    process.wait_until(lambda running=process: "tiny:default in" in running.said())
    if attempt % 2:  # Half of the moments are counted from the start, half from the first step.
      process.wait_until(lambda before=rows: log.exists() and len(log.read_bytes()) > len(before))
    time.sleep(moments.uniform(0, 0.6))
    process.kill()
    said += process.finish().stderr
  assert said.count("resumed seed") >= 2, "kills came before there was a checkpoint"
  done = launch(f"--config={tiny}", f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  assert outcome(workdir) == unbroken


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_resume(
  signum, status, launch, tiny, unbroken, outcome, root, tmp_path
):
  workdir = tmp_path / "run"
  process = launch.start(f"--config={tiny}", f"--workdir={workdir}", **SLOWLY)
  process.wait_until(lambda: bool(steps(workdir)))
  process.send_signal(signum)
  stopped = process.finish()
  assert stopped.returncode == status
  assert f"stopped by {signum.name}; everything so far is saved" in stopped.stderr
  assert outcome(workdir)["status"] == "interrupted"
  last = steps(workdir)[-1]

  command = shlex.split(stopped.stderr.partition("Resume with:\n")[2])
  assert command[0] == "python"
  resumed = subprocess.run(
    [sys.executable, *command[1:]], cwd=root, capture_output=True, text=True, check=True
  )
  assert f"resumed seed 0 at step {last}\n" in resumed.stderr
  assert outcome(workdir) == unbroken
  assert not list((workdir / "checkpoints").iterdir()), "checkpoints of finished units are removed"


def test_a_second_signal_stops_at_once(launch, tiny, tmp_path):
  workdir = tmp_path / "run"
  process = launch.start(
    f"--config={tiny}", "--config.save_every=12", f"--workdir={workdir}", TINY_PAUSE_S="3"
  )
  process.wait_until(lambda: (workdir / "metrics.jsonl").exists())
  process.wait_until(lambda: (workdir / "metrics.jsonl").read_text() != "")
  process.send_signal(signal.SIGINT)
  process.wait_until(lambda: "once more stops at once" in process.said())
  process.send_signal(signal.SIGINT)
  stopped = process.finish(timeout_s=20)
  assert stopped.returncode == 130
  assert "stopped at once. Resume from the last save with" in stopped.stderr
  assert "Traceback" not in stopped.stderr


def test_a_damaged_checkpoint_costs_one_interval(launch, tiny, unbroken, outcome, stopped):
  before, newest = steps(stopped)
  damage(next((stopped / "checkpoints").glob(f"seed=0-*/{newest}")))
  done = launch(f"--config={tiny}", f"--workdir={stopped}")
  assert done.returncode == 0, done.stderr
  assert f"checkpoint {newest} in" in done.stderr
  assert "is damaged" in done.stderr
  assert f"resumed seed 0 at step {before}\n" in done.stderr
  assert outcome(stopped) == unbroken


def test_all_checkpoints_damaged_starts_the_unit_anew(launch, tiny, unbroken, outcome, stopped):
  for checkpoint in (stopped / "checkpoints").glob("seed=0-*/[0-9]*"):
    damage(checkpoint)
  process = launch.start(f"--config={tiny}", f"--workdir={stopped}", **SLOWLY)
  process.wait_until(lambda: steps(stopped)[:1] == [2])
  process.terminate()
  again = process.finish()
  assert again.returncode == 143, again.stderr
  assert "starting from the beginning" in again.stderr
  assert "resumed" not in again.stderr

  # What was saved after the damage counts, although the damaged ones have later steps.
  done = launch(f"--config={tiny}", f"--workdir={stopped}")
  assert "resumed seed 0 at step" in done.stderr
  assert outcome(stopped) == unbroken


def test_time_of_earlier_sessions_counts(launch, tiny, tmp_path):
  arguments = (f"--config={tiny}", f"--workdir={tmp_path / 'run'}")
  seconds = []
  for _ in range(2):
    assert launch(*arguments).returncode == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    seconds.append(results["environment"]["wall_s"])
  assert seconds[1] > seconds[0] > 0
