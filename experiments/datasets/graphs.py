"""Graphs from files and from generators, and communities in them. All on the host."""

from __future__ import annotations

import array
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import networkx as nx
import numpy as np
import scipy.sparse

from experiments.datasets.rows import csv_rows, text_lines, to_number
from models import graph as graph_lib
from models.graph import Graph

SUFFIXES = (".mtx", ".csv", ".tsv", ".txt")

_HEADERS = (("source", "target"), ("from", "to"), ("src", "dst"))
_MAX_NODES = 10_000_000
_LFR_ATTEMPTS = 20


@dataclasses.dataclass(frozen=True, eq=False)
class EdgeTable:
  """A simple graph with named nodes; `make_table` checks and builds one.

  Attributes:
    senders: `[E]` int32 node that influences.
    receivers: `[E]` int32 node that is influenced. An undirected edge is listed once.
    weights: `[E]` float64 above 0, or None for a graph without weights.
    names: `[N]` names of the nodes, all different; nodes without an edge are among them.
    directed: whether an edge influences in one direction only.
    self_loops: number of edges from a node to itself that were dropped.
    duplicates: number of repetitions of an edge that were dropped. Of an undirected graph an edge
      and its reverse are the same.
    zero_weights: number of edges of weight 0 that were dropped.
  """

  senders: np.ndarray
  receivers: np.ndarray
  weights: np.ndarray | None
  names: tuple[str, ...]
  directed: bool
  self_loops: int = 0
  duplicates: int = 0
  zero_weights: int = 0


def make_table(
  senders: np.ndarray,
  receivers: np.ndarray,
  names: Sequence[str],
  weights: np.ndarray | None = None,
  *,
  directed: bool = False,
) -> EdgeTable:
  """Drops self-loops, repeated edges and edges of weight 0, and counts them.

  Args:
    senders: `[E]` integers from 0 to N - 1.
    receivers: `[E]`, as `senders`.
    names: `[N]` names of the nodes.
    weights: `[E]` finite numbers, none negative.
    directed: whether an edge influences in one direction only.

  Raises:
    ValueError: unequal lengths, a node without a name, a name given twice, a weight that is
      negative or not finite, or an edge given twice with different weights.
  """
  return _make_table(senders, receivers, names, weights, directed, lambda edge: f"edge {edge}")


def read_edges(path: str | pathlib.Path, *, directed: bool = False) -> EdgeTable:
  """Reads an edge list or a Matrix Market file, in one pass and without keeping its text.

  - `.mtx`: a square matrix in coordinate format, `pattern`, `real` or `integer`, `general` or
    `symmetric`. The entry in row i and column j is an edge from i to j. Nodes are named by their
    number in the file, from "1".
  - `.csv` (commas), `.tsv` (tabs), `.txt` (spaces or tabs; lines that begin with # or % are
    comments): an edge a line, `source target` or `source target weight`. A first line with the
    names of the columns (source and target, from and to, or src and dst; and weight) allows any
    order and more columns. Nodes are numbered as they come up; their names stay text.

  Each may be compressed: `.csv.gz`.

  Args:
    path: the file.
    directed: whether an edge influences in one direction only; an edge of a `symmetric` matrix
      then stands for both.

  Raises:
    ValueError: an ending that is not in SUFFIXES, or a file that cannot be read; the message
      names the line.
  """
  path = pathlib.Path(path)
  kind = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
  kind = kind.lower()
  if kind == ".mtx":
    return _read_matrix_market(path, directed)
  if kind in (".csv", ".tsv"):
    return _read_list(path, csv_rows(path, "," if kind == ".csv" else "\t"), directed)
  if kind == ".txt":
    return _read_list(path, _spaced_rows(path), directed)
  raise ValueError(
    f"{path}: the kind of file is told by its ending; expected {', '.join(SUFFIXES)}, or one of "
    "them and .gz. Rename the file"
  )


def to_graph(table: EdgeTable, isolated: str = "drop") -> tuple[Graph, np.ndarray]:
  """The mean over neighbours as an operator.

  Args:
    table: a graph.
    isolated: what to do with nodes that nobody influences. "drop" takes them out, again and again
      where taking them out leaves others without influence (only in a directed graph); "zero"
      keeps them, with an empty row.

  Returns:
    The row-normalised operator on M nodes, and the `[M]` positions of its nodes in `table.names`.

  Raises:
    ValueError: no node is left, or `isolated` is unknown.
  """
  if isolated not in ("drop", "zero"):
    raise ValueError(f"isolated = {isolated!r}; expected 'drop' or 'zero'")
  senders, receivers, weights = table.senders, table.receivers, table.weights
  if not table.directed:
    senders, receivers = np.r_[senders, receivers], np.r_[receivers, senders]
    weights = None if weights is None else np.r_[weights, weights]
  num_nodes = len(table.names)
  keep = np.ones(num_nodes, bool)
  if isolated == "drop":
    keep = _influenced(senders, receivers, num_nodes)
    present = keep[senders]
    senders, receivers = senders[present], receivers[present]
    weights = None if weights is None else weights[present]
  kept = np.flatnonzero(keep)
  if not kept.size:
    raise ValueError(
      f"no node is left of {num_nodes}: none is influenced by another without end; expected edges "
      "between different nodes, and in a directed graph a circle of them"
    )
  number = np.cumsum(keep) - 1
  return graph_lib.from_edges(number[senders], number[receivers], kept.size, weights), kept


def cluster_nodes(graph: Graph, *, resolution: float = 5.0, seed: int = 10) -> np.ndarray:
  """Communities by the Louvain method, as in the authors' code.

  Direction and weights are left out: two nodes are joined when one of them influences the other.
  The result depends on the graph and the seed only: nodes are integers, whose order in a set does
  not change from process to process.

  Args:
    graph: an operator without a stage axis.
    resolution: above 0; larger gives more and smaller communities.
    seed: of the order in which nodes are visited.

  Returns:
    `[N]` int32, communities 0..K-1 in the order of their first nodes; a node without an edge is a
    community of its own.

  Raises:
    ValueError: a resolution that is not positive.
  """
  if not resolution > 0:
    raise ValueError(f"resolution = {resolution}; expected a positive number, 1 is the usual one")
  present = np.asarray(graph.weights) != 0
  edges = np.asarray([graph.senders, graph.receivers])[:, present]
  network = nx.Graph()
  network.add_nodes_from(range(graph.num_nodes))
  network.add_edges_from(edges[:, edges[0] != edges[1]].T.tolist())
  communities = nx.community.louvain_communities(network, resolution=resolution, seed=seed)
  cluster = np.empty(graph.num_nodes, np.int32)
  for number, members in enumerate(sorted(communities, key=min)):
    cluster[list(members)] = number
  return cluster


def lfr_graph(
  num_nodes: int = 1500, average_degree: float = 24, seed: int = 0, *, mixing: float = 0.3
) -> EdgeTable:
  """A simulated graph with communities and unequal degrees (Lancichinetti et al. 2008).

  Degrees follow a power law with exponent 3, from about half the mean to 4 times the mean;
  community sizes one with exponent 1.5, from 1.5 to 6 times the mean degree.

  Args:
    num_nodes: N, at least 10 times the average degree.
    average_degree: wanted mean degree, at least 4; what comes out is within an eighth of it from 6
      on, and may be a quarter less below, since the smallest degree is a whole number.
    seed: of the generator.
    mixing: wanted share of a node's edges that leave its community; what comes out is larger, 0.46
      for 0.3, since later nodes also receive the edges of earlier ones.

  Returns:
    An undirected graph without weights; nodes are named "0" to "N-1".

  Raises:
    ValueError: sizes out of range, or no graph in 20 attempts.
  """
  if average_degree < 4 or num_nodes < 10 * average_degree:
    raise ValueError(
      f"num_nodes = {num_nodes}, average_degree = {average_degree}; expected a degree of at least "
      "4 and at least 10 times as many nodes"
    )
  if not 0 <= mixing <= 1:
    raise ValueError(f"mixing = {mixing}; expected a share from 0 to 1")
  for attempt in range(_LFR_ATTEMPTS):
    try:
      network = nx.LFR_benchmark_graph(
        num_nodes,
        3,
        1.5,
        mixing,
        # Nodes are given their edges one after another, on top of those that earlier nodes gave
        # them, which adds a fifth: this smallest degree gives the wanted mean (by trial).
        min_degree=round(0.46 * average_degree),
        max_degree=int(4 * average_degree),
        min_community=int(1.5 * average_degree),
        max_community=int(6 * average_degree),
        max_iters=100,
        seed=seed * _LFR_ATTEMPTS + attempt,
      )
    except nx.NetworkXException:
      continue
    return _from_networkx(network)
  raise ValueError(
    f"no graph of {num_nodes} nodes with mean degree {average_degree} and mixing {mixing} in "
    f"{_LFR_ATTEMPTS} attempts from seed {seed}; try another seed, more nodes or a smaller degree"
  )


def block_graph(sizes: Sequence[int], within: float, between: float, seed: int = 0) -> EdgeTable:
  """A simulated stochastic block model.

  Args:
    sizes: number of nodes of each block; blocks follow each other.
    within: probability of an edge between two nodes of a block.
    between: probability of an edge between nodes of different blocks.
    seed: of the generator.

  Returns:
    An undirected graph without weights; nodes are named "0" to "N-1".

  Raises:
    ValueError: a size below 1 or a probability outside [0, 1].
  """
  if not sizes or min(sizes) < 1 or not (0 <= within <= 1 and 0 <= between <= 1):
    raise ValueError(
      f"sizes = {sizes}, within = {within}, between = {between}; expected positive sizes and "
      "probabilities from 0 to 1"
    )
  probabilities = np.full((len(sizes), len(sizes)), between)
  np.fill_diagonal(probabilities, within)
  network = nx.stochastic_block_model(sizes, probabilities.tolist(), seed=seed)
  return _from_networkx(network)


def _spaced_rows(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
  """Rows as `csv_rows` gives them, of a file with comments and any white space between fields."""
  for line, text in enumerate(text_lines(path), 1):
    fields = text.split()
    if fields and fields[0][0] not in "#%":
      yield line, fields


def _read_list(
  path: pathlib.Path, rows: Iterator[tuple[int, list[str]]], directed: bool
) -> EdgeTable:
  line, first = next(rows, (1, []))
  if not first:
    raise ValueError(f"{path}: is empty; expected an edge a line: source, target[, weight]")
  lowered = [field.lower() for field in first]
  header = next((pair for pair in _HEADERS if set(pair) <= set(lowered)), None)
  columns = [0, 1, 2][: len(first)]
  if header is not None:
    columns = [lowered.index(name) for name in (*header, "weight") if name in lowered]
  elif len(first) not in (2, 3):
    raise ValueError(
      f"{path}, line {line}: has {len(first)} fields; expected source, target and perhaps weight, "
      "or a first line that names these columns"
    )
  ends, weights, lines = array.array("q"), array.array("d"), array.array("q")
  number: dict[str, int] = {}

  def add(line: int, fields: list[str]) -> None:
    if len(fields) != len(first):
      raise ValueError(
        f"{path}, line {line}: has {len(fields)} fields; expected {len(first)} as in the first line"
      )
    for column in columns[:2]:
      if not fields[column]:
        raise ValueError(f"{path}, line {line}: a node has no name; expected two names")
      ends.append(number.setdefault(fields[column], len(number)))
    if len(columns) == 3:
      hint = " If it is the name of a column, call the columns source, target, weight."
      weights.append(
        _weight(path, line, fields[columns[2]], hint if header is None and not lines else "")
      )
    lines.append(line)

  if header is None:
    add(line, first)
  for line, fields in rows:
    add(line, fields)
  names = tuple(number)
  if not lines:
    raise ValueError(f"{path}: has no edge below its first line; expected an edge a line")
  if header is None and len(lines) > 1:
    # Else the names of the columns would silently become an edge between two more nodes.
    words = [not _is_number(name) for name in names]
    if all(words[:2]) and not any(words[2:]) and ends.count(0) == ends.count(1) == 1:
      raise ValueError(
        f"{path}, line {lines[0]}: {' and '.join(names[:2])} are the only nodes that are not "
        "numbers. If they name the columns, call them source and target; else add such a line above"
      )
  return _make_table(
    np.asarray(ends[0::2]),
    np.asarray(ends[1::2]),
    names,
    np.asarray(weights) if len(columns) == 3 else None,
    directed,
    lambda edge: f"{path}, line {lines[edge]}",
  )


def _read_matrix_market(path: pathlib.Path, directed: bool) -> EdgeTable:
  rows = enumerate(text_lines(path), 1)
  banner = next(rows, (1, ""))[1].lower().split()
  if (
    len(banner) != 5
    or banner[:3] != ["%%matrixmarket", "matrix", "coordinate"]
    or banner[3] not in ("pattern", "real", "integer")
    or banner[4] not in ("general", "symmetric")
  ):
    raise ValueError(
      f"{path}, line 1: {' '.join(banner)[:80]!r} is not the first line of a graph; expected "
      "%%MatrixMarket matrix coordinate, then pattern, real or integer, then general or symmetric. "
      "An edge list without it is a .txt file"
    )
  weighted, symmetric = banner[3] != "pattern", banner[4] == "symmetric"
  entries = ((n, text.split()) for n, text in rows if text.strip() and text[0] != "%")
  line, size = next(entries, (2, []))
  num_nodes, declared = _matrix_size(path, line, size)

  ends, weights, lines = array.array("q"), array.array("d"), array.array("q")
  for line, fields in entries:
    if len(lines) == declared:
      raise ValueError(
        f"{path}, line {line}: more entries than the {declared} that the size line declares"
      )
    if len(fields) != 2 + weighted:
      raise ValueError(
        f"{path}, line {line}: has {len(fields)} fields; expected {2 + weighted} in a {banner[3]} "
        "matrix"
      )
    for field in fields[:2]:
      node = _integer(path, line, field)
      if not 1 <= node <= num_nodes:
        raise ValueError(f"{path}, line {line}: node {node}; expected 1 to {num_nodes}")
      ends.append(node - 1)
    if weighted:
      weights.append(_weight(path, line, fields[2]))
    lines.append(line)
  if len(lines) < declared:
    raise ValueError(
      f"{path}, line {line}: the file ends after {len(lines)} entries; expected the "
      f"{declared} that its size line declares. Fetch the file again"
    )
  senders, receivers, where = np.asarray(ends[0::2]), np.asarray(ends[1::2]), np.asarray(lines)
  values = np.asarray(weights) if weighted else None
  if symmetric and directed:
    other = senders != receivers
    senders, receivers = np.r_[senders, receivers[other]], np.r_[receivers, senders[other]]
    where = np.r_[where, where[other]]
    values = None if values is None else np.r_[values, values[other]]
  names = tuple(map(str, range(1, num_nodes + 1)))
  return _make_table(
    senders, receivers, names, values, directed, lambda edge: f"{path}, line {where[edge]}"
  )


def _matrix_size(path: pathlib.Path, line: int, fields: list[str]) -> tuple[int, int]:
  """Number of nodes and of entries from the size line."""
  if len(fields) != 3:
    raise ValueError(
      f"{path}, line {line}: has {len(fields)} fields; expected the size line: rows, columns, "
      "entries"
    )
  num_rows, num_columns, declared = (_integer(path, line, field) for field in fields)
  if num_rows != num_columns or not 1 <= num_rows <= _MAX_NODES or declared < 0:
    raise ValueError(
      f"{path}, line {line}: {num_rows} rows, {num_columns} columns and {declared} entries; "
      f"expected a square matrix of 1 to {_MAX_NODES} rows"
    )
  return num_rows, declared


def _integer(path: pathlib.Path, line: int, field: str) -> int:
  try:
    return int(field)
  except ValueError:
    raise ValueError(
      f"{path}, line {line}: {field[:80]!r} is not a whole number; expected one"
    ) from None


def _weight(path: pathlib.Path, line: int, field: str, hint: str = "") -> float:
  weight = to_number(field)
  if not 0 <= weight < math.inf:
    raise ValueError(
      f"{path}, line {line}: the weight is {field[:80]!r}; expected a finite number, 0 or more."
      + hint
    )
  return weight


def _is_number(field: str) -> bool:
  return not math.isnan(to_number(field))


def _make_table(
  senders: np.ndarray,
  receivers: np.ndarray,
  names: Sequence[str],
  weights: np.ndarray | None,
  directed: bool,
  where: Callable[[int], str],
) -> EdgeTable:
  """`make_table`; `where(edge)` says in errors which edge is meant."""
  names = tuple(names)
  senders, receivers = np.asarray(senders), np.asarray(receivers)
  weights = None if weights is None else np.asarray(weights, np.float64)
  if senders.ndim != 1 or senders.shape != receivers.shape:
    raise ValueError(
      f"senders and receivers have shapes {senders.shape} and {receivers.shape}; expected two "
      "vectors of one length"
    )
  if weights is not None and weights.shape != senders.shape:
    raise ValueError(
      f"weights have shape {weights.shape}; expected one for each of the {senders.size} edges"
    )
  ends = np.stack([senders, receivers])
  if ends.size and (ends.min() < 0 or ends.max() >= len(names)):
    bad = int(np.flatnonzero(((ends < 0) | (ends >= len(names))).any(axis=0))[0])
    raise ValueError(
      f"{where(bad)} joins nodes {senders[bad]} and {receivers[bad]}; expected 0 to "
      f"{len(names) - 1}, there are {len(names)} names"
    )
  if len(set(names)) != len(names):
    seen: set[str] = set()
    twice = next(name for name in names if name in seen or seen.add(name))
    raise ValueError(f"names hold {twice!r} twice; expected different names")
  keep = senders != receivers
  self_loops = int((~keep).sum())
  zero_weights = 0
  if weights is not None:
    if not np.all((weights >= 0) & (weights < np.inf)):
      bad = int(np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0])
      raise ValueError(
        f"{where(bad)} has weight {weights[bad]}; expected a finite number, 0 or more"
      )
    zero_weights = int((keep & (weights == 0)).sum())
    keep &= weights != 0
  index = np.flatnonzero(keep)
  low, high = ends[:, index].astype(np.int64)
  if not directed:
    low, high = np.minimum(low, high), np.maximum(low, high)
  _, first, group = np.unique(low * len(names) + high, return_index=True, return_inverse=True)
  if weights is not None:
    original = index[first][group]
    differs = np.flatnonzero(weights[index] != weights[original])
    if differs.size:
      later = int(index[differs[0]])
      earlier = int(original[differs[0]])
      raise ValueError(
        f"{where(later)} gives the edge {names[senders[later]]} - {names[receivers[later]]} weight "
        f"{weights[later]:g}, {where(earlier)} weight {weights[earlier]:g}; expected one weight. "
        + ("Add them up" if directed else "Add them up, or read the graph as directed")
      )
  kept = index[np.sort(first)]
  return EdgeTable(
    senders[kept].astype(np.int32),
    receivers[kept].astype(np.int32),
    None if weights is None else weights[kept],
    names,
    directed,
    self_loops=self_loops,
    duplicates=index.size - kept.size,
    zero_weights=zero_weights,
  )


def _influenced(senders: np.ndarray, receivers: np.ndarray, num_nodes: int) -> np.ndarray:
  """`[N]` bool, nodes that are left when those without an incoming edge are taken out for good."""
  incoming = np.bincount(receivers, minlength=num_nodes)
  outgoing = scipy.sparse.csr_array(
    (np.ones(senders.size, np.int8), (senders, receivers)), shape=(num_nodes, num_nodes)
  )
  left = np.ones(num_nodes, bool)
  taken = np.flatnonzero(incoming == 0)
  while taken.size:
    left[taken] = False
    reached = outgoing[taken].indices
    np.subtract.at(incoming, reached, 1)
    taken = np.unique(reached[incoming[reached] == 0])
  return left


def _from_networkx(network: nx.Graph) -> EdgeTable:
  """A table of a NetworkX graph on the nodes 0..N-1."""
  ends = np.asarray(list(network.edges()), np.int64).reshape(-1, 2)
  return make_table(ends[:, 0], ends[:, 1], [str(n) for n in range(len(network))])
