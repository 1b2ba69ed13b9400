"""Figures of the GATE experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from experiments.gate.judge import Table, theory_merges
from experiments.gate.study import LEVELS
from launch.run import Run
from models.graph import Graph

# Okabe and Ito's colours, told apart by colour-blind readers too.
STYLE = {
  "dim": ("#E69F00", "s", "difference in means"),
  "ht": ("#999999", "v", "Horvitz-Thompson"),
  "polynomial": ("#CC79A7", "P", "polynomial roll-out"),
  "ols": ("#0072B2", "o", "ols on own and neighbours' treatment"),
  "quadratic": ("#56B4E9", "D", "ols, quadratic"),
  "gnn": ("#009E73", "^", "graph network"),
}
DRAWN = ("dim", "ht", "ols", "gnn")
LINE = {"unit": "-", "cluster": "--"}
SMALL = 400  # nodes that a drawing of the network can show


def draw_study(
  run: Run,
  table: Table,
  theory: Mapping[tuple[str, str, str], Mapping[str, float]],
  coverage: Mapping[tuple[str, str], Mapping[str, Any]],
) -> None:
  """Bias and RMSE against merged stages, the theory, and coverage."""
  _bias_and_rmse(run, table)
  if theory:
    _theory(run, table, theory)
  _coverage(run, coverage)


def _bias_and_rmse(run: Run, table: Table) -> None:
  outcomes = list(table.truth)
  counts = range(1, len(table.plans["ramp"].shares))
  figure, axes = plt.subplots(
    2, len(outcomes), figsize=(3.1 * len(outcomes), 6), sharex=True, squeeze=False
  )
  for column, outcome in enumerate(outcomes):
    for estimator in DRAWN:
      colour, marker, label = STYLE[estimator]
      for level in LEVELS:
        merges = [k for k in counts if table.has(outcome, level, f"last {k}", estimator)]
        if not merges:
          continue
        bias = [table.bias(outcome, level, f"last {k}", estimator) for k in merges]
        rmse = [math.sqrt(table.mse(outcome, level, f"last {k}", estimator)) for k in merges]
        style = {"color": colour, "marker": marker, "linestyle": LINE[level], "markersize": 4}
        axes[0, column].plot(merges, bias, label=f"{label}, {level}", **style)
        axes[1, column].plot(merges, rmse, **style)
    axes[0, column].axhline(0, color="black", linewidth=0.8)
    axes[0, column].set_title(f"{outcome} (GATE {table.truth[outcome]:.3g})", fontsize=10)
    axes[1, column].set_xlabel("stages merged, from the largest share")
    axes[1, column].set_yscale("log")
    for row in (0, 1):
      axes[row, column].grid(alpha=0.3)
  axes[0, 0].set_ylabel("bias (units of y)")
  axes[1, 0].set_ylabel("root mean squared error")
  handles, labels = max((ax.get_legend_handles_labels() for ax in axes[0]), key=lambda h: len(h[0]))
  figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=8, bbox_to_anchor=(0.5, -0.1))
  figure.tight_layout()
  caption = "Bias and RMSE by outcome; solid: units randomised, dashed: clusters."
  run.figure("bias_rmse", figure, caption)


def _theory(
  run: Run, table: Table, theory: Mapping[tuple[str, str, str], Mapping[str, float]]
) -> None:
  figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
  merges = theory_merges(table)
  x = np.arange(len(merges))
  for ax, level in zip(axes, LEVELS, strict=True):
    for estimator in ("dim", "ols"):
      colour, marker, label = STYLE[estimator]
      expected = [theory[level, estimator, m] for m in merges]
      ax.plot(x, [e["merged"] for e in expected], color=colour, linestyle=":")
      ax.plot(x, [e["finite"] for e in expected], color=colour)
      values = [table.get("two_hop", level, m, estimator) - table.truth["two_hop"] for m in merges]
      half = [1.96 * v.std(ddof=1) / math.sqrt(v.size) for v in values]
      ax.errorbar(
        x, [v.mean() for v in values], yerr=half, color=colour, fmt=marker, label=label, capsize=3
      )
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(x, merges)
    ax.set_title(f"{level} level")
    ax.grid(alpha=0.3)
  axes[0].set_ylabel("bias (units of y)")
  axes[0].legend(fontsize=8)
  figure.tight_layout()
  caption = (
    "Two-hop outcome. Points: Monte Carlo means with 95% intervals; lines: the bias formula, "
    "dotted without the correction for finitely many clusters."
  )
  run.figure("theory", figure, caption)


def _coverage(run: Run, coverage: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
  outcomes = list(dict.fromkeys(outcome for _, outcome in coverage))
  figure, axes = plt.subplots(1, len(outcomes), figsize=(9, 3.6), sharey=True)
  for (level, outcome), found in coverage.items():
    ax = axes[outcomes.index(outcome)]
    x = np.arange(len(found["merges"])) + (-0.1 if level == "unit" else 0.1)
    colour = STYLE["ols"][0] if level == "unit" else STYLE["dim"][0]
    for key, marker, what in (
      ("covered", "o", "mean of the estimator"),
      ("covers_gate", "x", "GATE"),
    ):
      share = np.asarray(found[key])
      half = 1.96 * np.sqrt(share * (1 - share) / found["replications"])
      ax.errorbar(
        x, share, yerr=half, fmt=marker, color=colour, capsize=3, label=f"{what}, {level} level"
      )
    ax.set_xticks(range(len(found["merges"])), found["merges"])
    ax.set_title(f"{outcome} outcome")
  for ax in axes:
    ax.axhline(0.95, color="black", linewidth=0.8)
    ax.grid(alpha=0.3)
  axes[0].set_ylabel("share of intervals that cover")
  axes[0].legend(fontsize=8, loc="lower left")
  caption = (
    "Coverage of 95% cluster-robust intervals of ols: left it fits the outcome, right it misses "
    "the second hop, which biases it."
  )
  run.figure("coverage", figure, caption)


def draw_network(run: Run, graph: Graph, cluster: np.ndarray, z: np.ndarray, what: str) -> None:
  """A small network, coloured by cluster; filled nodes are treated."""
  if graph.num_nodes > SMALL:
    return
  import networkx as nx

  drawn = nx.Graph()
  drawn.add_nodes_from(range(graph.num_nodes))
  drawn.add_edges_from(zip(np.asarray(graph.senders), np.asarray(graph.receivers), strict=True))
  places = nx.spring_layout(drawn, seed=0)
  figure, ax = plt.subplots(figsize=(6.5, 6))
  nx.draw_networkx_edges(drawn, places, ax=ax, alpha=0.15, width=0.5)
  colours = plt.get_cmap("tab20")(np.asarray(cluster) % 20)
  at = np.array([places[i] for i in range(graph.num_nodes)])
  treated = np.asarray(z) > 0.5
  ax.scatter(*at[treated].T, c=colours[treated], s=28, edgecolors="black", linewidths=0.6)
  ax.scatter(*at[~treated].T, facecolors="white", edgecolors=colours[~treated], s=28)
  ax.set_axis_off()
  caption = f"{what}. Colour: cluster; filled: treated."
  run.figure("network", figure, caption)


def draw_estimates(
  run: Run, rows: Sequence[Mapping[str, Any]], title: str, label: str = "GATE (units of y)"
) -> None:
  """Estimates with their intervals, in the order of the table."""
  figure, ax = plt.subplots(figsize=(7, 0.42 * len(rows) + 1.3))
  for i, row in enumerate(rows):
    ax.plot(row["estimate"], -i, "o", color=STYLE["ols"][0])
    if row["low"] is not None:
      ax.plot([row["low"], row["high"]], [-i, -i], color=STYLE["ols"][0])
  ax.set_yticks([-i for i in range(len(rows))], [row["name"] for row in rows], fontsize=8)
  ax.axvline(0, color="black", linewidth=0.8)
  ax.set_xlabel(label)
  ax.set_title(title, fontsize=10)
  ax.grid(alpha=0.3, axis="x")
  caption = "Estimates with 95% intervals; the intervals do not hold the bias of interference."
  run.figure("estimates", figure, caption)


def draw_means(run: Run, shares: np.ndarray, means: np.ndarray, errors: np.ndarray) -> None:
  """Mean outcome of each stage against its share."""
  figure, ax = plt.subplots(figsize=(5.5, 3.6))
  ax.errorbar(shares, means, yerr=1.96 * errors, fmt="o", color=STYLE["ols"][0], capsize=3)
  ax.set_xlabel("share treated")
  ax.set_ylabel("mean outcome")
  ax.grid(alpha=0.3)
  run.figure("means", figure, "Mean outcome of each stage, with 95% intervals by cluster.")
