"""Runs the claims, the solution of a user's model, or a large model over the mesh."""

from __future__ import annotations

import contextlib
import functools
import io

import jax
import ml_collections
import numpy as np

from algorithms import opi
from experiments.opi import figures, judge, models, study
from launch.files import write_atomic
from launch.run import Run


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  """See README.md."""
  with jax.enable_x64(True) if config.x64 else contextlib.nullcontext():
    if config.file or config.factory or config.study == "mdp":
      own_model(config, run)
    elif config.study == "claims":
      claims(config, run)
    elif config.study == "large":
      large(config, run)
    else:
      raise ValueError(f"config.study = {config.study!r}; expected 'claims', 'mdp' or 'large'")


def claims(config: ml_collections.ConfigDict, run: Run) -> None:
  """Planning, learning and linear values, each judged."""
  rows = study.planning(config, run)
  run.say(f"solving {config.random_models} random models in all ways")
  drawn = run.unit("random models", functools.partial(study.random_models, config))
  judge.planning(run, rows, drawn)

  run.say("investment model")
  found = run.unit("investment", functools.partial(study.investment, config))
  judge.investment(run, found)
  figures.convergence(run, found)
  judge.sparse(run, run.unit("sparse", functools.partial(study.sparse, config, run)))

  run.say("counterexample: mean field")
  field = run.unit("mean field", functools.partial(study.mean_field, config))
  traces = {
    mode: run.unit(f"counterexample {mode}", functools.partial(study.simulation, config, run, mode))
    for mode in run.progress(study.MODES, "counterexample: simulations")
  }
  simulated = {
    ratio: {mode: trace[i] for mode, trace in traces.items()}
    for i, ratio in enumerate(config.counterexample.simulated)
  }
  judge.counterexample(run, field, simulated)
  figures.flow(run, field)
  figures.simulations(run, simulated)

  run.say("uniform updates within states")
  judge.uniform(run, run.unit("uniform", functools.partial(study.uniform, config, run)))
  judge.linear(run, run.unit("linear", study.linear))
  for name in config.tables:
    if name in models.GRID_SHAPES:
      figures.grid_world(run, name)
  if "car_rental" in config.tables:
    figures.car_rental(run)


def own_model(config: ml_collections.ConfigDict, run: Run) -> None:
  """Solves the model of `config.file` or `config.factory` and writes solution.npz."""
  if bool(config.file) == bool(config.factory):
    raise ValueError(
      "expected one model: --config.file=model.npz or --config.factory=file.py:function"
    )
  if config.file:
    mdp = models.from_file(config.file)
  else:
    mdp = models.from_factory(config.factory)
  opi.check_mdp(mdp)
  run.say(f"{mdp.num_states:,} states, {mdp.num_actions} actions")
  _finish(run, opi.solve(mdp, _settings(config)))


def large(config: ml_collections.ConfigDict, run: Run) -> None:
  """A random sparse model with its states spread over the mesh."""
  mdp = models.random_sparse(run.key("sparse"), **config.sparse)
  run.say(f"{mdp.num_states:,} states over {run.mesh.shape['data']} devices")
  result = opi.solve_sharded(mdp, run.mesh, _settings(config))
  run.metric("iterations", float(result.num_iterations), "greedy steps")
  run.metric("span", float(result.span), "value")


def _settings(config: ml_collections.ConfigDict) -> opi.OPIConfig:
  solver = config.solver
  return opi.OPIConfig(
    solver.num_sweeps,
    solver.lookahead,
    epsilon=solver.epsilon,
    max_iterations=solver.max_iterations or None,
  )


def _finish(run: Run, result: opi.OPIResult) -> None:
  value, half = np.asarray(result.value), np.asarray(result.upper - result.lower) / 2
  if not result.converged:
    run.warn(
      f"the cap on iterations was hit; values are known to +-{half.max():.3g}. Raise "
      "config.solver.max_iterations or config.solver.epsilon"
    )
  buffer = io.BytesIO()
  arrays = {n: np.asarray(getattr(result, n)) for n in ("value", "policy", "lower", "upper")}
  np.savez(buffer, **arrays)
  write_atomic(run.workdir / "solution.npz", buffer.getvalue())
  run.metric("iterations", float(result.num_iterations), "greedy steps")
  run.metric("error bound", float(half.max()), "value")
  shown = np.unique(np.linspace(0, value.size - 1, min(value.size, 20)).astype(int))
  run.table(
    "Solution",
    [
      {"state": int(s), "action": int(arrays["policy"][s]), "value": float(value[s])} for s in shown
    ],
    "Some states; all are in solution.npz.",
  )
  figures.solution(run, result)
