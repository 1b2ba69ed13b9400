"""The user's own ramp-up: a table of who was treated at which stage, and what came out."""

from __future__ import annotations

import array
import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.datasets.rows import csv_rows, to_number

COLUMNS = ("node", "stage", "share", "z", "y")

# A realised share further than this from the nominal one does not come from the stated design.
_MAX_DEVIATION_SD = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutLog:
  """A ramp-up as it was run.

  Attributes:
    stages: `[L]` labels of the stages, in order.
    shares: `[L]` float64, nominal treatment share of each stage.
    z: `[L, N]` float64, treatments, 0 or 1.
    y: `[L, N]` float64, outcomes.
    rows: `[L, N]` int64, line of the file that holds each entry, from 1.
    warnings: what does not fit the stated design and is no error.
  """

  stages: tuple[str, ...]
  shares: np.ndarray
  z: np.ndarray
  y: np.ndarray
  rows: np.ndarray
  warnings: tuple[str, ...]


def read_log(
  path: str | pathlib.Path, nodes: Sequence[str], cluster: np.ndarray | None = None
) -> RolloutLog:
  """Reads a roll-out log: a CSV file, plain or `.gz`, with a row for each node and stage.

  The first line names the columns: node, stage, share, z and y, in any order; others are left out.
  Rows may come in any order. Stages are put in the order of their labels: of numbers by value,
  else of text, which is right for ISO dates.

  Args:
    path: the file.
    nodes: `[N]` names of the graph's nodes, all different.
    cluster: `[N]` randomisation unit of each node, 0..K-1; each node is its own when None.

  Returns:
    The log. Its warnings name stages whose realised share is more than 5 binomial standard
    deviations from the nominal one, and stages in which a cluster is treated in part (derived).

  Raises:
    ValueError: names the line of the file: a column or field is missing, a node is not in the
      graph or comes twice in a stage, a value is out of range, z contradicts the share, or a share
      changes within a stage. Where a row is missing it names node and stage.
  """
  path = pathlib.Path(path)
  rows = csv_rows(path)
  line, header = next(rows, (1, []))
  columns = _columns(path, line, header)
  number = {name: i for i, name in enumerate(nodes)}
  stage_number: dict[str, int] = {}
  shares: list[float] = []
  share_lines: list[int] = []
  node_of, stage_of, line_of = array.array("q"), array.array("q"), array.array("q")
  z_of, y_of = array.array("d"), array.array("d")

  for line, fields in rows:
    if len(fields) != len(header):
      raise ValueError(
        f"{path}, line {line}: has {len(fields)} fields; expected {len(header)} as in the first "
        "line"
      )
    name, label, *values = (fields[column] for column in columns)
    node = number.get(name)
    if node is None:
      raise ValueError(
        f"{path}, line {line}: node {name!r} is not in the graph; expected a name as it is written "
        "there. Leave out rows of other nodes"
      )
    if not label:
      raise ValueError(f"{path}, line {line}: stage is empty; expected the name of a stage")
    share, z, y = map(to_number, values)
    if not 0 <= share <= 1:
      raise ValueError(
        f"{path}, line {line}: share is {values[0]!r}; expected a number from 0 to 1, not percent"
      )
    if z not in (0, 1):
      raise ValueError(
        f"{path}, line {line}: z is {values[1]!r}; expected 1 if the node was treated, else 0"
      )
    if not math.isfinite(y):
      raise ValueError(
        f"{path}, line {line}: y is {values[2]!r}; expected a finite number. A node without an "
        "outcome cannot be used: leave it out of the graph and of the log"
      )
    if share in (0, 1) and z != share:
      raise ValueError(
        f"{path}, line {line}: z is {z:g} at share {share:g}; expected {share:g} for every node of "
        f"stage {label}"
      )
    stage = stage_number.setdefault(label, len(stage_number))
    if stage == len(shares):
      shares.append(share)
      share_lines.append(line)
    elif share != shares[stage]:
      raise ValueError(
        f"{path}, line {line}: share {share:g} in stage {label}, which has share "
        f"{shares[stage]:g} in line {share_lines[stage]}; expected one share a stage. Stages with "
        "several shares are several stages"
      )
    node_of.append(node)
    stage_of.append(stage)
    line_of.append(line)
    z_of.append(z)
    y_of.append(y)

  if not line_of:
    raise ValueError(f"{path}: has no row below its first line; expected one a node and stage")
  labels = tuple(stage_number)
  place = _place(
    path, np.asarray(node_of), np.asarray(stage_of), np.asarray(line_of), labels, nodes
  )
  order = _stage_order(labels)

  def table(values: array.array) -> np.ndarray:
    return np.asarray(values)[place].reshape(len(labels), len(nodes))[order]

  stages = tuple(labels[i] for i in order)
  ordered_shares, z = np.asarray(shares)[order], table(z_of)
  warnings = _warnings(stages, ordered_shares, z, cluster)
  return RolloutLog(stages, ordered_shares, z, table(y_of), table(line_of), warnings)


def _columns(path: pathlib.Path, line: int, header: Sequence[str]) -> list[int]:
  """Positions of COLUMNS in the first line."""
  if not header:
    raise ValueError(f"{path}: is empty; expected a first line {','.join(COLUMNS)}")
  names = [name.lower() for name in header]
  missing = [name for name in COLUMNS if name not in names]
  if missing:
    raise ValueError(
      f"{path}, line {line}: there is no column {' and no column '.join(missing)} in "
      f"{','.join(header)[:200]}; expected a first line with {','.join(COLUMNS)} in any order"
    )
  twice = [name for name in COLUMNS if names.count(name) > 1]
  if twice:
    raise ValueError(f"{path}, line {line}: column {twice[0]} comes twice; expected it once")
  return [names.index(name) for name in COLUMNS]


def _place(
  path: pathlib.Path,
  node: np.ndarray,
  stage: np.ndarray,
  line: np.ndarray,
  labels: Sequence[str],
  nodes: Sequence[str],
) -> np.ndarray:
  """Order that sorts the rows by stage and node, once each pair is there exactly once."""
  key = stage * len(nodes) + node
  order = np.argsort(key, kind="stable")
  again = np.flatnonzero(np.diff(key[order]) == 0)
  if again.size:
    first = again[np.argmin(line[order[again + 1]])]
    earlier, later = order[first], order[first + 1]
    raise ValueError(
      f"{path}, line {line[later]}: node {nodes[node[later]]!r} comes again in stage "
      f"{labels[stage[later]]}; expected one row, and line {line[earlier]} is one already"
    )
  counts = np.bincount(node, minlength=len(nodes))
  absent = np.flatnonzero(counts == 0)
  if absent.size:
    raise ValueError(
      f"{path}: node {nodes[absent[0]]!r} of the graph is in no row, and so are "
      f"{absent.size - 1} others of {len(nodes)}; expected a row for each node and stage. Add "
      "them, or leave these nodes out of the graph"
    )
  short = np.flatnonzero(counts < len(labels))
  if short.size:
    its_rows = np.flatnonzero(node == short[0])
    lacking = sorted(set(range(len(labels))) - set(stage[its_rows].tolist()))
    raise ValueError(
      f"{path}: node {nodes[short[0]]!r} (line {line[its_rows[0]]}) has no row for stage "
      f"{labels[lacking[0]]}, and {len(labels) * len(nodes) - len(node) - 1} other rows are "
      "missing; expected a row for each node and stage"
    )
  return order


def _stage_order(labels: Sequence[str]) -> list[int]:
  values = [to_number(label) for label in labels]
  if any(math.isnan(value) for value in values):
    return sorted(range(len(labels)), key=lambda i: labels[i])
  return sorted(range(len(labels)), key=lambda i: values[i])


def _warnings(
  stages: Sequence[str], shares: np.ndarray, z: np.ndarray, cluster: np.ndarray | None
) -> tuple[str, ...]:
  warnings = []
  unit = np.arange(z.shape[1]) if cluster is None else np.asarray(cluster)
  size = np.bincount(unit)
  for stage, share, treated in zip(stages, shares, z, strict=True):
    part = np.bincount(unit, treated) / size
    split = np.flatnonzero((part > 0) & (part < 1))
    if split.size:
      warnings.append(
        f"stage {stage}: {split.size} of {size.size} clusters, the first {split[0]}, are treated "
        "in part; they are not the units of randomisation, so that standard errors are wrong"
      )
    sd = math.sqrt(share * (1 - share) / size.size)
    if abs(part.mean() - share) > _MAX_DEVIATION_SD * sd:
      warnings.append(
        f"stage {stage}: {part.mean():.4g} of {size.size} randomisation units are treated, "
        f"{abs(part.mean() - share) / sd:.1f} standard deviations from the share {share:g}; "
        + ("was it drawn by cluster?" if cluster is None else "are these the clusters of the draw?")
      )
  return tuple(warnings)
