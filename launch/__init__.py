"""Everything around a run: command line, Run context, mesh, checkpoints, claims, report.

This file must exist: it lets `launch.py` and the folder `launch/` live side by side. It imports
nothing heavy, so that `python launch.py --list` and `--help` answer without JAX.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Run", "load_config", "run_experiment"]


def run_experiment(config: Any, workdir: str, *, experiment: str | None = None) -> dict[str, Any]:
  """Runs one experiment from Python, without flags, and returns its results.

  Args:
    config: what the experiment's `get_config(preset)` returned, changed or not.
    workdir: folder for everything the run writes; the same folder again resumes the run.
    experiment: name of a built-in experiment or the path of an experiment folder; by default
      `config.experiment`.

  Returns:
    The content of `results.json`.
  """
  from launch import main

  return main.run_experiment(config, workdir, experiment=experiment)


def load_config(text: str) -> Any:
  """The config that `--config=text` stands for, e.g. `load_config("jrf:smoke")`."""
  from launch import config

  return config.load(config.resolve(text))


def __getattr__(name: str) -> Any:
  if name == "Run":
    from launch.run import Run

    return Run
  raise AttributeError(f"module 'launch' has no attribute {name!r}")
