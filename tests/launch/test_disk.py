"""A full or read-only disk: a clear error, and what was saved before is still good."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from launch.files import WorkdirError, explained, write_atomic

SLOWLY = {"TINY_PAUSE_S": "0.1"}


@pytest.mark.parametrize(
  ("code", "message"),
  [
    (errno.ENOSPC, "the disk is full; free some space there or choose another --workdir"),
    (errno.EDQUOT, "the disk quota is used up"),
    (errno.EROFS, "the file system is read-only; choose another --workdir"),
    (errno.EACCES, "permission denied; choose another --workdir"),
    (errno.EIO, os.strerror(errno.EIO)),
  ],
)
def test_a_failed_write_keeps_the_old_file_and_explains(code, message, tmp_path, monkeypatch):
  path = tmp_path / "results.json"
  write_atomic(path, b"old")

  def fail(descriptor):
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(os, "fsync", fail)
  with pytest.raises(WorkdirError) as caught:
    write_atomic(path, b"new")
  assert f"cannot write {path}: {message}" in str(caught.value)
  assert "the same command resumes" in str(caught.value)
  assert path.read_bytes() == b"old"
  assert [p.name for p in tmp_path.iterdir()] == ["results.json"], "no half-written file is left"


def test_other_errors_pass_unchanged(tmp_path):
  with pytest.raises(KeyError), explained(tmp_path):
    raise KeyError("mine")


class Disk:
  """A file system in memory, of a few megabytes."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._filler = folder / "filler"

  def mount(self, *options: str) -> subprocess.CompletedProcess:
    option = ",".join(["size=4m", *options])
    command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(self.folder)]
    return subprocess.run(command, capture_output=True, text=True)

  def fill(self) -> None:
    """Leaves not a byte free, whatever the run writes or deletes meanwhile."""
    with self._filler.open("ab", buffering=0) as file:
      for size in (1 << 16, 1 << 12, 1):
        try:
          while True:
            file.write(bytes(size))
        except OSError as error:
          if error.errno != errno.ENOSPC:
            raise

  def free(self) -> None:
    self._filler.unlink()


@pytest.fixture
def disk(tmp_path):
  made = Disk(tmp_path / "disk")
  made.folder.mkdir()
  if sys.platform != "linux" or os.geteuid() != 0:
    pytest.skip("mounting a small file system needs root on Linux")
  mounted = made.mount()
  if mounted.returncode:
    pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
  yield made
  subprocess.run(["umount", "--lazy", str(made.folder)], check=True)


def test_full_disk_then_space(disk, launch, tiny, outcome, tmp_path):
  workdir = disk.folder / "run"
  process = launch.start(f"--config={tiny}", f"--workdir={workdir}", **SLOWLY)
  process.wait_until(lambda: any((workdir / "checkpoints").glob("seed=0-*/2")))
  while process.poll() is None:
    disk.fill()
  full = process.finish()
  assert full.returncode == 2, full.stderr
  last = full.stderr.splitlines()[-1]  # Orbax may have logged the error in its own way before.
  assert last.startswith("error: cannot write")
  assert "the disk is full; free some space there" in last

  disk.free()
  done = launch(f"--config={tiny}", f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  assert "resumed seed 0 at step" in done.stderr
  elsewhere = tmp_path / "elsewhere"
  assert launch(f"--config={tiny}", f"--workdir={elsewhere}").returncode == 0
  assert outcome(workdir) == outcome(elsewhere)


def test_read_only_disk_then_writable(disk, launch, tiny, outcome):
  workdir = disk.folder / "run"
  process = launch.start(f"--config={tiny}", f"--workdir={workdir}", **SLOWLY)
  process.wait_until(lambda: any((workdir / "checkpoints").glob("seed=0-*/2")))
  process.terminate()
  process.finish()
  disk.mount("remount", "ro")
  refused = launch(f"--config={tiny}", f"--workdir={workdir}")
  assert refused.returncode == 2
  assert "the file system is read-only; choose another --workdir" in refused.stderr
  assert "Traceback" not in refused.stderr
  assert outcome(workdir)["status"] == "interrupted"

  disk.mount("remount", "rw")
  done = launch(f"--config={tiny}", f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  assert "resumed seed 0 at step" in done.stderr
