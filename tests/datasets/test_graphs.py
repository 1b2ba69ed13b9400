"""Graph files against SciPy's reader and NetworkX; damaged files are refused with their line."""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import subprocess
import sys

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.datasets import graphs
from models import graph as graph_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]

MTX = """%%MatrixMarket matrix coordinate real general
% a comment

4 4 5
1 2 0.5
% another
2 3 2e0
3 3 7
1 2 0.5
4 1 0
"""
CSV = """source,target,weight
ann,bob,1.5
"smith, j.",ann,2
bob,ann,1.5
"""


@pytest.fixture
def write(tmp_path):
  def write(name: str, content: str | bytes) -> pathlib.Path:
    path = tmp_path / name
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path

  return write


def edges(table: graphs.EdgeTable) -> list[tuple[str, str]]:
  names = table.names
  return [(names[s], names[r]) for s, r in zip(table.senders, table.receivers, strict=True)]


def dense(table: graphs.EdgeTable) -> np.ndarray:
  """Entry (sender, receiver), both ways when undirected."""
  matrix = np.zeros((len(table.names),) * 2)
  matrix[table.senders, table.receivers] = 1 if table.weights is None else table.weights
  return matrix if table.directed else np.maximum(matrix, matrix.T)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
@pytest.mark.parametrize("field", ["pattern", "real", "integer"])
def test_matrix_market_equals_scipys_reader(write, field, symmetry, directed):
  rng = np.random.default_rng(0)
  matrix = np.where(rng.random((9, 9)) < 0.3, rng.integers(1, 5, (9, 9)), 0)
  if symmetry == "symmetric" or not directed:
    matrix = np.tril(matrix) + np.tril(matrix, -1).T
  matrix[8], matrix[:, 8] = 0, 0
  text = io.BytesIO()
  sparse = scipy.sparse.coo_array(matrix if field == "integer" else matrix / 2)
  scipy.io.mmwrite(text, sparse, "made for a test", field, symmetry=symmetry)
  table = graphs.read_edges(write("a.mtx", text.getvalue()), directed=directed)
  expected = scipy.io.mmread(io.BytesIO(text.getvalue())).toarray()
  assert table.self_loops == np.count_nonzero(np.diag(expected))
  np.fill_diagonal(expected, 0)
  np.testing.assert_array_equal(dense(table), expected)
  assert table.names == tuple("123456789")
  assert (table.weights is None) == (field == "pattern")


def test_what_a_matrix_market_file_drops(write):
  table = graphs.read_edges(write("a.mtx", MTX))
  assert edges(table) == [("1", "2"), ("2", "3")]
  assert table.weights.tolist() == [0.5, 2]
  assert (table.self_loops, table.duplicates, table.zero_weights) == (1, 1, 1)
  compressed = graphs.read_edges(write("a.mtx.gz", MTX))
  assert edges(compressed) == edges(table)


def test_edge_lists(write):
  for name in ("a.csv", "a.csv.gz"):
    table = graphs.read_edges(write(name, CSV))
    assert table.names == ("ann", "bob", "smith, j.")
    assert edges(table) == [("ann", "bob"), ("smith, j.", "ann")]
    assert table.weights.tolist() == [1.5, 2]
    assert table.duplicates == 1
  directed = graphs.read_edges(write("a.csv", CSV), directed=True)
  assert (len(directed.senders), directed.duplicates) == (3, 0)
  # No header; a byte order mark, Windows line ends and an empty line do not matter.
  table = graphs.read_edges(write("b.tsv", "\ufeffx y\tz\r\n\r\nz\t007\r\n"))
  assert edges(table) == [("x y", "z"), ("z", "007")]
  assert table.weights is None
  table = graphs.read_edges(write("c.txt", "# Nodes: 3\n1\t2\n2  3\n% end\n 3 3\n"))
  assert edges(table) == [("1", "2"), ("2", "3")]
  assert table.self_loops == 1
  # Columns of a header in another order, with more columns.
  table = graphs.read_edges(write("d.csv", "when,To,From\n1,b,a\n2,c,a\n"), directed=True)
  assert edges(table) == [("a", "b"), ("a", "c")]


def test_many_edges_are_read_as_they_are(write):
  rng = np.random.default_rng(0)
  pairs = rng.integers(0, 5000, (100_000, 2))
  lines = "\n".join(f"{a} {b}" for a, b in pairs)
  table = graphs.read_edges(write("a.txt", lines))
  expected = {frozenset(map(str, pair)) for pair in pairs.tolist() if pair[0] != pair[1]}
  assert {frozenset(edge) for edge in edges(table)} == expected
  assert len(table.senders) == len(expected)
  assert len(expected) + table.self_loops + table.duplicates == len(pairs)


BANNER = "%%MatrixMarket matrix coordinate pattern symmetric\n"


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.mtx", "", "line 1: '' is not the first line"),
    ("a.mtx", "3 3 1\n1 2\n", "line 1: '3 3 1' is not the first line"),
    ("a.mtx", "%%MatrixMarket matrix array real general\n1 1\n1\n", "line 1: .*matrix array"),
    ("a.mtx", "%%MatrixMarket matrix coordinate complex general\n", "line 1: .*complex"),
    ("a.mtx", BANNER + "% only comments\n", "line 2: has 0 fields; expected the size line"),
    ("a.mtx", BANNER + "3 3\n", "line 2: has 2 fields; expected the size line"),
    ("a.mtx", BANNER + "3 4 1\n1 2\n", "line 2: 3 rows, 4 columns"),
    ("a.mtx", BANNER + "99999999999 99999999999 1\n1 2\n", "line 2: 99999999999 rows"),
    ("a.mtx", BANNER + "3 3 x\n", "line 2: 'x' is not a whole number"),
    ("a.mtx", BANNER + "3 3 1\n%\n1 4\n", "line 4: node 4; expected 1 to 3"),
    ("a.mtx", BANNER + "3 3 1\n0 1\n", "line 3: node 0; expected 1 to 3"),
    ("a.mtx", BANNER + "3 3 2\n1 2\n", "line 3: the file ends after 1 entries; expected the 2"),
    ("a.mtx", BANNER + "3 3 1\n1 2\n2 3\n", "line 4: more entries than the 1"),
    ("a.mtx", BANNER + "3 3 1\n1 2 5\n", "line 3: has 3 fields; expected 2 in a pattern"),
    ("a.mtx", MTX.replace("2e0", "two"), "line 7: the weight is 'two'"),
    ("a.mtx", MTX.replace("2e0", "-2"), "line 7: the weight is '-2'"),
    ("a.csv", "", "is empty"),
    ("a.csv", "\n \n", "is empty"),
    ("a.csv", "source,target\n", "no edge below its first line"),
    ("a.csv", "a,b\nb\n", "line 2: has 1 fields; expected 2"),
    ("a.csv", "a,b\n\nb,\n", "line 3: a node has no name"),
    ("a.csv", "a,b,1,1\n", "line 1: has 4 fields"),
    ("a.csv", "a,b,1\nb,c,nan\n", "line 2: the weight is 'nan'"),
    ("a.csv", "a,b,1\nb,c,inf\n", "line 2: the weight is 'inf'"),
    ("a.csv", "ego,alter,tie\na,b,1\n", "line 1: the weight is 'tie'.*source, target, weight"),
    ("a.csv", "ego,alter\n1,2\n2,3\n", "line 1: ego and alter are the only nodes that are not"),
    ("a.csv", "a,b,1\nc,d,1\nb,a,2\n", "line 3 gives the edge b - a weight 2, .*line 1 weight 1"),
    ("a.csv", 'a,b\n"c,d\n', "line 2: unexpected end of data"),
    ("a.csv", "a,b\nc\0,d\n", "line 2: holds a zero byte"),
    ("a.csv", b"a,b\nc,\xff\n", "line 2: invalid start byte at byte 2"),
    ("a.csv", "a,b\n".encode("utf-16"), "line 1: invalid start byte at byte 0"),
    ("a.csv", b"a," + b"b" * (1 << 21), "line 1: holds a zero byte or more than"),
    ("a.xlsx", "a,b\n", "told by its ending; expected .mtx, .csv, .tsv, .txt"),
  ],
)
def test_bad_files_are_refused(write, name, content, message):
  with pytest.raises(ValueError, match=message) as error:
    graphs.read_edges(write(name, content))
  assert name in str(error.value)


def test_missing_and_truncated_files_are_refused(write, tmp_path):
  with pytest.raises(ValueError, match=r"none.csv: cannot be read .*No such file"):
    graphs.read_edges(tmp_path / "none.csv")
  (tmp_path / "folder.csv").mkdir()
  with pytest.raises(ValueError, match="cannot be read"):
    graphs.read_edges(tmp_path / "folder.csv")
  path = write("a.txt.gz", "\n".join(f"{n} {n * n}" for n in range(9999)))
  path.write_bytes(path.read_bytes()[:9999])
  with pytest.raises(ValueError, match=r"a.txt.gz: cannot be read after line \d+"):
    graphs.read_edges(path)


@settings(
  max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_file_is_read_or_refused(write, data):
  name, text = data.draw(st.sampled_from([("a.mtx", MTX), ("a.csv", CSV), ("a.txt", "1 2\n2 3\n")]))
  content = bytearray(text.encode())
  for _ in range(data.draw(st.integers(1, 4))):
    start = data.draw(st.integers(0, len(content)))
    end = min(len(content), start + data.draw(st.integers(0, 8)))
    content[start:end] = data.draw(
      st.binary(max_size=3) | st.sampled_from([b"\n", b",", b"%", b"1"])
    )
  path = write(name, bytes(content))
  try:
    table = graphs.read_edges(path)
  except ValueError as refused:
    message = str(refused)
    assert message.startswith(str(path)), message
    return
  assert len(table.senders) == len({frozenset(edge) for edge in edges(table)})
  assert not np.any(table.senders == table.receivers)


def test_to_graph_drops_or_keeps_isolated_nodes():
  table = graphs.make_table([0, 3, 3], [3, 4, 3], list("abcde"), [1, 3, 1])
  assert table.self_loops == 1
  graph, kept = graphs.to_graph(table)
  assert kept.tolist() == [0, 3, 4]
  np.testing.assert_allclose(
    graph_lib.to_sparse(graph).toarray(), [[0, 1, 0], [0.25, 0, 0.75], [0, 1, 0]]
  )
  graph, kept = graphs.to_graph(table, isolated="zero")
  assert kept.tolist() == [0, 1, 2, 3, 4]
  assert graph_lib.degree(graph).tolist() == [1, 0, 0, 2, 1]
  with pytest.raises(ValueError, match="isolated = 'keep'"):
    graphs.to_graph(table, isolated="keep")
  with pytest.raises(ValueError, match="no node is left of 2"):
    graphs.to_graph(graphs.make_table([1], [1], ["a", "b"]))


def test_to_graph_of_a_directed_graph_leaves_no_empty_row():
  # A chain into a circle: dropping its first node leaves the next without influence, and so on.
  chain = np.arange(300)
  table = graphs.make_table(
    [*chain, 300, 301, 302],
    [*(chain + 1), 301, 300, 301],
    [str(n) for n in range(303)],
    directed=True,
  )
  graph, kept = graphs.to_graph(table)
  assert kept.tolist() == [300, 301]
  assert graph_lib.to_sparse(graph).toarray().tolist() == [[0, 1], [1, 0]]
  graph, kept = graphs.to_graph(table, isolated="zero")
  # An edge's receiver is the row.
  assert graph_lib.to_sparse(graph)[1, 0] == 1
  assert np.flatnonzero(graph_lib.degree(graph) == 0).tolist() == [0, 302]
  with pytest.raises(ValueError, match="in a directed graph a circle"):
    graphs.to_graph(graphs.make_table([0], [1], ["a", "b"], directed=True))


def test_to_graph_equals_networkx():
  table = graphs.block_graph([40, 60], 0.2, 0.02, seed=1)
  network = nx.Graph(edges(table))
  graph, kept = graphs.to_graph(table)
  names = [table.names[node] for node in kept]
  assert graph_lib.degree(graph).tolist() == [network.degree(name) for name in names]
  adjacency = nx.to_numpy_array(network, nodelist=names)
  expected = adjacency / adjacency.sum(axis=1, keepdims=True)
  np.testing.assert_allclose(graph_lib.to_sparse(graph).toarray(), expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (([0], [1, 1], ["a", "b"]), "senders and receivers have shapes"),
    (([0], [1], ["a", "b"], [1, 2]), "weights have shape"),
    (([0, 0], [1, 2], ["a", "b"]), "edge 1 joins nodes 0 and 2; expected 0 to 1"),
    (([0], [1], ["a", "a"]), "names hold 'a' twice"),
    (([0, 1], [1, 2], ["a", "b", "c"], [1, -2]), "edge 1 has weight -2"),
    (([0, 1], [1, 0], ["a", "b"], [1, 2]), "edge 1 gives the edge b - a weight 2.*as directed"),
  ],
)
def test_bad_tables(arguments, message):
  with pytest.raises(ValueError, match=message):
    graphs.make_table(*arguments)


def test_clusters_are_the_planted_blocks():
  # Complete blocks in a ring: no other partition is near them in modularity.
  ring = nx.ring_of_cliques(8, 6)
  ends = np.asarray(ring.edges)
  table = graphs.make_table(ends[:, 0], ends[:, 1], [str(n) for n in range(50)])
  graph, _ = graphs.to_graph(table, isolated="zero")
  cluster = graphs.cluster_nodes(graph, resolution=1.0, seed=0)
  expected = [*np.repeat(np.arange(8), 6), 8, 9]
  assert cluster.tolist() == expected
  fine = graphs.cluster_nodes(graph, resolution=100.0, seed=0)
  assert fine.tolist() == list(range(50))
  with pytest.raises(ValueError, match="resolution = 0"):
    graphs.cluster_nodes(graph, resolution=0)


def test_clusters_do_not_depend_on_the_process():
  code = (
    "from experiments.datasets import graphs\n"
    "graph, _ = graphs.to_graph(graphs.lfr_graph(300, 12, seed=1))\n"
    "print(graphs.cluster_nodes(graph).tolist())"
  )
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", code],
      cwd=ROOT,
      env=os.environ | {"PYTHONHASHSEED": seed},
      stdout=subprocess.PIPE,
      text=True,
    )
    for seed in ("0", "77")
  ]
  first, second = (process.communicate(timeout=120)[0] for process in processes)
  assert first == second
  assert len(set(first.split(","))) > 5


@pytest.mark.parametrize(("num_nodes", "average_degree"), [(1500, 24), (300, 12), (600, 30)])
def test_lfr_graphs_have_the_degree_and_communities_asked_for(num_nodes, average_degree):
  table = graphs.lfr_graph(num_nodes, average_degree, seed=2)
  assert len(table.names) == num_nodes
  assert abs(2 * len(table.senders) / num_nodes / average_degree - 1) < 1 / 8
  again = graphs.lfr_graph(num_nodes, average_degree, seed=2)
  assert np.array_equal(again.senders, table.senders)
  other = graphs.lfr_graph(num_nodes, average_degree, seed=3)
  assert not np.array_equal(other.senders, table.senders)
  network = nx.Graph(edges(table))
  graph, kept = graphs.to_graph(table)
  cluster = graphs.cluster_nodes(graph, resolution=1.0)
  communities = [
    {table.names[kept[node]] for node in np.flatnonzero(cluster == k)}
    for k in range(cluster.max() + 1)
  ]
  # A random graph of this degree has modularity below 0.25.
  assert nx.community.modularity(network, communities) > 0.35


def test_block_graphs_have_the_densities_asked_for():
  sizes, within, between = [60, 90], 0.3, 0.05
  table = graphs.block_graph(sizes, within, between, seed=0)
  block = np.repeat([0, 1], sizes)
  same = (block[table.senders] == block[table.receivers]).sum()
  pairs = 60 * 59 / 2 + 90 * 89 / 2
  assert abs(same - pairs * within) < 4 * np.sqrt(pairs * within * (1 - within))
  across = len(table.senders) - same
  assert abs(across - 5400 * between) < 4 * np.sqrt(5400 * between * (1 - between))


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: graphs.lfr_graph(100, 24), "num_nodes = 100, average_degree = 24"),
    (lambda: graphs.lfr_graph(100, 2), "a degree of at least 4"),
    (lambda: graphs.lfr_graph(300, 12, mixing=2.0), "mixing = 2"),
    (lambda: graphs.block_graph([10, 0], 0.1, 0.1), "sizes ="),
    (lambda: graphs.block_graph([10], 1.1, 0.1), "within = 1.1"),
  ],
)
def test_bad_generators(make, message):
  with pytest.raises(ValueError, match=message):
    make()
