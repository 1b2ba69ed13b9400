"""Simulated outcomes and growing graphs against dense NumPy and binomial probabilities."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from algorithms.gate import interference, outcomes
from algorithms.gate.outcomes import OutcomeConfig
from models.graph import Graph, from_edges

NODES = 30
CONSTANTS = {"intercept": 0.7, "direct": 1.3, "spillover": 0.9, "second_hop": 0.4}


class Network:
  def __init__(self):
    network = nx.barabasi_albert_graph(NODES, 2, seed=4)
    self.adjacency = nx.to_numpy_array(network)
    self.degree = self.adjacency.sum(axis=1)
    self.w = self.adjacency / self.degree[:, None]
    second = self.w @ self.w
    self.second = second - np.diag(np.diag(second))
    rng = np.random.default_rng(0)
    self.z = (rng.random((3, NODES)) < np.array([[0.0], [0.3], [0.7]])).astype(float)

  @property
  def graph(self) -> Graph:
    receivers, senders = np.nonzero(self.adjacency)
    return from_edges(senders, receivers, NODES)

  @property
  def second_graph(self) -> Graph:
    receivers, senders = np.nonzero(self.second)
    weights = self.second[receivers, senders]
    return from_edges(senders, receivers, NODES, weights, normalise=False)

  def mean(self, kind: str, z: np.ndarray) -> np.ndarray:
    """Outcomes without noise, from dense matrices."""
    a, b, c, r = CONSTANTS.values()
    e = z @ self.w.T
    return {
      "linear": a + b * z + c * e,
      "dynamic": a + b * z + c * e,
      "square": a + b * z + c * e**2,
      "sqrt": a + b * z + c * np.sqrt(e),
      "multiplicative": self.degree / self.degree.mean() * (a + b * z + c * e),
      "two_hop": a + b * z + c * e + r * z @ self.second.T,
    }[kind]


@pytest.fixture(scope="module")
def network() -> Network:
  return Network()


def dense(graph: Graph) -> np.ndarray:
  matrix = np.zeros((graph.num_nodes, graph.num_nodes))
  np.add.at(matrix, (np.asarray(graph.receivers), np.asarray(graph.senders)), graph.weights)
  return matrix


def test_outcomes_and_effects_equal_dense_formulas(x64, network):
  z, e = jnp.asarray(network.z), jnp.asarray(network.z @ network.w.T)
  graph = network.graph
  ones = np.ones((1, NODES))
  for kind in outcomes.OUTCOMES:
    config = OutcomeConfig(kind, **CONSTANTS, noise=0)
    expected = network.mean(kind, network.z)
    got = outcomes.mean_outcome(config, graph, z, e)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    got = outcomes.simulate_outcome(jax.random.key(0), config, graph, z, e)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    effect = (network.mean(kind, ones) - network.mean(kind, 0 * ones)).mean()
    np.testing.assert_allclose(outcomes.true_gate(config, graph), effect, rtol=1e-12)
  diagonal = np.diag(network.w @ network.w)
  np.testing.assert_allclose(outcomes.return_weight(graph), diagonal, atol=1e-12)


def test_noise_is_fresh_and_of_the_size_asked_for(network):
  """4,000 draws a stage: means within 4.5 sd, deviations within 4.5 / sqrt(8000) of their own."""
  draws, noise = 4000, 0.1
  graph = network.graph
  z = jnp.asarray(network.z, jnp.float32)
  e = jnp.asarray(network.z @ network.w.T, jnp.float32)
  for kind in ("linear", "multiplicative"):
    config = OutcomeConfig(kind, **CONSTANTS, noise=noise)
    keys = jax.random.split(jax.random.key(1), draws)
    draw = jax.vmap(outcomes.simulate_outcome, (0, None, None, None, None))
    y = jax.jit(draw, static_argnums=1)(keys, config, graph, z, e)
    assert y.dtype == jnp.float32
    y = np.asarray(y, np.float64)[:, :, :2]
    mean = network.mean(kind, network.z)[:, :2]
    size = noise * (np.abs(mean) if kind == "multiplicative" else np.ones_like(mean))
    standard = (y - mean) / size
    assert np.abs(standard.mean(axis=0)).max() < 4.5 / np.sqrt(draws)
    assert np.abs(standard.std(axis=0) - 1).max() < 4.5 / np.sqrt(2 * draws)
    # Units and stages are independent of each other.
    correlation = np.corrcoef(standard.reshape(draws, -1).T) - np.eye(6)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(draws)


def test_linear_models_as_operators(x64, network):
  a, b, c, r = CONSTANTS.values()
  for kind, gamma in (
    ("linear", c * network.w),
    ("two_hop", c * network.w + r * network.second),
  ):
    config = OutcomeConfig(kind, **CONSTANTS, noise=0.2)
    model = outcomes.as_linear(config, network.graph, network.second_graph)
    np.testing.assert_allclose(dense(model.spillover), gamma, atol=1e-12)
    assert np.all(np.diff(model.spillover.receivers) >= 0)
    np.testing.assert_array_equal(model.intercept, np.full(NODES, a))
    np.testing.assert_array_equal(model.direct, np.full(NODES, b))
    assert float(model.noise_sd) == 0.2
    effect = (b + gamma.sum(axis=1)).mean()
    np.testing.assert_allclose(interference.total_effect(model), effect, rtol=1e-12)
  with pytest.raises(ValueError, match="'square' is not linear"):
    outcomes.as_linear(OutcomeConfig("square"), network.graph, network.second_graph)


def test_growing_graphs_are_row_means_that_keep_their_edges(x64, network):
  stages = 4
  draw = jax.jit(outcomes.draw_dynamic_graphs, static_argnums=(2, 3))
  graphs = jax.device_get(draw(jax.random.key(3), network.graph, stages, 2))
  assert graphs.weights.shape == (stages, network.graph.weights.size + 2 * stages * NODES // 2 * 2)
  upper = set(np.argsort(-network.degree, kind="stable")[: NODES // 2])
  present = network.adjacency
  for leaves in zip(graphs.senders, graphs.receivers, graphs.weights, strict=True):
    graph = Graph(*leaves, NODES)
    matrix = dense(graph)
    assert np.all(np.diff(graph.receivers) >= 0)
    before, present = present, (matrix > 0).astype(float)
    np.testing.assert_array_equal(present, present.T)
    assert not np.diag(present).any()
    assert np.all(present >= before)
    assert present.sum() > before.sum()
    # The mean over neighbours, each once.
    np.testing.assert_allclose(matrix, present / present.sum(axis=1, keepdims=True), atol=1e-12)
    added = np.argwhere(np.triu(present - before))
    assert all(upper & {a, b} for a, b in added)


def test_new_neighbours_come_in_proportion_to_degree(network):
  """Of a lower node's possible new neighbours i, each joins with 1 - (1 - d / sum d)^5, alone.

  The number of new edges of a lower node is so a binomial one, over its upper non-neighbours;
  means over 600 draws are within 4.5 standard deviations for all 15 nodes.
  """
  draws = 600
  order = np.argsort(-network.degree, kind="stable")
  upper, lower = order[: NODES // 2], order[NODES // 2 :]
  keys = jax.random.split(jax.random.key(7), draws)
  graph = network.graph

  def degrees(key):
    grown = outcomes.draw_dynamic_graphs(key, graph, 1)
    present = (grown.weights[0] > 0).astype(jnp.int32)
    return jax.ops.segment_sum(present, grown.receivers[0], NODES)

  gained = np.asarray(jax.jit(jax.vmap(degrees))(keys)) - network.degree
  candidates = (network.adjacency[np.ix_(lower, upper)] == 0).sum(axis=1)
  chance = 1 - (1 - network.degree[lower] / network.degree.sum()) ** 5
  deviation = np.sqrt(candidates * chance * (1 - chance) / draws)
  error = (gained[:, lower].mean(axis=0) - candidates * chance) / deviation
  assert np.abs(error).max() < 4.5
  assert gained[:, upper].mean() > 2 * gained[:, lower].mean()


def test_outcomes_refuse_what_does_not_fit(network):
  with pytest.raises(ValueError, match="'cubic'; expected one of linear, square"):
    OutcomeConfig("cubic")
  for noise in (-0.1, float("nan")):
    with pytest.raises(ValueError, match="expected a standard deviation"):
      OutcomeConfig(noise=noise)
  z = jnp.asarray(network.z)
  for bad in (z[:1], z[:, :-1]):
    with pytest.raises(ValueError, match=r"expected \[stages, 30\] for both"):
      outcomes.mean_outcome(OutcomeConfig(), network.graph, z, bad)
  with pytest.raises(ValueError, match=r"expected \[stages, 30\] for both"):
    outcomes.mean_outcome(OutcomeConfig(), network.graph, z[:, :-1], z[:, :-1])
