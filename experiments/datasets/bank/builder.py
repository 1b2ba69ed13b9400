"""TFDS builders of Bank Marketing (Moro, Cortez and Rita 2014), from the user's own file.

Three public layouts are read: `bank-full.csv` (and its sample `bank.csv`) and
`bank-additional-full.csv` of UCI 222, separated by semicolons, and the CSV or ARFF export of
OpenML 1461, which is `bank-full.csv` with columns V1 to V16 and the classes 1 and 2.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
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
  recode,
  require,
  to_columns,
)

_WHERE = (
  "Download Bank Marketing from the UCI Machine Learning Repository (id 222: bank-full.csv or "
  "bank-additional-full.csv) or from OpenML (id 1461, as CSV or ARFF), and give its path"
)
_MONTHS = (
  "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
)  # fmt: skip
_JOBS = (
  "admin.", "blue-collar", "entrepreneur", "housemaid", "management", "retired",
  "self-employed", "services", "student", "technician", "unemployed", "unknown",
)  # fmt: skip
# Order of the columns in bank-full.csv, which OpenML calls V1 to V16.
_FULL_HEADER = (
  "age", "job", "marital", "education", "default", "balance", "housing", "loan", "contact", "day",
  "month", "duration", "campaign", "pdays", "previous", "poutcome", "y",
)  # fmt: skip
_OPENML_HEADER = (*(f"V{number}" for number in range(1, 17)), "Class")
_OPENML_CLASSES = {"1": "no", "2": "yes"}


class Bank(TabularBuilder):
  """45,211 phone calls of a Portuguese bank; the label is a subscribed term deposit.

  The attribute is an age of at least 25 years, as in the authors' code. `duration`, the length of
  the call, is part of the authors' protocol and stays in; it is known only when the answer is.
  """

  VERSION = tfds.core.Version("1.0.0")
  SPEC: ClassVar[Spec] = Spec(
    name="bank",
    numeric=("age", "balance", "day", "duration", "campaign", "pdays", "previous"),
    categories={
      "job": _JOBS,
      "marital": ("divorced", "married", "single"),
      "education": ("primary", "secondary", "tertiary", "unknown"),
      "default": ("no", "yes"),
      "housing": ("no", "yes"),
      "loan": ("no", "yes"),
      "contact": ("cellular", "telephone", "unknown"),
      "month": _MONTHS,
      "poutcome": ("failure", "other", "success", "unknown"),
    },
    label="y",
    label_values=("no", "yes"),
    label_name="term deposit subscribed",
    attributes={"age": Attribute("age", "1 = 25 years or older, 0 = younger", at_least=25.0)},
    licence="CC BY 4.0",
    provenance="UCI Machine Learning Repository, Bank Marketing (id 222), the user's own copy.",
    homepage="https://doi.org/10.24432/C5K306",
    citation="""@article{moro2014data,
  author = {Moro, S{\\'e}rgio and Cortez, Paulo and Rita, Paulo},
  title = {A data-driven approach to predict the success of bank telemarketing},
  journal = {Decision Support Systems},
  volume = {62},
  year = {2014}
}""",
  )

  @classmethod
  def for_path(cls, path: str | pathlib.Path | None) -> type[TabularBuilder]:
    found = set(_read_columns(_user_file(path)))
    # When neither layout fits, reading it as bank-full.csv names the columns that are missing.
    return BankAdditional if set(BankAdditional.SPEC.columns) <= found else Bank

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    return (Source.of_user(_user_file(path)),)

  @classmethod
  def read(cls, sources: Sequence[Source]) -> Mapping[str, Columns]:
    (source,) = sources
    columns = _read_columns(source.path)
    require(columns, cls.SPEC.columns, f"{source.path.name} ({_WHERE})")
    return {"train": columns}


class BankAdditional(Bank):
  """41,188 calls of the same bank with five social and economic indicators."""

  SPEC: ClassVar[Spec] = dataclasses.replace(
    Bank.SPEC,
    numeric=(
      "age", "duration", "campaign", "pdays", "previous", "emp.var.rate", "cons.price.idx",
      "cons.conf.idx", "euribor3m", "nr.employed",
    ),
    categories={
      "job": _JOBS,
      "marital": ("divorced", "married", "single", "unknown"),
      "education": (
        "illiterate", "basic.4y", "basic.6y", "basic.9y", "high.school", "professional.course",
        "university.degree", "unknown",
      ),
      "default": ("no", "unknown", "yes"),
      "housing": ("no", "unknown", "yes"),
      "loan": ("no", "unknown", "yes"),
      "contact": ("cellular", "telephone"),
      "month": _MONTHS,
      "day_of_week": ("mon", "tue", "wed", "thu", "fri"),
      "poutcome": ("failure", "nonexistent", "success"),
    },
  )  # fmt: skip


def _user_file(path: str | pathlib.Path | None) -> pathlib.Path:
  if path is None:
    raise DatasetError(f"bank is not part of the project: path is missing. {_WHERE}")
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise DatasetError(f"path: there is no file {file}. {_WHERE}")
  return file


def _read_columns(path: pathlib.Path) -> Columns:
  """Reads any of the layouts into columns with the names and classes of UCI."""
  lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
  if any(line.lower().startswith("@data") for line in lines):
    names, rows = _arff(lines)
  else:
    header = lines[0] if lines else ""
    reader = csv.reader(lines, delimiter=";" if ";" in header else ",")
    names = next(reader, [])
    rows = list(reader)
  columns = to_columns(names, rows, path.name)
  if set(_OPENML_HEADER) <= set(columns):
    columns = {
      uci: columns[openml] for uci, openml in zip(_FULL_HEADER, _OPENML_HEADER, strict=True)
    }
    columns["y"] = recode(columns, "y", _OPENML_CLASSES, path.name)
  return columns


def _arff(lines: Sequence[str]) -> tuple[list[str], list[list[str]]]:
  """Names and rows of an ARFF file of nominal and numeric attributes."""
  lines = [line for line in lines if not line.startswith("%")]
  start = next(number for number, line in enumerate(lines) if line.lower().startswith("@data"))
  attribute = re.compile(r"@attribute\s+(?:'([^']+)'|\"([^\"]+)\"|(\S+))", re.IGNORECASE)
  names = [
    next(name for name in match.groups() if name)
    for match in map(attribute.match, lines[:start])
    if match
  ]
  rows = csv.reader(lines[start + 1 :], quotechar="'", skipinitialspace=True)
  return names, [[cell.strip('"') for cell in row] for row in rows]
