"""Two real processes joined by jax.distributed run the tiny experiment as one."""

import contextlib
import json
import shlex
import signal
import socket

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LIMIT_S = 120


def free_port() -> int:
  with contextlib.closing(socket.socket()) as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


@pytest.fixture
def start_two(launch, tiny):
  """`start_two(workdir, workdir)`: both processes of a run, started."""

  def start(*workdirs, pause_s="0", flags=()):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    return [
      launch.start(
        *(f"--config={tiny}", f"--workdir={workdir}", *flags),
        *(coordinator, f"--num_processes={len(workdirs)}", f"--process_id={i}"),
        TINY_PAUSE_S=pause_s,
      )
      for i, workdir in enumerate(workdirs)
    ]

  return start


def outcome(workdir) -> dict:
  results = json.loads((workdir / "results.json").read_text())
  assert results.pop("environment")["processes"] >= 1
  return results


@pytest.fixture
def alone(launch, tiny, tmp_path) -> dict:
  """What a single process finds."""
  assert launch(f"--config={tiny}", f"--workdir={tmp_path / 'alone'}").returncode == 0
  return outcome(tmp_path / "alone")


def test_equal_to_one_process_and_process_0_writes(start_two, alone, tmp_path):
  workdir = tmp_path / "shared"
  first, second = (process.finish(LIMIT_S) for process in start_two(workdir, workdir))
  assert first.returncode == 0, first.stderr
  assert second.returncode == 0, second.stderr
  assert "process 1 of 2: 1 of 2 devices are local" in second.stderr
  assert outcome(workdir) == alone
  results = json.loads((workdir / "results.json").read_text())
  assert results["environment"]["processes"] == 2
  # Each row of the log once: only process 0 wrote.
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert len(rows) == len({(row["unit"], row["step"]) for row in rows}) == 24


def test_a_workdir_that_is_not_shared_is_refused(start_two, tmp_path):
  first, second = (p.finish(LIMIT_S) for p in start_two(tmp_path / "a", tmp_path / "b"))
  for done in (first, second):
    assert done.returncode == 2, done.stderr
    assert "processes 1 do not see" in done.stderr
    assert "--workdir must be a folder that all hosts share" in done.stderr
  assert not (tmp_path / "b").exists()


def test_a_workdir_refused_by_process_0_stops_both(start_two, tmp_path):
  workdir = tmp_path / "shared"
  workdir.mkdir()
  (workdir / "thesis.tex").write_text("years of work")
  started = start_two(workdir, workdir, flags=["--fresh"])
  first, second = (process.finish(LIMIT_S) for process in started)
  assert (first.returncode, second.returncode) == (2, 2), first.stderr + second.stderr
  assert "holds 'thesis.tex' and no config.json" in first.stderr
  assert "process 0 cannot use the workdir" in second.stderr


def test_a_signal_to_one_stops_both_and_they_resume(start_two, launch, alone, tmp_path):
  workdir = tmp_path / "shared"
  processes = start_two(workdir, workdir, pause_s="0.1")
  processes[0].wait_until(lambda: any((workdir / "checkpoints").glob("seed=0-*/4")))
  processes[1].send_signal(signal.SIGTERM)
  for process in processes:
    stopped = process.finish(LIMIT_S)
    assert stopped.returncode == 143, stopped.stderr
    assert "stopped by SIGTERM; everything so far is saved" in stopped.stderr
  assert outcome(workdir)["status"] == "interrupted"

  coordinator = f"--coordinator=127.0.0.1:{free_port()}"
  again = []
  for process in processes:
    command = shlex.split(process.said().partition("Resume with:\n")[2])
    again.append(launch.start(*command[2:], coordinator))
  first, second = (process.finish(LIMIT_S) for process in again)
  assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
  assert "resumed seed 0 at step" in first.stderr
  assert outcome(workdir) == alone


def test_a_killed_process_ends_the_other_and_they_resume(start_two, alone, tmp_path):
  """Process 0 is killed: JAX waits 100 s before it gives up another one."""
  workdir = tmp_path / "shared"
  processes = start_two(workdir, workdir, pause_s="0.1")
  processes[0].wait_until(lambda: any((workdir / "checkpoints").glob("seed=0-*/4")))
  processes[0].kill()
  assert processes[1].finish(LIMIT_S).returncode != 0

  first, second = (p.finish(LIMIT_S) for p in start_two(workdir, workdir))
  assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
  assert "resumed seed 0 at step" in first.stderr
  assert outcome(workdir) == alone


FAILING = """
import jax

def fail():
  if jax.process_index() == 1:
    raise ValueError("process 1 has had enough")
  return 0

def run(config, run):
  for i in range(3):
    run.unit(f"unit {i}", fail if i == 1 else int)
"""


def test_an_error_in_one_process_ends_both(launch, tmp_path):
  """Without a hang, although process 0 waits for process 1 in a computation."""
  folder = tmp_path / "failing"
  folder.mkdir()
  (folder / "run.py").write_text(FAILING)
  (folder / "config.py").write_text(
    "import ml_collections\ndef get_config(preset):\n  return ml_collections.ConfigDict()\n"
  )
  common = (f"--config={folder}", f"--workdir={tmp_path / 'run'}", "--num_processes=2")
  coordinator = f"--coordinator=127.0.0.1:{free_port()}"
  started = [launch.start(*common, coordinator, f"--process_id={i}") for i in range(2)]
  first, second = (process.finish(LIMIT_S) for process in started)
  assert first.returncode != 0
  assert second.returncode == 1
  assert "error: process 1 has had enough" in second.stderr
