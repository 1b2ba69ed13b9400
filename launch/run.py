"""The Run context: what an experiment gets from the project, and nothing more."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import jax
import ml_collections
import numpy as np
from flax import serialization
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from launch import claims as claims_lib
from launch import config as config_lib
from launch import environment
from launch import progress as progress_lib
from launch.checkpoint import Checkpoints
from launch.files import TEMP_PREFIX, WorkdirError, explained, write_atomic
from launch.metrics import MetricsLog, check_finite

T = TypeVar("T")

# Everything that a run writes. config.json is the last: without it the folder is no workdir.
CONTENTS = (
  "checkpoints",
  "units",
  "figures",
  "tensorboard",
  "metrics.jsonl",
  "solution.npz",
  "processes.txt",
  "results.json",
  "report.html",
  "traceback.txt",
  "config.json",
)


class Interrupted(Exception):
  """The run was asked to stop and has saved everything; the same command resumes it."""

  def __init__(self, signum: int):
    super().__init__(f"stopped by {signal.Signals(signum).name}")
    self.signum = signum


class Run:
  """Keys, mesh, units of work, checkpoints, logging and results of one run.

  Used as a context manager: on leaving it, results.json is written with the status "complete",
  "interrupted" or "failed". Everything is recomputed or read back in the same order on a resume,
  so an experiment needs no code of its own for it.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    *,
    fresh: bool = False,
  ):
    """Opens the workdir, new or to be resumed.

    Args:
      workdir: folder for everything the run writes.
      config: the locked config of the run.
      mesh: the device mesh that `config.mesh` asks for.
      fresh: first delete what an earlier run left in the workdir.

    Raises:
      WorkdirError: when the folder belongs to something else, to another config (the differing
        keys are named), to a run in progress, or is not shared between the hosts.
    """
    self.config = config
    self.mesh = mesh
    self.workdir = pathlib.Path(workdir)
    self._is_main = jax.process_index() == 0
    self._unit_name = "run"
    self._checkpoints: Checkpoints | None = None
    self._checkpoint_folder = self.workdir / "checkpoints" / "run"
    self._signum: int | None = None
    self._started = time.monotonic()
    self._earlier_s = 0.0
    self._claims: list[dict[str, Any]] = []
    self._metrics: dict[str, Any] = {}
    self._peers: list[dict[str, Any]] = []
    self._warnings: list[str] = []
    self._tables: dict[str, list[dict[str, Any]]] = {}
    self._figures: dict[str, str] = {}
    self._lock: TextIO | None = None
    self._log: MetricsLog | None = None
    try:
      self._on_main(lambda: self._open_workdir(fresh))
      self._check_shared_workdir()
    except BaseException:
      # A notebook keeps the exception, and with it this object and the lock, alive.
      self._close()
      raise

  # Keys, units, checkpoints.

  def key(self, name: str) -> jax.Array:
    """A typed PRNG key that depends on `config.seed` and `name` only."""
    seed = int(self.config.seed)
    if not 0 <= seed < 2**32:
      # JAX keeps other bits of it with and without float64.
      raise ValueError(f"config.seed = {seed}; expected 0 <= seed < 2**32, choose one there")
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], dtype=np.uint32)
    key = jax.random.key(seed)
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])

  def unit(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, computed once: a resumed run reads the kept result.

    Args:
      name: name of the unit, unique in the run, e.g. "seed=3".
      fn: returns plain data: numbers, strings, arrays, and dicts and lists of these.
      *args: what the unit depends on besides the config; plain data too. A kept result made
        from other arguments is computed again.

    Returns:
      What `fn` returned, with arrays as NumPy arrays and tuples as lists.
    """
    path = self.workdir / "units" / f"{_file_name(name)}.msgpack"
    fingerprint = hashlib.sha256(serialization.msgpack_serialize(_plain(list(args)))).hexdigest()
    # Other arguments must not continue from the checkpoints of these.
    folder = self.workdir / "checkpoints" / f"{_file_name(name)}-{fingerprint[:8]}"
    kept = self._read_unit(path, name, fingerprint)
    if kept is not None:
      if self._is_main:  # A kill between keeping the result and removing them leaves some.
        shutil.rmtree(folder, ignore_errors=True)
      return kept["result"]
    outer = self._unit_name, self._checkpoints, self._checkpoint_folder
    self._unit_name, self._checkpoints, self._checkpoint_folder = name, None, folder
    try:
      content = {"name": name, "fingerprint": fingerprint, "result": _plain(fn(*args))}
      data = serialization.msgpack_serialize(content)
      if self._checkpoints is not None:
        self._checkpoints.wait()
      self._on_main(lambda: write_atomic(path, hashlib.sha256(data).digest() + data))
      if self._checkpoints is not None:
        self._checkpoints.delete()
    finally:
      if self._checkpoints is not None:
        self._checkpoints.close()
      self._unit_name, self._checkpoints, self._checkpoint_folder = outer
    self._stop_if_asked()
    # Read back, so that a resumed run gets exactly what the first one got.
    return serialization.msgpack_restore(data)["result"]

  @property
  def checkpoints(self) -> Checkpoints:
    """Checkpoints of the unit being computed; they are removed when it is done."""
    if self._checkpoints is None:
      self._checkpoints = Checkpoints(self._checkpoint_folder, after_save=self._stop_if_asked)
    return self._checkpoints

  # Logging.

  def log(self, step: int, **metrics: Any) -> None:
    """Appends a row to metrics.jsonl; the first number that is not finite stops the run."""
    values = {k: float(np.asarray(v)) for k, v in metrics.items()}
    if self._log is not None:
      self._log.log(self._unit_name, step, values)
    check_finite(self._unit_name, step, values)

  def progress(self, iterable: Iterable[T], desc: str, total: int | None = None) -> Iterator[T]:
    """Yields from `iterable`, showing progress."""
    return progress_lib.progress(iterable, desc, total) if self._is_main else iter(iterable)

  def say(self, text: str) -> None:
    """Prints a line to the person who runs this, once however many processes there are."""
    if self._is_main:
      print(text, file=sys.stderr, flush=True)

  # What goes to results.json and report.html.

  def metric(self, name: str, values: Sequence[float] | float, unit: str) -> claims_lib.Estimate:
    """Records a number, one value a seed, with its mean and interval."""
    value = claims_lib.estimate(np.atleast_1d(np.asarray(values, np.float64)))
    self._metrics[name] = {
      "mean": value.mean,
      "ci95": None if value.ci95 is None else list(value.ci95),
      "n": value.n,
      "unit": unit,
    }
    return value

  def claim(self, id: str, statement: str, **fields: Any) -> str:
    """Records a claim and returns its verdict; the fields are those of `claims.claim_row`."""
    row = claims_lib.claim_row(id, statement, **fields)
    if any(other["id"] == id for other in self._claims):
      raise ValueError(f"claim {id!r} was recorded twice; ids are unique in an experiment")
    self._claims.append(row)
    return row["verdict"]

  def peer(self, name: str, version: str, what: str, ours: float, theirs: float, unit: str) -> None:
    """Records a comparison with an outside implementation, measured in the same run."""
    self._peers.append(environment.peer_row(name, version, what, ours, theirs, unit))

  def warn(self, text: str) -> None:
    """Records a warning that stands at the top of the report."""
    if text not in self._warnings:
      self._warnings.append(text)
      self.say(f"warning: {text}")

  def table(self, name: str, rows: Sequence[Mapping[str, Any]], caption: str = "") -> None:
    """Records a table; `rows` are dicts with the same keys in the same order."""
    rows = [{k: _json_cell(v) for k, v in row.items()} for row in rows]
    self._tables[name] = {"caption": caption, "rows": rows}

  def figure(self, name: str, figure: Any, caption: str = "") -> None:
    """Keeps a matplotlib figure as figures/NAME.png and .svg, and closes it."""
    import matplotlib.pyplot as plt

    name = _file_name(name)
    self._on_main(lambda: self._write_figure(name, figure))
    self._figures[name] = caption
    plt.close(figure)

  def _write_figure(self, name: str, figure: Any) -> None:
    for suffix in ("png", "svg"):
      path = self.workdir / "figures" / f"{name}.{suffix}"
      with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name(f"{TEMP_PREFIX}{path.name}")
        figure.savefig(temp, dpi=150, bbox_inches="tight", format=suffix)
        os.replace(temp, path)

  def results(self, status: str) -> dict[str, Any]:
    """The content of results.json."""
    return {
      "schema": 1,
      "experiment": self.config.experiment,
      "preset": self.config.preset,
      "config_hash": config_lib.config_hash(self.config),
      "status": status,
      "metrics": self._metrics,
      "claims": self._claims,
      "peers": self._peers,
      "tables": self._tables,
      "figures": self._figures,
      "warnings": self._warnings,
      "environment": {
        **environment.describe(),
        "wall_s": round(self._earlier_s + time.monotonic() - self._started, 1),
        "peak_rss_mb": environment.peak_rss_mb(),
      },
    }

  # Context manager.

  def __enter__(self) -> Run:
    self._old_handlers = {}
    for signum in (signal.SIGINT, signal.SIGTERM):
      try:
        self._old_handlers[signum] = signal.signal(signum, self._on_signal)
      except ValueError:  # Not the main thread: the host program handles its own signals.
        break
    return self

  def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
    for signum, handler in self._old_handlers.items():
      # None stands for a handler that was not set from Python, such as one of jax.distributed.
      signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    status = "complete"
    if kind is not None:
      status = "interrupted" if kind in (Interrupted, KeyboardInterrupt) else "failed"
    try:
      if self._checkpoints is not None:
        self._checkpoints.close()
      if self._is_main:
        self._write_results(status)
    except WorkdirError:
      # On the way out with an error, that error is the news.
      if kind is None:
        raise
    finally:
      self._close()

  def _close(self) -> None:
    if self._log is not None:
      self._log.close()
    if self._lock is not None:
      self._lock.close()

  def _write_results(self, status: str) -> None:
    from launch import report

    results = self.results(status)
    if status == "complete":
      html = report.render(results, config_lib.flatten(self.config), self.workdir / "figures")
      write_atomic(self.workdir / "report.html", html.encode())
    text = json.dumps(results, indent=1, allow_nan=False)
    write_atomic(self.workdir / "results.json", (text + "\n").encode())

  # Signals.

  def _on_signal(self, signum: int, frame: Any) -> None:
    if self._signum is not None:
      raise KeyboardInterrupt
    self._signum = signum
    self.say(
      f"{signal.Signals(signum).name}: finishing this step and saving; once more stops at once"
    )

  def _stop_if_asked(self) -> None:
    """Raises Interrupted, in all processes at the same point, when any was asked to stop."""
    signum = self._signum or 0
    if jax.process_count() > 1:
      signum = int(multihost_utils.process_allgather(np.int32(signum)).max())
    if signum:
      if self._checkpoints is not None:
        self._checkpoints.wait()
      raise Interrupted(signum)

  # Workdir.

  def _open_workdir(self, fresh: bool) -> None:
    with explained(self.workdir, "create"):
      self.workdir.mkdir(parents=True, exist_ok=True)
    self._lock = _lock(self.workdir / ".lock")
    mine = config_lib.identity(self.config)
    config_path = self.workdir / "config.json"
    before = _read_config(config_path)
    if before is None:
      others = [p.name for p in self.workdir.iterdir() if not p.name.startswith(".")]
      if others:
        raise WorkdirError(
          f"{self.workdir} holds {others[0]!r} and no config.json, so it is not the workdir of a "
          "run. Give a new or empty folder as --workdir."
        )
    elif fresh:
      with explained(self.workdir, "delete what is in"):
        _clear(self.workdir)
    elif lines := config_lib.differences(before, mine):
      raise WorkdirError(
        f"{self.workdir} was made by a different config:\n  "
        + "\n  ".join(lines)
        + "\nGive another --workdir, or the same config again."
      )
    if before is None or fresh:
      data = json.dumps(mine, indent=1, sort_keys=True)
      write_atomic(config_path, (data + "\n").encode())
    self._earlier_s = _wall_seconds(self.workdir / "results.json")
    for leftover in self.workdir.rglob(f"{TEMP_PREFIX}*"):
      if leftover.is_file():
        leftover.unlink(missing_ok=True)
    self._log = MetricsLog(self.workdir / "metrics.jsonl")

  def _check_shared_workdir(self) -> None:
    """Every host must see the file that process 0 wrote, or a resume would not find the units."""
    if jax.process_count() == 1:
      return
    token = np.frombuffer(os.urandom(8), dtype=np.uint32).astype(np.int32)
    token = np.asarray(multihost_utils.broadcast_one_to_all(token))
    text = " ".join(str(int(word)) for word in token)
    path = self.workdir / "processes.txt"
    self._on_main(lambda: write_atomic(path, text.encode()))
    seen = path.is_file() and path.read_text() == text
    everyone = np.asarray(multihost_utils.process_allgather(np.int32(seen)))
    if not everyone.all():
      hosts = [str(i) for i in np.flatnonzero(everyone == 0)]
      raise WorkdirError(
        f"processes {', '.join(hosts)} do not see {path}, which process 0 wrote: --workdir must be "
        "a folder that all hosts share (a network file system or a mounted bucket)."
      )

  def _read_unit(self, path: pathlib.Path, name: str, fingerprint: str) -> dict[str, Any] | None:
    kept = _read_kept(path, name, fingerprint, self.say)
    if jax.process_count() > 1:
      everyone = np.asarray(multihost_utils.process_allgather(np.int32(kept is not None)))
      return kept if everyone.all() else None
    return kept

  def _on_main(self, write: Callable[[], None]) -> None:
    """Calls `write` in process 0 and waits for it; when it fails, all processes stop.

    Raises:
      WorkdirError: in process 0 the error itself, and in the others a pointer to it.
    """
    error = None
    if self._is_main:
      try:
        write()
      except Exception as caught:  # Any of them would leave the other processes waiting.
        error = caught
    failed = error is not None
    if jax.process_count() > 1:
      failed = bool(multihost_utils.broadcast_one_to_all(np.int32(failed)))
    if failed:
      raise error or WorkdirError(
        f"process 0 cannot use the workdir {self.workdir}; its own message says why."
      )


def _read_kept(
  path: pathlib.Path, name: str, fingerprint: str, say: Callable[[str], None]
) -> dict[str, Any] | None:
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return None
  if hashlib.sha256(data[32:]).digest() != data[:32]:
    say(f"unit {name}: its kept result is damaged; computing it again")
    return None
  content = serialization.msgpack_restore(data[32:])
  if content["name"] != name:
    raise ValueError(f"units {name!r} and {content['name']!r} share a file name; rename one")
  if content["fingerprint"] != fingerprint:
    say(f"unit {name}: its arguments have changed; computing it again")
    return None
  return content


def _lock(path: pathlib.Path) -> TextIO:
  """Holds the workdir for this process; released by the system however the process ends."""
  with explained(path):
    file = path.open("w")
  try:
    import fcntl
  except ImportError:  # Windows: two runs in one workdir are not caught there.
    return file
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.close()
    raise WorkdirError(
      f"another run is using {path.parent}; wait for it, or give another --workdir."
    ) from None
  except OSError:  # A file system without locks: go on without one.
    return file
  return file


def _read_config(path: pathlib.Path) -> dict[str, Any] | None:
  """The config that the workdir was made by; None when there is none.

  Raises:
    WorkdirError: when it is no config of a run; other programs have files of that name.
  """
  if not path.exists():
    return None
  try:
    content = json.loads(path.read_text())
  except ValueError:
    content = None
  if isinstance(content, dict) and {"experiment", "preset", "seed"} <= content.keys():
    return content
  raise WorkdirError(
    f"{path} is damaged, or not of a run. Give another --workdir, or delete the folder if it was "
    "made by a run."
  )


def _wall_seconds(path: pathlib.Path) -> float:
  """Seconds that earlier sessions of a resumed run took, as far as they lived to write them."""
  try:
    return float(json.loads(path.read_text())["environment"]["wall_s"])
  except (OSError, ValueError, KeyError, TypeError):
    return 0.0


def _clear(workdir: pathlib.Path) -> None:
  for name in CONTENTS:
    path = workdir / name
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink(missing_ok=True)


def _file_name(name: str) -> str:
  return re.sub(r"[^A-Za-z0-9=._-]+", "_", name).strip("_.") or "unit"


def _plain(tree: Any) -> Any:
  """Plain data for keeping: tuples become lists, device arrays NumPy arrays."""
  if isinstance(tree, Mapping):
    return {str(k): _plain(v) for k, v in tree.items()}
  if isinstance(tree, list | tuple):
    return [_plain(v) for v in tree]
  if tree is None or isinstance(tree, bool | int | float | str):
    return tree
  if isinstance(tree, jax.Array | np.ndarray | np.generic):
    return np.asarray(jax.device_get(tree))
  raise TypeError(
    f"a unit's arguments and result are plain data; got {type(tree).__name__}. Return numbers, "
    "strings, arrays, dicts and lists."
  )


def _json_cell(value: Any) -> Any:
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    value = np.asarray(value).item()
  if isinstance(value, float) and not np.isfinite(value):
    return None
  return value
