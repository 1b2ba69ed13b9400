"""Walks once a seed, with checkpoints, and claims what is known of such walks."""

import os
import time

import jax
import matplotlib.pyplot as plt

from . import walk

# A pause a step, so that a test can interrupt the run; no part of the config.
PAUSE_S = float(os.environ.get("TINY_PAUSE_S", "0"))


def run(config, run):
  step_fn = jax.jit(walk.step)

  def one_seed(seed):
    state, start = walk.init(run.key(f"walk/{seed}")), 0
    found = run.checkpoints.restore(state)
    if found is not None:
      start, state = found
      run.say(f"resumed seed {seed} at step {start}")
    for step in range(start, config.steps):
      state = step_fn(state, config.model.rate)
      run.log(step, norm=(state["x"] ** 2).sum())
      time.sleep(PAUSE_S)
      if (step + 1) % config.save_every == 0:
        run.checkpoints.save(step + 1, state)
    return {"x": state["x"], "moves": int(state["moves"])}

  units = [run.unit(f"seed={seed}", one_seed, seed) for seed in range(config.seeds)]
  norm = run.metric("norm", [(unit["x"] ** 2).sum() for unit in units], "length squared")
  moves = sum(unit["moves"] for unit in units)
  run.claim(
    "all-moves",
    "A resumed walk makes every move once",
    source="ours",
    criteria={"moves = seeds x steps": moves == config.seeds * config.steps},
    measured=f"{moves} moves, norm {norm}",
    value=norm,
  )
  figure, axes = plt.subplots(figsize=(2, 2))
  axes.plot(units[0]["x"])
  run.figure("end point", figure, "where the first walk ends")
  run.table("units", [{"seed": i, "moves": u["moves"]} for i, u in enumerate(units)], "by seed")
