"""Runs the ramp-up study, the analysis of a roll-out log, or the insurance field experiment."""

from __future__ import annotations

import contextlib

import jax
import ml_collections
import numpy as np

from algorithms import gate
from experiments.gate import analysis, figures, judge, networks, social_insure, study
from experiments.gate.judge import Table
from experiments.gate.study import LEVELS
from launch.run import Run


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  """See README.md."""
  with jax.enable_x64(True) if config.x64 else contextlib.nullcontext():
    if config.study == "social_insure":
      social_insure.run(config, run)
    elif config.log:
      analysis.run(config, run)
    elif config.study == "ramp_up":
      ramp_up(config, run)
    else:
      raise ValueError(
        f"config.study = {config.study!r}; expected 'ramp_up' or 'social_insure'. To analyse your "
        "own ramp-up give --config.graph and --config.log"
      )


def ramp_up(config: ml_collections.ConfigDict, run: Run) -> None:
  """Simulates outcomes of ramp-ups on a graph, and judges the claims."""
  network = networks.load(config, run)
  plans = study.make_plans(config.shares)
  cells: dict[tuple[str, str, str, str, str], np.ndarray] = {}
  truth = study.true_effects(config, network)
  for level in LEVELS:
    for plan in plans.values():
      cells |= study.run_cell(run, network, level, plan)
    cells |= study.run_gnn(run, network, level, plans["ramp"])
  table = Table(plans, truth, cells)
  theory = study.theory(run, network, plans["ramp"], judge.theory_merges(table))
  coverage = {
    (level, outcome): found
    for level in LEVELS
    for outcome, found in study.run_coverage(run, network, level, plans["ramp"]).items()
  }

  judge.record(run, table)
  if theory:
    judge.mean_rows(run, theory, table)
  judge.claims(run, table, theory, coverage, network.name)
  analysis.diagnose(run, network, plans["ramp"])
  figures.draw_study(run, table, theory, coverage)
  design = network.design(config, "cluster", plans["ramp"])
  z = gate.draw_rollout(run.key("network figure"), design)
  what = f"Stage with share {plans['ramp'].shares[-1]:g} of a cluster-randomised ramp-up"
  figures.draw_network(run, network.graph, network.cluster, np.asarray(z)[-1], what)
