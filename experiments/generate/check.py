"""Compares SmolLM2-135M with goldens.json: what transformers computes from the same GGUF file."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generate.strings import strings
from launch.run import Run
from models.transformer import SamplingConfig, Transformer, TransformerConfig, generate
from models.transformer.tokenizer import Tokenizer

GOLDENS = pathlib.Path(__file__).with_name("goldens.json")
MODEL = "smollm2-135m"

# Shares of a row's largest logit.
LOGITS_WITHIN = 1e-4
# A first difference where the best two logits are closer than this is one of rounding.
ROUNDING = 2e-4


def applies(model: str, dtype: str) -> bool:
  """Whether the goldens are of this model."""
  return model == MODEL and dtype == "float32"


def measure(
  params: Any, config: TransformerConfig, words: Tokenizer, goldens: dict[str, Any] | None = None
) -> dict[str, Any]:
  """What agrees with the goldens, and by how much.

  Returns:
    "logits": for each prompt the largest error of 64 logits after its last token, as a share of
    the prompt's largest logit; "agreed": how many of the greedy tokens agree before the first
    that does not; "length": of how many; "gap": of the best two logits at the first that does
    not, as a share of the largest, NaN where all agree; "prompt_ids" and "token_ids": whether the
    tokenizer gives the same ids, for prompts and strings.
  """
  goldens = json.loads(GOLDENS.read_text()) if goldens is None else goldens
  rows = goldens["rows"]
  largest = np.array([row["largest_logit"] for row in rows])
  prompts = [row["prompt_ids"] for row in rows]
  lengths = jnp.array([len(ids) for ids in prompts])
  ids = np.zeros((len(rows), max(map(len, prompts))), np.int32)
  for padded, prompt in zip(ids, prompts, strict=True):
    padded[: len(prompt)] = prompt

  @jax.jit
  def last_logits(params: Any, ids: jax.Array) -> jax.Array:
    return Transformer(config).apply(params, ids, lengths=lengths, last_only=True).logits

  chosen = np.asarray(last_logits(params, ids))[:, goldens["logit_ids"]]
  errors = np.abs(chosen - np.array([row["logits"] for row in rows])).max(axis=1) / largest

  theirs = np.array([row["continuation"] for row in rows])
  greedy = SamplingConfig(max_new_tokens=theirs.shape[1])
  ours = generate(params, config, prompts, greedy).tokens
  same = np.cumprod(ours == theirs, axis=1).sum(axis=1)
  gap = np.array([[*row["gap"], np.nan] for row in rows])[np.arange(len(rows)), same] / largest
  hashes = [hashlib.sha256(str(words.encode(text)).encode()).hexdigest()[:8] for text in strings()]
  return {
    "logits": errors,
    "agreed": same,
    "length": theirs.shape[1],
    "gap": gap,
    "prompt_ids": np.array([words.encode(row["prompt"]) == row["prompt_ids"] for row in rows]),
    "token_ids": np.array(hashes) == np.array(goldens["token_id_hashes"]),
  }


def claims(run: Run, found: dict[str, Any]) -> None:
  """Records the claims and the table of prompts."""
  goldens = json.loads(GOLDENS.read_text())
  made_by = f"transformers {goldens['made_by']['transformers']}"
  run.claim(
    "generate-logits",
    f"Logits of SmolLM2-135M are those of {made_by} from the same file.",
    source="ours",
    criteria={
      f"error at most {LOGITS_WITHIN:g} of a prompt's largest logit": bool(
        np.max(found["logits"]) <= LOGITS_WITHIN
      )
    },
    measured=f"largest relative error {np.max(found['logits']):.1e}",
    n=len(found["logits"]),
  )
  whole = found["agreed"] == found["length"]
  criteria = {f"all {found['length']} tokens of every prompt": bool(np.all(whole))}
  measured = f"{whole.sum()} of {len(whole)} prompts in all {found['length']} tokens"
  if not np.all(whole):
    gap = found["gap"][~whole]
    criteria[f"or rounding: the best two within {ROUNDING:g} of the largest"] = bool(
      np.all(gap <= ROUNDING)
    )
    measured += f"; first differences where the best two are within {gap.max():.1e} of the largest"
  run.claim(
    "generate-greedy",
    f"Greedy continuations are those of {made_by}.",
    source="ours",
    criteria=criteria,
    measured=measured,
    n=len(whole),
  )
  run.claim(
    "generate-tokenizer",
    f"The tokenizer, read from the GGUF file, gives the ids of {made_by}.",
    source="ours",
    criteria={
      "every prompt": bool(np.all(found["prompt_ids"])),
      "every string of many scripts, broken UTF-8 and special tokens": bool(
        np.all(found["token_ids"])
      ),
    },
    measured=f"{np.sum(found['token_ids'])} of {len(found['token_ids'])} strings",
    n=len(found["token_ids"]),
  )
  run.table(
    "prompts",
    [
      {"prompt": row["prompt"], "relative error": float(error), "tokens that agree": int(agreed)}
      for row, error, agreed in zip(goldens["rows"], found["logits"], found["agreed"], strict=True)
    ],
    f"Against {made_by}, float32.",
  )
