"""Figures of the JRF study."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import ml_collections
import numpy as np

from experiments.jrf.arms import Arm
from launch.claims import estimate
from launch.run import Run

# Okabe and Ito's colours, told apart by colour-blind readers too.
STYLE = {
  "naive": ("#E69F00", "s", "naive penalty"),
  "forward_naive": ("#56B4E9", "D", "forward + naive penalty"),
  "jrf": ("#0072B2", "o", "JRF, exact"),
  "oracle": ("#000000", "^", "clean-attribute oracle"),
}


def draw(
  run: Run,
  config: ml_collections.ConfigDict,
  frontier: Sequence[Arm],
  noise: Sequence[Arm],
  assumed: Sequence[Arm],
  sweeps: dict[str, Any],
  audited: dict[str, Any],
  weight: float,
) -> None:
  """Draws every figure; `sweeps` holds the arms of the three sweeps one after the other."""
  test = {name: np.asarray(values) for name, values in sweeps["test"].items()}
  starts = np.cumsum([0, len(frontier), len(noise), len(assumed)])
  parts = [
    {name: values[:, a:b] for name, values in test.items()} for a, b in itertools.pairwise(starts)
  ]
  seeds = test["soft_gap"].shape[0]
  _frontier(run, config, frontier, parts[0], seeds)
  _noise(run, noise, parts[1], seeds, weight)
  _assumed(run, config, assumed, parts[2], audited, seeds)


def _means(values: np.ndarray) -> tuple[list[float], list[float]]:
  """Means over seeds of `[S, X]` values, and half-widths of their 95% intervals."""
  found = [estimate(v) for v in values.T]
  return [e.mean for e in found], [e.ci95[1] - e.mean if e.ci95 else 0.0 for e in found]


def _errorbar(ax: Any, x: Any, values: np.ndarray, method: str, x_half: Any = None) -> None:
  """Draws `[S, X]` values of a method over `x`, with intervals."""
  colour, marker, label = STYLE[method]
  mean, half = _means(values)
  ax.errorbar(x, mean, yerr=half, xerr=x_half, color=colour, marker=marker, label=label, capsize=3)


def _frontier(
  run: Run, config: ml_collections.ConfigDict, arms: Sequence[Arm], metrics: Any, seeds: int
) -> None:
  figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
  quality = ("auc", "balanced_accuracy")
  for ax, name in zip(axes, quality, strict=True):
    for method in STYLE:
      where = [i for i, arm in enumerate(arms) if arm.method == method]
      gap, half = _means(metrics["soft_gap"][:, where])
      _errorbar(ax, gap, metrics[name][:, where], method, x_half=half)
    ax.set_xlabel("soft gap on clean test rows (probability)")
    ax.set_ylabel(name.replace("_", " ").replace("auc", "AUC"))
    ax.grid(alpha=0.3)
  axes[0].legend()
  weights = ", ".join(f"{w:g}" for w in config.fairness.weights)
  run.figure(
    "frontier",
    figure,
    f"Fairness against quality for lambda = {weights}, flip rates "
    f"{config.noise.label[0]:g}; means and 95% intervals over {seeds} seeds. "
    "Up and left is better.",
  )


def _noise(run: Run, arms: Sequence[Arm], metrics: Any, seeds: int, weight: float) -> None:
  figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
  for ax, name in zip(axes, ("soft_gap", "matched_gap"), strict=True):
    for method in STYLE:
      where = [i for i, arm in enumerate(arms) if arm.method == method]
      _errorbar(ax, [arms[i].label[0] for i in where], metrics[name][:, where], method)
    ax.set_xlabel("flip rate of labels and groups")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
  axes[0].set_ylabel("soft gap on clean test rows (probability)")
  axes[1].set_ylabel("gap at matched positive rate (probability)")
  axes[0].legend()
  run.figure(
    "noise",
    figure,
    f"Gap against noise at lambda = {weight:g}; means and 95% intervals over {seeds} seeds.",
  )


def _assumed(
  run: Run,
  config: ml_collections.ConfigDict,
  arms: Sequence[Arm],
  metrics: Any,
  audited: dict[str, Any],
  seeds: int,
) -> None:
  figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
  rates = [arm.assumed_attribute[0] for arm in arms]
  _errorbar(axes[0], rates, metrics["soft_gap"], "jrf")
  axes[0].set_ylabel("soft gap of JRF trained with that rate")
  curve = np.asarray(audited["sensitivity"])
  clean = np.asarray(audited["clean_gap"])
  for values in curve:
    axes[1].plot(rates, values, color="#0072B2", alpha=0.35, linewidth=1)
  axes[1].plot(rates, curve.mean(axis=0), color="#0072B2", label="estimate, mean of seeds")
  axes[1].axhline(clean.mean(), color="black", linestyle=":", label="clean gap, mean of seeds")
  axes[1].set_ylabel("estimated gap of one trained model")
  axes[1].legend()
  for ax in axes:
    ax.axvline(config.noise.attribute[0], color="grey", linewidth=1)
    ax.set_xlabel("assumed flip rate of groups (true one: grey line)")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
  run.figure(
    "sensitivity",
    figure,
    f"What a wrong assumed rate does. Left: training with it, means and 95% intervals over {seeds} "
    "seeds. Right: auditing with it, one line a seed.",
  )
