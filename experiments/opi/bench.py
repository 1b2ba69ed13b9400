"""Speed and memory of optimistic policy iteration beside quantecon and a broadcast formulation.

python experiments/opi/bench.py        # prints a table, writes peers into results.json

The investment model is solved with m = 100 and m = 1, and with m = 100 once more with the
expectation written as QuantEcon's lectures in JAX have it: a product broadcast over (y, z, y', z')
and summed, instead of one matrix product. The random sparse model of 20,000 states is solved beside
`DiscreteDP` of quantecon, compiled by Numba (`pip install quantecon`). Medians of five solves after
one that compiles.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from launch import bench, environment, report

SOLVES = 5
EPSILON = 1e-6


def seconds(solve: Callable[[], Any]) -> dict[str, float]:
  """Seconds of the first solve and the median of the rest."""
  times = []
  for _ in range(1 + SOLVES):
    began = time.perf_counter()
    solve()
    times.append(time.perf_counter() - began)
  return {"first": times[0], "again": float(np.median(times[1:]))}


def _double() -> Any:
  import jax

  jax.config.update("jax_enable_x64", True)
  return jax


def run_investment(arguments: argparse.Namespace, sweeps: int) -> dict[str, float]:
  """The matrix product."""
  del arguments
  jax = _double()
  from algorithms import opi
  from experiments.opi import models, study

  mdp = models.investment()
  epsilon = 2 * study.INVESTMENT_NORM * mdp.discount / (1 - mdp.discount)
  config = opi.OPIConfig(sweeps, epsilon=epsilon, stopping="norm")
  solve = jax.jit(lambda model: opi.solve(model, config).value)
  return seconds(lambda: jax.block_until_ready(solve(mdp)))


def run_broadcast(arguments: argparse.Namespace) -> dict[str, float]:
  """The same loop with the four-way product of the lectures."""
  del arguments
  jax = _double()
  import jax.numpy as jnp

  from experiments.opi import models, study

  partial = models.investment().backup
  reward, transition, discount = partial.args
  num_outputs, num_shocks, _ = reward.shape
  rows, columns = jnp.arange(num_outputs)[:, None], jnp.arange(num_shocks)[None]

  def backup(value: Any) -> Any:
    # value of (y', z') laid along the last two of the axes (y, z, y', z').
    expected = jnp.sum(value[None, None] * transition[None, :, None, :], axis=3)
    return reward + discount * expected

  def policy_backup(policy: Any, value: Any) -> Any:
    expected = jnp.sum(value[policy] * transition[None], axis=2)
    return reward[rows, columns, policy] + discount * expected

  @jax.jit
  def solve() -> Any:
    def unfinished(carry: tuple) -> Any:
      return carry[1] > study.INVESTMENT_NORM

    def body(carry: tuple) -> tuple:
      value, _ = carry
      q = backup(value)
      policy, improved = q.argmax(axis=2), q.max(axis=2)
      error = jnp.max(abs(improved - value))
      swept = jax.lax.fori_loop(0, 99, lambda _, v: policy_backup(policy, v), improved)
      return swept, error

    start = jnp.zeros((num_outputs, num_shocks)), jnp.asarray(jnp.inf)
    return jax.lax.while_loop(unfinished, body, start)[0]

  return seconds(lambda: jax.block_until_ready(solve()))


def _sparse_model(jax: Any) -> Any:
  from experiments.opi import models
  from experiments.opi.config import get_config

  return models.random_sparse(jax.random.key(0), **get_config().sparse)


def run_sparse(arguments: argparse.Namespace) -> dict[str, float]:
  """The random sparse model."""
  del arguments
  jax = _double()
  from algorithms import opi

  mdp = _sparse_model(jax)
  solve = jax.jit(lambda model: opi.solve(model, opi.OPIConfig(20, epsilon=EPSILON)).value)
  return seconds(lambda: jax.block_until_ready(solve(mdp)))


def run_quantecon(arguments: argparse.Namespace) -> dict[str, float]:
  """The same by quantecon's modified policy iteration."""
  del arguments
  from experiments.opi import study

  peer = study.quantecon_model(_sparse_model(_double()))
  settings = {"epsilon": EPSILON, "k": 20, "max_iter": 10_000}
  return seconds(lambda: peer.solve(method="modified_policy_iteration", **settings))


PARTS = {
  "many sweeps": functools.partial(run_investment, sweeps=100),
  "value iteration": functools.partial(run_investment, sweeps=1),
  "broadcast": run_broadcast,
  "sparse": run_sparse,
  "quantecon": run_quantecon,
}
NEEDS = {"quantecon": "quantecon"}


def main() -> None:
  arguments = bench.parser(__doc__.partition("\n")[0], PARTS).parse_args()
  found = bench.run_parts("experiments.opi.bench", PARTS, arguments, NEEDS)
  if found is None:
    return
  version = metadata.version("jax")
  ours, model = found["many sweeps"], "investment model, m = 100"
  rows = []
  for part, name in (
    ("value iteration", "value iteration, the same code"),
    ("broadcast", "broadcast product of the lectures, jax"),
  ):
    theirs = found[part]
    rows.append(
      environment.peer_row(name, version, f"{model}, compiled", ours["again"], theirs["again"], "s")
    )
    rows.append(
      environment.peer_row(
        name, version, f"{model}, peak memory", ours["memory"], theirs["memory"], "MiB"
      )
    )
  if (theirs := found["quantecon"]) is not None:
    ours, name = found["sparse"], ("quantecon", metadata.version("quantecon"))
    what = "sparse model of 20,000 states, m = 20"
    rows += [
      environment.peer_row(*name, f"{what}, compiled", ours["again"], theirs["again"], "s"),
      environment.peer_row(*name, f"{what}, cold", ours["first"], theirs["first"], "s"),
      environment.peer_row(*name, f"{what}, peak memory", ours["memory"], theirs["memory"], "MiB"),
    ]
  print(report.peers_table({"peers": rows}))
  report.write_peers("opi", rows)


if __name__ == "__main__":
  main()
