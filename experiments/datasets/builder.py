"""What the tabular data sets share: their description, and a TFDS builder that writes them.

A builder reads local files only, writes `array_record` files and needs no TensorFlow. One record
is one person, `{"numeric": float32 [P], "categorical": int32 [Q], "label": int}`, in the order of
the source files; column names and categories are in the builder's metadata.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from experiments.datasets.records import LocalBuilder
from experiments.datasets.source import DatasetError, Source

__all__ = ["Attribute", "Columns", "DatasetError", "Source", "Spec", "TabularBuilder"]

# Column name to `[N]` strings.
Columns = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Attribute:
  """A binary sensitive attribute and the column it is taken from.

  Attributes:
    column: the numeric or categorical column; it never becomes a feature then.
    meaning: what 1 and 0 stand for.
    ones: categories coded 1; every other category is coded 0.
    at_least: for a numeric column, the smallest value coded 1.
  """

  column: str
  meaning: str
  ones: tuple[str, ...] = ()
  at_least: float | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
  """Description of one tabular data set.

  Attributes:
    name: what `tabular.load` calls it.
    numeric: numeric columns, in order.
    categories: categorical columns, in order, each with its complete list of categories.
    label: column of the label.
    label_values: the value of that column coded 0 and the one coded 1.
    label_name: what 1 means.
    attributes: sensitive attributes by name; the first one is the default.
    licence: of the data.
    provenance: where the files come from.
    homepage: public page of the data.
    citation: BibTeX.
  """

  name: str
  numeric: tuple[str, ...]
  categories: Mapping[str, tuple[str, ...]]
  label: str
  label_values: tuple[str, str]
  label_name: str
  attributes: Mapping[str, Attribute]
  licence: str
  provenance: str
  homepage: str
  citation: str

  @property
  def columns(self) -> tuple[str, ...]:
    return (*self.numeric, *self.categories, self.label)


class TabularBuilder(LocalBuilder, skip_registration=True):
  """Writes one tabular data set. A subclass says what `SPEC` is, where files are, how to read them.

  Arguments as for `LocalBuilder`.
  """

  SPEC: ClassVar[Spec]

  @classmethod
  def for_path(cls, path: str | pathlib.Path | None) -> type[TabularBuilder]:
    """The builder for the layout of the user's file; most data sets have one layout."""
    del path
    return cls

  @classmethod
  def read(cls, sources: Sequence[Source]) -> Mapping[str, Columns]:
    """Reads the files: split name to columns, at least those of the spec."""
    raise NotImplementedError

  def _info(self) -> tfds.core.DatasetInfo:
    spec = self.SPEC
    return tfds.core.DatasetInfo(
      builder=self,
      description=f"{spec.provenance} Label 1: {spec.label_name}. Licence: {spec.licence}.",
      features=tfds.features.FeaturesDict(
        {
          "numeric": tfds.features.Tensor(shape=(len(spec.numeric),), dtype=np.float32),
          "categorical": tfds.features.Tensor(shape=(len(spec.categories),), dtype=np.int32),
          "label": tfds.features.ClassLabel(num_classes=2),
        }
      ),
      homepage=spec.homepage,
      citation=spec.citation,
      license=spec.licence,
      metadata=tfds.core.MetadataDict(
        numeric=list(spec.numeric),
        categorical={column: list(names) for column, names in spec.categories.items()},
        label=spec.label_name,
      ),
      # The order of the files is kept.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
    del dl_manager  # it would fetch files; ours are local
    return {
      split: self._generate_examples(columns)
      for split, columns in self.read(self.sources()).items()
    }

  def _generate_examples(self, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    numeric, categorical, labels = encode(self.SPEC, columns)
    for row, label in enumerate(labels.tolist()):
      yield row, {"numeric": numeric[row], "categorical": categorical[row], "label": label}


def encode(spec: Spec, columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Turns the strings of a file into numbers.

  Args:
    spec: description of the data set.
    columns: at least the columns of the spec, `[N]` strings each.

  Returns:
    `[N, P]` float32 numeric columns, `[N, Q]` int32 category codes, `[N]` int32 labels.

  Raises:
    DatasetError: a column is missing, or a cell is not a finite number, a known category or a
      known label; the message names the column, the row and the value.
  """
  require(columns, spec.columns, spec.name)
  rows = len(columns[spec.label])
  numeric = np.empty((rows, len(spec.numeric)), np.float32)
  for position, name in enumerate(spec.numeric):
    numeric[:, position] = _numbers(spec.name, name, columns[name])
  categorical = np.empty((rows, len(spec.categories)), np.int32)
  for position, (name, known) in enumerate(spec.categories.items()):
    categorical[:, position] = _codes(spec.name, name, columns[name], known)
  labels = _codes(spec.name, spec.label, columns[spec.label], spec.label_values)
  return numeric, categorical, labels


def to_columns(names: Sequence[str], rows: Iterable[Sequence[str]], where: str) -> Columns:
  """Turns rows of cells into columns; the first of two columns with one name wins.

  Raises:
    DatasetError: no row, or a row with another number of cells than there are names.
  """
  table = list(rows)
  for number, row in enumerate(table, start=1):
    if len(row) != len(names):
      raise DatasetError(
        f"{where}: data row {number} has {len(row)} cells, expected {len(names)}; "
        "the file is cut or of another layout"
      )
  if not table:
    raise DatasetError(f"{where}: no data rows; the file is cut or of another layout")
  columns: dict[str, np.ndarray] = {}
  for name, cells in zip(names, zip(*table, strict=True), strict=True):
    columns.setdefault(name, np.array(cells))
  return columns


def require(columns: Columns, names: Iterable[str], where: str) -> None:
  """Raises DatasetError if one of the columns is missing from a file."""
  missing = [name for name in names if name not in columns]
  if missing:
    raise DatasetError(
      f"{where}: missing column {', '.join(map(repr, missing))}; found {', '.join(columns)}"
    )


def from_one_hot(columns: Columns, mapping: Mapping[str, str], where: str) -> np.ndarray:
  """Joins one-hot columns into one column of categories.

  Args:
    columns: `[N]` strings "0" or "1" by column name.
    mapping: name of the one-hot column to category.
    where: what to call the file in an error.

  Returns:
    `[N]` category names.

  Raises:
    DatasetError: a column is missing, or a row does not have exactly one 1.
  """
  require(columns, mapping, where)
  hot = np.stack([columns[name] == "1" for name in mapping], axis=1)
  wrong = np.flatnonzero(hot.sum(axis=1) != 1)
  if wrong.size:
    raise DatasetError(
      f"{where}: data row {wrong[0] + 1} has {hot[wrong[0]].sum()} ones among "
      f"{', '.join(mapping)}, expected one"
    )
  return np.array(list(mapping.values()))[hot.argmax(axis=1)]


def recode(columns: Columns, name: str, mapping: Mapping[str, str], where: str) -> np.ndarray:
  """Replaces the codes of a column by their meaning.

  Raises:
    DatasetError: the column is missing or holds another code.
  """
  require(columns, (name,), where)
  return np.array(list(mapping.values()))[_codes(where, name, columns[name], tuple(mapping))]


def _numbers(dataset: str, name: str, cells: np.ndarray) -> np.ndarray:
  try:
    values = cells.astype(np.float64)
  except ValueError:
    values = np.array([_number(cell) for cell in cells])
  wrong = np.flatnonzero(~np.isfinite(values))
  if wrong.size:
    raise DatasetError(
      f"{dataset}: column {name!r}, data row {wrong[0] + 1} is {str(cells[wrong[0]])!r}, expected "
      "a number"
    )
  return values.astype(np.float32)


def _number(cell: str) -> float:
  try:
    return float(cell)
  except ValueError:
    return math.nan


def _codes(dataset: str, name: str, cells: np.ndarray, known: Sequence[str]) -> np.ndarray:
  found, inverse = np.unique(cells, return_inverse=True)
  strange = [str(value) for value in found if value not in known]
  if strange:
    raise DatasetError(
      f"{dataset}: column {name!r} holds {', '.join(map(repr, strange[:5]))}, expected one of "
      f"{', '.join(map(repr, known))}"
    )
  return np.array([known.index(value) for value in found], np.int32)[inverse]
