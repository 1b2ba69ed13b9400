"""The user's roll-out log: what is read, and which line is named when it cannot be."""

from __future__ import annotations

import gzip
import pathlib
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.gate.log import read_log

HEADER = "node,stage,share,z,y"
ROWS = [
  ("ann", "1", "0", "0", "1.5"),
  ("bob", "1", "0", "0", "2"),
  ("cas", "1", "0", "0", "-1e-3"),
  ("ann", "2", "0.5", "1", "3"),
  ("bob", "2", ".50", "0", "4"),
  ("cas", "2", "0.5", "1.0", "5"),
]
NODES = ["cas", "ann", "bob"]
TEXT = "\n".join([HEADER, *map(",".join, ROWS)]) + "\n"


@pytest.fixture
def write(tmp_path):
  def write(content: str | bytes, name: str = "log.csv") -> pathlib.Path:
    path = tmp_path / name
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path

  return write


def test_a_log_is_read_in_the_order_of_the_graph(write):
  for name in ("log.csv", "log.csv.gz"):
    log = read_log(write(TEXT, name), NODES)
    assert log.stages == ("1", "2")
    assert log.shares.tolist() == [0, 0.5]
    assert log.z.tolist() == [[0, 0, 0], [1, 1, 0]]
    assert log.y.tolist() == [[-1e-3, 1.5, 2], [5, 3, 4]]
    assert log.rows.tolist() == [[4, 2, 3], [7, 5, 6]]
    assert log.warnings == ()


def test_order_of_rows_and_columns_and_more_columns_do_not_matter(write):
  expected = read_log(write(TEXT), NODES)
  rows = [(y, f'"a, {node}"', z, node, share, stage) for node, stage, share, z, y in ROWS]
  random.Random(0).shuffle(rows)
  text = "\ufeffY,note,Z,Node, Share ,Stage\r\n" + "\r\n".join(map(", ".join, rows))
  log = read_log(write(text), NODES)
  assert log.stages == expected.stages
  for name in ("shares", "z", "y"):
    np.testing.assert_array_equal(getattr(log, name), getattr(expected, name))
  lines = text.split("\r\n")
  for stage, row in zip(log.stages, log.rows, strict=True):
    for node, line in zip(NODES, row, strict=True):
      assert f", {node}, " in lines[line - 1]
      assert lines[line - 1].endswith(f" {stage}")


@pytest.mark.parametrize(
  ("labels", "expected"),
  [
    (["10", "9", "0.5"], ("0.5", "9", "10")),
    (["2026-02-01", "2025-11-30", "2026-01-15"], ("2025-11-30", "2026-01-15", "2026-02-01")),
    (["b", "1", "a"], ("1", "a", "b")),
  ],
)
def test_stages_are_ordered_by_their_labels(write, labels, expected):
  share_and_z = {expected[0]: "0,0", expected[1]: "0.25,1", expected[2]: "1,1"}
  rows = [f"x,{label},{share_and_z[label]},{i}" for i, label in enumerate(labels)]
  log = read_log(write("\n".join([HEADER, *rows])), ["x"])
  assert log.stages == expected
  assert log.shares.tolist() == [0, 0.25, 1]
  assert log.y[:, 0].tolist() == [labels.index(label) for label in expected]


def replaced(line: int, text: str) -> str:
  lines = TEXT.splitlines()
  lines[line - 1] = text
  return "\n".join(lines)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "is empty"),
    (HEADER, "no row below its first line"),
    (replaced(1, "node,stage,z"), "line 1: there is no column share and no column y"),
    (replaced(1, "ann,1,0,0,1"), "line 1: there is no column node"),
    (replaced(1, "node,stage,share,z,y,y").replace("\n", ",1\n"), "line 1: column y comes twice"),
    (replaced(3, "bob,1,0,0"), "line 3: has 4 fields; expected 5"),
    (replaced(3, "bob,1,0,0,2,"), "line 3: has 6 fields; expected 5"),
    (replaced(3, "dan,1,0,0,2"), "line 3: node 'dan' is not in the graph"),
    (replaced(3, "bob,,0,0,2"), "line 3: stage is empty"),
    (replaced(3, "bob,1,5%,0,2"), "line 3: share is '5%'; expected a number from 0 to 1"),
    (replaced(3, "bob,1,50,0,2"), "line 3: share is '50'.*not percent"),
    (replaced(3, "bob,1,nan,0,2"), "line 3: share is 'nan'"),
    (replaced(3, "bob,1,0,2,2"), "line 3: z is '2'; expected 1 if the node was treated"),
    (replaced(3, "bob,1,0,no,2"), "line 3: z is 'no'"),
    (replaced(3, "bob,1,0,0,"), "line 3: y is ''; expected a finite number"),
    (replaced(3, "bob,1,0,0,inf"), "line 3: y is 'inf'"),
    (replaced(3, "bob,1,0,1,2"), "line 3: z is 1 at share 0; expected 0 .* stage 1"),
    (replaced(6, "bob,3,1,0,2"), "line 6: z is 0 at share 1; expected 1 .* stage 3"),
    (replaced(6, "bob,2,0.25,0,2"), "line 6: share 0.25 in stage 2, .* share 0.5 in line 5"),
    (replaced(6, "ann,2,0.5,0,2"), "line 6: node 'ann' comes again in stage 2.* line 5 is one"),
    (replaced(6, ""), r"node 'bob' \(line 3\) has no row for stage 2, and 0 other rows"),
    (replaced(3, "").replace("bob,2", "cas,3"), "node 'bob' of the graph is in no row.* 0 others"),
    ("\n".join(TEXT.splitlines()[:2]), "node 'cas' of the graph is in no row, and so are 1 others"),
    (replaced(3, '"bob,1,0,0,2'), "line 7: unexpected end of data"),
    (TEXT.encode().replace(b"bob", b"b\xe9b"), "line 3: .* expected UTF-8"),
  ],
)
def test_bad_logs_are_refused(write, text, message):
  with pytest.raises(ValueError, match=message) as error:
    read_log(write(text), NODES)
  assert "log.csv" in str(error.value)


def test_the_first_of_several_repeated_rows_is_named(write):
  lines = TEXT.splitlines()
  with pytest.raises(ValueError, match=r"line 8: .*'cas' comes again in stage 2.* line 7 is"):
    read_log(write("\n".join([*lines, lines[6], lines[1]])), NODES)


def rollout(z: np.ndarray, share: float) -> str:
  rows = [f"{n},a,{share},{treated},{n}" for n, treated in enumerate(z)]
  return "\n".join([HEADER, *rows])


def test_a_share_that_was_not_realised_is_a_warning(write):
  # The standard deviation of a share .1 of 900 units is .01, of 100 clusters .03.
  nodes, cluster = [str(n) for n in range(900)], np.arange(900) // 9
  near, far = (np.arange(900) < treated for treated in (90 + 44, 90 + 46))
  assert read_log(write(rollout(near.astype(int), 0.1)), nodes).warnings == ()
  (warning,) = read_log(write(rollout(far.astype(int), 0.1)), nodes).warnings
  assert "stage a: 0.1511 of 900 randomisation units" in warning
  assert "5.1 standard deviations from the share 0.1; was it drawn by cluster?" in warning
  by_cluster = (cluster < 24).astype(int)
  assert read_log(write(rollout(by_cluster, 0.1)), nodes, cluster).warnings == ()
  (warning,) = read_log(write(rollout((cluster < 26).astype(int), 0.1)), nodes, cluster).warnings
  assert "0.26 of 100 randomisation units" in warning
  assert "5.3 standard deviations" in warning


def test_a_cluster_treated_in_part_is_a_warning(write):
  nodes, cluster = [str(n) for n in range(20)], np.arange(20) % 10
  z = (cluster % 2).astype(int)
  assert read_log(write(rollout(z, 0.5)), nodes, cluster).warnings == ()
  z[13] = 0
  (warning,) = read_log(write(rollout(z, 0.5)), nodes, cluster).warnings
  assert "stage a: 1 of 10 clusters, the first 3, are treated in part" in warning


def test_a_large_log(write):
  nodes, stages = 10_000, 20
  rng = np.random.default_rng(0)
  z, y = rng.integers(0, 2, (stages, nodes)), rng.integers(0, 1000, (stages, nodes))
  rows = [f"n{i},{s},0.5,{z[s, i]},{y[s, i]}" for i in range(nodes) for s in range(stages)]
  log = read_log(write("\n".join([HEADER, *rows])), [f"n{i}" for i in range(nodes)])
  np.testing.assert_array_equal(log.z, z)
  np.testing.assert_array_equal(log.y, y)
  assert log.stages == tuple(map(str, range(stages)))


@settings(
  max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_log_is_read_or_refused(write, data):
  content = bytearray(TEXT.encode())
  for _ in range(data.draw(st.integers(1, 3))):
    start = data.draw(st.integers(0, len(content)))
    end = min(len(content), start + data.draw(st.integers(0, 8)))
    content[start:end] = data.draw(
      st.binary(max_size=3) | st.sampled_from([b"\n", b",", b'"', b"1", b"ann"])
    )
  path = write(bytes(content))
  try:
    log = read_log(path, NODES)
  except ValueError as refused:
    message = str(refused)
    assert message.startswith(str(path)), message
    return
  assert log.z.shape == log.y.shape == (len(log.stages), len(NODES))
  assert set(log.z.ravel()) <= {0, 1}
  assert np.all(np.isfinite(log.y))
