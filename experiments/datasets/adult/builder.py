"""TFDS builder of Adult (Becker and Kohavi 1996), from the UCI files beside this module."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import pathlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow_datasets as tfds

from experiments.datasets.builder import (
  Attribute,
  Columns,
  DatasetError,
  Source,
  Spec,
  TabularBuilder,
  to_columns,
)

_FOLDER = pathlib.Path(__file__).parent
_FILES = {"train": "adult.data.xz", "test": "adult.test.xz"}
_REMEDY = "It belongs to the project: restore it with `git checkout -- experiments/datasets/adult`."

# Order of the columns in the files (adult.names).
_HEADER = (
  "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
  "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
  "native-country", "income",
)  # fmt: skip


class Adult(TabularBuilder):
  """48,842 adults of the 1994 US census; the label is an income over 50,000 dollars a year.

  A "?" is a category of its own: nobody is dropped.
  """

  VERSION = tfds.core.Version("1.0.0")
  SPEC: ClassVar[Spec] = Spec(
    name="adult",
    numeric=(
      "age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week",
    ),
    categories={
      "workclass": (
        "?", "Federal-gov", "Local-gov", "Never-worked", "Private", "Self-emp-inc",
        "Self-emp-not-inc", "State-gov", "Without-pay",
      ),
      "education": (
        "Preschool", "1st-4th", "5th-6th", "7th-8th", "9th", "10th", "11th", "12th", "HS-grad",
        "Some-college", "Assoc-voc", "Assoc-acdm", "Bachelors", "Masters", "Prof-school",
        "Doctorate",
      ),
      "marital-status": (
        "Divorced", "Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent",
        "Never-married", "Separated", "Widowed",
      ),
      "occupation": (
        "?", "Adm-clerical", "Armed-Forces", "Craft-repair", "Exec-managerial",
        "Farming-fishing", "Handlers-cleaners", "Machine-op-inspct", "Other-service",
        "Priv-house-serv", "Prof-specialty", "Protective-serv", "Sales", "Tech-support",
        "Transport-moving",
      ),
      "relationship": (
        "Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife",
      ),
      "race": ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White"),
      "sex": ("Female", "Male"),
      "native-country": (
        "?", "Cambodia", "Canada", "China", "Columbia", "Cuba", "Dominican-Republic", "Ecuador",
        "El-Salvador", "England", "France", "Germany", "Greece", "Guatemala", "Haiti",
        "Holand-Netherlands", "Honduras", "Hong", "Hungary", "India", "Iran", "Ireland", "Italy",
        "Jamaica", "Japan", "Laos", "Mexico", "Nicaragua", "Outlying-US(Guam-USVI-etc)", "Peru",
        "Philippines", "Poland", "Portugal", "Puerto-Rico", "Scotland", "South", "Taiwan",
        "Thailand", "Trinadad&Tobago", "United-States", "Vietnam", "Yugoslavia",
      ),
    },
    label="income",
    label_values=("<=50K", ">50K"),
    label_name="income over 50K dollars a year",
    attributes={
      "sex": Attribute("sex", "1 = male, 0 = female", ones=("Male",)),
      "race": Attribute("race", "1 = White, 0 = every other category", ones=("White",)),
    },
    licence="CC BY 4.0",
    provenance=(
      "UCI Machine Learning Repository, Adult (id 2): adult.data followed by adult.test, committed "
      "with the project."
    ),
    homepage="https://doi.org/10.24432/C5XW20",
    citation="""@misc{becker1996adult,
  author = {Becker, Barry and Kohavi, Ronny},
  title = {Adult},
  year = {1996},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C5XW20}
}""",
  )  # fmt: skip

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    if path is not None:
      raise DatasetError(
        f"path: got {str(path)!r}, but adult is committed with the project; leave path out"
      )
    checksums = json.loads((_FOLDER / "checksums.json").read_text())
    return tuple(
      Source(_FOLDER / name, checksums[name]["sha256"], _REMEDY) for name in _FILES.values()
    )

  @classmethod
  def read(cls, sources: Sequence[Source]) -> Mapping[str, Columns]:
    checksums = json.loads((_FOLDER / "checksums.json").read_text())
    splits = {}
    for split, source in zip(_FILES, sources, strict=True):
      source.digest()
      raw = lzma.decompress(source.path.read_bytes())
      if hashlib.sha256(raw).hexdigest() != checksums[source.path.name]["raw_sha256"]:
        raise DatasetError(f"{source.path} unpacks to other bytes than UCI published. {_REMEDY}")
      # adult.test opens with a comment line and ends its labels with a full stop.
      lines = [line for line in raw.decode("ascii").splitlines() if line and line[0] != "|"]
      rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO("\n".join(lines)))]
      for row in rows:
        row[-1] = row[-1].removesuffix(".")
      splits[split] = to_columns(_HEADER, rows, source.path.name)
    return splits
