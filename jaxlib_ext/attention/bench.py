"""Times and memory of the attention operations beside `jax.nn.dot_product_attention`.

  python -m jaxlib_ext.attention.bench            # prints the table, about a minute on 2 cores
  python -m jaxlib_ext.attention.bench --write    # and puts it into README.md

Times are the least of 20 runs of each side, taken in turns. Temporary memory is what the compiler
sets aside. tokamax is a peer too where it is installed and runs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_ext import attention

README = pathlib.Path(__file__).with_name("README.md")
MARKS = "<!-- table: made by python -m jaxlib_ext.attention.bench --write -->", "<!-- end table -->"
RUNS = 20


class Case(NamedTuple):
  """What is compared: two functions of the same arrays, and the bar for ours / theirs."""

  what: str
  peer: str
  ours: Callable[..., Any]
  theirs: Callable[..., Any]
  arrays: tuple
  bar: float | None = None


def normal(*shape: int) -> jax.Array:
  return jax.random.normal(jax.random.key(hash(shape) % 1000), shape)


def int32(values: Any) -> jax.Array:
  return jnp.asarray(values, jnp.int32)


def dense(q: jax.Array, k: jax.Array, v: jax.Array, q_len: Any, kv_len: Any, causal: bool) -> Any:
  return jax.nn.dot_product_attention(
    q, k, v, query_seq_lengths=q_len, key_value_seq_lengths=kv_len, is_causal=causal
  )


def decode_cases() -> list[Case]:
  rows, slots = 8, 2048
  q, k, v = normal(rows, 1, 8, 64), normal(rows, slots, 2, 64), normal(rows, slots, 2, 64)
  full = np.full(rows, slots)
  quarter = np.linspace(slots // 8, 3 * slots // 8, rows)
  return [
    Case(
      f"decode, 8 rows x {slots} slots, {name}",
      "jax.nn.dot_product_attention",
      attention.decode_attention,
      lambda q, k, v, n: dense(q, k, v, jnp.ones_like(n), n, False),
      (q, k, v, int32(lengths)),
      bar,
    )
    for name, lengths, bar in (("all full", full, 1.0), ("a quarter full", quarter, 0.6))
  ]


def prefix_cases() -> list[Case]:
  candidates, prefix, suffix, heads, kv_heads, size = 16, 4096, 16, 16, 4, 64
  q = normal(1, candidates, 1, heads, size)
  above = normal(1, prefix, kv_heads, size), normal(1, prefix, kv_heads, size)
  own = [normal(1, candidates, suffix, kv_heads, size) for _ in range(2)]
  lengths = int32([prefix]), int32(np.full((1, candidates), suffix))

  def broadcast(q, pk, pv, plen, sk, sv, slen):
    k, v = (
      jnp.concatenate([jnp.broadcast_to(p, (candidates, *p.shape[1:])), s[0]], axis=1)
      for p, s in ((pk, sk), (pv, sv))
    )
    return dense(q[0], k, v, None, plen + slen[0], False)

  def mapped(q, pk, pv, plen, sk, sv, slen):
    def one(q, sk, sv, slen):
      k, v = (jnp.concatenate([p, s[None]], axis=1) for p, s in ((pk, sk), (pv, sv)))
      return attention.decode_attention(q[None], k, v, plen + slen)

    return jax.vmap(one)(q[0], sk[0], sv[0], slen[0])

  arrays = (q, *above, lengths[0], *own, lengths[1])
  what = f"shared prefix of {prefix:,}, 16 candidates"
  ours = attention.shared_prefix_attention
  return [
    Case(what, "prefix broadcast, jax.nn", ours, broadcast, arrays, 1 / 6),
    Case(what, "jax.vmap of decode_attention", ours, mapped, arrays, 1 / 1.5),
  ]


def packet_cases() -> list[Case]:
  rows, columns, page, heads, kv_heads, size = 8, 32, 64, 8, 2, 64
  pages = [normal(rows * columns, page, kv_heads, size) for _ in range(2)]
  table = int32(np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns))
  delta = int32(np.random.default_rng(1).integers(-999, 999, (rows, columns)))
  arrays = (normal(rows, heads, size), *pages, table, int32(np.full(rows, columns * page)))
  starts, rope = int32(np.arange(rows + 1)), attention.Rope.from_theta(1e4, size)

  def packets(q, k, v, table, kv_len):
    return attention.packet_attention(q, k, v, table, delta, kv_len, starts, rope=rope)

  def plain(q, k, v, table, kv_len):
    return attention.ragged_paged_attention(q, k, v, table, kv_len, starts)

  what = "packets that owe a rotation, 8 rows x 2,048 slots"
  return [Case(what, "the same pages as they are", packets, plain, arrays, 1.15)]


def prefill_cases() -> list[Case]:
  size = 2048
  q, k, v = normal(1, size, 8, 64), normal(1, size, 2, 64), normal(1, size, 2, 64)
  causal = functools.partial(dense, q_len=None, kv_len=None, causal=True)
  cases = [
    Case(
      f"causal prefill of {size:,}",
      "jax.nn.dot_product_attention",
      attention.flash_attention,
      causal,
      (q, k, v),
    )
  ]
  try:
    # Not a dependency.
    tokamax = importlib.import_module("tokamax")
    theirs = functools.partial(tokamax.dot_product_attention, is_causal=True)
    jax.jit(theirs)(q, k, v)
  except Exception as error:
    print(f"tokamax is left out: {type(error).__name__}: {error}")
  else:
    cases.append(Case(cases[0].what, "tokamax", attention.flash_attention, theirs, (q, k, v)))
  return cases


def measure(case: Case) -> tuple[float, float, float, float]:
  """Least milliseconds and MiB of temporaries: `(ours, theirs, our memory, their memory)`."""
  times: list[list[float]] = [[], []]
  compiled, memory = [], []
  for fn in (case.ours, case.theirs):
    compiled.append(jax.jit(lambda *arrays, fn=fn: fn(*arrays)).lower(*case.arrays).compile())
    memory.append(compiled[-1].memory_analysis().temp_size_in_bytes / 2**20)
  difference = [np.asarray(fn(*case.arrays)).reshape(-1) for fn in compiled]
  if "as they are" not in case.peer:
    np.testing.assert_allclose(*difference, atol=1e-5)
  for _ in range(RUNS):
    for kept, fn in zip(times, compiled, strict=True):
      began = time.perf_counter()
      jax.block_until_ready(fn(*case.arrays))
      kept.append(1e3 * (time.perf_counter() - began))
  return min(times[0]), min(times[1]), memory[0], memory[1]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--write", action="store_true", help=f"put the table into {README.name}")
  args = parser.parse_args()
  lines = [
    "| what | beside | ours, ms | theirs, ms | ours / theirs | goal | ours, MiB | theirs, MiB |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for case in (*decode_cases(), *prefix_cases(), *packet_cases(), *prefill_cases()):
    ours, theirs, memory, their_memory = measure(case)
    goal = f"{case.bar:.2f}" if case.bar else "–"
    lines.append(
      f"| {case.what} | {case.peer} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {goal} "
      f"| {memory:.1f} | {their_memory:.1f} |"
    )
    print(lines[-1], flush=True)
  device = jax.devices()[0]
  lines += ["", f"jax {jax.__version__}, {device.device_kind or device.platform}, float32."]
  if args.write:
    head, _, rest = README.read_text().partition(MARKS[0])
    tail = rest.partition(MARKS[1])[2]
    README.write_text("\n".join([head + MARKS[0], *lines, MARKS[1]]) + tail)


if __name__ == "__main__":
  main()
