"""Loads a model, streams its answer to a prompt, and says how fast it was."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments import pretrained
from experiments.generate import check
from launch.run import Run
from models.transformer import (
  SamplingConfig,
  Transformer,
  TransformerConfig,
  generate,
  param_shardings,
  tokenizer,
)


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  started = time.perf_counter()
  if config.model == "random":
    model_config, params, words = _random_model(run.key("model"))
  else:
    model_config, params, words = pretrained.load(config.model, dtype=config.dtype)
  params = jax.device_put(params, param_shardings(params, model_config, run.mesh))
  run.say(
    f"{config.model}: {model_config.num_parameters:,} parameters, "
    f"{time.perf_counter() - started:.1f} s to load"
  )
  prompt = words.encode(_text(config, words))
  sampling = SamplingConfig(
    temperature=config.temperature,
    top_k=config.top_k or None,
    top_p=config.top_p,
    max_new_tokens=config.max_new_tokens,
    stop_ids=words.stop_ids,
  )
  stream = _Stream(words)
  result = generate(
    params,
    model_config,
    [prompt] * config.copies,
    sampling,
    key=run.key("sample"),
    on_tokens=stream,
  )
  stream.end()
  answers = [words.decode(row[:n]) for row, n in zip(result.tokens, result.lengths, strict=True)]
  for i, answer in enumerate(answers[1:], start=2):
    print(f"--- answer {i}\n{answer}")
  rate = stream.rate()
  if rate is not None:
    run.say(f"{rate:.1f} tokens/s, {len(prompt)} prompt tokens, {result.lengths.sum()} new ones")
    run.metric("decode", rate, "tokens a second, all rows, compilation left out")
  run.metric("new_tokens", result.lengths.astype(float), "tokens")
  run.metric("log_prob", result.model_log_probs.sum(axis=1), "nats an answer")
  run.table("answers", [{"answer": answer} for answer in answers])
  _figure(run, result, words)
  if config.check and check.applies(config.model, config.dtype):
    run.say("comparing with transformers' answers; --config.check=False leaves this out")
    check.claims(run, run.unit("check", lambda: check.measure(params, model_config, words)))


def _text(config: ml_collections.ConfigDict, words: tokenizer.Tokenizer) -> str:
  if not config.chat:
    return config.prompt
  messages = [{"role": "system", "content": config.system}] if config.system else []
  return words.chat([*messages, {"role": "user", "content": config.prompt}])


class _Stream:
  """Prints the first row's text as it grows, and keeps the time."""

  def __init__(self, words: tokenizer.Tokenizer):
    self.words, self.ids, self.printed = words, [], ""
    self.times: list[tuple[float, int]] = []

  def __call__(self, tokens: np.ndarray, valid: np.ndarray) -> None:
    self.times.append((time.perf_counter(), int(valid.sum())))
    self.ids += [int(i) for i in tokens[0][valid[0]]]
    text = self.words.decode(self.ids)
    # A character may be half here: its bytes come with the next tokens.
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    if text.startswith(self.printed):
      print(text[len(self.printed) :], end="", flush=True)
      self.printed = text

  def end(self) -> None:
    print(self.words.decode(self.ids)[len(self.printed) :], flush=True)

  def rate(self) -> float | None:
    # The first call is the prompt's, the second compiles.
    if len(self.times) < 4:
      return None
    return sum(n for _, n in self.times[2:]) / (self.times[-1][0] - self.times[1][0])


def _random_model(key: jax.Array) -> tuple[TransformerConfig, Any, tokenizer.Tokenizer]:
  words = tokenizer.byte_tokenizer()
  config = TransformerConfig(
    vocab_size=words.vocab_size,
    num_layers=2,
    hidden_size=32,
    mlp_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tied_embeddings=True,
    max_positions=256,
  )
  return config, Transformer(config).init(key, jnp.zeros((1, 1), jnp.int32)), words


def _figure(run: Run, result: Any, words: tokenizer.Tokenizer) -> None:
  import matplotlib.pyplot as plt

  count = int(result.lengths[0])
  figure, axes = plt.subplots(figsize=(8, 3))
  axes.bar(np.arange(count), np.exp(result.model_log_probs[0, :count]), width=1.0)
  axes.set(xlabel="token of the first answer", ylabel="its probability", ylim=(0, 1))
  run.figure("probabilities", figure, "How sure the model was of each token it wrote.")
