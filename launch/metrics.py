"""Rows of numbers that a run logs while it works."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from launch.files import explained


class NonFiniteError(RuntimeError):
  """A logged number is NaN or infinite; shown without a traceback."""


class MetricsLog:
  """Appends rows to `metrics.jsonl`, and to TensorBoard when tensorboardX is installed.

  A row that a kill left half written is dropped on opening. Rows logged again after a resume
  repeat the unit and step of rows already there: readers keep the last one (`read`).
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    with explained(path):
      if path.exists():
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
          path.write_bytes(whole)
      self._file = path.open("a")
    self._board = _Board.open(path.parent / "tensorboard")

  def log(self, unit: str, step: int, values: Mapping[str, float]) -> None:
    """Writes one row; numbers that are not finite are written as text."""
    row = {"unit": unit, "step": int(step)}
    row.update({k: v if math.isfinite(v) else repr(v) for k, v in values.items()})
    with explained(self._path):
      self._file.write(json.dumps(row) + "\n")
      self._file.flush()
      if self._board is not None:
        self._board.log(unit, step, values)

  def close(self) -> None:
    # Every row was flushed, or raised: what is left to fail here is known already.
    with contextlib.suppress(OSError):
      self._file.close()
    if self._board is not None:
      self._board.close()


class _Board:
  """A TensorBoard file written row by row.

  tensorboardX's own SummaryWriter writes from a thread and at exit, where a full disk ends in
  tracebacks that nobody can catch.
  """

  def __init__(self, folder: pathlib.Path):
    from tensorboardX.event_file_writer import EventsWriter

    with explained(folder):
      folder.mkdir(exist_ok=True)
      # Without the suffix, a run resumed within a second writes over the file before it.
      self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")

  @classmethod
  def open(cls, folder: pathlib.Path) -> _Board | None:
    """A board in `folder`; None when tensorboardX is not installed."""
    return cls(folder) if importlib.util.find_spec("tensorboardX") else None

  def log(self, unit: str, step: int, values: Mapping[str, float]) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    rows = [Summary.Value(tag=f"{unit}/{k}", simple_value=v) for k, v in values.items()]
    self._writer.write_event(
      Event(wall_time=time.time(), step=int(step), summary=Summary(value=rows))
    )
    self._writer.flush()

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._writer.close()


def check_finite(unit: str, step: int, values: Mapping[str, float]) -> None:
  """Stops the run at the first number that is not finite.

  Raises:
    NonFiniteError: naming the metric, unit and step.
  """
  for name, value in values.items():
    if not math.isfinite(value):
      raise NonFiniteError(
        f"metric {name} is {value} in unit {unit!r} at step {step}. The run stops here so that "
        "nothing is built on it: look at the rows before it in metrics.jsonl, then try a smaller "
        "learning rate or check the input for extreme values."
      )


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Rows of a metrics.jsonl, the last one of each unit and step, in order of appearance."""
  rows: dict[tuple[str, int], dict[str, Any]] = {}
  for line in path.read_text().splitlines():
    row = json.loads(line)
    rows[row["unit"], row["step"]] = row
  return list(rows.values())
