"""Figures of the OPI experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from algorithms import opi
from experiments.opi import models
from launch.run import Run

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
# Which way an action of the grid worlds goes: (right, up).
_ARROWS = {
  "frozenlake": {0: (-1, 0), 1: (0, -1), 2: (1, 0), 3: (0, 1)},
  "cliff": {0: (0, 1), 1: (1, 0), 2: (0, -1), 3: (-1, 0)},
}


def convergence(run: Run, found: Mapping[str, Any]) -> None:
  """Error against iterations, sweeps and time for each m."""
  figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
  for colour, (sweeps, curve) in zip(COLOURS, found["curves"].items(), strict=False):
    error = np.maximum(curve["error"], 1e-12)
    count = np.arange(1, len(error) + 1)
    for axis, x in zip(axes, (count, curve["sweeps"], curve["seconds"]), strict=True):
      axis.plot(x, error, color=colour, label=f"m = {sweeps}")
  for axis, label in zip(axes, ("greedy steps", "sweeps", "seconds"), strict=True):
    axis.set(xlabel=label, xscale="log", yscale="log")
  axes[0].set_ylabel("largest error of the value")
  axes[0].legend(frameon=False)
  figure.tight_layout()
  run.figure(
    "convergence", figure, "Investment model. Each m stops when the largest |T v - v| is 1e-5."
  )


def grid_world(run: Run, name: str) -> None:
  """Value and greedy actions of a grid world."""
  rows, columns = models.GRID_SHAPES[name]
  mdp = models.table(name)
  result = opi.solve(mdp)
  value = np.asarray(result.value)[: rows * columns].reshape(rows, columns)
  policy = np.asarray(result.policy)[: rows * columns].reshape(rows, columns)
  ends = np.abs(np.asarray(mdp.reward)[: rows * columns]).max(axis=1) == 0
  stays = (np.asarray(mdp.next_state)[: rows * columns] >= rows * columns).all(axis=(1, 2))
  figure, axis = plt.subplots(figsize=(0.55 * columns + 1.5, 0.55 * rows + 0.8))
  image = axis.imshow(value, cmap="viridis")
  figure.colorbar(image, ax=axis, label="value")
  for i in range(rows):
    for j in range(columns):
      if not (ends & stays)[i * columns + j]:
        right, up = _ARROWS[name][int(policy[i, j])]
        axis.annotate(
          "",
          xy=(j + 0.3 * right, i - 0.3 * up),
          xytext=(j - 0.3 * right, i + 0.3 * up),
          arrowprops={"arrowstyle": "->", "color": "white"},
        )
  axis.set(xticks=[], yticks=[])
  run.figure(f"map-{name}", figure, f"{name}: optimal value and actions.")


def car_rental(run: Run) -> None:
  """The published policy map."""
  result = opi.solve(models.car_rental())
  moves = np.asarray(result.policy).reshape(21, 21) - 5
  figure, axis = plt.subplots(figsize=(4.6, 4))
  image = axis.imshow(moves, origin="lower", cmap="RdBu", vmin=-5, vmax=5)
  figure.colorbar(image, ax=axis, label="cars moved from the first to the second place")
  axis.set(xlabel="cars at the second place", ylabel="cars at the first place")
  run.figure("map-car_rental", figure, "Jack's car rental: optimal moves overnight.")


def flow(run: Run, field: Mapping[str, Any]) -> None:
  """The counterexample's paths in the plane of state 0's action values."""
  figure, axis = plt.subplots(figsize=(5.4, 4.6))
  for colour, (ratio, found) in zip(COLOURS, field.items(), strict=False):
    path = np.concatenate([[[0.0, -1.0]], found["trace"]])
    axis.plot(path[:, 0], path[:, 1], color=colour, lw=1, label=f"rho = {float(ratio):g}")
    if found["root"] is not None:
      axis.plot(found["root"], found["root"], "o", color=colour, mfc="none")
  axis.axline((0, 0), slope=1, color="0.8", lw=0.8, zorder=0)
  axis.plot(*models.COUNTEREXAMPLE_Q[0], "k*", ms=10, label="optimum")
  axis.set(xlabel="q(0, 0)", ylabel="q(0, 1)")
  axis.legend(frameon=False, fontsize=8)
  run.figure(
    "flow", figure, "Mean field of the counterexample from (0, -1); circles: derived fixed points."
  )


def simulations(run: Run, simulated: Mapping[float, Mapping[str, np.ndarray]]) -> None:
  """q(0, 0) of every seed, with and without the repair."""
  figure, axes = plt.subplots(1, len(simulated), figsize=(3.6 * len(simulated), 3.2), sharey=True)
  for axis, (ratio, modes) in zip(np.atleast_1d(axes), simulated.items(), strict=True):
    for colour, (mode, trace) in zip(COLOURS, modes.items(), strict=False):
      x = np.arange(1, trace.shape[1] + 1) / trace.shape[1]
      lines = axis.plot(x, trace[:, :, 0, 0].T, color=colour, lw=0.7)
      lines[0].set_label(mode)
    axis.axhline(24, color="k", lw=0.8, ls=":")
    axis.set(title=f"rho = {ratio:g}", xlabel="share of the updates")
  np.atleast_1d(axes)[0].set_ylabel("q(0, 0)")
  np.atleast_1d(axes)[0].legend(frameon=False, fontsize=8)
  figure.tight_layout()
  run.figure("simulations", figure, "A line a seed; dotted: the optimum.")


def solution(run: Run, result: opi.OPIResult) -> None:
  """The value of a user's model and what is known of its error."""
  order = np.argsort(np.asarray(result.value))
  figure, axis = plt.subplots(figsize=(6, 3.2))
  x = np.arange(order.size)
  axis.fill_between(
    x, np.asarray(result.lower)[order], np.asarray(result.upper)[order], alpha=0.3, label="bounds"
  )
  axis.plot(x, np.asarray(result.value)[order], label="value")
  axis.set(xlabel="state, by value", ylabel="value")
  axis.legend(frameon=False)
  run.figure("solution", figure)
