"""The graph of a run: Wikipedia mentions, MovieLens co-rating, LFR, or a file of the user's."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import ml_collections
import numpy as np

from experiments.datasets import graphs
from experiments.datasets.graphs import EdgeTable
from experiments.datasets.rows import csv_rows
from experiments.gate.study import Network
from launch.run import Run
from models import graph as graph_lib
from models.graph import Graph

NAMED = {
  "wiki": "mentions among 10,033 Wikipedia articles (real)",
  "movielens": "MovieLens users with 20 films in common (real)",
  "lfr": "LFR graph with communities (simulated)",
}
MAX_PATHS = 50_000_000  # of two edges; the theory of the two_hop outcome keeps one entry each
_STANFORD3 = (
  " The authors' graph, socfb-Stanford3.mtx of the Facebook100 collection, is offered by the "
  "Network Repository; download it and give its path."
)


def load(config: ml_collections.ConfigDict, run: Run) -> Network:
  """The graph of the config with its communities, for the simulated study."""
  table = read(config)
  if table.directed or table.weights is not None:
    raise ValueError(
      f"config.graph = {config.graph!r} is {'directed' if table.directed else 'weighted'}; the "
      "simulated outcomes and the network are for undirected graphs without weights. Leave out "
      "directions and weights, or give --config.log to analyse your own ramp-up, on any graph"
    )
  graph, kept = graphs.to_graph(table, "drop")
  if config.clusters:
    names = [table.names[i] for i in kept]
    cluster = read_clusters(config.clusters, names)
  else:
    c = config.louvain
    cluster = run.unit(
      "communities",
      lambda: graphs.cluster_nodes(graph, resolution=c.resolution, seed=c.seed),
    )
  run.say(f"{describe(config, table, graph, kept)}; {int(cluster.max()) + 1} clusters")
  paths = int(np.sum(np.square(np.asarray(graph_lib.degree(graph)))))
  second_hop = None
  if paths <= MAX_PATHS:
    second_hop = graph_lib.compose(graph, graph, zero_diagonal=True)
  else:
    run.warn(
      f"the graph has {paths:,} paths of two edges, more than {MAX_PATHS:,}: the bias formula for "
      "the two_hop outcome is left out"
    )
  return Network(title(config), graph, np.asarray(cluster), second_hop)


def title(config: ml_collections.ConfigDict) -> str:
  """What the report calls the graph."""
  return NAMED.get(config.graph, pathlib.Path(config.graph).name)


def describe(
  config: ml_collections.ConfigDict, table: EdgeTable, graph: Graph, kept: np.ndarray
) -> str:
  """The graph in a line, and what was left out of it."""
  dropped = {
    "nodes that nobody influences": len(table.names) - kept.size,
    "self-loops": table.self_loops,
    "repeated edges": table.duplicates,
    "edges of weight 0": table.zero_weights,
  }
  left = ", ".join(f"{count:,} {what}" for what, count in dropped.items() if count)
  return (
    f"{title(config)}: {graph.num_nodes:,} nodes, {graph.weights.shape[0]:,} directed edges"
    + (f", left out {left}" if left else "")
  )


def read(config: ml_collections.ConfigDict) -> EdgeTable:
  """The edges of the config's graph.

  Raises:
    ValueError: no such file, or one that cannot be read as a graph.
  """
  if config.graph == "lfr":
    c = config.lfr
    return graphs.lfr_graph(c.num_nodes, c.average_degree, c.seed)
  if config.graph == "wiki":
    from experiments.datasets import wiki_mentions

    return wiki_mentions.load(directed=config.directed)
  if config.graph == "movielens":
    from experiments.datasets import movielens

    return movielens.load()
  if not pathlib.Path(config.graph).is_file():
    raise ValueError(
      f"config.graph = {config.graph!r} is no file; expected {', '.join(NAMED)} or the path of an "
      f"edge list ({', '.join(graphs.SUFFIXES)}).{_STANFORD3 if config.preset == 'paper' else ''}"
    )
  return graphs.read_edges(config.graph, directed=config.directed)


def read_clusters(path: str, names: Sequence[str]) -> np.ndarray:
  """Randomisation units `[N]`, 0..K-1, from a CSV file with the columns node and cluster.

  Args:
    path: the file; rows of nodes that are not in `names` are left out.
    names: `[N]` names of the nodes.

  Raises:
    ValueError: a column, a node or a cluster is missing, or a node has two clusters.
  """
  rows = csv_rows(pathlib.Path(path))
  line, header = next(rows, (1, []))
  if not {"node", "cluster"} <= set(header):
    raise ValueError(
      f"{path}, line {line}: the columns are {', '.join(header) or 'missing'}; expected node and "
      "cluster in the first line"
    )
  node, cluster = header.index("node"), header.index("cluster")
  found: dict[str, str] = {}
  for line, fields in rows:
    if len(fields) != len(header) or not fields[cluster]:
      raise ValueError(f"{path}, line {line}: expected a value for each of {', '.join(header)}")
    if found.setdefault(fields[node], fields[cluster]) != fields[cluster]:
      raise ValueError(
        f"{path}, line {line}: node {fields[node]!r} is in cluster {fields[cluster]!r}, and before "
        f"in {found[fields[node]]!r}; expected one cluster a node"
      )
  absent = [name for name in names if name not in found]
  if absent:
    raise ValueError(
      f"{path}: node {absent[0]!r} of the graph has no cluster, and so {len(absent) - 1} others; "
      "expected a row for each. A node that was randomised alone is a cluster of its own"
    )
  return np.unique([found[name] for name in names], return_inverse=True)[1].astype(np.int32)
