"""TFDS builder of ProPublica's COMPAS table (Angwin et al. 2016): two races, filtered."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from experiments.datasets.builder import (
  Attribute,
  Columns,
  Source,
  Spec,
  TabularBuilder,
  require,
  to_columns,
)

_RACES = ("African-American", "Caucasian")
_MAX_DAYS_TO_SCREENING = 30
_FILTER_COLUMNS = (
  "race",
  "days_b_screening_arrest",
  "is_recid",
  "c_charge_degree",
  "score_text",
)


class Compas(TabularBuilder):
  """5,278 defendants of Broward County; the label is NOT being charged again within two years.

  The cohort is that of OpenML 42193, which the authors' code uses: African-American and Caucasian
  defendants who pass the filters of ProPublica's analysis (screened within 30 days of the arrest,
  recidivism known, not an ordinary traffic offence, a score given). The scores themselves, names,
  dates and everything recorded after the screening are left out.
  """

  VERSION = tfds.core.Version("1.0.0")
  SPEC: ClassVar[Spec] = Spec(
    name="compas",
    numeric=("age", "juv_fel_count", "juv_misd_count", "juv_other_count", "priors_count"),
    categories={
      "sex": ("Female", "Male"),
      "age_cat": ("Less than 25", "25 - 45", "Greater than 45"),
      "race": _RACES,
      "c_charge_degree": ("F", "M"),
    },
    label="two_year_recid",
    label_values=("1", "0"),
    label_name="no recidivism within two years",
    attributes={
      "race": Attribute("race", "1 = Caucasian, 0 = African-American", ones=("Caucasian",)),
      "sex": Attribute("sex", "1 = male, 0 = female", ones=("Male",)),
    },
    licence="none stated by ProPublica",
    provenance=(
      "ProPublica, compas-analysis, compas-scores-two-years.csv: African-American and Caucasian "
      "defendants after ProPublica's filters."
    ),
    homepage=("https://www.propublica.org/article/how-we-analyzed-the-compas-recidivism-algorithm"),
    citation="""@misc{angwin2016machine,
  author = {Angwin, Julia and Larson, Jeff and Mattu, Surya and Kirchner, Lauren},
  title = {Machine Bias},
  year = {2016},
  howpublished = {ProPublica}
}""",
  )

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    return (Source.of_artifact("compas") if path is None else Source.of_user(path),)

  @classmethod
  def read(cls, sources: Sequence[Source]) -> Mapping[str, Columns]:
    (source,) = sources
    with source.path.open(newline="", encoding="utf-8") as file:
      reader = csv.reader(file)
      columns = to_columns(next(reader, []), reader, source.path.name)
    require(columns, (*cls.SPEC.columns, *_FILTER_COLUMNS), source.path.name)
    days = columns["days_b_screening_arrest"]
    # A blank number of days fails the filter, as a missing value does in ProPublica's R code.
    days = np.where(days == "", "inf", days).astype(np.float64)
    kept = (
      np.isin(columns["race"], _RACES)
      & (np.abs(days) <= _MAX_DAYS_TO_SCREENING)
      & (columns["is_recid"] != "-1")
      & (columns["c_charge_degree"] != "O")
      & (columns["score_text"] != "N/A")
    )
    return {"train": {name: columns[name][kept] for name in cls.SPEC.columns}}
