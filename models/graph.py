"""Graphs as row operators, and graph neural networks over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from models.mlp import MLP

GNN_KINDS = ("cheb", "mean")


@struct.dataclass
class Graph:
  """A sparse `[N, N]` operator, stored as edges sorted by their receiver.

  Entry `(receivers[e], senders[e])` holds `weights[e]`; repeated entries add up. A padding edge
  has weight 0. Leaves may have a leading stage axis: one operator a stage, for `jax.vmap`.

  Attributes:
    senders: `[E]` int32, columns.
    receivers: `[E]` int32, rows, ascending.
    weights: `[E]` float.
    num_nodes: N, static.
  """

  senders: jax.Array
  receivers: jax.Array
  weights: jax.Array
  num_nodes: int = struct.field(pytree_node=False)


def from_edges(
  senders: np.ndarray,
  receivers: np.ndarray,
  num_nodes: int,
  weights: np.ndarray | None = None,
  *,
  normalise: bool = True,
) -> Graph:
  """A graph from edge arrays of any order, on the host.

  Args:
    senders: `[E]` node that influences.
    receivers: `[E]` node that is influenced. For an undirected graph give each edge both ways.
    num_nodes: N; nodes without an edge are allowed and get an empty row.
    weights: `[E]`, 1 by default.
    normalise: divide each row by its sum, so that the operator takes the mean over neighbours.

  Raises:
    ValueError: unequal lengths, a node outside [0, N), a weight that is not finite, or a row
      whose weights sum to zero or less while `normalise` is asked for.
  """
  senders, receivers = np.asarray(senders), np.asarray(receivers)
  weights = np.ones(senders.shape) if weights is None else np.asarray(weights, np.float64)
  if senders.ndim != 1 or not senders.shape == receivers.shape == weights.shape:
    raise ValueError(
      f"senders, receivers and weights have shapes {senders.shape}, {receivers.shape} and "
      f"{weights.shape}; expected three vectors of one length"
    )
  for name, nodes in (("senders", senders), ("receivers", receivers)):
    if nodes.size and (nodes.min() < 0 or nodes.max() >= num_nodes):
      bad = int(np.flatnonzero((nodes < 0) | (nodes >= num_nodes))[0])
      raise ValueError(
        f"{name}[{bad}] = {nodes[bad]}; expected nodes 0 to {num_nodes - 1}. Relabel the nodes, or "
        "give the right num_nodes"
      )
  if not np.all(np.isfinite(weights)):
    bad = int(np.flatnonzero(~np.isfinite(weights))[0])
    raise ValueError(f"weights[{bad}] = {weights[bad]}; expected finite weights")
  order = np.lexsort((senders, receivers))
  senders, receivers, weights = senders[order], receivers[order], weights[order]
  if normalise:
    total = np.bincount(receivers, weights, minlength=num_nodes)
    if np.any(total[receivers] <= 0):
      bad = int(receivers[total[receivers] <= 0][0])
      raise ValueError(
        f"the weights of row {bad} sum to {total[bad]}; expected a positive sum. Leave out edges "
        "of weight 0, or pass normalise=False"
      )
    weights = weights / total[receivers]
  return Graph(
    jnp.asarray(senders, jnp.int32),
    jnp.asarray(receivers, jnp.int32),
    jnp.asarray(weights),
    num_nodes,
  )


def apply(graph: Graph, x: jax.Array, axis_name: str | None = None) -> jax.Array:
  """The operator times `x`: for a row-normalised graph, means over neighbours.

  Args:
    graph: an operator; with `axis_name`, this device's share of the edges.
    x: `[N, ...]` values of the nodes.
    axis_name: mesh axis that the edges are sharded over, inside `jax.shard_map`.

  Returns:
    `[N, ...]`, 0 at nodes without an edge.
  """
  weights = graph.weights.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)
  out = jax.ops.segment_sum(
    weights * x[graph.senders], graph.receivers, graph.num_nodes, indices_are_sorted=True
  )
  return out if axis_name is None else jax.lax.psum(out, axis_name)


def apply_transpose(graph: Graph, x: jax.Array, axis_name: str | None = None) -> jax.Array:
  """The transposed operator times `x`; arguments and result as in `apply`."""
  weights = graph.weights.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)
  out = jax.ops.segment_sum(weights * x[graph.receivers], graph.senders, graph.num_nodes)
  return out if axis_name is None else jax.lax.psum(out, axis_name)


def degree(graph: Graph, axis_name: str | None = None) -> jax.Array:
  """`[N]` float, the number of entries of each row that are not 0; `axis_name` as in `apply`."""
  present = (graph.weights != 0).astype(graph.weights.dtype)
  out = jax.ops.segment_sum(present, graph.receivers, graph.num_nodes, indices_are_sorted=True)
  return out if axis_name is None else jax.lax.psum(out, axis_name)


def compose(first: Graph, second: Graph, *, zero_diagonal: bool = False) -> Graph:
  """The operator `first @ second`, on the host; `zero_diagonal` leaves its diagonal out.

  The square of a row mean reaches nodes two hops away; its number of entries grows with the sum of
  the squared degrees.

  Raises:
    ValueError: operators on different numbers of nodes.
  """
  if first.num_nodes != second.num_nodes:
    raise ValueError(
      f"first has {first.num_nodes} nodes and second {second.num_nodes}; expected operators on the "
      "same nodes"
    )
  product = (to_sparse(first) @ to_sparse(second)).tocoo()
  rows, columns, values = product.row, product.col, product.data
  if zero_diagonal:
    off = rows != columns
    rows, columns, values = rows[off], columns[off], values[off]
  return from_edges(columns, rows, first.num_nodes, values, normalise=False)


def to_sparse(graph: Graph) -> Any:
  """The operator as a `scipy.sparse.csr_array` in float64, on the host."""
  from scipy import sparse

  values = np.asarray(graph.weights, np.float64)
  places = (np.asarray(graph.receivers), np.asarray(graph.senders))
  return sparse.csr_array((values, places), shape=(graph.num_nodes, graph.num_nodes))


def pad(graph: Graph, num_edges: int) -> Graph:
  """The same operator with edges of weight 0 at the end: one shape for several graphs or devices.

  The graph may have a stage axis.

  Raises:
    ValueError: the graph has more edges than `num_edges`.
  """
  missing = num_edges - graph.weights.shape[-1]
  if missing < 0:
    raise ValueError(
      f"num_edges = {num_edges} is less than the graph's {graph.weights.shape[-1]} edges; give the "
      "largest number of edges of all graphs"
    )
  last = graph.num_nodes - 1
  widths = [(0, 0)] * (graph.weights.ndim - 1) + [(0, missing)]
  return Graph(
    jnp.pad(graph.senders, widths, constant_values=last),
    jnp.pad(graph.receivers, widths, constant_values=last),
    jnp.pad(graph.weights, widths),
    graph.num_nodes,
  )


def chebyshev_basis(
  graph: Graph,
  x: jax.Array,
  order: int,
  lambda_max: float = 2.0,
  axis_name: str | None = None,
) -> jax.Array:
  """Chebyshev polynomials of the scaled graph Laplacian, applied to `x` (Defferrard et al. 2016).

  With `L = I - D^-1/2 A D^-1/2` scaled to `2 L / lambda_max - I`; for the default `lambda_max` the
  second polynomial is `-D^-1/2 A D^-1/2`. Nothing here is learned, so of a network's first layer
  it can be computed once.

  Args:
    graph: row mean over an undirected graph without weights. (Of a directed one D counts incoming
      edges, 1 at least, as in the library of the authors.)
    x: `[N, D]`.
    order: number of polynomials, K.
    lambda_max: largest eigenvalue of L, or a bound of it.
    axis_name: mesh axis that the edges are sharded over.

  Returns:
    `[N, K * D]`.

  Raises:
    ValueError: an order below 1, or an `x` that is not a row a node.
  """
  if order < 1:
    raise ValueError(f"order = {order}; expected 1 (a dense layer) or more")
  _check_rows(graph, x)
  # A node without neighbours has an empty row, so that any positive degree gives it 0.
  root = jnp.sqrt(jnp.maximum(degree(graph, axis_name), 1)).astype(x.dtype)[:, None]

  def scaled_laplacian(values: jax.Array) -> jax.Array:
    neighbours = root * apply(graph, values / root, axis_name)
    return (2 / lambda_max - 1) * values - (2 / lambda_max) * neighbours

  terms = [x]
  if order > 1:
    terms.append(scaled_laplacian(x))
  for _ in range(2, order):
    terms.append(2 * scaled_laplacian(terms[-1]) - terms[-2])
  return jnp.concatenate(terms, axis=-1)


def mean_basis(graph: Graph, x: jax.Array, axis_name: str | None = None) -> jax.Array:
  """`[N, 2 D]`: `x [N, D]` and its mean over neighbours; ValueError when N is not the graph's."""
  _check_rows(graph, x)
  return jnp.concatenate([x, apply(graph, x, axis_name)], axis=-1)


def _check_rows(graph: Graph, x: jax.Array) -> None:
  # Indexing with the number of a node beyond the last row would give the last row, not an error.
  if x.ndim != 2 or x.shape[0] != graph.num_nodes:
    raise ValueError(
      f"x has shape {x.shape}; expected [{graph.num_nodes}, D], a row for each node of the graph"
    )


class ChebConv(nn.Module):
  """Chebyshev graph convolution: a dense layer on `chebyshev_basis`.

  Attributes:
    features: width of the output.
    order: number of polynomials; 1 is a dense layer for each node.
    lambda_max: see `chebyshev_basis`.
  """

  features: int
  order: int = 2
  lambda_max: float = 2.0

  @nn.compact
  def __call__(self, graph: Graph, x: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Maps `[N, D]` to `[N, features]`, without an activation."""
    basis = chebyshev_basis(graph, x, self.order, self.lambda_max, axis_name)
    return nn.Dense(self.features)(basis)


class MeanConv(nn.Module):
  """Mean aggregation: a dense layer on a node's own values and the mean of its neighbours'.

  Attributes:
    features: width of the output.
  """

  features: int

  @nn.compact
  def __call__(self, graph: Graph, x: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Maps `[N, D]` to `[N, features]`, without an activation."""
    return nn.Dense(self.features)(mean_basis(graph, x, axis_name))


def build_gnn(
  kind: str = "cheb", hidden: int = 16, rectify_output: bool = False
) -> tuple[
  Callable[[jax.Array, int], Any],
  Callable[..., jax.Array],
  Callable[[Any, jax.Array], jax.Array],
]:
  """A graph convolution and two dense layers on each node.

  "cheb" is the authors' network: Chebyshev orders 2, 1 and 1. Only its first layer looks at the
  graph, before any parameter, so `basis` is computed once for a graph and a treatment. Initial
  weights are PyTorch's.

  Args:
    kind: one of GNN_KINDS.
    hidden: width of both hidden layers.
    rectify_output: ReLU on the output too, as in the authors' code: it cannot predict below 0.

  Returns:
    `(init, basis, apply_fn)`: `init(key, num_inputs) -> params`; `basis(graph, x [N, D]) ->
    [N, 2 D]`; `apply_fn(params, basis) -> [N]`.

  Raises:
    ValueError: unknown kind or a width below 1.
  """
  if kind not in GNN_KINDS or hidden < 1:
    raise ValueError(
      f"kind = {kind!r}, hidden = {hidden}; expected one of {', '.join(GNN_KINDS)} and 1 or more"
    )
  model = MLP((hidden, hidden), 1, "uniform")

  def init(key: jax.Array, num_inputs: int) -> Any:
    return model.init(key, jnp.zeros((1, 2 * num_inputs), jnp.float32))

  def basis(graph: Graph, x: jax.Array, axis_name: str | None = None) -> jax.Array:
    if kind == "mean":
      return mean_basis(graph, x, axis_name)
    return chebyshev_basis(graph, x, 2, axis_name=axis_name)

  def apply_fn(params: Any, inputs: jax.Array) -> jax.Array:
    out = model.apply(params, inputs)
    return nn.relu(out) if rectify_output else out

  return init, basis, apply_fn
