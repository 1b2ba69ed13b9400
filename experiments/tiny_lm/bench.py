"""Speed and memory of training a small decoder beside transformers.

python experiments/tiny_lm/bench.py    # prints a table, writes peers into results.json

Both train the default preset's decoder on random tokens in batches of the preset's size: this
project in one compiled scan, transformers' LlamaForCausalLM with AdamW and gradient clipping in a
loop (`pip install torch transformers`). Time a step is the median over calls of 20 steps after one
call that compiles or warms up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from launch import bench, environment, report

STEPS, CALLS = 20, 3


def _step_seconds(run_steps: Callable[[], Any]) -> float:
  times = []
  for _ in range(1 + CALLS):
    began = time.perf_counter()
    run_steps()
    times.append((time.perf_counter() - began) / STEPS)
  return float(np.median(times[1:]))


def _tokens(config: Any, vocab_size: int) -> np.ndarray:
  shape = (STEPS, config.train.batch, config.length)
  return np.random.default_rng(0).integers(0, vocab_size, shape)


def run_ours(arguments: argparse.Namespace) -> dict[str, float]:
  """This project."""
  del arguments
  import jax
  import jax.numpy as jnp

  from algorithms import language_modeling as lm
  from experiments.tiny_lm.config import get_config
  from experiments.tiny_lm.run import decoder_config
  from models.transformer import Transformer, tokenizer

  config = get_config()
  model_config = decoder_config(config, tokenizer.byte_tokenizer().vocab_size)
  model = Transformer(model_config)
  lm_config = lm.LMConfig(1000, config.train.learning_rate)
  state = lm.init(model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)), lm_config)
  tokens = jnp.asarray(_tokens(config, model_config.vocab_size), jnp.int32)

  @jax.jit
  def steps(state: lm.LMState) -> lm.LMState:
    def apply_fn(params: Any, tokens: jax.Array) -> jax.Array:
      return model.apply(params, tokens).logits

    return lm.run(state, apply_fn, tokens, jnp.ones(tokens.shape), lm_config)[0]

  return {"step": _step_seconds(lambda: jax.block_until_ready(steps(state)))}


def run_transformers(arguments: argparse.Namespace) -> dict[str, float]:
  """The same by transformers."""
  del arguments
  import torch
  from transformers import LlamaConfig, LlamaForCausalLM

  from experiments.tiny_lm.config import get_config
  from experiments.tiny_lm.run import decoder_config
  from models.transformer import to_huggingface, tokenizer

  config = get_config()
  model_config = decoder_config(config, tokenizer.byte_tokenizer().vocab_size)
  model = LlamaForCausalLM(LlamaConfig(**to_huggingface(model_config))).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate)
  tokens = torch.tensor(_tokens(config, model_config.vocab_size))

  def steps() -> None:
    for batch in tokens:
      optimizer.zero_grad()
      model(batch, labels=batch).loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()

  return {"step": _step_seconds(steps)}


PARTS = {"ours": run_ours, "transformers": run_transformers}
NEEDS = {"transformers": "transformers"}


def main() -> None:
  arguments = bench.parser(__doc__.partition("\n")[0], PARTS).parse_args()
  found = bench.run_parts("experiments.tiny_lm.bench", PARTS, arguments, NEEDS)
  if found is None:
    return
  ours, theirs, rows = found["ours"], found["transformers"], []
  if theirs is not None:
    peer = ("transformers", metadata.version("transformers"))
    times = (1e3 * x["step"] for x in (ours, theirs))
    memory = (x["memory"] for x in (ours, theirs))
    rows = [
      environment.peer_row(*peer, "training step, compiled", *times, "ms"),
      environment.peer_row(*peer, "peak memory", *memory, "MiB"),
    ]
  print(report.peers_table({"peers": rows}))
  report.write_peers("tiny_lm", rows)


if __name__ == "__main__":
  main()
