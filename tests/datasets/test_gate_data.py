"""Mentions, films in common and the insurance experiment: known edges, true counts, refusals."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.datasets import movielens, social_insure, wiki_mentions
from experiments.datasets.graphs import EdgeTable
from experiments.datasets.movielens import Movielens
from experiments.datasets.social_insure import builder as insure_builder
from experiments.datasets.source import DatasetError, Source
from experiments.datasets.wiki_mentions import WikiMentions, find_mentions
from launch import artifacts

REPO = pathlib.Path(__file__).resolve().parents[2]
INSURE = REPO / "experiments" / "datasets" / "social_insure"


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> pathlib.Path:
  """One folder of prepared records for the whole file."""
  return tmp_path_factory.mktemp("tfds")


def _artifact(name: str) -> pathlib.Path:
  if not artifacts.is_cached(name):
    pytest.skip(f"needs the real file: python launch.py --fetch={name}")
  return artifacts.artifact(name)


def _named_edges(table: EdgeTable) -> set[tuple[str, str]]:
  names = table.names
  return {(names[s], names[r]) for s, r in zip(table.senders, table.receivers, strict=True)}


# Mentions


ARTICLES = {
  "Europe": ("Geography", "Europe is no part of North America."),
  "America": ("Geography", "It is a name of two continents, and of the U.S.; see also europe's."),
  "North America": ("Geography", "A continent. America is larger, and Europe-wide is one word."),
  "Cell (biology)": ("Biology", "Cells are small; a cell biology (biology) is none, nor NORTH."),
  "north": ("Physics", "The North, north America and north\namerica. Cell (biology) is elsewhere."),
}
# mentioning, mentioned
MENTIONS = {
  ("Europe", "North America"),
  ("America", "Europe"),
  ("North America", "America"),
  ("north", "North America"),
  ("north", "America"),
  ("north", "Cell (biology)"),
}


def _wiki_file(tmp_path: pathlib.Path, content: str | None = None) -> pathlib.Path:
  entries = {t: {"topic": topic, "extract": text} for t, (topic, text) in ARTICLES.items()}
  path = tmp_path / "summaries.json"
  path.write_text(json.dumps(entries) if content is None else content, encoding="utf-8")
  return path


def test_hand_made_mentions(tmp_path):
  path, data_dir = _wiki_file(tmp_path), tmp_path / "tfds"
  articles = wiki_mentions.read(path=path, data_dir=data_dir)
  assert articles.titles == tuple(ARTICLES)
  assert articles.topics == tuple(topic for topic, _ in ARTICLES.values())
  titles = np.array(articles.titles)
  found = zip(titles[articles.mentioning], titles[articles.mentioned], strict=True)
  assert set(found) == MENTIONS
  table = wiki_mentions.load(directed=True, path=path, data_dir=data_dir)
  # What is mentioned influences what mentions it.
  assert _named_edges(table) == {(mentioned, mentioning) for mentioning, mentioned in MENTIONS}
  assert table.directed
  undirected = wiki_mentions.load(path=path, data_dir=data_dir)
  assert not undirected.directed
  assert len(undirected.senders) == len(MENTIONS)
  assert undirected.weights is None


def test_mention_rules_one_by_one():
  titles = ["A b", "B", "C-d", "Élan", "B c d", "A b"]
  texts = [
    "B a b A. b",  # its own title, also as a b, is passed over whole
    "a b c d",  # the longer title takes the b
    "B's, élan: C-d and c-D",
    "",
    "xB B.c-d bB (b c) b-c",  # not the longer title, which has no hyphen
    "a b",  # of two equal titles the first one counts
  ]
  expected = [[1], [0], [1, 3], [], [1, 2], [0]]
  assert [found.tolist() for found in find_mentions(titles, texts)] == expected


def _oracle(titles: list[tuple[str, ...]], words: list[str]) -> set[int]:
  """Leftmost matches of an alternation, longest titles first, on words parted by single spaces."""
  order = sorted(range(len(titles)), key=lambda n: (-len(titles[n]), n))
  parts = []
  for number in order:
    title = " ".join(titles[number])
    first = f"(?:{re.escape(title[0].lower())}|{re.escape(title[0].upper())})"
    parts.append(f"(?P<t{number}>{first}{re.escape(title[1:])})")
  pattern = re.compile(rf"(?<= )(?:{'|'.join(parts)})(?= )")
  return {int(match.lastgroup[1:]) for match in pattern.finditer(f" {' '.join(words)} ")}


WORDS = st.sampled_from(["a", "A", "b", "B", "c", "aB", "a-b"])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
  titles=st.lists(st.lists(WORDS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
  words=st.lists(WORDS, max_size=12),
)
def test_mentions_equal_a_regular_expression(titles, words):
  texts = [" ".join(words)] + [""] * (len(titles) - 1)
  (found, *rest) = find_mentions([" ".join(title) for title in titles], texts)
  assert set(found.tolist()) == _oracle(titles, words) - {0}
  assert not any(other.size for other in rest)


def test_real_mentions(records, no_network):
  path = _artifact("wiki-mentions")
  assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("05ed445d555bcced")
  articles = wiki_mentions.read(data_dir=records)
  entries = json.loads(path.read_text("utf-8"))
  assert articles.titles == tuple(entries)
  assert articles.topics == tuple(entry["topic"] for entry in entries.values())
  assert len(articles.titles) == 10_033
  assert len(articles.mentioning) == 67_811
  assert np.unique(articles.mentioning).size == 10_033 - 85
  undirected = wiki_mentions.load(data_dir=records)
  assert (len(undirected.senders), undirected.duplicates) == (65_812, 67_811 - 65_812)
  assert np.unique(np.r_[undirected.senders, undirected.receivers]).size == 10_000
  assert undirected.self_loops == 0

  # Every 400th article against the regular expression, with the titles that its text holds.
  split = [tuple(re.findall(r"\w+(?:-\w+)*|[()]", title)) for title in articles.titles]
  joined = [" ".join(title) for title in split]
  for row in range(0, 10_033, 400):
    words = re.findall(r"\w+(?:-\w+)*|[()]", entries[articles.titles[row]]["extract"])
    text = f" {' '.join(words)} ".lower()
    near = [n for n, title in enumerate(joined) if f" {title.lower()} " in text]
    expected = {near[k] for k in _oracle([split[n] for n in near], words)} - {row}
    assert set(articles.mentioned[articles.mentioning == row].tolist()) == expected


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("{", "expected JSON"),
    ("[1]", "expected JSON"),
    ('{"A": {"topic": "x"}}', r"expected JSON .*extract"),
    ('{"A": 3}', "expected JSON"),
    ('{"A": {"topic": "x", "extract": null}}', "article 'A'"),
    ("{}", "holds no article"),
  ],
)
def test_wiki_file_of_another_layout_is_refused(tmp_path, content, message):
  path = _wiki_file(tmp_path, content)
  with pytest.raises(DatasetError, match=message):
    wiki_mentions.load(path=path, data_dir=tmp_path / "tfds")


# Films in common


def _ratings_file(tmp_path: pathlib.Path, rows: list[str] | None = None) -> pathlib.Path:
  rated = {5: (1, 2, 3, 4), 2: (4, 3, 9), 9: (9, 3), 7: (8,)}
  if rows is None:
    rows = [f"{user}\t{film}\t3\t88" for user, films in rated.items() for film in films]
  path = tmp_path / "ratings.inter"
  path.write_text("\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *rows]))
  return path


@pytest.mark.parametrize(
  ("shared", "edges"),
  [(1, {("2", "5"), ("2", "9"), ("5", "9")}), (2, {("2", "5"), ("2", "9")}), (3, set())],
)
def test_hand_made_films_in_common(tmp_path, shared, edges):
  path = _ratings_file(tmp_path)
  table = movielens.load(shared_films=shared, path=path, data_dir=tmp_path / "tfds")
  assert table.names == ("2", "5", "7", "9")
  assert _named_edges(table) == edges
  assert not table.directed


def test_real_films_in_common(records, no_network):
  path = _artifact("movielens")
  assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("4edb74e2a81178c2")
  rated = np.zeros((944, 1683), np.int32)
  lines = path.read_text().splitlines()[1:]
  for line in lines:
    user, film, *_ = line.split("\t")
    rated[int(user), int(film)] = 1
  assert len(lines) == rated.sum() == 100_000
  common = (rated.astype(np.float32) @ rated.T.astype(np.float32)).astype(int)
  for shared in (20, 50):
    table = movielens.load(shared_films=shared, data_dir=records)
    assert table.names == tuple(map(str, range(1, 944)))
    found = np.zeros((944, 944), bool)
    found[np.int32(table.names)[table.senders], np.int32(table.names)[table.receivers]] = True
    np.testing.assert_array_equal(found | found.T, (common >= shared) & ~np.eye(944, dtype=bool))
  assert len(movielens.load(data_dir=records).senders) == 123_565


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([], "holds no rating"),
    (["1\t2\t3"], r"line 2: expected 4 fields"),
    (["1\t2\t3\t4", "1\tx\t3\t4"], r"line 3: expected 4 fields"),
    (["1\t2\t3\t4", "1\t2\t5\t9"], r"1 ratings are there twice"),
    (["1\t2\t3\t4\0"], "zero byte"),
  ],
)
def test_damaged_ratings_are_refused(tmp_path, rows, message):
  path = _ratings_file(tmp_path, rows)
  with pytest.raises(DatasetError, match=message):
    movielens.load(path=path, data_dir=tmp_path / "tfds")


def test_ratings_of_another_layout_are_refused(tmp_path):
  path = tmp_path / "u.data"
  path.write_text("196\t242\t3\t881250949\n")
  with pytest.raises(DatasetError, match=r"line 1: expected the columns user_id:token"):
    movielens.load(path=path, data_dir=tmp_path / "tfds")


def test_too_few_shared_films(tmp_path):
  with pytest.raises(DatasetError, match="shared_films = 0"):
    movielens.load(shared_films=0, path=_ratings_file(tmp_path), data_dir=tmp_path / "tfds")


# The insurance experiment


@pytest.fixture(scope="module")
def insure(records) -> dict[str, np.ndarray]:
  return social_insure.load(data_dir=records)


def test_insurance_table_equals_the_file(insure):
  """The committed file, read without any code of the project."""
  text = lzma.decompress((INSURE / "social_insure.csv.xz").read_bytes()).decode()
  rows = list(csv.DictReader(io.StringIO(text)))
  assert len(rows) == 1_410
  assert set(insure) == set(rows[0])
  for name, values in insure.items():
    cells = [row[name] for row in rows]
    if name in ("address", "village"):
      assert values.tolist() == cells
    else:
      expected = np.array([float(cell) if cell else np.nan for cell in cells], np.float32)
      np.testing.assert_array_equal(values, expected)
      assert values.dtype == (
        np.int32 if name in ("takeup_survey", "default", "intensive") else np.float32
      )


def test_insurance_counts_and_randomisation(insure):
  missing = {n: int(np.isnan(v).sum()) for n, v in insure.items() if v.dtype == np.float32}
  assert {name: count for name, count in missing.items() if count} == {
    "age": 4, "agpop": 6, "ricearea_2010": 9, "male": 3, "literacy": 21,
  }  # fmt: skip
  assert [insure[name].sum() for name in ("takeup_survey", "default", "intensive")] == [
    654, 683, 693,
  ]  # fmt: skip
  places: dict[str, set] = {}
  names = ("address", "village", "default", "pre_takeup_rate")
  for address, *values in zip(*(insure[name] for name in names), strict=True):
    places.setdefault(address, set()).add(tuple(values))
  # The default and the first round's take-up belong to the natural village.
  assert len(places) == 166
  assert {len(values) for values in places.values()} == {1}
  assert len({value[0] for values in places.values() for value in values}) == 44


@pytest.fixture
def insure_copy(tmp_path, monkeypatch) -> pathlib.Path:
  """A copy of the committed files that a test may damage."""
  copy = tmp_path / "social_insure"
  shutil.copytree(INSURE, copy)
  monkeypatch.setattr(insure_builder, "_FOLDER", copy)
  return copy


def test_damaged_insurance_table_is_refused(insure_copy, tmp_path):
  file = insure_copy / "social_insure.csv.xz"
  content = bytearray(file.read_bytes())
  content[1000] ^= 1
  file.write_bytes(content)
  with pytest.raises(DatasetError, match=r"is damaged: SHA-256 .*`git checkout"):
    social_insure.load(tmp_path / "tfds")
  file.unlink()
  with pytest.raises(DatasetError, match=r"cannot read .*social_insure\.csv\.xz"):
    social_insure.load(tmp_path / "tfds")


def test_other_bytes_inside_a_right_archive_are_refused(insure_copy, tmp_path):
  checksums = json.loads((insure_copy / "checksums.json").read_text())
  checksums["social_insure.csv.xz"]["raw_sha256"] = "0" * 64
  (insure_copy / "checksums.json").write_text(json.dumps(checksums))
  with pytest.raises(DatasetError, match="other bytes than causaldata published"):
    social_insure.load(tmp_path / "tfds")


# All three


def test_builders_are_plain_tfds_builders(tmp_path):
  """Written by our classes, read back by TFDS alone, without knowing our code."""
  wiki = WikiMentions(data_dir=tmp_path, sources=[Source.of_user(_wiki_file(tmp_path))])
  films = Movielens(data_dir=tmp_path, sources=[Source.of_user(_ratings_file(tmp_path))])
  for builder in (wiki, films):
    builder.download_and_prepare()
  rows = list(tfds.builder_from_directory(wiki.data_dir).as_data_source("train"))
  assert [row["title"].decode() for row in rows] == list(ARTICLES)
  assert rows[4]["mentions"].tolist() == [1, 2, 3]
  rows = list(tfds.builder_from_directory(films.data_dir).as_data_source("train"))
  assert [(int(row["user"]), row["films"].tolist()) for row in rows] == [
    (2, [3, 4, 9]), (5, [1, 2, 3, 4]), (7, [8]), (9, [3, 9]),
  ]  # fmt: skip


def test_loads_without_network_and_tensorflow(insure, tmp_path):
  script = textwrap.dedent(f"""
    import socket, sys
    def refuse(*args, **kwargs): raise AssertionError("network used")
    socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
    from experiments.datasets import movielens, social_insure, wiki_mentions
    folder = {str(tmp_path)!r}
    wiki = wiki_mentions.load(path={str(_wiki_file(tmp_path))!r}, data_dir=folder)
    films = movielens.load(path={str(_ratings_file(tmp_path))!r}, data_dir=folder)
    insure = social_insure.load(folder)
    loaded = [name for name in ("tensorflow", "torch", "pandas") if name in sys.modules]
    print(len(wiki.names), len(films.names), len(insure["default"]), loaded)
  """)
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "5 4 1410 []"


@pytest.mark.parametrize(
  ("name", "load"), [("wiki-mentions", wiki_mentions.load), ("movielens", movielens.load)]
)
def test_damaged_cached_artifact_is_refused(name, load, tmp_path, monkeypatch):
  """The size is right, so the cache accepts it; the hash is not."""
  monkeypatch.setenv("REPRISE_CACHE", str(tmp_path))
  item = artifacts.ARTIFACTS[name]
  folder = tmp_path / "artifacts" / f"{name}-{item.sha256[:8]}"
  folder.mkdir(parents=True)
  (folder / item.member.split("/")[-1]).write_bytes(b"\0" * item.size)
  with pytest.raises(DatasetError, match=f"is damaged.*--fetch={name}"):
    load(data_dir=tmp_path)


@pytest.mark.parametrize("name", ["movielens", "social_insure", "wiki_mentions"])
def test_readme_states_source_licence_and_hash(name):
  text = (REPO / "experiments" / "datasets" / name / "README.md").read_text()
  for part in ("Source:", "Licence:"):
    assert part in text
  if name == "social_insure":
    (hashes,) = json.loads((INSURE / "checksums.json").read_text()).values()
    assert hashes["sha256"] in text
    assert hashes["raw_sha256"] in text
  else:
    item = artifacts.ARTIFACTS[name.replace("_", "-")]
    assert item.sha256 in text
    assert f"`{item.package}` {item.version}" in text
