"""Speed and memory of the JRF table beside a sequential PyTorch script and fairlearn.

python experiments/jrf/bench.py            # prints a table, writes peers into results.json
python experiments/jrf/bench.py --seeds=1  # quicker

The PyTorch peer is written here after the authors' protocol (one model after the other, full
batches, Adam) and needs `pip install torch`; fairlearn needs `pip install -e '.[peers]'`. A peer
that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from importlib import metadata
from typing import Any

import numpy as np

from launch import bench, environment, report

METHODS = ("naive", "forward", "mirl_paper", "jrf_paper")
RATES = (0.0, 0.2, 0.3, 0.4)
WEIGHT, STEPS, LEARNING_RATE, HIDDEN = 15.0, 50, 5e-3, (32, 32)


def study(folder: str) -> tuple[Any, Any, Any]:
  """A Run, the numeric Adult data and the authors' training."""
  import jax

  import launch
  from experiments.jrf import run as experiment
  from launch.mesh import make_mesh, split_cpu
  from launch.run import Run

  config = launch.load_config("jrf")
  split_cpu(config.cpu_devices)
  mesh = make_mesh(config.mesh.to_dict())
  jax.set_mesh(mesh)
  data = experiment.load(config, features="numeric")
  return Run(folder, config, mesh), data, experiment.authors_training(config)


def run_ours(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds to train the whole table, first call (with compilation) and second."""
  import jax

  from experiments.jrf import training as t
  from experiments.jrf.arms import Arm
  from models.mlp import build_mlp

  with tempfile.TemporaryDirectory() as folder:
    run, data, training = study(folder)
    arms = [Arm(m, (r, r), (r, r), WEIGHT) for r in RATES for m in METHODS]
    parts = [t.split(data, run.key(f"split/seed={s}"), training) for s in range(arguments.seeds)]
    keys = [t.noise_keys(run, s) for s in range(arguments.seeds)]
    init, apply_fn = build_mlp(data.features.shape[1], HIDDEN, initial=training.initial)
    params = [init(run.key(f"init/seed={s}")) for s in range(arguments.seeds)]
    work = []
    for mode in ("exact", "paper"):
      chosen = [arm for arm in arms if arm.mode == mode]
      table = t.make_table(parts, chosen, keys, run.mesh)
      config = training.jrf_config(mode, "data")
      state = t.first_states(params, len(chosen), config, run.mesh)
      work.append((t.make_trainer(run.mesh, apply_fn, training, mode, STEPS), state, table))
    seconds = []
    for _ in range(2):
      began = time.perf_counter()
      for trainer, state, table in work:
        jax.block_until_ready(trainer(state, table))
      seconds.append(time.perf_counter() - began)
  return {"first": seconds[0], "again": seconds[1]}


def run_torch(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of the same models, one after the other in PyTorch on all cores."""
  import torch

  from experiments.jrf import training as t
  from experiments.jrf.arms import Arm

  torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
  with tempfile.TemporaryDirectory() as folder:
    run, data, training = study(folder)
    seconds = 0.0
    for seed in range(arguments.seeds):
      train = t.split(data, run.key(f"split/seed={seed}"), training)["train"]
      features = torch.from_numpy(np.asarray(train.features))
      for rate in RATES:
        arm = Arm("naive", (rate, rate), (rate, rate), WEIGHT)
        rows, _ = t.noisy_rows(train, arm, t.noise_keys(run, seed)[0])
        labels = torch.from_numpy(np.array(rows.labels, np.float32))
        members = [torch.from_numpy(np.asarray(rows.attribute) == k) for k in (0, 1)]
        for method in METHODS:
          began = time.perf_counter()
          _train_torch(features, labels, members, rate, method, seed)
          seconds += time.perf_counter() - began
  return {"first": seconds, "again": seconds}


def _train_torch(
  features: Any, labels: Any, members: list[Any], rate: float, method: str, seed: int
) -> None:
  import torch
  from torch import nn

  torch.manual_seed(seed)
  sizes = (features.shape[1], *HIDDEN)
  layers: list[Any] = []
  for a, b in itertools.pairwise(sizes):
    layers += [nn.Linear(a, b), nn.ReLU()]
  model = nn.Sequential(*layers, nn.Linear(sizes[-1], 1), nn.Sigmoid())
  optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
  bce = nn.BCELoss()
  forward = method in ("forward", "jrf_paper")
  corrected = method in ("mirl_paper", "jrf_paper") and rate > 0.01
  for _ in range(STEPS):
    optimiser.zero_grad()
    f = model(features).squeeze(1)
    loss = bce((1 - rate) * f + rate * (1 - f) if forward else f, labels)
    if method != "forward":
      mean_0, mean_1 = f[members[0]].mean(), f[members[1]].mean()
      if corrected:
        det = max(1 - 2 * rate, 0.05)
        mean_0, mean_1 = (
          ((1 - rate) * mean_0 - rate * mean_1) / det,
          ((1 - rate) * mean_1 - rate * mean_0) / det,
        )
      loss = loss + WEIGHT * (mean_0 - mean_1).abs()
    loss.backward()
    optimiser.step()


def run_fairlearn(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of one ExponentiatedGradient fit, mean over seeds, on all features."""
  from experiments.jrf import fairlearn_peer
  from experiments.jrf import run as experiment
  from experiments.jrf.arms import Arm
  from experiments.jrf.training import Training

  with tempfile.TemporaryDirectory() as folder:
    run, _, _ = study(folder)
    data, training = experiment.load(run.config), Training.from_config(run.config)
    arm = Arm("none", (0.3, 0.3), (0.3, 0.3), 0.0)
    began = time.perf_counter()
    for seed in range(arguments.seeds):
      fairlearn_peer.fit(run, data, arm, training, run.config, seed)
  return {"first": (time.perf_counter() - began) / arguments.seeds, "again": 0.0}


def run_one_jrf(arguments: argparse.Namespace) -> dict[str, float]:
  """Seconds of one JRF fit with early stopping on all features, mean over seeds."""
  from experiments.jrf import run as experiment
  from experiments.jrf import training as t
  from experiments.jrf.arms import Arm

  with tempfile.TemporaryDirectory() as folder:
    run, _, _ = study(folder)
    data, training = experiment.load(run.config), t.Training.from_config(run.config)
    arm = Arm("jrf", (0.3, 0.3), (0.3, 0.3), 0.1)
    began = time.perf_counter()
    run.unit("bench", lambda: t.train_table(run, data, [arm], arguments.seeds, training))
  return {"first": (time.perf_counter() - began) / arguments.seeds, "again": 0.0}


PARTS = {"ours": run_ours, "torch": run_torch, "fairlearn": run_fairlearn, "one_jrf": run_one_jrf}


def main() -> None:
  parser = bench.parser(__doc__.partition("\n")[0], PARTS)
  parser.add_argument("--seeds", type=int, default=5)
  arguments = parser.parse_args()
  needs = {"torch": "torch", "fairlearn": "fairlearn"}
  found = bench.run_parts("experiments.jrf.bench", PARTS, arguments, needs)
  if found is None:
    return
  models = arguments.seeds * len(RATES) * len(METHODS)
  what = f"{models} models x {STEPS} steps, Adult numeric"
  rows = []
  ours, theirs = found["ours"], found["torch"]
  if theirs is not None:
    torch = ("PyTorch, sequential", metadata.version("torch"))
    rows += [
      environment.peer_row(*torch, f"{what}, compiled", ours["again"], theirs["first"], "s"),
      environment.peer_row(
        *torch, f"{what}, with compilation", ours["first"], theirs["first"], "s"
      ),
      environment.peer_row(*torch, f"{what}, peak memory", ours["memory"], theirs["memory"], "MiB"),
    ]
  ours, theirs = found["one_jrf"], found["fairlearn"]
  if theirs is not None:
    name = ("fairlearn ExponentiatedGradient", metadata.version("fairlearn"))
    what = f"one fit, Adult all features, mean of {arguments.seeds}, with compilation"
    rows += [
      environment.peer_row(*name, what, ours["first"], theirs["first"], "s"),
      environment.peer_row(*name, "peak memory of it", ours["memory"], theirs["memory"], "MiB"),
    ]
  print(report.peers_table({"peers": rows}))
  report.write_peers("jrf", rows)


if __name__ == "__main__":
  main()
