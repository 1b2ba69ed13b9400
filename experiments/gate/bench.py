"""Speed and memory of the GATE estimators beside statsmodels and PyTorch.

python experiments/gate/bench.py                    # prints a table, writes peers into results.json
python experiments/gate/bench.py --replications=50  # quicker

Replications of the regression run beside a loop over statsmodels (`pip install statsmodels`), the
network beside the same loop in PyTorch (`pip install torch`), once written as the authors have it,
with the graph convolution in every step, and once with it taken out of the loop as here. The part
"large" shows what a graph of 200,000 nodes and 4 million edges takes. A peer that is not installed
is left out and named.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from importlib import metadata
from typing import Any

import numpy as np

from launch import bench, environment, report

LARGE_NODES, LARGE_EDGES = 200_000, 4_000_000
STATSMODELS_REPLICATIONS = 20  # of many: a loop takes the same time for each


def study() -> tuple[Any, Any, Any, Any]:
  """A Run, the simulated graph, its ramp-up plan of five stages and the cluster design."""
  import jax

  import launch
  from experiments.gate import networks
  from experiments.gate.study import make_plans
  from launch.mesh import make_mesh, split_cpu
  from launch.run import Run

  config = launch.load_config("gate:lfr")
  split_cpu(config.cpu_devices)
  mesh = make_mesh(config.mesh.to_dict())
  jax.set_mesh(mesh)
  jax.config.update("jax_enable_x64", True)
  run = Run(os.path.join(tempfile.mkdtemp(), "bench"), config, mesh)
  network = networks.load(config, run)
  plan = make_plans(config.shares)["ramp"]
  return run, network, plan, network.design(config, "cluster", plan)


def run_ols(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of all replications of merged ols with its interval, compiled and with compilation."""
  import jax

  from experiments.gate import study as s

  run, network, plan, design = study()
  model = s.outcome(run.config, "two_hop")
  merges = (plan.merges[0],)
  mapped = s.spread(functools.partial(s.intervals, (model,), merges), run.config.batch, run.mesh)
  keys = jax.random.split(run.key("bench"), arguments.replications)
  seconds = []
  for _ in range(2):
    began = time.perf_counter()
    jax.block_until_ready(mapped((network.graph, design), keys))
    seconds.append(time.perf_counter() - began)
  return {"first": seconds[0], "again": seconds[1]}


def run_statsmodels(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of the same in a loop: SciPy exposures, statsmodels with clustered errors."""
  import statsmodels.api as sm

  from models import graph as graph_lib

  _, network, plan, _ = study()
  operator, cluster = graph_lib.to_sparse(network.graph), network.cluster
  second = operator @ operator
  second.setdiag(0)
  shares = np.array(plan.shares)[list(plan.merges[0].stages)]
  rng = np.random.default_rng(0)
  began = time.perf_counter()
  for _ in range(STATSMODELS_REPLICATIONS):
    score = rng.permutation(network.num_clusters)
    z = (score[None] < np.round(shares * network.num_clusters)[:, None]).astype(float)[:, cluster]
    e = (operator @ z.T).T
    y = 1 + z + e + 0.5 * (second @ z.T).T + 0.1 * rng.normal(size=z.shape)
    x = np.stack([np.ones(z.size), z.ravel(), e.ravel()], axis=1)
    groups = np.tile(cluster, shares.size)
    fit = sm.OLS(y.ravel(), x).fit(cov_type="cluster", cov_kwds={"groups": groups})
    fit.t_test([0, 1, 1]).conf_int()
  one = (time.perf_counter() - began) / STATSMODELS_REPLICATIONS
  return {"first": one * arguments.replications}


def run_gnn(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of one replication of the network on five stages, on one device, compiled."""
  import jax

  from experiments.gate import study as s
  from models.graph import build_gnn

  del arguments
  run, network, plan, design = study()
  init, *_ = build_gnn(run.config.gnn.kind, run.config.gnn.hidden)
  params = jax.tree.map(lambda w: w.astype(np.float32), init(run.key("network"), 2))
  replicate = functools.partial(s.gnn_estimates, run.config, (plan.merges[0],), "linear")
  compiled = jax.jit(replicate)
  seconds = []
  for i in range(4):
    began = time.perf_counter()
    jax.block_until_ready(
      compiled((network.graph, design, params), jax.random.fold_in(run.key("bench"), i))
    )
    seconds.append(time.perf_counter() - began)
  return {"first": seconds[0], "again": float(np.median(seconds[1:]))}


def run_torch(arguments: argparse.Namespace, hoisted: bool = False) -> dict[str, float]:
  """Seconds of the same loop in PyTorch; `hoisted` takes the graph convolution out of it."""
  import torch
  from torch import nn

  from models import graph as graph_lib

  del arguments
  torch.set_num_threads(environment.cpu_count())
  run, network, plan, _ = study()
  c = run.config.gnn
  shares = np.array(plan.shares)[list(plan.merges[0].stages)]
  rng = np.random.default_rng(0)
  score = rng.permutation(network.num_clusters)
  treated = score[None] < np.round(shares * network.num_clusters)[:, None]
  z = treated.astype(np.float32)[:, network.cluster]
  y = torch.tensor(1 + z + (graph_lib.to_sparse(network.graph) @ z.T).T, dtype=torch.float32)
  degree = np.bincount(np.asarray(network.graph.receivers), minlength=network.graph.num_nodes)
  normalised = (degree - degree.mean()) / degree.std()
  values = 1 / np.sqrt(degree[network.graph.receivers] * degree[network.graph.senders])
  places = torch.tensor(np.stack([network.graph.receivers, network.graph.senders]))
  size = (degree.size, degree.size)
  adjacency = torch.sparse_coo_tensor(places, torch.tensor(values, dtype=torch.float32), size)
  adjacency = adjacency.coalesce().to_sparse_csr()
  inputs = [torch.tensor(np.stack([row, normalised], 1), dtype=torch.float32) for row in z]
  targets = list(y)

  def basis(x: Any) -> Any:
    return torch.cat([x, -(adjacency @ x)], dim=1)

  model = nn.Sequential(
    nn.Linear(4, c.hidden), nn.ReLU(), nn.Linear(c.hidden, c.hidden), nn.ReLU(),
    nn.Linear(c.hidden, 1),
  )  # fmt: skip
  optimiser = torch.optim.Adam(model.parameters(), lr=c.learning_rate)
  seconds = []
  for _ in range(2):
    began = time.perf_counter()
    fixed = [basis(x) for x in inputs] if hoisted else None
    for _ in range(c.epochs):
      for stage, target in enumerate(targets):
        optimiser.zero_grad()
        x = fixed[stage] if fixed is not None else basis(inputs[stage])
        loss = ((model(x).squeeze(1) - target) ** 2).mean()
        loss.backward()
        optimiser.step()
    seconds.append(time.perf_counter() - began)
  return {"first": seconds[0], "again": seconds[1]}


def run_large(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of a design report and of one estimate on a graph of 4 million edges."""
  import jax
  import jax.numpy as jnp

  from algorithms import gate
  from models import graph as graph_lib

  del arguments
  jax.config.update("jax_enable_x64", True)
  rng = np.random.default_rng(0)
  half = LARGE_EDGES // 2
  a = rng.integers(0, LARGE_NODES, half)
  # Half of the neighbours are near, so that clusters of 200 hold some of a node's edges.
  near = (a + rng.integers(1, 100, half)) % LARGE_NODES
  b = np.where(rng.random(half) < 0.5, near, rng.integers(0, LARGE_NODES, half))
  graph = graph_lib.from_edges(np.r_[a, b], np.r_[b, a], LARGE_NODES)
  cluster = np.arange(LARGE_NODES) // 200
  design = gate.make_design((0.0, 0.02, 0.05, 0.1, 0.25, 0.5), LARGE_NODES, cluster)
  began = time.perf_counter()
  design_report = jax.jit(gate.design_report)((graph,), design)
  jax.block_until_ready(design_report)
  reported = time.perf_counter() - began

  @jax.jit
  def estimate(graph: Any, design: Any, key: Any) -> Any:
    z = gate.draw_rollout(key, design)
    e = gate.exposures((graph,), z)
    y = 1 + z + e[..., 0]
    x = gate.design_matrix("linear", z, e)
    return gate.ols(x, y, jnp.ones(2), design.cluster, design.num_clusters)

  began = time.perf_counter()
  found = jax.block_until_ready(estimate(graph, design, jax.random.key(0)))
  estimated = time.perf_counter() - began
  if abs(float(found.tau) - 2) > 1e-6:
    raise RuntimeError(f"the estimate {float(found.tau)} of a model that fits is not its GATE of 2")
  return {"first": reported, "again": estimated}


PARTS = {
  "ols": run_ols,
  "statsmodels": run_statsmodels,
  "gnn": run_gnn,
  "torch": run_torch,
  "torch_hoisted": functools.partial(run_torch, hoisted=True),
  "large": run_large,
}
NEEDS = {"statsmodels": "statsmodels", "torch": "torch", "torch_hoisted": "torch"}


def main() -> None:
  parser = bench.parser(__doc__.partition("\n")[0], PARTS)
  parser.add_argument("--replications", type=int, default=1000)
  arguments = parser.parse_args()
  found = bench.run_parts("experiments.gate.bench", PARTS, arguments, NEEDS)
  if found is None:
    return
  rows = []
  count = f"{arguments.replications:,} replications of merged ols with intervals"
  if (theirs := found["statsmodels"]) is not None:
    name = ("statsmodels, loop", metadata.version("statsmodels"))
    ours = found["ols"]
    rows += [
      environment.peer_row(*name, f"{count}, compiled", ours["again"], theirs["first"], "s"),
      environment.peer_row(*name, f"{count}, cold", ours["first"], theirs["first"], "s"),
      environment.peer_row(*name, "peak memory of it", ours["memory"], theirs["memory"], "MiB"),
    ]
  ours = found["gnn"]
  for part, what in (
    ("torch", "graph convolution in every step"),
    ("torch_hoisted", "graph convolution taken out"),
  ):
    if (theirs := found[part]) is not None:
      name = (f"PyTorch, {what}", metadata.version("torch"))
      one = "one network replication, 5 stages x 400 epochs"
      rows += [
        environment.peer_row(*name, f"{one}, compiled", ours["again"], theirs["again"], "s"),
        environment.peer_row(*name, f"{one}, cold", ours["first"], theirs["first"], "s"),
      ]
      if part == "torch":
        row = (*name, "peak memory of it", ours["memory"], theirs["memory"], "MiB")
        rows.append(environment.peer_row(*row))
  print(report.peers_table({"peers": rows}))
  large = found["large"]
  print(
    f"{LARGE_NODES:,} nodes, {LARGE_EDGES:,} edges: design report {large['first']:.1f} s, one "
    f"estimate on six stages {large['again']:.1f} s, both cold; peak memory {large['memory']:,} MiB"
  )
  report.write_peers("gate", rows)


if __name__ == "__main__":
  main()
