"""TFDS builder of MovieLens 100K by user, and the graph of users with films in common."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow_datasets as tfds

from experiments.datasets import graphs, records
from experiments.datasets.graphs import EdgeTable
from experiments.datasets.records import LocalBuilder
from experiments.datasets.rows import csv_rows
from experiments.datasets.source import DatasetError, Source

_HEADER = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]


class Movielens(LocalBuilder):
  """943 users; a record is `{"user", "films": int32 [M]}`, the films that the user rated.

  Users and films keep their numbers of the source, from 1; both are in increasing order. What the
  ratings were is left out.
  """

  VERSION = tfds.core.Version("1.0.0")

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    return (Source.of_artifact("movielens") if path is None else Source.of_user(path),)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=(
        "MovieLens 100K: which films each user rated, from the file ml-100k.inter of RecBole 1.2.1."
      ),
      features=tfds.features.FeaturesDict(
        {
          "user": tfds.features.Scalar(np.int32),
          "films": tfds.features.Tensor(shape=(None,), dtype=np.int32),
        }
      ),
      homepage="https://grouplens.org/datasets/movielens/100k/",
      citation="""@article{harper2015movielens,
  author = {Harper, F. Maxwell and Konstan, Joseph A.},
  title = {The MovieLens Datasets: History and Context},
  journal = {ACM Transactions on Interactive Intelligent Systems},
  volume = {5},
  number = {4},
  year = {2015},
  doi = {10.1145/2827872}
}""",
      license="GroupLens: research use, no redistribution",
      disable_shuffling=True,
    )

  def _generate_examples(self, sources: Sequence[Source]) -> Iterator[tuple[int, dict[str, Any]]]:
    (source,) = sources
    for row, (user, films) in enumerate(_read_films(source.path)):
      yield row, {"user": user, "films": films}


def load(
  *,
  shared_films: int = 20,
  data_dir: str | pathlib.Path | None = None,
  path: str | pathlib.Path | None = None,
) -> EdgeTable:
  """The graph in which users with enough films in common are joined.

  Args:
    shared_films: smallest number of films, at least 1, that both users of an edge rated.
    data_dir: where the records are kept; by default `tfds` in the project's cache.
    path: the user's own copy of the source file; by default the artifact.

  Returns:
    An undirected, unweighted graph; nodes are named by the users' numbers "1" to "943".

  Raises:
    DatasetError: `shared_films` is below 1, or the file or the folder is damaged or cannot be
      written.
    launch.artifacts.ArtifactError: the file cannot be downloaded.
  """
  if shared_films < 1:
    raise DatasetError(f"shared_films = {shared_films}; expected at least 1")
  rows = records.read(Movielens, "movielens", Movielens.find_sources(path), data_dir)
  films = [row["films"] for row in rows]
  user = np.repeat(np.arange(len(rows)), [len(f) for f in films])
  film = np.unique(np.concatenate(films), return_inverse=True)[1]
  rated = scipy.sparse.csr_array((np.ones(user.size, np.int32), (user, film)))
  common = scipy.sparse.triu(rated @ rated.T, k=1, format="coo")
  enough = common.data >= shared_films
  return graphs.make_table(
    common.row[enough], common.col[enough], [str(row["user"]) for row in rows]
  )


def _read_films(path: pathlib.Path) -> list[tuple[int, np.ndarray]]:
  """Users and the films that each rated, all increasing.

  Raises:
    DatasetError: the file is of another layout, cut, or rates a film twice for a user.
  """
  try:
    rows = list(csv_rows(path, "\t"))
    if not rows or rows[0][1] != _HEADER:
      raise DatasetError(f"{path}, line 1: expected the columns {', '.join(_HEADER)}")
    for line, fields in rows[1:]:
      if len(fields) != len(_HEADER) or not (fields[0].isdecimal() and fields[1].isdecimal()):
        raise DatasetError(
          f"{path}, line {line}: expected {len(_HEADER)} fields that begin with the numbers of a "
          "user and a film; the file is cut or of another layout"
        )
  except DatasetError:
    raise
  except ValueError as error:
    raise DatasetError(str(error)) from error
  pairs = np.array([fields[:2] for _, fields in rows[1:]], np.int32).reshape(-1, 2)
  if not pairs.size:
    raise DatasetError(f"{path}: holds no rating")
  unique = np.unique(pairs, axis=0)
  if len(unique) != len(pairs):
    raise DatasetError(f"{path}: {len(pairs) - len(unique)} ratings are there twice; expected once")
  users, starts = np.unique(unique[:, 0], return_index=True)
  return list(zip(users.tolist(), np.split(unique[:, 1], starts[1:]), strict=True))
