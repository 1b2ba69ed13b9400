"""TFDS builder of the rice insurance experiment of Cai, de Janvry and Sadoulet (2015)."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.datasets import records
from experiments.datasets.builder import Columns, to_columns
from experiments.datasets.records import LocalBuilder
from experiments.datasets.source import DatasetError, Source

_FOLDER = pathlib.Path(__file__).parent
_FILE = "social_insure.csv.xz"
_REMEDY = (
  "It belongs to the project: restore it with `git checkout -- experiments/datasets/social_insure`."
)

_PLACES = ("address", "village")
_BINARY = ("takeup_survey", "default", "intensive")
# These have empty cells, or values other than 0 and 1.
_NUMERIC = (
  "age", "agpop", "ricearea_2010", "disaster_prob", "male", "risk_averse", "literacy",
  "pre_takeup_rate",
)  # fmt: skip


class SocialInsure(LocalBuilder):
  """1,410 households of the second round of information sessions.

  A record is `{"address", "village", "binary": int32 [3], "numeric": float32 [8]}`; the names of
  the columns are in the builder's metadata, and a number that is missing is NaN.
  """

  VERSION = tfds.core.Version("1.0.0")

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    if path is not None:
      raise DatasetError(
        f"path: got {str(path)!r}, but social_insure is committed with the project; leave path out"
      )
    return (Source(_FOLDER / _FILE, _checksums()["sha256"], _REMEDY),)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=(
        "Cai, de Janvry and Sadoulet (2015), second-round households, as Cai_2015.csv of "
        "causaldata 0.1.5, committed with the project."
      ),
      features=tfds.features.FeaturesDict(
        {
          **{name: tfds.features.Text() for name in _PLACES},
          "binary": tfds.features.Tensor(shape=(len(_BINARY),), dtype=np.int32),
          "numeric": tfds.features.Tensor(shape=(len(_NUMERIC),), dtype=np.float32),
        }
      ),
      homepage="https://doi.org/10.1257/app.20130442",
      citation="""@article{cai2015social,
  author = {Cai, Jing and de Janvry, Alain and Sadoulet, Elisabeth},
  title = {Social Networks and the Decision to Insure},
  journal = {American Economic Journal: Applied Economics},
  volume = {7},
  number = {2},
  pages = {81--108},
  year = {2015},
  doi = {10.1257/app.20130442}
}""",
      license="MIT (causaldata)",
      metadata=tfds.core.MetadataDict(binary=list(_BINARY), numeric=list(_NUMERIC)),
      disable_shuffling=True,
    )

  def _generate_examples(self, sources: Sequence[Source]) -> Iterator[tuple[int, dict[str, Any]]]:
    (source,) = sources
    columns = _read_columns(source)
    binary = np.stack([_numbers(columns[name]) for name in _BINARY], axis=1).astype(np.int32)
    numeric = np.stack([_numbers(columns[name]) for name in _NUMERIC], axis=1)
    for row in range(len(binary)):
      yield (
        row,
        {
          **{name: str(columns[name][row]) for name in _PLACES},
          "binary": binary[row],
          "numeric": numeric[row],
        },
      )


def load(data_dir: str | pathlib.Path | None = None) -> Mapping[str, np.ndarray]:
  """The 13 columns of the table, which the README explains.

  Args:
    data_dir: where the records are kept; by default `tfds` in the project's cache.

  Returns:
    `[1410]` arrays by name: "address" and "village" as strings; "takeup_survey", "default" and
    "intensive" as int32, 0 or 1; every other column as float32 with NaN where it is missing.

  Raises:
    DatasetError: the file is missing or damaged, or `data_dir` cannot be written.
  """
  rows = records.read(SocialInsure, "social_insure", SocialInsure.find_sources(None), data_dir)
  columns = {name: np.array([row[name].decode() for row in rows]) for name in _PLACES}
  for part, names in (("binary", _BINARY), ("numeric", _NUMERIC)):
    values = np.stack([row[part] for row in rows])
    columns |= {name: values[:, position] for position, name in enumerate(names)}
  return columns


def _checksums() -> dict[str, str]:
  return json.loads((_FOLDER / "checksums.json").read_text())[_FILE]


def _read_columns(source: Source) -> Columns:
  source.digest()
  raw = lzma.decompress(source.path.read_bytes())
  if hashlib.sha256(raw).hexdigest() != _checksums()["raw_sha256"]:
    raise DatasetError(f"{source.path} unpacks to other bytes than causaldata published. {_REMEDY}")
  reader = csv.reader(io.StringIO(raw.decode("ascii")))
  return to_columns(next(reader, []), reader, source.path.name)


def _numbers(cells: np.ndarray) -> np.ndarray:
  """`[N]` float32; an empty cell is NaN."""
  return np.where(cells == "", "nan", cells).astype(np.float32)
