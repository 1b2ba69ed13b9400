"""What every test shares: strict JAX settings, a cache of its own, no network where asked."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

# Set before JAX is imported, and in the environment so that processes started by tests have them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax
import pytest

# A plugin may have imported JAX before this file.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
  """Keeps tests out of the user's cache; REPRISE_TEST_CACHE names one to keep between runs."""
  shared = os.environ.get("REPRISE_TEST_CACHE")
  if shared:
    os.environ["REPRISE_CACHE"] = shared
  elif "REPRISE_CACHE" not in os.environ:
    made = tempfile.mkdtemp(prefix="reprise-test-cache-")
    os.environ["REPRISE_CACHE"] = made
    config.add_cleanup(lambda: shutil.rmtree(made, ignore_errors=True))


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
  """The checkout."""
  return pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def x64() -> Iterator[None]:
  """float64 in JAX for this test only."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
  """Connecting a socket to anything but this machine's own files fails."""

  def refuse(real):
    def connect(self, address, *args):
      if self.family != getattr(socket, "AF_UNIX", None):
        raise OSError(f"this test may not use the network; something connected to {address}")
      return real(self, address, *args)

    return connect

  for name in ("connect", "connect_ex"):
    monkeypatch.setattr(socket.socket, name, refuse(getattr(socket.socket, name)))


class Process(subprocess.Popen):
  """A running command whose output goes to files, so that it never waits for its reader."""

  def __init__(self, arguments: list[str], logs: pathlib.Path, **options):
    self._out, self._err = logs.with_suffix(".out"), logs.with_suffix(".err")
    with self._out.open("w") as out, self._err.open("w") as err:
      super().__init__(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **options)

  def said(self) -> str:
    """What it has written to stderr."""
    return self._err.read_text()

  def finish(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Waits for its end."""
    code = self.wait(timeout_s)
    return subprocess.CompletedProcess(self.args, code, self._out.read_text(), self.said())

  def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
    """Waits while it works, until `condition()`."""
    end = time.monotonic() + timeout_s
    while not condition():
      assert self.poll() is None, f"ended too early, status {self.returncode}: {self.said()}"
      assert time.monotonic() < end, f"nothing happened in {timeout_s} s: {self.said()}"
      time.sleep(0.01)


class CommandLine:
  """Starts `python launch.py` in processes of its own, and ends those still running."""

  def __init__(self, root: pathlib.Path, logs: pathlib.Path):
    self._root = root
    self._logs = logs
    self._started: list[Process] = []

  def __call__(self, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs to the end; `env` is added to the environment."""
    return self.start(*arguments, **env).finish()

  def start(self, *arguments: object, **env: str) -> Process:
    """Starts a run and does not wait for it."""
    process = Process(
      [sys.executable, str(self._root / "launch.py"), *map(str, arguments)],
      self._logs / f"process-{len(self._started)}",
      cwd=self._root,
      env={**os.environ, **env},
    )
    self._started.append(process)
    return process

  def close(self) -> None:
    for process in self._started:
      process.kill()
      process.wait()


@pytest.fixture
def launch(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
  """`launch("--config=...")` runs the command line; `launch.start` does not wait for it."""
  command_line = CommandLine(root, tmp_path_factory.mktemp("logs"))
  yield command_line
  command_line.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A complete small experiment in a folder outside the project."""
  source = pathlib.Path(__file__).parent / "tiny"
  folder = tmp_path_factory.mktemp("experiments") / "tiny"
  shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
  return folder
