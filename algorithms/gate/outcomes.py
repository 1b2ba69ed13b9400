"""Potential outcomes of the authors' simulations.

With e = W z the mean over treated neighbours:

  linear          y = a + b z + c e                    square      y = a + b z + c e^2
  two_hop         y = a + b z + c e + r W2 z           sqrt        y = a + b z + c sqrt(e)
  multiplicative  y = (1 + noise) (d_i / mean d) (a + b z + c e)
  dynamic         linear, on a graph that gains edges at every stage

W2 = W W without its diagonal. The noise is fresh in each stage. Formulas: the authors' code.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from algorithms.gate.interference import LinearInterference
from models import graph as graph_lib
from models.graph import Graph

OUTCOMES = ("linear", "square", "sqrt", "multiplicative", "two_hop", "dynamic")


@dataclasses.dataclass(frozen=True)
class OutcomeConfig:
  """Constants of the outcome models.

  Attributes:
    kind: one of OUTCOMES.
    intercept: a.
    direct: b.
    spillover: c.
    second_hop: r.
    noise: standard deviation of the noise.
  """

  kind: str = "linear"
  intercept: float = 1.0
  direct: float = 1.0
  spillover: float = 1.0
  second_hop: float = 0.5
  noise: float = 0.1

  def __post_init__(self) -> None:
    if self.kind not in OUTCOMES:
      raise ValueError(f"outcome = {self.kind!r}; expected one of {', '.join(OUTCOMES)}")
    if not self.noise >= 0:
      raise ValueError(f"noise = {self.noise}; expected a standard deviation of 0 or more")


def return_weight(graph: Graph) -> jax.Array:
  """`[N]` diagonal of W W, for a graph without repeated edges whose edges go both ways.

  Entry `(j, i)` of such a row mean is `1 / degree_j` wherever `(i, j)` is an entry.
  """
  degree = graph_lib.degree(graph)
  return graph_lib.apply(graph, 1 / jnp.maximum(degree, 1))


def mean_outcome(config: OutcomeConfig, graph: Graph, z: jax.Array, e: jax.Array) -> jax.Array:
  """Outcomes without noise.

  Args:
    config: the model; "multiplicative" is taken here without its noise.
    graph: row mean over an undirected graph.
    z: `[L, N]` treatments.
    e: `[L, N]` exposures, taken on each stage's own graph where it is dynamic.

  Returns:
    `[L, N]`.

  Raises:
    ValueError: shapes that do not agree.
  """
  if not z.shape == e.shape == (z.shape[0], graph.num_nodes):
    raise ValueError(
      f"z has shape {z.shape} and e {e.shape}; expected [stages, {graph.num_nodes}] for both"
    )
  spill = {"square": jnp.square, "sqrt": jnp.sqrt}.get(config.kind, lambda x: x)(e)
  y = config.intercept + config.direct * z + config.spillover * spill
  if config.kind == "two_hop":
    second = graph_lib.apply(graph, e.T).T - return_weight(graph)[None, :] * z
    y = y + config.second_hop * second
  if config.kind == "multiplicative":
    degree = graph_lib.degree(graph)
    y = (degree / degree.mean())[None, :] * y
  return y


def simulate_outcome(
  key: jax.Array, config: OutcomeConfig, graph: Graph, z: jax.Array, e: jax.Array
) -> jax.Array:
  """Draws outcomes `[L, N]`; arguments as for `mean_outcome`."""
  y = mean_outcome(config, graph, z, e)
  noise = config.noise * jax.random.normal(key, z.shape, y.dtype)
  return y * (1 + noise) if config.kind == "multiplicative" else y + noise


def true_gate(config: OutcomeConfig, graph: Graph) -> jax.Array:
  """Mean outcome with everybody treated minus mean outcome with nobody treated."""
  ones = jnp.ones((1, graph.num_nodes), graph.weights.dtype)
  full = graph_lib.apply(graph, ones.T).T
  zeros = jnp.zeros_like(ones)
  treated = mean_outcome(config, graph, ones, full)
  return treated.mean() - mean_outcome(config, graph, zeros, zeros).mean()


def as_linear(config: OutcomeConfig, graph: Graph, second_hop: Graph) -> LinearInterference:
  """The model as `y = a + B z + noise`, for the theory.

  Args:
    config: of kind "linear" or "two_hop".
    graph: row mean over neighbours.
    second_hop: W W without its diagonal; used for "two_hop" only.

  Raises:
    ValueError: another kind.
  """
  if config.kind not in ("linear", "two_hop"):
    raise ValueError(f"outcome = {config.kind!r} is not linear in the treatments")
  parts = [(config.spillover, graph)]
  if config.kind == "two_hop":
    parts.append((config.second_hop, second_hop))
  receivers = np.concatenate([np.asarray(g.receivers) for _, g in parts])
  order = np.argsort(receivers, kind="stable")
  spillover = Graph(
    jnp.asarray(np.concatenate([np.asarray(g.senders) for _, g in parts])[order]),
    jnp.asarray(receivers[order]),
    jnp.asarray(np.concatenate([c * np.asarray(g.weights) for c, g in parts])[order]),
    graph.num_nodes,
  )
  ones = jnp.ones(graph.num_nodes, graph.weights.dtype)
  return LinearInterference(
    config.intercept * ones,
    config.direct * ones,
    spillover,
    jnp.asarray(config.noise, graph.weights.dtype),
  )


def draw_dynamic_graphs(key: jax.Array, graph: Graph, num_stages: int, added: int = 5) -> Graph:
  """Graphs of a network that grows while the ramp-up runs.

  Before every stage each node in the upper half by degree of the starting graph draws `added`
  new neighbours with probabilities proportional to that degree; edges go both ways and stay
  (inferred: the authors' code rebuilds its graph and loses track of the clusters; here nodes keep
  their numbers). A node may draw itself or a neighbour that it has: such draws have weight 0.

  Args:
    key: PRNG key.
    graph: row mean over an undirected graph.
    num_stages: L; the first stage has gained edges already.
    added: draws of each node and stage.

  Returns:
    Row means with a leading stage axis, all with the same number of edges.
  """
  n = graph.num_nodes
  degree = graph_lib.degree(graph)
  grows = jnp.argsort(-degree)[: n // 2]
  # Inverse of the distribution function: a categorical draw would make N numbers for each edge.
  heap = jnp.cumsum(degree)
  drawn = jax.random.uniform(key, (num_stages, n // 2, added), heap.dtype) * heap[-1]
  drawn = jnp.minimum(jnp.searchsorted(heap, drawn, side="right"), n - 1)
  born = jnp.broadcast_to(jnp.arange(num_stages)[:, None, None], drawn.shape).reshape(-1)
  a = jnp.broadcast_to(grows[None, :, None], drawn.shape).reshape(-1).astype(jnp.int32)
  b = drawn.reshape(-1).astype(jnp.int32)
  senders = jnp.concatenate([graph.senders, a, b])
  receivers = jnp.concatenate([graph.receivers, b, a])
  births = jnp.concatenate([jnp.full(graph.senders.shape, -1), born, born])
  # The earliest of repeated edges counts: sorted by edge and then by birth, it comes first.
  order = jnp.lexsort((births, senders, receivers))
  senders, receivers, births = senders[order], receivers[order], births[order]
  repeated = (senders[1:] == senders[:-1]) & (receivers[1:] == receivers[:-1])
  fresh = jnp.concatenate([jnp.ones(1, bool), ~repeated]) & (senders != receivers)

  def at(stage: jax.Array) -> Graph:
    present = (fresh & (births <= stage)).astype(graph.weights.dtype)
    count = jax.ops.segment_sum(present, receivers, n, indices_are_sorted=True)
    weights = present / jnp.maximum(count, 1)[receivers]
    return Graph(senders, receivers, weights, n)

  return jax.vmap(at)(jnp.arange(num_stages))
