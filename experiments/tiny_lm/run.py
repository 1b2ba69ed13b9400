"""Makes the examples, trains the decoder, asks it held-out questions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from algorithms import language_modeling as lm
from experiments.tiny_lm.tasks import Examples, make_examples, scores
from launch.run import Run
from models.transformer import (
  SamplingConfig,
  Transformer,
  TransformerConfig,
  generate,
  param_shardings,
  tokenizer,
)
from models.transformer.weights import save_folder

# Far from every training seed: reasoning-gym makes row i of a data set from seed + i.
_HELD_OUT_SEED = 2**30


def run(config: ml_collections.ConfigDict, run: Run) -> None:
  words = tokenizer.byte_tokenizer()
  make = functools.partial(
    make_examples,
    {name: dict(settings) for name, settings in config.tasks.items()},
    words=words,
    length=config.length,
    question_weight=config.question_weight,
  )
  held_out = make(config.held_out, _HELD_OUT_SEED)
  model_config = decoder_config(config, words.vocab_size)
  result = run.unit(
    "train", functools.partial(_train, config, run, make, model_config, held_out, words)
  )
  save_folder(run.workdir / "model", model_config, result["params"])
  tokenizer.save(words, run.workdir / "model")
  _report(config, run, result)


def decoder_config(config: ml_collections.ConfigDict, vocab_size: int) -> TransformerConfig:
  """The decoder of a preset."""
  return TransformerConfig(
    vocab_size=vocab_size,
    tied_embeddings=True,
    max_positions=max(256, config.length),
    **config.model,
  )


def lm_config(config: ml_collections.ConfigDict) -> lm.LMConfig:
  """The optimiser of a preset."""
  train = config.train
  return lm.LMConfig(train.steps, train.learning_rate, train.warmup_steps)


def _train(
  config: ml_collections.ConfigDict,
  run: Run,
  make: Any,
  model_config: TransformerConfig,
  held_out: Examples,
  words: tokenizer.Tokenizer,
) -> dict[str, Any]:
  train = config.train
  examples = make(config.examples, config.seed, without=held_out)
  run.say(
    f"{len(examples.tokens)} examples, {model_config.num_parameters:,} parameters, {train.steps} "
    f"steps of {train.batch} rows"
  )
  settings = lm_config(config)
  model = Transformer(model_config)
  params = model.init(run.key("init"), jnp.zeros((1, 1), jnp.int32))
  params = jax.device_put(params, param_shardings(params, model_config, run.mesh))
  rows = NamedSharding(run.mesh, PartitionSpec(None, "data"))

  def apply_fn(params: Any, tokens: jax.Array) -> jax.Array:
    return model.apply(params, tokens).logits

  update = jax.jit(lambda state, *batch: lm.run(state, apply_fn, *batch, settings))
  state = lm.init(params, settings)
  order = np.random.default_rng(config.seed).permutation(len(examples.tokens))
  losses: list[float] = []
  done = 0
  restored = run.checkpoints.restore((state, np.zeros(train.steps)))
  if restored is not None:
    done, (state, kept) = restored
    losses = list(kept[:done])
    run.say(f"going on from step {done} of {train.steps}")
  for at in run.progress(range(done, train.steps, train.every), "training"):
    size = min(train.every, train.steps - at)
    # Rows are visited in one fixed order, again and again, wherever a run was stopped.
    place = (np.arange(at * train.batch, (at + size) * train.batch)) % len(order)
    chosen = order[place].reshape(size, train.batch)
    batch = jax.device_put((examples.tokens[chosen], examples.weights[chosen]), rows)
    state, metrics = update(state, *batch)
    losses += [float(x) for x in metrics["loss"]]
    run.log(at + size, loss=np.mean(losses[-size:]), gradient_norm=metrics["gradient_norm"][-1])
    padded = np.pad(losses, (0, train.steps - len(losses)))
    run.checkpoints.save(at + size, (state, padded))
  result = generate(
    state.params,
    model_config,
    held_out.questions,
    SamplingConfig(max_new_tokens=config.length, stop_ids=words.stop_ids),
  )
  answers = [words.decode(row[:n]) for row, n in zip(result.tokens, result.lengths, strict=True)]
  return {
    "params": jax.tree.map(np.asarray, state.params),
    "losses": np.array(losses),
    "exact": scores(held_out, answers),
    "shown": [
      {"task": task, "question": words.decode(q).strip(), "answer": a, "right": e["answer"]}
      for task, q, a, e in zip(
        held_out.task, held_out.questions, answers, held_out.entries, strict=True
      )
    ],
  }


def _report(config: ml_collections.ConfigDict, run: Run, result: dict[str, Any]) -> None:
  import matplotlib.pyplot as plt

  run.metric("loss/last", np.mean(result["losses"][-config.train.every :]), "nats a token")
  held = []
  for task, exact in result["exact"].items():
    share = run.metric(f"exact_match/{task}", exact.astype(float), "share of held-out questions")
    held.append((task, share))
  run.claim(
    "tiny-lm-learns",
    "The decoder answers most held-out questions of each task exactly.",
    source="ours",
    criteria={f"greedy answers, {task} at least .9": share.mean >= 0.9 for task, share in held},
    measured=", ".join(f"{task} {share.mean:.3f}" for task, share in held),
    n=config.held_out,
  )
  run.table("held-out answers", result["shown"][:: max(1, len(result["shown"]) // 12)][:12])
  figure, axes = plt.subplots(figsize=(6, 3.5))
  axes.plot(np.arange(1, len(result["losses"]) + 1), result["losses"], lw=1)
  axes.set(xlabel="step", ylabel="loss (nats a token)", yscale="log")
  run.figure("loss", figure, "Training loss, answers weighted 1 and questions less.")
