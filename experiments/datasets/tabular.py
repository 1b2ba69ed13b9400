"""Reads the tabular data sets as arrays: `load("adult")`."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from experiments.datasets import records
from experiments.datasets.adult import Adult
from experiments.datasets.bank import Bank
from experiments.datasets.builder import Attribute, DatasetError, Source, Spec, TabularBuilder
from experiments.datasets.compas import Compas
from experiments.datasets.credit_default import CreditDefault
from experiments.datasets.law_school import LawSchool

__all__ = ["DATASETS", "DatasetError", "Tabular", "load"]

DATASETS: dict[str, type[TabularBuilder]] = {
  builder.SPEC.name: builder for builder in (Adult, Compas, CreditDefault, LawSchool, Bank)
}

T = TypeVar("T")

_FEATURES = ("all", "numeric")


@dataclasses.dataclass(frozen=True, eq=False)
class Tabular:
  """A data set for binary classification with a binary sensitive attribute.

  Attributes:
    features: `[N, D]` float32, not standardised; neither the label nor the attribute is in it.
    feature_names: `[D]` names; a one-hot column is called "column=category".
    labels: `[N]` int32, 0 or 1.
    attribute: `[N]` int32, 0 or 1.
    attribute_name: of the sensitive attribute.
    attribute_meaning: what its values 1 and 0 stand for.
    label_name: what label 1 means.
    name: of the data set.
    licence: of the data.
    provenance: where the data come from.
  """

  features: np.ndarray
  feature_names: tuple[str, ...]
  labels: np.ndarray
  attribute: np.ndarray
  attribute_name: str
  attribute_meaning: str
  label_name: str
  name: str
  licence: str
  provenance: str


def load(
  name: str,
  *,
  features: str = "all",
  data_dir: str | pathlib.Path | None = None,
  path: str | pathlib.Path | None = None,
  sensitive: str | None = None,
) -> Tabular:
  """Loads a data set in the order of its source files.

  The first call writes it as TFDS records; later calls, in any process, read those.

  Args:
    name: a name of `DATASETS`.
    features: "all" for numeric and one-hot columns, "numeric" for the numeric ones only.
    data_dir: where the records are kept; by default `tfds` in the project's cache.
    path: the user's own copy of the source file, where the data set takes one.
    sensitive: name of the sensitive attribute; by default the data set's first.

  Returns:
    The arrays.

  Raises:
    DatasetError: an argument is unknown, a file is missing, damaged or has another layout, or
      `data_dir` cannot be written.
    launch.artifacts.ArtifactError: the source file cannot be downloaded.
  """
  builder_class = _choose("name", name, DATASETS).for_path(path)
  spec = builder_class.SPEC
  _choose("features", features, dict.fromkeys(_FEATURES))
  sensitive = next(iter(spec.attributes)) if sensitive is None else sensitive
  attribute = _choose("sensitive", sensitive, spec.attributes)
  numeric, categorical, labels = _records(builder_class, builder_class.find_sources(path), data_dir)
  columns, names = _features(spec, numeric, categorical, attribute, features)
  return Tabular(
    features=columns,
    feature_names=names,
    labels=labels,
    attribute=_attribute(spec, numeric, categorical, attribute),
    attribute_name=sensitive,
    attribute_meaning=attribute.meaning,
    label_name=spec.label_name,
    name=spec.name,
    licence=spec.licence,
    provenance=spec.provenance,
  )


def _choose(argument: str, value: str, known: Mapping[str, T]) -> T:
  """`known[value]`, or an error that suggests the nearest values."""
  if value in known:
    return known[value]
  near = difflib.get_close_matches(str(value), known, n=1)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  raise DatasetError(f"{argument}: got {value!r}, expected one of {', '.join(known)}.{hint}")


def _records(
  builder_class: type[TabularBuilder],
  sources: Sequence[Source],
  data_dir: str | pathlib.Path | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The records as `([N, P], [N, Q], [N])`."""
  rows = records.read(builder_class, builder_class.SPEC.name, sources, data_dir)
  return (
    np.stack([row["numeric"] for row in rows]),
    np.stack([row["categorical"] for row in rows]),
    np.array([row["label"] for row in rows], np.int32),
  )


def _features(
  spec: Spec,
  numeric: np.ndarray,
  categorical: np.ndarray,
  attribute: Attribute,
  features: str,
) -> tuple[np.ndarray, tuple[str, ...]]:
  """`[N, D]` float32 features without the attribute's column, and their names."""
  kept = [position for position, name in enumerate(spec.numeric) if name != attribute.column]
  parts, names = [numeric[:, kept]], [spec.numeric[position] for position in kept]
  if features == "all":
    for position, (column, known) in enumerate(spec.categories.items()):
      if column != attribute.column:
        parts.append(np.eye(len(known), dtype=np.float32)[categorical[:, position]])
        names.extend(f"{column}={category}" for category in known)
  return np.concatenate(parts, axis=1), tuple(names)


def _attribute(
  spec: Spec, numeric: np.ndarray, categorical: np.ndarray, attribute: Attribute
) -> np.ndarray:
  """`[N]` int32 values of the attribute."""
  if attribute.at_least is not None:
    values = numeric[:, spec.numeric.index(attribute.column)] >= attribute.at_least
  else:
    known = list(spec.categories)
    codes = categorical[:, known.index(attribute.column)]
    names = spec.categories[attribute.column]
    values = np.isin(codes, [names.index(name) for name in attribute.ones])
  return values.astype(np.int32)
