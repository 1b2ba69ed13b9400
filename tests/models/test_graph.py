"""Graph operators and networks against dense NumPy, eigenvalues and NetworkX."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from numpy.polynomial import chebyshev

from models import graph as graph_lib
from models.graph import ChebConv, Graph, MeanConv, build_gnn, from_edges

N = 12  # node 11 is isolated


@pytest.fixture(scope="module")
def network() -> nx.Graph:
  network = nx.gnm_random_graph(N - 1, 20, seed=3)
  network.add_node(N - 1)
  return network


@pytest.fixture(scope="module")
def adjacency(network) -> np.ndarray:
  return nx.to_numpy_array(network, nodelist=range(N))


def row_mean(adjacency: np.ndarray) -> np.ndarray:
  return adjacency / np.maximum(adjacency.sum(axis=1, keepdims=True), 1)


def graph_of(matrix: np.ndarray, **options) -> Graph:
  """Edges in a random order, so that sorting them is the code's own work."""
  receivers, senders = np.nonzero(matrix)
  order = np.random.default_rng(0).permutation(receivers.size)
  receivers, senders = receivers[order], senders[order]
  return from_edges(senders, receivers, len(matrix), matrix[receivers, senders], **options)


def draw(*shape: int) -> np.ndarray:
  return np.random.default_rng(1).normal(size=shape)


def test_operators_equal_dense_algebra(x64, network, adjacency):
  graph, w = graph_of(adjacency), row_mean(adjacency)
  for x in (draw(N), draw(N, 3)):
    np.testing.assert_allclose(graph_lib.apply(graph, jnp.asarray(x)), w @ x, atol=1e-12)
    transposed = graph_lib.apply_transpose(graph, jnp.asarray(x))
    np.testing.assert_allclose(transposed, w.T @ x, atol=1e-12)
  degrees = [network.degree(node) for node in range(N)]
  np.testing.assert_array_equal(graph_lib.degree(graph), degrees)
  np.testing.assert_allclose(graph_lib.to_sparse(graph).toarray(), w, atol=1e-15)
  _, pull = jax.vjp(lambda x: graph_lib.apply(graph, x), jnp.zeros(N))
  np.testing.assert_allclose(pull(jnp.asarray(draw(N)))[0], w.T @ draw(N), atol=1e-12)


def test_weights_and_repeated_edges(x64):
  senders, receivers, weights = [1, 2, 1, 0], [0, 0, 0, 2], [1.0, 3.0, 2.0, -5.0]
  graph = from_edges(senders, receivers, 3, weights, normalise=False)
  dense = np.array([[0, 3, 3], [0, 0, 0], [-5, 0, 0]])
  np.testing.assert_array_equal(graph_lib.apply(graph, jnp.eye(3)), dense)
  np.testing.assert_array_equal(graph_lib.to_sparse(graph).toarray(), dense)
  normalised = from_edges(senders[:3], receivers[:3], 3, weights[:3])
  np.testing.assert_allclose(graph_lib.apply(normalised, jnp.eye(3))[0], [0, 0.5, 0.5])


def test_compose_is_the_dense_product(x64, adjacency):
  w = row_mean(adjacency)
  other = np.triu(draw(N, N), 3)
  first, second = graph_of(adjacency), graph_of(other, normalise=False)
  for a, b, dense in (
    (first, first, w @ w),
    (first, second, w @ other),
    (second, first, other @ w),
  ):
    product = graph_lib.compose(a, b)
    np.testing.assert_allclose(graph_lib.apply(product, jnp.eye(N)), dense, atol=1e-12)
  two_hop = graph_lib.compose(first, first, zero_diagonal=True)
  dense = w @ w - np.diag(np.diag(w @ w))
  np.testing.assert_allclose(graph_lib.apply(two_hop, jnp.eye(N)), dense, atol=1e-12)
  assert np.all(np.diff(two_hop.receivers) >= 0)
  assert not np.any(two_hop.receivers == two_hop.senders)
  with pytest.raises(ValueError, match="first has 12 nodes and second 3"):
    graph_lib.compose(first, from_edges([0], [1], 3))


def test_padding_changes_no_result(x64, adjacency):
  graph = graph_of(adjacency)
  padded = graph_lib.pad(graph, 64)
  assert padded.senders.shape == padded.receivers.shape == padded.weights.shape == (64,)
  assert np.all(np.diff(padded.receivers) >= 0)
  x = jnp.asarray(draw(N, 2))
  for function in (graph_lib.apply, graph_lib.apply_transpose, graph_lib.mean_basis):
    np.testing.assert_array_equal(function(padded, x), function(graph, x))
  np.testing.assert_array_equal(graph_lib.degree(padded), graph_lib.degree(graph))
  with pytest.raises(ValueError, match=r"num_edges = 3 .* 40 edges"):
    graph_lib.pad(graph, 3)


def test_padding_and_applying_with_a_stage_axis(x64, adjacency):
  other = np.roll(adjacency, 1, axis=0)
  pair = [graph_of(adjacency, normalise=False), graph_of(other, normalise=False)]
  stages = graph_lib.pad(jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair), 50)
  assert stages.weights.shape == (2, 50)
  x = draw(2, N)
  expected = np.stack([adjacency @ x[0], other @ x[1]])
  got = jax.vmap(graph_lib.apply)(stages, jnp.asarray(x))
  np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("lambda_max", [2.0, 1.7])
def test_chebyshev_basis_equals_polynomials_of_the_eigenvalues(x64, adjacency, lambda_max):
  degrees = adjacency.sum(axis=1)
  scale = np.where(degrees > 0, np.maximum(degrees, 1) ** -0.5, 0)
  laplacian = np.eye(N) - scale[:, None] * adjacency * scale
  values, vectors = np.linalg.eigh(2 * laplacian / lambda_max - np.eye(N))
  x = draw(N, 2)
  expected = np.concatenate(
    [vectors * chebyshev.chebval(values, [0] * k + [1]) @ vectors.T @ x for k in range(4)], axis=1
  )
  basis = graph_lib.chebyshev_basis(graph_of(adjacency), jnp.asarray(x), 4, lambda_max)
  np.testing.assert_allclose(basis, expected, atol=1e-10)
  if lambda_max == 2:
    np.testing.assert_array_equal(basis[N - 1, 2:4], 0)  # isolated


def test_a_directed_graph_is_scaled_by_incoming_edges(x64):
  # 0 -> 1 -> 2, 0 -> 2: node 0 has no incoming edge and counts as having one.
  graph = from_edges([0, 1, 0], [1, 2, 2], 3)
  basis = graph_lib.chebyshev_basis(graph, jnp.eye(3), 2)
  expected = -np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]]) / np.sqrt([[1.0], [1.0], [2.0]])
  np.testing.assert_allclose(basis[:, 3:], expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["cheb", "mean"])
def test_network_equals_dense_numpy(x64, adjacency, kind):
  graph, w = graph_of(adjacency), row_mean(adjacency)
  degrees = adjacency.sum(axis=1)
  x = np.stack([np.arange(N) % 2, degrees], axis=1)
  scale = np.maximum(degrees, 1) ** -0.5
  around = w @ x if kind == "mean" else -scale[:, None] * (adjacency @ (scale[:, None] * x))
  inputs = np.concatenate([x, around], axis=1)

  init, basis, apply_fn = build_gnn(kind)
  params = init(jax.random.key(0), 2)
  layers = [jax.tree.map(np.asarray, params["params"][f"Dense_{i}"]) for i in range(3)]
  assert [layer["kernel"].shape for layer in layers] == [(4, 16), (16, 16), (16, 1)]
  h = inputs
  for i, layer in enumerate(layers):
    h = h @ layer["kernel"].astype(float) + layer["bias"].astype(float)
    h = np.maximum(h, 0) if i < 2 else h
  got = basis(graph, jnp.asarray(x))
  np.testing.assert_allclose(got, inputs, atol=1e-12)
  np.testing.assert_allclose(apply_fn(params, got), h[:, 0], atol=1e-6)
  # The output takes both signs, so that its ReLU is seen.
  shifted = jax.tree.map(lambda leaf: leaf, params)
  shifted["params"]["Dense_2"]["bias"] = jnp.asarray(layers[2]["bias"] - np.median(h))
  expected = h[:, 0] - np.median(h)
  assert expected.min() < -1e-3 < 1e-3 < expected.max()
  _, _, rectified = build_gnn(kind, rectify_output=True)
  np.testing.assert_allclose(rectified(shifted, got), np.maximum(expected, 0), atol=1e-6)


@pytest.mark.parametrize("layer", [ChebConv(5, order=3, lambda_max=1.5), MeanConv(5)])
def test_layers_equal_dense_numpy(x64, adjacency, layer):
  graph, x = graph_of(adjacency), draw(N, 2)
  params = layer.init(jax.random.key(1), graph, jnp.asarray(x))
  dense = params["params"]["Dense_0"]
  w = row_mean(adjacency)
  if isinstance(layer, MeanConv):
    terms = [x, w @ x]
  else:
    scale = np.maximum(adjacency.sum(axis=1), 1) ** -0.5
    scaled = (np.eye(N) - scale[:, None] * adjacency * scale) * 2 / 1.5 - np.eye(N)
    terms = [x, scaled @ x, 2 * scaled @ scaled @ x - x]
  expected = np.concatenate(terms, axis=1) @ np.asarray(dense["kernel"], float)
  np.testing.assert_allclose(layer.apply(params, graph, jnp.asarray(x)), expected, atol=1e-6)


def test_float32_stays_float32(x64, adjacency):
  graph = graph_of(adjacency)
  assert graph.weights.dtype == jnp.float64
  init, basis, apply_fn = build_gnn()
  inputs = basis(graph, jnp.ones((N, 2), jnp.float32))
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), init(jax.random.key(0), 2))
  assert inputs.dtype == apply_fn(params, inputs).dtype == jnp.float32
  exact = basis(graph, jnp.ones((N, 2)))
  np.testing.assert_allclose(inputs, exact, rtol=1e-6)


def test_memory_is_that_of_edges_and_nodes():
  nodes, edges = 200_000, 4_000_000
  index = jax.ShapeDtypeStruct((edges,), jnp.int32)
  graph = Graph(index, index, jax.ShapeDtypeStruct((edges,), jnp.float32), nodes)
  x = jax.ShapeDtypeStruct((nodes, 2), jnp.float32)
  compiled = jax.jit(lambda g, x: graph_lib.chebyshev_basis(g, x, 2)).lower(graph, x).compile()
  # A handful of copies of the edges, where N x N float32 would be 160 GB.
  assert compiled.memory_analysis().temp_size_in_bytes < 20 * 4 * (edges + nodes)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (([0, 1], [1], 2), r"shapes \(2,\), \(1,\)"),
    (([0, 5], [1, 0], 2), r"senders\[1\] = 5; expected nodes 0 to 1"),
    (([0, 1], [-1, 0], 2), r"receivers\[0\] = -1"),
    (([0, 1], [1, 0], 2, [1.0, np.nan]), r"weights\[1\] = nan"),
    (([0, 1], [1, 0], 2, [1.0, 0.0]), "row 0 sum to 0"),
  ],
)
def test_bad_edges(arguments, message):
  with pytest.raises(ValueError, match=message):
    from_edges(*arguments)


def test_bad_networks_and_inputs(adjacency):
  graph = graph_of(adjacency)
  with pytest.raises(ValueError, match=r"kind = 'gat'.*cheb, mean"):
    build_gnn("gat")
  with pytest.raises(ValueError, match="hidden = 0"):
    build_gnn(hidden=0)
  with pytest.raises(ValueError, match="order = 0"):
    graph_lib.chebyshev_basis(graph, jnp.ones((N, 1)), 0)
  for basis in (graph_lib.mean_basis, lambda g, x: graph_lib.chebyshev_basis(g, x, 2)):
    with pytest.raises(ValueError, match=r"shape \(4, 2\); expected \[12, D\]"):
      basis(graph, jnp.ones((4, 2)))
