"""Speed and memory of SmolLM2-135M beside transformers and llama.cpp, all on the same GGUF file.

python experiments/generate/bench.py   # prints a table, writes peers into results.json

Each package continues prompts of 16 tokens by 64 greedy ones, 1, 8 and 32 rows at once, and reads a
prompt of 1,024 tokens into a cache. Medians of three after one that compiles. transformers unpacks
the file to float32 as this project does (`pip install torch transformers accelerate`); llama.cpp's
Python binding works on the 4-bit blocks as they are, one row at a time
(`pip install llama-cpp-python`), so that its numbers are of another precision.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from launch import bench, environment, report
from launch.artifacts import artifact

MODEL = "smollm2-135m"
ROWS = (1, 8, 32)
PROMPT, NEW, LONG = 16, 64, 1024
REPEATS = 3


def _seconds(call: Callable[[], Any]) -> float:
  times = []
  for _ in range(1 + REPEATS):
    began = time.perf_counter()
    call()
    times.append(time.perf_counter() - began)
  return float(np.median(times[1:]))


def _ids(rows: int, length: int) -> np.ndarray:
  """Ids of no meaning: the work is that of any others. Special ones lie below 17."""
  return np.random.default_rng(0).integers(100, 40_000, (rows, length))


def run_ours(arguments: argparse.Namespace) -> dict[str, float]:
  """This project."""
  del arguments
  import jax
  import jax.numpy as jnp

  from experiments import pretrained
  from models.transformer import SamplingConfig, Transformer, generate, init_cache

  config, params, _ = pretrained.load(MODEL)
  greedy = SamplingConfig(max_new_tokens=NEW)
  found = {}
  for rows in ROWS:
    prompts = _ids(rows, PROMPT).tolist()
    seconds = _seconds(lambda prompts=prompts: generate(params, config, prompts, greedy))
    found[f"decode {rows}"] = rows * NEW / seconds
  ids = jnp.asarray(_ids(1, LONG), jnp.int32)

  @jax.jit
  def prefill(params: Any, ids: jax.Array) -> Any:
    cache = init_cache(config, 1, LONG)
    return Transformer(config).apply(params, ids, cache=cache, last_only=True)

  seconds = _seconds(lambda: jax.block_until_ready(prefill(params, ids)))
  return found | {"prefill": LONG / seconds, "weights": 4 * config.num_parameters}


def run_transformers(arguments: argparse.Namespace) -> dict[str, float]:
  """The same by transformers."""
  del arguments
  import torch
  from transformers import AutoModelForCausalLM

  path = artifact(MODEL)
  model = AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32
  ).eval()

  def decode(ids: Any) -> Any:
    return model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      min_new_tokens=NEW,
      max_new_tokens=NEW,
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
    )

  found = {}
  with torch.no_grad():
    for rows in ROWS:
      ids = torch.tensor(_ids(rows, PROMPT))
      found[f"decode {rows}"] = rows * NEW / _seconds(lambda ids=ids: decode(ids))
    ids = torch.tensor(_ids(1, LONG))
    seconds = _seconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
  return found | {"prefill": LONG / seconds}


def run_llama_cpp(arguments: argparse.Namespace) -> dict[str, float]:
  """The same by llama.cpp, on the 4-bit blocks."""
  del arguments
  from llama_cpp import Llama

  threads = environment.cpu_count()
  model = Llama(
    str(artifact(MODEL)), n_ctx=2 * LONG, n_threads=threads, n_threads_batch=threads, verbose=False
  )

  def decode() -> None:
    model.reset()
    tokens = model.generate(_ids(1, PROMPT)[0].tolist(), temp=0.0)
    for _ in range(NEW):
      next(tokens)

  def prefill() -> None:
    model.reset()
    model.eval(_ids(1, LONG)[0].tolist())

  return {"decode 1": NEW / _seconds(decode), "prefill": LONG / _seconds(prefill)}


def run_memory(arguments: argparse.Namespace) -> dict[str, float]:
  """Bytes a second of a copy, read and written, by as many threads as there are CPUs."""
  del arguments
  from concurrent import futures

  halves = np.ones((environment.cpu_count(), 2**26), np.float32)
  copies = np.empty_like(halves)
  with futures.ThreadPoolExecutor(len(halves)) as pool:
    seconds = _seconds(lambda: list(pool.map(np.copyto, copies, halves)))
  return {"copy": 2 * halves.nbytes / seconds}


PARTS = {
  "ours": run_ours,
  "transformers": run_transformers,
  "llama.cpp": run_llama_cpp,
  "memory": run_memory,
}
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
DISTRIBUTIONS = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}


def main() -> None:
  arguments = bench.parser(__doc__.partition("\n")[0], PARTS).parse_args()
  found = bench.run_parts("experiments.generate.bench", PARTS, arguments, PACKAGES)
  if found is None:
    return
  ours, rows = found["ours"], []
  for part, distribution in DISTRIBUTIONS.items():
    if (theirs := found[part]) is None:
      continue
    peer = (distribution, metadata.version(distribution))
    bits = "float32" if part == "transformers" else "float32 against 4 bits"
    for name in theirs:
      kind, _, count = name.partition(" ")
      if kind == "memory":
        rows.append(environment.peer_row(*peer, "peak memory", ours[name], theirs[name], "MiB"))
        continue
      what = f"decode, batch of {count}" if count else f"prefill of {LONG:,} tokens"
      # As times, so that a ratio below 1 is a win as everywhere.
      mine, other = (1e3 / x[name] for x in (ours, theirs))
      rows.append(environment.peer_row(*peer, f"{what}, {bits}", mine, other, "ms a token"))
  # The least time of a token: the weights are read once.
  least = 1e3 * ours["weights"] / found["memory"]["copy"]
  what = "decode, batch of 1, against reading the weights at the speed of a copy"
  peer = ("copy by NumPy", metadata.version("numpy"))
  rows.append(environment.peer_row(*peer, what, 1e3 / ours["decode 1"], least, "ms a token"))
  print(report.peers_table({"peers": rows}))
  report.write_peers("generate", rows)


if __name__ == "__main__":
  main()
