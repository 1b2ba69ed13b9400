"""Tabular data: true counts, no leakage, no TensorFlow, no network, and clear refusals."""

from __future__ import annotations

import csv
import io
import json
import lzma
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zipfile

import numpy as np
import pytest
import tensorflow_datasets as tfds

from experiments.datasets import records as records_lib
from experiments.datasets import tabular
from experiments.datasets.adult import Adult
from experiments.datasets.adult import builder as adult_builder
from experiments.datasets.builder import DatasetError
from experiments.datasets.compas import Compas
from launch import artifacts

REPO = pathlib.Path(__file__).resolve().parents[2]
ADULT = REPO / "experiments" / "datasets" / "adult"


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> pathlib.Path:
  """One folder of prepared records for the whole file."""
  return tmp_path_factory.mktemp("tfds")


@pytest.fixture(scope="module")
def adult(records) -> tabular.Tabular:
  return tabular.load("adult", data_dir=records)


def _adult_lines() -> list[list[str]]:
  """The committed files, read without any code of the project."""
  rows = []
  for name in ("adult.data.xz", "adult.test.xz"):
    text = lzma.decompress((ADULT / name).read_bytes()).decode()
    rows += [line.split(", ") for line in text.split("\n") if line.count(",") == 14]
  return rows


# Small files with the columns of the real ones. Each gives (path, rows in order).


def _write_csv(path: pathlib.Path, header: list[str], rows: list[list[str]], sep: str = ",") -> str:
  with path.open("w", newline="") as file:
    writer = csv.writer(file, delimiter=sep)
    writer.writerow(header)
    writer.writerows(rows)
  return str(path)


COMPAS_HEADER = [
  "id", "name", "sex", "dob", "age", "age_cat", "race", "juv_fel_count", "decile_score",
  "juv_misd_count", "juv_other_count", "priors_count", "days_b_screening_arrest",
  "c_charge_degree", "is_recid", "score_text", "end", "event",
  "two_year_recid",
]  # fmt: skip


def _compas_row(**changes: str) -> list[str]:
  row = dict.fromkeys(COMPAS_HEADER, "9") | {
    "sex": "Male", "age": "30", "age_cat": "25 - 45", "race": "Caucasian", "juv_fel_count": "0",
    "juv_misd_count": "1", "juv_other_count": "2", "priors_count": "3",
    "days_b_screening_arrest": "-1", "c_charge_degree": "F", "is_recid": "0", "score_text": "Low",
    "two_year_recid": "0",
  }  # fmt: skip
  return list((row | changes).values())


def _compas_file(tmp_path: pathlib.Path, extra: list[list[str]] | None = None) -> str:
  # The real file has this column twice; the first one counts.
  header = [*COMPAS_HEADER, "priors_count"]
  rows = [
    _compas_row(age="21", age_cat="Less than 25", two_year_recid="1"),
    _compas_row(race="African-American", sex="Female", age="50", age_cat="Greater than 45"),
    _compas_row(race="Hispanic"),
    _compas_row(days_b_screening_arrest="31"),
    _compas_row(days_b_screening_arrest="-31"),
    _compas_row(days_b_screening_arrest=""),
    _compas_row(is_recid="-1"),
    _compas_row(c_charge_degree="O"),
    _compas_row(score_text="N/A"),
    _compas_row(race="African-American", days_b_screening_arrest="30", c_charge_degree="M"),
    *(extra or []),
  ]
  return _write_csv(tmp_path / "compas.csv", header, [[*row, "99"] for row in rows])


CREDIT_NUMERIC = [
  "LIMIT_BAL", "AGE", "PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6", "BILL_AMT1",
  "BILL_AMT2", "BILL_AMT3", "BILL_AMT4", "BILL_AMT5", "BILL_AMT6", "PAY_AMT1", "PAY_AMT2",
  "PAY_AMT3", "PAY_AMT4", "PAY_AMT5", "PAY_AMT6",
]  # fmt: skip


def _credit_file(tmp_path: pathlib.Path, education: str = "0,0,1,0,0,0,0") -> str:
  header = ["ID", "SEX", *CREDIT_NUMERIC, "default-payment-next-month"]
  header += [f"EDUCATION_{code}" for code in range(7)] + [f"MARRIAGE_{code}" for code in range(4)]
  rows = [
    [str(row), str(row % 2), *[str(100 * row + column) for column in range(20)], str(row % 3 == 0)]
    for row in range(1, 7)
  ]
  for row in rows:
    row[-1] = "1" if row[-1] == "True" else "0"
    row.extend([*education.split(","), "0", "1", "0", "0"])
  return _write_csv(tmp_path / "credit.csv", header, rows)


LAW_RACES = ("Amerindian", "Asian", "Black", "Hispanic", "Mexican", "Other", "Puertorican", "White")


def _law_file(tmp_path: pathlib.Path) -> str:
  header = ["LSAT", "UGPA", "ZFYA", *(f"Race_{race}" for race in LAW_RACES)]
  header += ["Sex_1", "Sex_2", "PF_0", "PF_1"]
  out = io.StringIO()
  writer = csv.writer(out)
  writer.writerow(header)
  for row in range(8):
    hot = [int(row == column) for column in range(8)]
    sex, passed = [row % 2, 1 - row % 2], [int(row < 3), int(row >= 3)]
    writer.writerow([30 + row, 3.5, -0.25 * row, *hot, *sex, *passed])
  path = tmp_path / "law.csv.zip"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("law.csv", out.getvalue())
  return str(path)


BANK_HEADER = [
  "age", "job", "marital", "education", "default", "balance", "housing", "loan", "contact", "day",
  "month", "duration", "campaign", "pdays", "previous", "poutcome", "y",
]  # fmt: skip
BANK_ROWS = [
  "58,management,married,tertiary,no,2143,yes,no,unknown,5,may,261,1,-1,0,unknown,no",
  "24,blue-collar,single,secondary,no,-29,yes,no,cellular,6,jun,151,1,-1,0,failure,yes",
  "25,admin.,divorced,primary,yes,2,no,yes,telephone,7,dec,76,3,90,2,success,no",
]
BANK_ROWS = [row.split(",") for row in BANK_ROWS]


def _bank_file(tmp_path: pathlib.Path, layout: str) -> str:
  if layout == "full":
    path = tmp_path / "bank-full.csv"
    lines = [BANK_HEADER, *BANK_ROWS]
    quoted = [";".join(c if c.lstrip("-").isdigit() else f'"{c}"' for c in line) for line in lines]
    path.write_text("\n".join(quoted) + "\n")
    return str(path)
  rows = [[*row[:-1], {"no": "1", "yes": "2"}[row[-1]]] for row in BANK_ROWS]
  names = [*(f"V{number}" for number in range(1, 17)), "Class"]
  if layout == "openml-csv":
    return _write_csv(tmp_path / "openml.csv", names, rows)
  path = tmp_path / "openml.arff"
  head = ["% a comment", "@RELATION bank-marketing"]
  head += [f"@ATTRIBUTE {name} {{a,b}}" for name in names]
  body = [",".join("'blue-collar'" if c == "blue-collar" else c for c in row) for row in rows]
  path.write_text("\n".join([*head, "@DATA", *body]) + "\n")
  return str(path)


FILES = {
  "compas": _compas_file,
  "credit_default": _credit_file,
  "law_school": _law_file,
  "bank": lambda tmp_path: _bank_file(tmp_path, "full"),
}


# Adult


def test_adult_counts_and_base_rates(adult):
  assert adult.features.shape == (48_842, 106)
  assert adult.features.dtype == np.float32
  assert adult.labels.dtype == adult.attribute.dtype == np.int32
  assert adult.labels.sum() == 7_841 + 3_846  # adult.names: 23.93 %
  assert adult.attribute.sum() == 32_650
  assert adult.licence == "CC BY 4.0"


def test_adult_equals_the_file_row_by_row(adult):
  rows = _adult_lines()
  assert len(rows) == len(adult.labels)
  columns = list(zip(*rows, strict=True))
  numeric = {"age": 0, "fnlwgt": 2, "education-num": 4, "capital-gain": 10, "capital-loss": 11,
             "hours-per-week": 12}  # fmt: skip
  for name, column in numeric.items():
    values = adult.features[:, adult.feature_names.index(name)]
    np.testing.assert_array_equal(values, np.array(columns[column], np.float32))
  for name, column in {"workclass": 1, "race": 8, "native-country": 13}.items():
    for category in set(columns[column]):
      values = adult.features[:, adult.feature_names.index(f"{name}={category}")]
      np.testing.assert_array_equal(values, np.array(columns[column]) == category)
  np.testing.assert_array_equal(adult.labels, [">50K" in label for label in columns[14]])
  np.testing.assert_array_equal(adult.attribute, np.array(columns[9]) == "Male")


def test_adult_numeric_has_the_six_columns(adult, records):
  numeric = tabular.load("adult", features="numeric", data_dir=records)
  assert numeric.feature_names == adult.feature_names[:6]
  np.testing.assert_array_equal(numeric.features, adult.features[:, :6])


def test_second_load_is_identical_and_writes_nothing(adult, records, monkeypatch):
  def refuse(self, *args, **kwargs):
    raise AssertionError("prepared twice")

  monkeypatch.setattr(Adult, "download_and_prepare", refuse)
  again = tabular.load("adult", data_dir=records)
  np.testing.assert_array_equal(again.features, adult.features)
  np.testing.assert_array_equal(again.labels, adult.labels)
  np.testing.assert_array_equal(again.attribute, adult.attribute)


def test_another_attribute_takes_its_own_columns_out(adult, records):
  race = tabular.load("adult", sensitive="race", data_dir=records)
  white = adult.features[:, adult.feature_names.index("race=White")]
  np.testing.assert_array_equal(race.attribute, white)
  assert race.attribute_name == "race"
  assert not [name for name in race.feature_names if name.startswith("race=")]
  assert {"sex=Male", "sex=Female"} <= set(race.feature_names)


def test_adult_loads_without_network_tensorflow_torch_or_jax(adult, records):
  script = textwrap.dedent(f"""
    import socket, sys
    def refuse(*args, **kwargs): raise AssertionError("network used")
    socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
    from experiments.datasets import tabular
    data = tabular.load("adult", data_dir={str(records)!r})
    loaded = [name for name in ("tensorflow", "torch", "jax") if name in sys.modules]
    print(len(data.labels), loaded)
  """)
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "48842 []"


@pytest.fixture
def adult_copy(tmp_path, monkeypatch) -> pathlib.Path:
  """A copy of the committed files that a test may damage."""
  copy = tmp_path / "adult"
  shutil.copytree(ADULT, copy)
  monkeypatch.setattr(adult_builder, "_FOLDER", copy)
  return copy


@pytest.mark.parametrize("name", ["adult.data.xz", "adult.test.xz"])
def test_damaged_committed_file_is_refused(adult_copy, tmp_path, name):
  content = bytearray((adult_copy / name).read_bytes())
  content[1000] ^= 1
  (adult_copy / name).write_bytes(content)
  with pytest.raises(DatasetError, match=r"is damaged: SHA-256 .*`git checkout"):
    tabular.load("adult", data_dir=tmp_path / "tfds")


def test_other_bytes_inside_a_right_archive_are_refused(adult_copy, tmp_path):
  checksums = json.loads((adult_copy / "checksums.json").read_text())
  checksums["adult.test.xz"]["raw_sha256"] = "0" * 64
  (adult_copy / "checksums.json").write_text(json.dumps(checksums))
  with pytest.raises(DatasetError, match="other bytes than UCI published"):
    tabular.load("adult", data_dir=tmp_path / "tfds")


def test_missing_committed_file_is_named(adult_copy, tmp_path):
  (adult_copy / "adult.data.xz").unlink()
  with pytest.raises(DatasetError, match=r"cannot read .*adult\.data\.xz"):
    tabular.load("adult", data_dir=tmp_path / "tfds")


# Every data set


def _assert_no_leak(data: tabular.Tabular) -> None:
  spec = tabular.DATASETS[data.name].SPEC
  forbidden = {spec.label, spec.attributes[data.attribute_name].column}
  assert not forbidden & {name.split("=")[0] for name in data.feature_names}
  assert len(set(data.feature_names)) == data.features.shape[1] == len(data.feature_names)
  for target in (data.labels, data.attribute):
    assert set(np.unique(target)) == {0, 1}
    same = (data.features == target[:, None]).all(axis=0)
    opposite = (data.features == 1 - target[:, None]).all(axis=0)
    assert not same.any()
    assert not opposite.any()


@pytest.mark.parametrize("sensitive", ["sex", "race"])
def test_adult_does_not_leak(records, sensitive):
  _assert_no_leak(tabular.load("adult", sensitive=sensitive, data_dir=records))


REAL = {
  # artifact, rows, features, positive labels, attribute 1
  "compas": ("compas", 5_278, 12, 2_795, 2_103),
  "credit_default": ("credit-default", 30_000, 31, 6_636, 11_888),
  "law_school": ("law-school", 21_791, 5, 19_360, 18_285),
}


@pytest.mark.parametrize("name", REAL)
def test_real_counts(name, records):
  artifact, rows, columns, positive, ones = REAL[name]
  if not artifacts.is_cached(artifact):
    pytest.skip(f"needs the real file: python launch.py --fetch={artifact}")
  data = tabular.load(name, data_dir=records)
  assert data.features.shape == (rows, columns)
  assert data.labels.sum() == positive
  assert data.attribute.sum() == ones
  for sensitive in tabular.DATASETS[name].SPEC.attributes:
    _assert_no_leak(tabular.load(name, sensitive=sensitive, data_dir=records))


def test_compas_cohort_and_coding(tmp_path):
  data = tabular.load("compas", path=_compas_file(tmp_path), data_dir=tmp_path / "tfds")
  # Of ten rows the first two and the last pass ProPublica's filters.
  np.testing.assert_array_equal(data.features[:, 0], [21, 50, 30])
  np.testing.assert_array_equal(data.labels, [0, 1, 1])
  np.testing.assert_array_equal(data.attribute, [1, 0, 0])
  assert data.feature_names == (
    "age", "juv_fel_count", "juv_misd_count", "juv_other_count", "priors_count", "sex=Female",
    "sex=Male", "age_cat=Less than 25", "age_cat=25 - 45", "age_cat=Greater than 45",
    "c_charge_degree=F", "c_charge_degree=M",
  )  # fmt: skip
  np.testing.assert_array_equal(data.features[1], [50, 0, 1, 2, 3, 1, 0, 0, 0, 1, 1, 0])


def test_credit_default_coding(tmp_path):
  data = tabular.load("credit_default", path=_credit_file(tmp_path), data_dir=tmp_path / "tfds")
  assert data.feature_names[:20] == tuple(CREDIT_NUMERIC)
  np.testing.assert_array_equal(data.features[2, :20], 300 + np.arange(20))
  np.testing.assert_array_equal(data.labels, [0, 0, 1, 0, 0, 1])
  # SEX is 1 for women in this file.
  np.testing.assert_array_equal(data.attribute, [0, 1, 0, 1, 0, 1])
  hot = [name for name, value in zip(data.feature_names, data.features[0], strict=True) if value]
  assert {"EDUCATION=2", "MARRIAGE=1"} <= set(hot)


def test_law_school_coding(tmp_path):
  path = _law_file(tmp_path)
  race = tabular.load("law_school", path=path, data_dir=tmp_path / "tfds")
  np.testing.assert_array_equal(race.attribute, [0] * 7 + [1])
  np.testing.assert_array_equal(race.labels, [0] * 3 + [1] * 5)
  assert race.feature_names == ("LSAT", "UGPA", "ZFYA", "sex=Female", "sex=Male")
  np.testing.assert_array_equal(race.features[3], [33, 3.5, -0.75, 1, 0])
  sex = tabular.load("law_school", path=path, data_dir=tmp_path / "tfds", sensitive="sex")
  np.testing.assert_array_equal(sex.attribute, [1, 0] * 4)
  assert sex.feature_names == ("LSAT", "UGPA", "ZFYA", *(f"race={race}" for race in LAW_RACES))


@pytest.mark.parametrize("layout", ["full", "openml-csv", "openml-arff"])
def test_bank_reads_each_public_layout_alike(tmp_path, layout):
  data = tabular.load("bank", path=_bank_file(tmp_path, layout), data_dir=tmp_path / "tfds")
  np.testing.assert_array_equal(data.attribute, [1, 0, 1])
  np.testing.assert_array_equal(data.labels, [0, 1, 0])
  assert data.feature_names[:6] == (
    "balance", "day", "duration", "campaign", "pdays", "previous",
  )  # fmt: skip
  np.testing.assert_array_equal(data.features[1, :6], [-29, 6, 151, 1, -1, 0])
  assert data.features[1, data.feature_names.index("job=blue-collar")] == 1
  assert "age" not in data.feature_names


def test_bank_additional_layout(tmp_path):
  header = [
    "age", "job", "marital", "education", "default", "housing", "loan", "contact", "month",
    "day_of_week", "duration", "campaign", "pdays", "previous", "poutcome", "emp.var.rate",
    "cons.price.idx", "cons.conf.idx", "euribor3m", "nr.employed", "y",
  ]  # fmt: skip
  row = [
    "24", "services", "married", "high.school", "unknown", "no", "no", "telephone", "may", "mon",
    "226", "1", "999", "0", "nonexistent", "1.1", "93.994", "-36.4", "4.857", "5191", "yes",
  ]  # fmt: skip
  path = _write_csv(tmp_path / "additional.csv", header, [row, ["40", *row[1:-1], "no"]], sep=";")
  data = tabular.load("bank", path=path, data_dir=tmp_path / "tfds")
  np.testing.assert_array_equal(data.attribute, [0, 1])
  np.testing.assert_array_equal(data.labels, [1, 0])
  assert data.features[0, data.feature_names.index("euribor3m")] == np.float32(4.857)
  assert data.features[0, data.feature_names.index("day_of_week=mon")] == 1


# Records


def test_builder_is_a_plain_tfds_builder(tmp_path):
  """Written by our class, read back by TFDS alone, without knowing our code."""
  source = Compas.find_sources(_compas_file(tmp_path))
  builder = Compas(data_dir=tmp_path / "tfds", sources=source)
  builder.download_and_prepare()
  assert builder.info.splits["train"].num_examples == 3
  other = tfds.builder_from_directory(builder.data_dir)
  rows = list(other.as_data_source("train"))
  np.testing.assert_array_equal(rows[1]["numeric"], np.array([50, 0, 1, 2, 3], np.float32))
  np.testing.assert_array_equal(rows[1]["categorical"], [0, 2, 0, 0])
  assert [row["label"] for row in rows] == [0, 1, 1]
  assert other.info.metadata["categorical"]["sex"] == ["Female", "Male"]


@pytest.mark.parametrize("name", FILES)
def test_load_needs_no_network(name, tmp_path, monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError("the network was used")

  for target in ("create_connection", "getaddrinfo"):
    monkeypatch.setattr(socket, target, refuse)
  monkeypatch.setattr(socket.socket, "connect", refuse)
  data = tabular.load(name, path=FILES[name](tmp_path), data_dir=tmp_path / "tfds")
  assert len(data.labels) > 0


def test_default_folder_is_the_projects_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("REPRISE_CACHE", str(tmp_path / "cache"))
  tabular.load("compas", path=_compas_file(tmp_path))
  assert [path.name.split("-")[0] for path in (tmp_path / "cache" / "tfds").iterdir()] == ["compas"]


def test_changed_file_is_read_anew(tmp_path):
  folder = tmp_path / "tfds"
  assert len(tabular.load("compas", path=_compas_file(tmp_path), data_dir=folder).labels) == 3
  changed = _compas_file(tmp_path, extra=[_compas_row()])
  assert len(tabular.load("compas", path=changed, data_dir=folder).labels) == 4


@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted", "metadata"])
def test_damaged_records_are_written_again(tmp_path, capsys, damage):
  path, folder = _compas_file(tmp_path), tmp_path / "tfds"
  before = tabular.load("compas", path=path, data_dir=folder)
  (file,) = folder.rglob("compas-train.array_record*")
  content = file.read_bytes()
  if damage == "cut":
    file.write_bytes(content[: len(content) // 2])
  elif damage == "flipped":
    file.write_bytes(bytes(255 - byte for byte in content))
  elif damage == "deleted":
    file.unlink()
  else:
    (file.parent / "dataset_info.json").write_text("{")
  after = tabular.load("compas", path=path, data_dir=folder)
  np.testing.assert_array_equal(after.features, before.features)
  assert "damaged" in capsys.readouterr().err


def _start_load(path: str, folder: pathlib.Path, first: str) -> subprocess.Popen:
  script = textwrap.dedent(f"""
    import pathlib, time
    from experiments.datasets import tabular
    from experiments.datasets.compas import Compas
    generate = Compas._generate_examples
    def slow(self, columns):
      for key, row in generate(self, columns):
        {first}
        yield key, row
    Compas._generate_examples = slow
    print(len(tabular.load("compas", path={path!r}, data_dir={str(folder)!r}).labels))
  """)
  return subprocess.Popen(
    [sys.executable, "-c", script], cwd=REPO, text=True, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )  # fmt: skip


def test_killed_preparation_is_done_again(tmp_path):
  path, folder, marker = _compas_file(tmp_path), tmp_path / "tfds", tmp_path / "started"
  process = _start_load(path, folder, f"pathlib.Path({str(marker)!r}).touch(); time.sleep(60)")
  deadline = time.monotonic() + 30
  while not marker.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  (left,) = folder.iterdir()
  assert left.name.startswith(records_lib._PREPARING_PREFIX)
  old = time.time() - 2 * records_lib._ABANDONED_AFTER_S
  os.utime(left, (old, old))
  assert len(tabular.load("compas", path=path, data_dir=folder).labels) == 3
  assert not left.exists()


def test_two_processes_may_prepare_the_same_data(tmp_path):
  path, folder = _compas_file(tmp_path), tmp_path / "tfds"
  both = [_start_load(path, folder, "time.sleep(0.3)") for _ in range(2)]
  outputs = [process.communicate(timeout=60) for process in both]
  assert [out.strip() for out, _ in outputs] == ["3", "3"], outputs
  assert len(list(folder.iterdir())) == 1


def test_full_disk_is_explained(tmp_path, monkeypatch):
  def fail(self):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(Compas, "download_and_prepare", fail)
  with pytest.raises(DatasetError, match=r"No space left on device.*REPRISE_CACHE"):
    tabular.load("compas", path=_compas_file(tmp_path), data_dir=tmp_path / "tfds")
  assert list((tmp_path / "tfds").iterdir()) == []


# Refusals


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"name": "adlt"}, r"name: got 'adlt'.*Did you mean 'adult'"),
    ({"name": "adult", "features": "numerical"}, r"features: got 'numerical'.*'numeric'"),
    ({"name": "adult", "sensitive": "gender"}, r"sensitive: got 'gender', expected one of sex"),
    ({"name": "adult", "path": "my.csv"}, r"path: got 'my\.csv'.*committed"),
    ({"name": "bank"}, r"path is missing.*UCI.*222.*OpenML.*1461"),
    ({"name": "bank", "path": "/nowhere/bank.csv"}, r"no file /nowhere/bank\.csv.*UCI"),
    ({"name": "compas", "path": "/nowhere/c.csv"}, r"cannot read /nowhere/c\.csv"),
  ],
)
def test_wrong_arguments(arguments, message, tmp_path):
  with pytest.raises(DatasetError, match=message):
    tabular.load(**arguments, data_dir=tmp_path)


def test_unreachable_artifact_is_explained(tmp_path, monkeypatch):
  monkeypatch.setenv("REPRISE_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(artifacts, "_pip_command", lambda *_: [sys.executable, "-c", "exit(1)"])
  with pytest.raises(artifacts.ArtifactError, match="--fetch=compas"):
    tabular.load("compas", data_dir=tmp_path)


def test_damaged_cached_artifact_is_refused(tmp_path, monkeypatch):
  """The size is right, so the cache accepts it; the hash is not."""
  monkeypatch.setenv("REPRISE_CACHE", str(tmp_path / "cache"))
  item = artifacts.ARTIFACTS["law-school"]
  target = tmp_path / "cache" / "artifacts" / f"law-school-{item.sha256[:8]}" / "law.csv.zip"
  target.parent.mkdir(parents=True)
  target.write_bytes(b"\0" * item.size)
  with pytest.raises(DatasetError, match=r"is damaged.*--fetch=law-school"):
    tabular.load("law_school", data_dir=tmp_path)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"sex": "Unknown"}, r"column 'sex' holds 'Unknown', expected one of 'Female', 'Male'"),
    ({"age": "young"}, r"column 'age', data row 4 is 'young', expected a number"),
    ({"priors_count": ""}, r"column 'priors_count', data row 4 is ''"),
    ({"two_year_recid": "2"}, r"column 'two_year_recid' holds '2'"),
  ],
)
def test_unexpected_values_are_named(tmp_path, changes, message):
  path = _compas_file(tmp_path, extra=[_compas_row(**changes)])
  with pytest.raises(DatasetError, match=message):
    tabular.load("compas", path=path, data_dir=tmp_path / "tfds")
  assert list((tmp_path / "tfds").iterdir()) == []


@pytest.mark.parametrize("name", ["compas", "credit_default", "bank"])
def test_file_of_another_layout_is_refused(tmp_path, name):
  path = _write_csv(tmp_path / "other.csv", ["a", "b"], [["1", "2"]])
  with pytest.raises(DatasetError, match=r"missing column .*found a, b"):
    tabular.load(name, path=path, data_dir=tmp_path / "tfds")


@pytest.mark.parametrize("content", ["", "a,b\n", "a,b\n1,2\n3\n"])
def test_cut_files_are_refused(tmp_path, content):
  path = tmp_path / "cut.csv"
  path.write_text(content)
  for name in ("compas", "credit_default", "bank"):
    with pytest.raises(DatasetError, match="cut or of another layout"):
      tabular.load(name, path=path, data_dir=tmp_path / "tfds")
  with pytest.raises(DatasetError, match=r"expected a zip file with law\.csv"):
    tabular.load("law_school", path=path, data_dir=tmp_path / "tfds")


def test_broken_one_hot_columns_are_named(tmp_path):
  path = _credit_file(tmp_path, education="0,1,1,0,0,0,0")
  with pytest.raises(DatasetError, match=r"data row 1 has 2 ones among EDUCATION_0"):
    tabular.load("credit_default", path=path, data_dir=tmp_path / "tfds")


@pytest.mark.parametrize("name", tabular.DATASETS)
def test_readme_states_source_and_licence(name):
  text = (REPO / "experiments" / "datasets" / name / "README.md").read_text()
  spec = tabular.DATASETS[name].SPEC
  for part in ("Source:", "Licence", "@", *spec.attributes):
    assert part in text
  for item in artifacts.ARTIFACTS.values():
    if item.name == name.replace("_", "-"):
      assert item.sha256 in text
  if name == "adult":
    for hashes in json.loads((ADULT / "checksums.json").read_text()).values():
      assert hashes["sha256"] in text
      assert hashes["raw_sha256"] in text
