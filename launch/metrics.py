"""Rows of numbers that a run logs while it works."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np

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
    try:
      from tensorboardX import SummaryWriter
    except ImportError:
      self._board = None
    else:
      self._board = SummaryWriter(str(path.parent / "tensorboard"))

  def log(self, unit: str, step: int, metrics: dict[str, Any]) -> None:
    """Writes one row.

    Raises:
      NonFiniteError: naming the metric, unit and step, after the row was written.
    """
    values = {k: float(np.asarray(v)) for k, v in metrics.items()}
    bad = [k for k, v in values.items() if not math.isfinite(v)]
    row = {"unit": unit, "step": int(step)}
    row.update({k: v if math.isfinite(v) else repr(v) for k, v in values.items()})
    with explained(self._path):
      self._file.write(json.dumps(row) + "\n")
      self._file.flush()
    if self._board is not None:
      for name, value in values.items():
        self._board.add_scalar(f"{unit}/{name}", value, step)
    if bad:
      raise NonFiniteError(
        f"metric {bad[0]} is {values[bad[0]]} in unit {unit!r} at step {step}. The run stops here "
        "so that nothing is built on it: look at the rows before it in metrics.jsonl, then try a "
        "smaller learning rate or check the input for extreme values."
      )

  def close(self) -> None:
    self._file.close()
    if self._board is not None:
      self._board.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Rows of a metrics.jsonl, the last one of each unit and step, in order of appearance."""
  rows: dict[tuple[str, int], dict[str, Any]] = {}
  for line in path.read_text().splitlines():
    row = json.loads(line)
    rows[row["unit"], row["step"]] = row
  return list(rows.values())
