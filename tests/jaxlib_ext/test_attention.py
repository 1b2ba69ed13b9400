"""Attention against NumPy in float64: values, gradients, dead slots, pages, compiles, kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from jaxlib_ext import attention
from jaxlib_ext.attention import reference
from jaxlib_ext.attention.rope import rotation

O_BAR, LSE_BAR = 5e-6, 1e-5


@pytest.fixture(autouse=True)
def highest_precision():
  with jax.default_matmul_precision("highest"):
    yield


def normal(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def int32(values):
  return np.asarray(values, np.int32)


def close(state, expected, o_bar=O_BAR, lse_bar=LSE_BAR):
  """o and lse within the bars, and the same rows empty."""
  o, lse = (np.asarray(x, np.float64) for x in state)
  assert np.array_equal(np.isneginf(lse), np.isneginf(expected[1]))
  assert not o[np.isneginf(lse)].any()
  some = np.isfinite(expected[1])
  np.testing.assert_allclose(o, expected[0], rtol=0, atol=o_bar)
  np.testing.assert_allclose(lse[some], expected[1][some], rtol=0, atol=lse_bar)


# B, T, S, H, K, D, Dv, options
FLASH = [
  (8, 129, 129, 8, 2, 64, 64, {}),
  (4, 7, 513, 12, 4, 80, 80, {"window": 64}),
  (4, 64, 64, 14, 2, 96, 32, {"soft_cap": 5.0}),
  (6, 1, 129, 8, 1, 128, 128, {"causal": False}),
  (2, 513, 513, 1, 1, 32, 32, {"window": 100, "soft_cap": 20.0}),
  (4, 64, 7, 8, 2, 192, 128, {"scale": 0.3}),
  (3, 129, 64, 2, 2, 40, 40, {"causal": False, "window": 9}),
  (8, 7, 1, 8, 1, 32, 32, {}),
  (2, 0, 7, 8, 2, 32, 32, {}),
  (2, 7, 0, 8, 2, 32, 32, {}),
]


def draw_flash(case, seed):
  """Arrays of a case, with lengths of every kind: none, one, all, and in between."""
  batch, num_queries, num_keys, heads, kv_heads, size, value_size, _ = case
  rng = np.random.default_rng(seed)
  q = normal(rng, batch, num_queries, heads, size)
  k, v = (normal(rng, batch, num_keys, kv_heads, d) for d in (size, value_size))
  q_len = rng.integers(0, num_queries + 1, batch)
  kv_len = rng.integers(0, num_keys + 1, batch)
  q_len[0], kv_len[0] = num_queries, num_keys
  if batch > 2:
    kv_len[1], q_len[2] = min(1, num_keys), 0
  return q, k, v, int32(q_len), int32(kv_len)


@pytest.mark.parametrize("case", FLASH, ids=lambda c: "x".join(map(str, c[:7])))
def test_flash_is_attention(case):
  run = jax.jit(functools.partial(attention.flash_attention, return_lse=True, **case[-1]))
  for seed in range(3):
    arrays = draw_flash(case, seed)
    close(run(*arrays), reference.flash(*arrays, **case[-1]))


def test_flash_takes_hard_scores_and_constant_keys():
  case = FLASH[0]
  q, k, v, *lengths = draw_flash(case, 7)
  run = jax.jit(functools.partial(attention.flash_attention, return_lse=True))
  # Scores near 100 are known to 1e-5 only, a rounding of float32; so is all that comes of them.
  hard = 30 * q
  scores = 30 * np.abs(np.einsum("bthd,bshd->bhts", q, np.repeat(k, 4, axis=2))).max() / 8
  bar = 2 * np.finfo(np.float32).eps * scores
  close(run(hard, k, v, *lengths), reference.flash(hard, k, v, *lengths), 4 * bar, bar)
  constant = np.ones_like(k)
  close(run(q, constant, v, *lengths), reference.flash(q, constant, v, *lengths))


def test_flash_offsets_and_segments():
  rng = np.random.default_rng(0)
  q, k, v = normal(rng, 3, 40, 4, 32), normal(rng, 3, 150, 2, 32), normal(rng, 3, 150, 2, 32)
  options = {
    "q_offset": int32([5, 110, -20]),
    "q_segment": int32(rng.integers(-1, 3, (3, 40))),
    "kv_segment": int32(rng.integers(-1, 3, (3, 150))),
  }
  lengths = int32([40, 31, 40]), int32([150, 149, 60])
  state = attention.flash_attention(q, k, v, *lengths, return_lse=True, **options)
  close(state, reference.flash(q, k, v, *lengths, **options))


def test_bfloat16_is_rounded_once():
  case = (4, 64, 129, 8, 2, 64, 64, {})
  q, k, v, *lengths = draw_flash(case, 3)
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
  o = attention.flash_attention(q, k, v, *lengths)
  assert o.dtype == jnp.bfloat16
  exact = reference.flash(*(np.asarray(x, np.float64) for x in (q, k, v)), *lengths)[0]
  rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
  error = np.abs(np.asarray(o, np.float64) - rounded)
  ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(rounded), 1e-30))) - 7)
  assert np.mean(error <= 2 * ulp) >= 0.99
  assert error.max() <= 1.6e-2


def test_float64_stays_float64(x64):
  case = (2, 20, 30, 4, 2, 16, 16, {})
  q, k, v, *lengths = (jnp.asarray(x) for x in draw_flash(case, 3))
  q, k, v = (x.astype(jnp.float64) for x in (q, k, v))
  state = attention.flash_attention(q, k, v, *lengths, return_lse=True)
  assert state.o.dtype == jnp.float64
  close(state, reference.flash(*map(np.asarray, (q, k, v, *lengths))), 1e-14, 1e-14)


def test_flash_never_holds_queries_times_keys():
  size, heads = 4096, 8
  q = jax.ShapeDtypeStruct((1, size, heads, 64), jnp.float32)
  k = jax.ShapeDtypeStruct((1, size, 2, 64), jnp.float32)
  compiled = jax.jit(attention.flash_attention).lower(q, k, k).compile()
  assert compiled.memory_analysis().temp_size_in_bytes <= 0.05 * heads * size * size * 4


# --- Pages ---------------------------------------------------------------------------------------

# P, M, H, K, D, Dv, lengths (q_len, kv_len) of the sequences, options
PAGED = [
  (16, 9, 8, 2, 64, 64, [(1, 130), (5, 5), (0, 0), (40, 144), (3, 17)], {}),
  (1, 30, 12, 4, 32, 32, [(1, 30), (7, 7), (1, 0), (2, 1)], {"window": 5}),
  (8, 20, 14, 2, 80, 48, [(64, 129), (1, 160), (1, 1)], {"soft_cap": 3.0}),
  (64, 3, 8, 1, 96, 96, [(129, 190), (1, 64), (1, 65)], {}),
  (16, 4, 4, 4, 128, 128, [(7, 64), (5, 3)], {"causal": False}),
]
ids_paged = pytest.mark.parametrize("case", PAGED, ids=lambda c: "x".join(map(str, c[:6])))


def draw_paged(case, seed=0, num_pages=50, spare=3):
  """Packed queries with some of no sequence behind them, pages, tables and lengths."""
  page_size, width, heads, kv_heads, size, value_size, lengths, _ = case
  rng = np.random.default_rng(seed)
  q_len, kv_len = np.array(lengths).T
  cu_q_len = int32(np.r_[0, np.cumsum(q_len)])
  q = normal(rng, cu_q_len[-1] + spare, heads, size)
  k, v = (normal(rng, num_pages, page_size, kv_heads, d) for d in (size, value_size))
  table = int32(rng.integers(0, num_pages, (len(lengths), width)))
  return q, k, v, table, int32(kv_len), cu_q_len


@ids_paged
def test_ragged_is_attention_over_gathered_pages(case):
  arrays = draw_paged(case)
  count = len(case[6])
  for num_seqs in (count, count - 1):
    state = attention.ragged_paged_attention(*arrays, num_seqs, return_lse=True, **case[-1])
    close(state, reference.ragged(*arrays, num_seqs, **case[-1]))


@ids_paged
def test_decode_over_pages_and_dense(case):
  _, k, v, table, kv_len, _ = draw_paged(case)
  rows, num_queries = len(kv_len), 2
  q = normal(np.random.default_rng(1), rows, num_queries, case[2], case[4])
  cu_q_len = int32(num_queries * np.arange(rows + 1))
  flat = q.reshape(-1, *q.shape[2:])
  expected = reference.ragged(flat, k, v, table, kv_len, cu_q_len, rows, **case[-1])
  expected = [x.reshape(rows, num_queries, *x.shape[1:]) for x in expected]
  options = {"return_lse": True, **case[-1]}
  close(attention.decode_attention(q, k, v, kv_len, page_table=table, **options), expected)
  dense = [x[table].reshape(rows, -1, *x.shape[2:]) for x in (k, v)]
  close(attention.decode_attention(q, *dense, kv_len, **options), expected)


def test_a_sequence_is_alone_in_a_batch():
  case = PAGED[0]
  q, k, v, table, kv_len, cu_q_len = draw_paged(case)
  run = functools.partial(attention.ragged_paged_attention, return_lse=True, chunk_size=8)
  together = run(q, k, v, table, kv_len, cu_q_len)
  for r in range(len(kv_len)):
    first, end = cu_q_len[r], cu_q_len[r + 1]
    if first == end:
      continue
    # Alone in an arena of the same size: the shapes that were compiled.
    alone_q = np.zeros_like(q)
    alone_q[: end - first] = q[first:end]
    starts = np.full_like(cu_q_len, end - first)
    starts[0] = 0
    rows = [r] + [0] * (len(kv_len) - 1)
    alone = run(alone_q, k, v, table[rows], kv_len[rows], starts, 1)
    for x, y in zip(together, alone, strict=True):
      assert np.array_equal(x[first:end], y[: end - first])


def test_a_row_is_alone_in_dense_attention():
  q, k, v, *lengths = draw_flash(FLASH[0], 5)
  flash = attention.flash_attention(q, k, v, *lengths)
  decode = attention.decode_attention(q[:, :3], k, v, lengths[1])
  for b in range(3):
    row = slice(b, b + 1)
    alone = attention.flash_attention(q[row], k[row], v[row], *(x[row] for x in lengths))
    # Other shapes are other programs, whose products may be summed in another order.
    np.testing.assert_allclose(flash[row], alone, atol=2e-6)
    alone = attention.decode_attention(q[row, :3], k[row], v[row], lengths[1][row])
    np.testing.assert_allclose(decode[row], alone, atol=2e-6)


def test_where_pages_lie_does_not_matter():
  q, k, v, table, kv_len, cu_q_len = draw_paged(PAGED[0], num_pages=45)
  run = functools.partial(attention.ragged_paged_attention, chunk_size=8)
  before = run(q, k, v, table, kv_len, cu_q_len)
  order = np.random.default_rng(1).permutation(len(k))
  moved_k, moved_v = np.empty_like(k), np.empty_like(v)
  moved_k[order], moved_v[order] = k, v
  moved_table = int32(order)[table]
  assert np.array_equal(before, run(q, moved_k, moved_v, moved_table, kv_len, cu_q_len))
  # One page for each entry of the table, in place of shared ones.
  own = [x[table].reshape(-1, *x.shape[1:]) for x in (k, v)]
  own_table = int32(np.arange(table.size)).reshape(table.shape)
  assert np.array_equal(before, run(q, *own, own_table, kv_len, cu_q_len))
  # Halves of pages.
  halves = [x.reshape(-1, 8, *x.shape[2:]) for x in (k, v)]
  half_table = (2 * table[..., None] + int32([[[0, 1]]])).reshape(len(table), -1)
  np.testing.assert_allclose(before, run(q, *halves, half_table, kv_len, cu_q_len), atol=1e-6)


def test_update_writes_slots_in_place():
  rng = np.random.default_rng(0)
  k, v = normal(rng, 5, 4, 2, 8), normal(rng, 5, 4, 2, 6)
  new_k, new_v = normal(rng, 4, 2, 8), normal(rng, 4, 2, 6)
  slots = int32([3, -1, 19, 8])
  given = jnp.array(k)
  k_pages, v_pages = attention.update_kv_pages(given, jnp.array(v), new_k, new_v, slots)
  assert given.is_deleted()
  for pages, old, new in ((k_pages, k, new_k), (v_pages, v, new_v)):
    expected = old.reshape(20, 2, -1).copy()
    expected[[3, 19, 8]] = new[[0, 2, 3]]
    assert np.array_equal(pages, expected.reshape(pages.shape))


# --- Dead slots ----------------------------------------------------------------------------------


def test_dead_slots_of_dense_keys_are_not_read():
  q, k, v, q_len, kv_len = draw_flash(FLASH[0], 2)
  dead_k = np.arange(k.shape[1])[None] >= kv_len[:, None]
  dead_q = np.arange(q.shape[1])[None] >= q_len[:, None]
  poisoned = [np.where(d[..., None, None], np.nan, x) for d, x in
              ((dead_q, q), (dead_k, k), (dead_k, v))]  # fmt: skip

  def run(q, k, v):
    o, lse = attention.flash_attention(q, k, v, q_len, kv_len, return_lse=True)
    return jnp.sum(o**2) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0)), (o, lse)

  graded = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))
  clean, dirty = graded(q, k, v), graded(*poisoned)
  assert np.isfinite(dirty[0][1][0]).all()
  for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
    assert np.array_equal(x, y)
  dq, dk, _ = dirty[1]
  assert not np.asarray(dq)[dead_q].any()
  assert not np.asarray(dk)[dead_k].any()


def poison_pages(k, v, table, kv_len, kept_len=None):
  """NaN in all that is not in use: pages of no table, slots behind a length; wild table tails."""
  page_size = k.shape[1]
  live = np.zeros(k.shape[:2], bool)
  table = table.copy()
  for r, length in enumerate(kv_len):
    slots = np.arange(table.shape[1] * page_size).reshape(-1, page_size)
    used = slots < length
    if kept_len is not None:
      used &= np.arange(page_size) < kept_len[r][:, None]
    for m in range(table.shape[1]):
      if used[m].any():
        live[table[r, m]] |= used[m]
      elif slots[m, 0] >= length:
        table[r, m] = [-5, 10**6, 2**31 - 1][m % 3]
  k, v = (np.where(live[..., None, None], x, np.nan) for x in (k, v))
  return k, v, table


@pytest.mark.parametrize("turn", [None, "key", "query"])
def test_dead_slots_of_pages_are_not_read(turn):
  case = PAGED[0]
  q, k, v, table, kv_len, cu_q_len = draw_paged(case, num_pages=60)
  # Each page once: a slot that one sequence may not read is no other's.
  table = int32(np.random.default_rng(5).permutation(60)[:45]).reshape(table.shape)
  options, kept_len = {}, None
  run = attention.ragged_paged_attention
  if turn:
    rng = np.random.default_rng(6)
    kept_len = int32(rng.integers(0, 17, table.shape))
    rope = attention.Rope.from_theta(1e4, 64)
    delta = int32(rng.integers(-99, 99, table.shape))
    run = attention.packet_attention
    options = {"rope": rope, "kept_len": kept_len, "turn": turn, "raw_keys": turn == "key"}
  # NaN queries of no sequence.
  dirty_q = q.copy()
  dirty_q[cu_q_len[-1] :] = np.nan
  dirty_k, dirty_v, dirty_table = poison_pages(k, v, table, kv_len, kept_len)
  extra = [delta] if turn else []
  clean = run(q, k, v, table, *extra, kv_len, cu_q_len, **options)
  dirty = run(dirty_q, dirty_k, dirty_v, dirty_table, *extra, kv_len, cu_q_len, **options)
  assert np.isfinite(dirty).all()
  assert np.array_equal(clean, dirty)


# --- States --------------------------------------------------------------------------------------


def test_merge_is_a_commutative_monoid():
  rng = np.random.default_rng(0)
  empty = rng.random((3, 50)) < 0.3
  lse = np.where(empty, -np.inf, 20 * normal(rng, 3, 50)).astype(np.float32)
  o = np.where(empty[..., None], 0, normal(rng, 3, 50, 8)).astype(np.float32)
  a, b, c = (attention.AttnState(jnp.asarray(o[i]), jnp.asarray(lse[i])) for i in range(3))
  merge = jax.jit(attention.merge)
  nothing = attention.AttnState(jnp.zeros_like(a.o), jnp.full_like(a.lse, -jnp.inf))

  def same(x, y):
    return all(np.array_equal(i, j) for i, j in zip(x, y, strict=True))

  assert same(merge(a, nothing), a)
  assert same(merge(nothing, a), a)
  assert same(merge(nothing, nothing), nothing)
  assert same(merge(a, b), merge(b, a))
  left, right = merge(merge(a, b), c), merge(a, merge(b, c))
  np.testing.assert_allclose(left.o, right.o, atol=1e-6)
  np.testing.assert_allclose(left.lse, right.lse, rtol=1e-6)


def test_merged_parts_are_the_whole():
  rng = np.random.default_rng(1)
  q, k, v = normal(rng, 2, 5, 4, 32), normal(rng, 2, 200, 2, 32), normal(rng, 2, 200, 2, 32)
  whole = attention.flash_attention(q, k, v, causal=False, return_lse=True)
  part = jax.jit(functools.partial(attention.flash_attention, causal=False, return_lse=True))
  for count in (2, 7, 64):
    owner = int32(rng.integers(0, count, (2, 200)))
    own = [
      part(q, k, v, q_segment=np.full((2, 5), i, np.int32), kv_segment=owner) for i in range(count)
    ]
    stacked = attention.merge_states(*(jnp.stack(x, axis=-2 + i) for i, x in
                                       enumerate(zip(*own, strict=True))))  # fmt: skip
    one_by_one = functools.reduce(attention.merge, own)
    for state in (stacked, one_by_one):
      np.testing.assert_allclose(state.o, whole.o, atol=2e-6)
      np.testing.assert_allclose(state.lse, whole.lse, atol=2e-6)


def test_no_states_with_keys_merge_to_nothing():
  o, lse = attention.merge_states(jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf))
  assert not o.any()
  assert np.isneginf(lse).all()


# --- Packets -------------------------------------------------------------------------------------

PACKET = (16, 9, 8, 2, 64, 64, [(1, 130), (5, 5), (0, 0), (20, 144), (3, 17)], {})


@pytest.mark.parametrize("turn", ["query", "key"])
@pytest.mark.parametrize("raw_keys", [False, True])
def test_packets_are_attention_over_turned_keys(turn, raw_keys):
  arrays = draw_paged(PACKET)
  rng = np.random.default_rng(3)
  rope = attention.Rope.from_theta(5e5, 64)
  kept_len = int32(rng.integers(0, 17, arrays[3].shape))
  for reach, bar in ((16_384, 2e-5), (131_072, 1e-4)):
    delta = int32(rng.integers(-reach, reach + 1, arrays[3].shape))
    options = {"kept_len": kept_len, "raw_keys": raw_keys}
    state = attention.packet_attention(
      *arrays[:4], delta, *arrays[4:], rope=rope, turn=turn, return_lse=True, **options
    )
    expected = reference.ragged(
      *arrays, len(PACKET[6]), delta=delta, frequencies=rope.frequencies, **options
    )
    close(state, expected, bar, 10 * bar)


@pytest.mark.parametrize("turn", ["query", "key"])
def test_packets_that_did_not_move_are_pages(turn):
  arrays = draw_paged(PACKET)
  moved = attention.packet_attention(
    *arrays[:4], np.zeros_like(arrays[3]), *arrays[4:],
    rope=attention.Rope.from_theta(1e4, 64), turn=turn,
  )  # fmt: skip
  assert np.array_equal(moved, attention.ragged_paged_attention(*arrays))


def test_angles_are_exact_at_any_position():
  rope = attention.Rope.from_theta(1e6, 128)
  delta = int32([0, 1, -1, 4095, 131_072, -131_071, 524_287, -524_287])
  exact = delta[:, None] * np.array(rope.frequencies, np.longdouble)[None]
  cos, sin = rotation(jnp.asarray(delta), rope, jnp.float32)
  np.testing.assert_allclose(cos, np.cos(exact).astype(np.float64), atol=5e-7)
  np.testing.assert_allclose(sin, np.sin(exact).astype(np.float64), atol=5e-7)


def test_rotations_are_a_group():
  rope = attention.Rope.from_theta(1e4, 48)  # of 64 dimensions
  x = normal(np.random.default_rng(0), 6, 3, 64)
  a, b = (int32(np.random.default_rng(s).integers(-999, 999, (6, 1))) for s in (1, 2))
  assert np.array_equal(attention.rotate(x, 0 * a, rope), x)
  turned = attention.rotate(attention.rotate(x, a, rope), b, rope)
  np.testing.assert_allclose(turned, attention.rotate(x, a + b, rope), atol=2e-6)
  expected = reference.rotate(x, a, rope.frequencies)
  np.testing.assert_allclose(attention.rotate(x, a, rope), expected, atol=2e-6)


# --- Shared prefixes -----------------------------------------------------------------------------


def draw_tree(rows=2, candidates=3, num_queries=2, prefix=70, suffix=9):
  rng = np.random.default_rng(0)
  q = normal(rng, rows, candidates, num_queries, 8, 32)
  prefix_k, prefix_v = (normal(rng, rows, prefix, 2, 32) for _ in "kv")
  suffix_k, suffix_v = (normal(rng, rows, candidates, suffix, 2, 32) for _ in "kv")
  prefix_len = int32([prefix, 11])[:rows]
  suffix_len = int32(rng.integers(num_queries, suffix + 1, (rows, candidates)))
  return q, prefix_k, prefix_v, prefix_len, suffix_k, suffix_v, suffix_len


def flattened(tree, r, c):
  """Keys and values of one candidate in a row."""
  _, prefix_k, prefix_v, prefix_len, suffix_k, suffix_v, suffix_len = tree
  return [
    np.concatenate([x[r, : prefix_len[r]], y[r, c, : suffix_len[r, c]]])[None]
    for x, y in ((prefix_k, suffix_k), (prefix_v, suffix_v))
  ]


def test_shared_prefix_is_separate_decodes():
  tree = draw_tree()
  state = attention.shared_prefix_attention(*tree, return_lse=True)
  for r, c in np.ndindex(2, 3):
    k, v = flattened(tree, r, c)
    ends = int32([2]), int32([k.shape[1]])
    expected = reference.flash(tree[0][r, c][None], k, v, *ends)
    close((state.o[r, c][None], state.lse[r, c][None]), expected, 2e-6)


def test_shared_prefix_over_pages():
  tree = draw_tree(prefix=64, suffix=8)
  q, prefix_k, prefix_v, prefix_len, suffix_k, suffix_v, suffix_len = tree
  pages = [x.reshape(-1, 8, 2, 32) for x in (prefix_k, prefix_v, suffix_k, suffix_v)]
  paged = attention.shared_prefix_attention(
    q, *pages[:2], prefix_len, *pages[2:], suffix_len,
    prefix_table=int32(np.arange(16)).reshape(2, 8),
    suffix_table=int32(np.arange(6)).reshape(2, 3, 1),
  )  # fmt: skip
  np.testing.assert_allclose(paged, attention.shared_prefix_attention(*tree), atol=2e-6)


def test_three_levels_are_flat():
  q, k0, v0, len0, k1, v1, len1 = draw_tree(rows=1, candidates=4)
  k2, v2 = k1[:, ::-1], v1[:, ::-1]  # a middle level of its own, for each candidate
  len2 = int32(len1[:, ::-1])
  top = attention.decode_attention(
    q.reshape(1, 8, 8, 32), k0, v0, len0, causal=False, return_lse=True
  )
  below = attention.shared_prefix_attention(
    q.reshape(4, 1, 2, 8, 32), k2[0], v2[0], len2[0], *(x.reshape(4, 1, *x.shape[2:]) for x in
    (k1, v1)), len1.reshape(4, 1), return_lse=True,
  )  # fmt: skip
  top = attention.AttnState(top.o.reshape(below.o.shape), top.lse.reshape(below.lse.shape))
  o = attention.finalize(attention.merge(top, below), jnp.float32)
  for c in range(4):
    parts = ((k0, k2, k1), (v0, v2, v1))
    k, v = (
      np.concatenate([x[0, : len0[0]], y[0, c, : len2[0, c]], z[0, c, : len1[0, c]]])[None]
      for x, y, z in parts
    )
    flat = attention.decode_attention(q[:, c], k, v, int32([k.shape[1]]))
    np.testing.assert_allclose(o[c], flat, atol=2e-6)


@pytest.mark.parametrize("with_suffix", [False, True])
def test_verify_tokens_see_the_cache_and_each_other(with_suffix):
  q, prefix_k, prefix_v, prefix_len, suffix_k, suffix_v, suffix_len = draw_tree()
  rng = np.random.default_rng(9)
  own_k, own_v = normal(rng, 2, 3, 2, 2, 32), normal(rng, 2, 3, 2, 2, 32)
  options = {}
  if with_suffix:
    options = {"suffix_k": suffix_k, "suffix_v": suffix_v, "suffix_len": suffix_len}
  o = attention.verify_attention(q, prefix_k, prefix_v, prefix_len, own_k, own_v, **options)
  for r, c in np.ndindex(2, 3):
    end = suffix_len[r, c] if with_suffix else 0
    k, v = (
      np.concatenate([x[r, : prefix_len[r]], y[r, c, :end], z[r, c]])
      for x, y, z in ((prefix_k, suffix_k, own_k), (prefix_v, suffix_v, own_v))
    )
    seen = np.tri(2, len(k), len(k) - 2, dtype=bool)
    expected = reference.attend(q[r, c], k, v, seen)
    np.testing.assert_allclose(o[r, c], expected[0], atol=2e-6)


# --- Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "options", [{}, {"window": 20, "soft_cap": 2.0}, {"causal": False}], ids=str
)
def test_gradients_are_those_of_dense_attention(options):
  case = (3, 150, 140, 4, 2, 32, 24, options)
  q, k, v, q_len, kv_len = draw_flash(case, 4)
  rng = np.random.default_rng(5)
  do, dlse = normal(rng, 3, 150, 4, 24), normal(rng, 3, 150, 4)

  def loss(q, k, v):
    o, lse = attention.flash_attention(q, k, v, q_len, kv_len, return_lse=True, **options)
    return jnp.sum(o * do) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) * dlse)

  found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
  options = dict(options)
  masked = {name: options.pop(name) for name in ("causal", "window") if name in options}
  for b in range(3):
    seen = reference.mask(150, 140, int(q_len[b]), int(kv_len[b]), **masked)
    some = seen.any(axis=1)[:, None]
    expected = reference.flash_gradients(
      q[b], k[b], v[b], seen, do[b] * some[..., None], dlse[b] * some, **options
    )
    for x, y in zip(found, expected, strict=True):
      np.testing.assert_allclose(x[b], y, rtol=0, atol=1e-5 * max(np.abs(y).max(), 1))


def test_gradients_against_finite_differences_and_under_vmap(x64):
  case = (2, 9, 12, 2, 1, 8, 8, {})
  q, k, v, *lengths = draw_flash(case, 4)
  q, k, v = (jnp.asarray(x, jnp.float64) for x in (q, k, v))

  def run(q, k, v):
    o, lse = attention.flash_attention(q, k, v, *lengths, return_lse=True)
    return o, jnp.where(lse > -jnp.inf, lse, 0)

  check_grads(run, (q, k, v), order=1, modes=["rev"])
  grads = jax.grad(lambda *x: sum(jnp.sum(y**2) for y in run(*x)), argnums=(0, 1, 2))
  stacked = jax.vmap(grads)(*(jnp.stack([x, 2 * x]) for x in (q, k, v)))
  for x, y in zip(stacked, grads(2 * q, 2 * k, 2 * v), strict=True):
    np.testing.assert_allclose(x[1], y, atol=1e-12)


def test_scan_over_layers_with_remat():
  q, k, v, *lengths = draw_flash((2, 9, 9, 2, 2, 8, 8, {}), 4)
  scales = jnp.asarray([0.5, 1.0, 2.0])

  def layer(x, scale):
    return x + attention.flash_attention(scale * x, k, v, *lengths), None

  def loss(scales, unroll):
    x = jnp.asarray(q)
    if unroll:
      for scale in scales:
        x = layer(x, scale)[0]
    else:
      x = jax.lax.scan(jax.checkpoint(layer), x, scales)[0]
    return jnp.sum(x**2)

  found = [jax.grad(loss)(scales, unroll) for unroll in (False, True)]
  np.testing.assert_allclose(*found, rtol=1e-5)


def test_second_derivatives_and_those_over_pages_are_refused():
  q, k, v, *lengths = draw_flash((1, 5, 5, 2, 2, 8, 8, {}), 4)

  def loss(q):
    return jnp.sum(attention.flash_attention(q, k, v, *lengths) ** 2)

  with pytest.raises(NotImplementedError, match="flash_attention has no second derivative"):
    jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2))(q)
  q, k, v, table, kv_len, cu_q_len = draw_paged(PAGED[4])
  with pytest.raises(NotImplementedError, match="attention over pages has no derivative"):
    jax.grad(lambda q: attention.ragged_paged_attention(q, k, v, table, kv_len, cu_q_len).sum())(q)


# --- Compiles, choice and errors -----------------------------------------------------------------


def test_new_lengths_do_not_compile_again():
  traces = {"ragged": 0, "decode": 0, "flash": 0, "packet": 0, "paged decode": 0}

  def counted(name, fn, **options):
    def run(*arrays, **more):
      traces[name] += 1
      return fn(*arrays, **options, **more)

    return jax.jit(run)

  rope = attention.Rope.from_theta(1e4, 32)
  ragged = counted("ragged", attention.ragged_paged_attention)
  packet = counted("packet", attention.packet_attention, rope=rope)
  flash = counted("flash", attention.flash_attention)
  decode = counted("decode", attention.decode_attention)
  paged = counted("paged decode", attention.decode_attention)
  rng = np.random.default_rng(0)
  k = normal(rng, 12, 8, 2, 32)
  q = normal(rng, 20, 4, 32)
  dense = k.reshape(4, 24, 2, 32)
  for _ in range(100):
    table = int32(rng.integers(0, 12, (4, 5)))
    kv_len = int32(rng.integers(0, 25, 4))
    cu_q_len = int32(np.sort(np.r_[0, rng.integers(0, 21, 4)]))
    count = int32(rng.integers(0, 5))
    ragged(q, k, k, table, kv_len, cu_q_len, count)
    packet(q, k, k, table, table, kv_len, cu_q_len, count)
    flash(q.reshape(4, 5, 4, 32), dense, dense, int32(rng.integers(0, 6, 4)), kv_len)
    decode(q[:8].reshape(4, 2, 4, 32), dense, dense, kv_len)
    paged(q[:8].reshape(4, 2, 4, 32), k, k, kv_len, page_table=table)
  assert set(traces.values()) == {1}


def test_explain_says_what_and_why():
  shapes = {"q": (2, 5, 8, 64), "k": (2, 9, 2, 64), "v": (2, 9, 2, 64)}
  choice = attention.explain("flash_attention", shapes, platform="cpu")
  assert choice.implementation == "xla"
  assert choice.reason
  assert choice.blocks["block_q"] > 0
  with pytest.raises(ValueError, match="op is 'flash'; expected one of flash_attention"):
    attention.explain("flash", shapes)
  with pytest.raises(ValueError, match="shapes has no v"):
    attention.explain("flash_attention", {"q": (1, 1, 1, 1), "k": (1, 1, 1, 1)})


GOOD = {"q": (2, 5, 8, 16), "k": (2, 9, 2, 16), "v": (2, 9, 2, 16)}


@pytest.mark.parametrize(
  ("shapes", "options", "message"),
  [
    ({"q": (2, 5, 7, 16)}, {}, "q has 7 heads, k has 2"),
    ({"v": (2, 8, 2, 16)}, {}, r"k is \(2, 9, 2, 16\), v is \(2, 8, 2, 16\)"),
    ({"q": (2, 5, 8, 8)}, {}, "q has a head size of 8, k of 16"),
    ({"q": (3, 5, 8, 16)}, {}, "q has 3 rows, k has 2"),
    ({"q": (5, 8, 16)}, {}, r"q is \(5, 8, 16\)"),
    ({}, {"kv_len": np.array([9, 9])}, r"kv_len is int64 \(2,\); expected int32 \(2,\)"),
    ({}, {"kv_len": int32([9, 10])}, r"kv_len is \[9, 10\]; expected 0..9"),
    ({}, {"window": 0}, "window is 0"),
    ({}, {"soft_cap": 0.0}, "soft_cap is 0.0"),
    ({}, {"scale": float("nan")}, "scale is nan"),
    ({}, {"q_segment": np.zeros((2, 5), np.int32)}, "q_segment is given and kv_segment is not"),
    ({}, {"kv_segment": np.zeros((2, 9), np.int32)}, "kv_segment is given and q_segment is not"),
    ({}, {"implementation": "cuda"}, "implementation is 'cuda'; expected one of None"),
  ],
)
def test_wrong_arguments_of_flash_are_named(shapes, options, message):
  arrays = {name: np.zeros(shape, np.float32) for name, shape in (GOOD | shapes).items()}
  with pytest.raises(ValueError, match=message):
    attention.flash_attention(**arrays, **options)


def test_keys_and_values_of_two_types_are_refused():
  q, k, v = (np.zeros(shape, np.float32) for shape in GOOD.values())
  with pytest.raises(ValueError, match="k is float16, v is float32"):
    attention.flash_attention(q, k.astype(np.float16), v)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"kv_len": int32([130, 5, 0, 145, 17])}, "kv_len has 145, page_table has room for 9 pages of"),
    ({"page_table": int32(np.full((5, 9), 50))}, "page_table names page 50; expected 0..49"),
    ({"page_table": np.zeros((5, 9))}, "page_table is float64"),
    ({"cu_q_len": int32([0, 1, 6, 6, 46, 60])}, "up to 52, the queries in q"),
    ({"cu_q_len": int32([0, 1, 6, 5, 46, 49])}, "that do not fall"),
    ({"num_seqs": 6}, "num_seqs is 6; expected 0..5"),
    ({"chunk_size": 0}, "chunk_size is 0"),
    ({"page_delta": np.zeros((5, 9), np.int32)}, "page_delta is given without rope"),
    (
      {"page_delta": int32(np.full((5, 9), 10**6)), "rope": attention.Rope((1.0,))},
      "page_delta has 1000000; limit 524287",
    ),
    (
      {"page_delta": np.zeros((5, 9), np.int32), "rope": attention.Rope((1.0,) * 33)},
      "rope has 33 frequencies, k_pages a head size of 64",
    ),
  ],
)
def test_wrong_arguments_over_pages_are_named(change, message):
  names = ("q", "k_pages", "v_pages", "page_table", "kv_len", "cu_q_len")
  arrays = dict(zip(names, draw_paged(PAGED[0]), strict=True)) | change
  run = attention.packet_attention if "page_delta" in change else attention.ragged_paged_attention
  with pytest.raises(ValueError, match=message):
    run(**arrays)


def test_checkify_finds_wrong_tables_when_they_run():
  q, k, v, table, kv_len, cu_q_len = draw_paged(PAGED[4])
  run = jax.jit(
    checkify.checkify(functools.partial(attention.ragged_paged_attention, causal=False))
  )
  assert run(q, k, v, table, kv_len, cu_q_len)[0].get() is None
  error, _ = run(q, k, v, table + int32(50), kv_len, cu_q_len)
  with pytest.raises(checkify.JaxRuntimeError, match="names a page that is not there"):
    error.throw()
  error, _ = run(q, k, v, table, kv_len + int32(100), cu_q_len)
  with pytest.raises(checkify.JaxRuntimeError, match="page_table has room for 64"):
    error.throw()


# --- Pallas kernels for TPUs, interpreted --------------------------------------------------------


@pytest.fixture(params=["interpret", "pallas_tpu"])
def kernel(request, capfd):
  """Both interpreters; that of TPUs looks for races and fills what is not written with NaN."""
  if request.param == "interpret":
    yield request.param
    return
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
  ):
    yield request.param
  assert "RACE DETECTED" not in capfd.readouterr().out


KERNEL_FLASH = [
  (3, 70, 129, 8, 2, 64, 64, {}),
  (2, 7, 300, 12, 4, 80, 80, {"window": 64}),
  (2, 64, 64, 14, 2, 96, 32, {"soft_cap": 5.0}),
  (2, 129, 40, 2, 2, 40, 40, {"causal": False, "window": 9}),
  (3, 1, 129, 8, 1, 192, 128, {"scale": 0.3}),
  (2, 0, 7, 8, 2, 32, 32, {}),
  (2, 7, 0, 8, 2, 32, 32, {}),
]


@pytest.mark.parametrize("case", KERNEL_FLASH, ids=lambda c: "x".join(map(str, c[:7])))
def test_the_flash_kernel_is_attention(case, kernel):
  arrays = draw_flash(case, 0)
  state = attention.flash_attention(*arrays, return_lse=True, implementation=kernel, **case[-1])
  close(state, reference.flash(*arrays, **case[-1]))


def test_the_flash_kernel_takes_offsets_segments_and_dead_slots(kernel):
  rng = np.random.default_rng(0)
  q, k, v = normal(rng, 3, 40, 4, 32), normal(rng, 3, 150, 2, 32), normal(rng, 3, 150, 2, 32)
  options = {
    "q_offset": int32([5, 110, -20]),
    "q_segment": int32(rng.integers(-1, 3, (3, 40))),
    "kv_segment": int32(rng.integers(-1, 3, (3, 150))),
  }
  q_len, kv_len = int32([40, 31, 40]), int32([150, 149, 60])
  run = functools.partial(
    attention.flash_attention, return_lse=True, implementation=kernel, **options
  )
  state = run(q, k, v, q_len, kv_len)
  close(state, reference.flash(q, k, v, q_len, kv_len, **options))
  dead_q = (np.arange(40)[None] >= q_len[:, None]) | (options["q_segment"] < 0)
  dead_k = (np.arange(150)[None] >= kv_len[:, None]) | (options["kv_segment"] < 0)
  q, k, v = (np.where(d[..., None, None], np.nan, x) for d, x in
             ((dead_q, q), (dead_k, k), (dead_k, v)))  # fmt: skip
  for x, y in zip(run(q, k, v, q_len, kv_len), state, strict=True):
    assert np.array_equal(x, y)


KERNEL_PAGED = [case for case in PAGED if case[0] % 8 == 0]


@pytest.mark.parametrize("case", KERNEL_PAGED, ids=lambda c: "x".join(map(str, c[:6])))
def test_the_paged_kernel_is_attention_over_gathered_pages(case, kernel):
  arrays = draw_paged(case)
  count = len(case[6])
  options = {"return_lse": True, "implementation": kernel, **case[-1]}
  expected = reference.ragged(*arrays, count - 1, **case[-1])
  close(attention.ragged_paged_attention(*arrays, count - 1, **options), expected)


@pytest.mark.parametrize("raw_keys", [False, True])
def test_the_paged_kernel_turns_packets_and_reads_no_dead_slot(raw_keys, kernel):
  case = PAGED[0]
  q, k, v, table, kv_len, cu_q_len = draw_paged(case, num_pages=60)
  table = int32(np.random.default_rng(5).permutation(60)[:45]).reshape(table.shape)
  rng = np.random.default_rng(6)
  kept_len = int32(rng.integers(0, 17, table.shape))
  # Fewer frequencies than half a head: the rest is not turned.
  rope = attention.Rope.from_theta(1e4, 48)
  delta = int32(rng.integers(-9999, 9999, table.shape))
  run = functools.partial(
    attention.packet_attention,
    rope=rope,
    kept_len=kept_len,
    raw_keys=raw_keys,
    return_lse=True,
    implementation=kernel,
  )
  state = run(q, k, v, table, delta, kv_len, cu_q_len)
  expected = reference.ragged(
    *(q, k, v, table, kv_len, cu_q_len, len(kv_len)),
    delta=delta,
    kept_len=kept_len,
    frequencies=np.array(rope.frequencies),
    raw_keys=raw_keys,
  )
  close(state, expected, 2e-5, 2e-5)
  dirty = q.copy()
  dirty[cu_q_len[-1] :] = np.nan
  k, v, table = poison_pages(k, v, table, kv_len, kept_len)
  for x, y in zip(run(dirty, k, v, table, delta, kv_len, cu_q_len), state, strict=True):
    assert np.array_equal(x, y)


@pytest.mark.parametrize("capacity", [5, 72, 128])
def test_the_paged_kernel_decodes_a_dense_cache_with_its_derivative(capacity, kernel):
  rng = np.random.default_rng(0)
  q, k, v = (normal(rng, 3, n, h, 32) for n, h in ((2, 6), (capacity, 2), (capacity, 2)))
  kv_len = int32([capacity, 1, 0])
  arrays = q, k, v, int32([2, 2, 2]), kv_len

  def run(q, k, v, implementation):
    state = attention.decode_attention(
      q, k, v, kv_len, return_lse=True, implementation=implementation
    )
    return jnp.sum(state.o**2) + jnp.sum(jnp.where(state.lse > -jnp.inf, state.lse, 0)), state

  graded = jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)
  (_, state), found = graded(q, k, v, kernel)
  close(state, reference.flash(*arrays))
  for x, y in zip(found, graded(q, k, v, "xla")[1], strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)


def test_the_kernels_share_prefixes_and_verify(kernel):
  rng = np.random.default_rng(0)
  q = normal(rng, 2, 3, 1, 4, 32)
  prefix = normal(rng, 2, 2, 40, 2, 32)
  suffix = normal(rng, 2, 2, 3, 16, 2, 32)
  own = normal(rng, 2, 2, 3, 1, 2, 32)
  prefix_len, suffix_len = int32([40, 17]), int32([[16, 3, 9], [1, 2, 16]])
  for run in (
    lambda **o: attention.shared_prefix_attention(q, *prefix, prefix_len, *suffix, suffix_len, **o),
    lambda **o: attention.verify_attention(
      *(q, *prefix, prefix_len, *own),
      suffix_k=suffix[0],
      suffix_v=suffix[1],
      suffix_len=suffix_len,
      **o,
    ),
  ):
    found, expected = (run(implementation=name, return_lse=True) for name in (kernel, "xla"))
    for x, y in zip(found, expected, strict=True):
      np.testing.assert_allclose(x, y, atol=2e-6)


def test_the_kernels_round_bfloat16_once(kernel):
  q, k, v, *lengths = draw_flash((3, 64, 129, 8, 2, 64, 64, {}), 3)
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
  wide = [np.asarray(x, np.float64) for x in (q, k, v)]
  pages = [x[:, :128].reshape(3 * 8, 16, 2, 64) for x in (k, v)]
  table = int32(np.arange(24)).reshape(3, 8)
  length = int32([128, 100, 3])
  paged_len = int32([1, 1, 1])
  for o, exact in (
    (
      attention.flash_attention(q, k, v, *lengths, implementation=kernel),
      reference.flash(*wide, *lengths)[0],
    ),
    (
      attention.decode_attention(q[:, :1], *pages, length, page_table=table, implementation=kernel),
      reference.flash(wide[0][:, :1], wide[1][:, :128], wide[2][:, :128], paged_len, length)[0],
    ),
  ):
    assert o.dtype == jnp.bfloat16
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    error = np.abs(np.asarray(o, np.float64) - rounded)
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(rounded), 1e-30))) - 7)
    assert np.mean(error <= 2 * ulp) >= 0.99
    assert error.max() <= 1.6e-2


def test_tpus_have_a_kernel_where_shapes_allow_and_explain_says_so():
  dense = {"q": (2, 64, 8, 64), "k": (2, 512, 2, 64), "v": (2, 512, 2, 64)}
  pages = {"q": (9, 8, 64), "k_pages": (40, 16, 2, 64), "v_pages": (40, 16, 2, 64),
           "page_table": (3, 12)}  # fmt: skip
  for op, shapes in (
    ("flash_attention", dense),
    ("decode_attention", dense | {"q": (2, 1, 8, 64)}),
    ("ragged_paged_attention", pages),
    ("packet_attention", pages),
  ):
    choice = attention.explain(op, shapes, platform="tpu")
    assert choice.implementation == "pallas_tpu"
    assert 0 < choice.vmem_bytes < 16 * 2**20
    assert attention.explain(op, shapes, platform="gpu").implementation == "xla"
  mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
  with jax.set_mesh(mesh):
    assert (
      attention.explain("flash_attention", dense, platform="tpu").implementation == "pallas_tpu"
    )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(axis_sizes=(4,))):
    choice = attention.explain("flash_attention", dense, platform="tpu")
  assert choice.implementation == "xla"
  assert "the mesh has model" in choice.reason


@pytest.mark.parametrize(
  ("op", "change", "message"),
  [
    ("ragged_paged_attention", {"k": (40, 4, 2, 64), "v": (40, 4, 2, 64)}, "pages have 4 slots"),
    ("ragged_paged_attention", {"page_table": (4096, 4096)}, "take 134,217,728 bytes of 943,718"),
    ("ragged_paged_attention", {"k": (9, 4096, 64, 128), "v": (9, 4096, 64, 128)}, "on the chip"),
    ("decode_attention", {"k": (2, 130, 2, 64), "v": (2, 130, 2, 64)}, "the cache has 130 slots"),
  ],
)
def test_what_a_kernel_cannot_is_said_and_xla_serves_it(op, change, message):
  shapes = {"q": (9, 8, 64), "k": (40, 16, 2, 64), "v": (40, 16, 2, 64), "page_table": (3, 12)}
  if op == "decode_attention":
    shapes = {"q": (2, 1, 8, 64)}
  shapes = shapes | change
  with pytest.raises(
    ValueError, match=f"implementation is 'pallas_tpu', and {op} cannot: .*{message}"
  ):
    attention.explain(op, shapes, implementation="pallas_tpu")
  choice = attention.explain(op, shapes, platform="tpu")
  assert choice.implementation == "xla"
  assert message in choice.reason


def test_other_types_and_platforms_are_refused_by_name():
  shapes = {"q": (2, 5, 8, 16), "k": (2, 9, 2, 16), "v": (2, 9, 2, 16)}
  with pytest.raises(ValueError, match="q is float16, k is float16"):
    attention.explain("flash_attention", shapes, dtype=jnp.float16, implementation="interpret")
  with pytest.raises(ValueError, match="'pallas_tpu' on cpu"):
    attention.explain("flash_attention", shapes, implementation="pallas_tpu", platform="cpu")
  with pytest.raises(NotImplementedError, match="no Pallas kernel for GPUs"):
    attention.explain("flash_attention", shapes, implementation="pallas_gpu")
