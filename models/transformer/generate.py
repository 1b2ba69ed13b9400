"""Sampling from a decoder: batched, ragged, with the log-probability of exactly what was drawn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from models.transformer.cache import KVCache, init_cache
from models.transformer.config import TransformerConfig
from models.transformer.model import Transformer

_SMALLEST_BUCKET = 32


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """How the next token is drawn.

  Attributes:
    temperature: 0 takes the most likely token.
    top_k: only the k most likely; None for all.
    top_p: only the smallest set of most likely tokens that holds this much probability.
    max_new_tokens: at most so many a row.
    stop_ids: tokens that end a row; the stop token itself is part of the result.

  Raises:
    ValueError: a field outside its range.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0
  max_new_tokens: int = 128
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self):
    if not 0 <= self.temperature < float("inf"):
      raise ValueError(f"temperature = {self.temperature}; expected 0 (greedy) or more")
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k = {self.top_k}; expected 1 or more, or None for all")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p = {self.top_p}; expected (0, 1]")
    if self.max_new_tokens < 1:
      raise ValueError(f"max_new_tokens = {self.max_new_tokens}; expected 1 or more")


@struct.dataclass
class Generation:
  """Results, a row a prompt.

  Attributes:
    tokens: `[B, N]` new ids; entries beyond `lengths` are 0.
    log_probs: `[B, N]` log-probability of each id under the distribution it was drawn from (after
      temperature, top-k and top-p; 0 when greedy).
    model_log_probs: `[B, N]` the same under the model's own distribution, at temperature 1.
    lengths: `[B]` new tokens, the stop token counted.
    stopped: `[B]` whether a stop token ended the row.
    cache: keys and values of the prompt and all new tokens but the last.
  """

  tokens: np.ndarray
  log_probs: np.ndarray
  model_log_probs: np.ndarray
  lengths: np.ndarray
  stopped: np.ndarray
  cache: KVCache


def truncated_logits(logits: jax.Array, config: SamplingConfig) -> jax.Array:
  """`[..., V]` logits of the distribution that is sampled, -inf for what top-k and top-p drop.

  Ties at a border are kept together, so that what is drawn does not depend on their order.
  """
  logits = logits / config.temperature
  if config.top_k is not None and config.top_k < logits.shape[-1]:
    border = jax.lax.top_k(logits, config.top_k)[0][..., -1:]
    logits = jnp.where(logits < border, -jnp.inf, logits)
  if config.top_p < 1:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # A token stays if those before it do not hold top_p yet; the first always does.
    kept = jnp.cumsum(probabilities, axis=-1) - probabilities < config.top_p
    border = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits < border, -jnp.inf, logits)
  return logits


def sample(
  key: jax.Array, logits: jax.Array, config: SamplingConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws from `logits [B, V]`: `(token, log-prob as drawn, log-prob of the model)`, `[B]` each."""
  model = jax.nn.log_softmax(logits, axis=-1)
  if config.temperature == 0:
    token = jnp.argmax(logits, axis=-1)
    drawn = jnp.zeros(token.shape, model.dtype)
  else:
    log_probs = jax.nn.log_softmax(truncated_logits(logits, config), axis=-1)
    token = jax.random.categorical(key, log_probs, axis=-1)
    drawn = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
  own = jnp.take_along_axis(model, token[:, None], axis=-1)[:, 0]
  return token.astype(jnp.int32), drawn, own


def generate(
  params: Any,
  config: TransformerConfig,
  prompts: Sequence[Sequence[int]],
  sampling: SamplingConfig | None = None,
  *,
  key: jax.Array | None = None,
  lora: Any = None,
  on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
  tokens_per_call: int = 8,
) -> Generation:
  """Continues prompts of any lengths together.

  Prompt lengths and the cache are rounded up to powers of two: one compilation a bucket. A row's
  draws depend on its own key and place only, not on the other rows.

  Args:
    params: of `Transformer(config)`.
    config: the model.
    prompts: ids, a row each.
    sampling: see `SamplingConfig`.
    key: PRNG key; may be None when greedy.
    lora: an adapter, or None.
    on_tokens: called with `(ids [B, n], valid [B, n])` after each compiled call, for streaming.
    tokens_per_call: tokens a compiled call makes before Python looks at them.

  Returns:
    A `Generation`.

  Raises:
    ValueError: no prompt, an empty one, ids outside the vocabulary, no room for a new token in
      the context, or a temperature without a key.
  """
  sampling = sampling or SamplingConfig()
  if sampling.temperature > 0 and key is None:
    raise ValueError(f"temperature = {sampling.temperature} needs a key; give jax.random.key(seed)")
  ids, lengths = _check_prompts(prompts, config)
  room = config.max_positions - int(lengths.max())
  num_new = min(sampling.max_new_tokens, room)
  sampling = dataclasses.replace(sampling, max_new_tokens=num_new)
  capacity = min(_bucket(ids.shape[1] + num_new), config.max_positions)
  width = min(_bucket(ids.shape[1]), capacity)
  ids = np.pad(ids, ((0, 0), (0, width - ids.shape[1])))
  key = jax.random.key(0) if key is None else key
  row_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(prompts)))

  static = {"config": config, "sampling": sampling}
  state = prefill(
    params, jnp.asarray(ids), jnp.asarray(lengths), lora, row_keys, capacity=capacity, **static
  )
  made = [[np.asarray(x)[:, None] for x in _emitted(state)]]
  count = 1
  while True:
    if on_tokens is not None:
      on_tokens(made[-1][0], made[-1][3])
    if count >= num_new or bool(state.done.all()):
      break
    state, chunk = decode(params, state, lora, row_keys, num_steps=tokens_per_call, **static)
    left = num_new - count
    made.append([np.asarray(x).T[:, :left] for x in chunk])
    count += tokens_per_call
  tokens, drawn, own, valid = (np.concatenate(part, axis=1) for part in zip(*made, strict=True))
  stopped = (np.isin(tokens, sampling.stop_ids) & valid).any(axis=1)
  return Generation(
    np.where(valid, tokens, 0),
    np.where(valid, drawn, 0),
    np.where(valid, own, 0),
    valid.sum(axis=1),
    stopped,
    state.cache,
  )


@struct.dataclass
class DecodeState:
  """Between two tokens: the last was drawn and is not in the cache yet.

  Attributes:
    cache: of what came before that token.
    token: `[B]` its id.
    drawn: `[B]` its log-probability as drawn.
    own: `[B]` its log-probability under the model.
    valid: `[B]` whether the row was still running when it was drawn.
    done: `[B]` whether the row has ended.
    count: tokens drawn so far.
  """

  cache: KVCache
  token: jax.Array
  drawn: jax.Array
  own: jax.Array
  valid: jax.Array
  done: jax.Array
  count: jax.Array


def _emitted(state: DecodeState) -> tuple[jax.Array, ...]:
  return state.token, state.drawn, state.own, state.valid


def _draw(
  logits: jax.Array,
  cache: KVCache,
  row_keys: jax.Array,
  count: jax.Array,
  running: jax.Array,
  sampling: SamplingConfig,
) -> DecodeState:
  keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, count)

  def row(key: jax.Array, logits: jax.Array) -> tuple[jax.Array, ...]:
    return jax.tree.map(lambda x: x[0], sample(key, logits[None], sampling))

  token, drawn, own = jax.vmap(row)(keys, logits)
  stop = jnp.isin(token, jnp.asarray(sampling.stop_ids, jnp.int32))
  done = ~running | stop | (count + 1 >= sampling.max_new_tokens)
  return DecodeState(cache, token, drawn, own, running, done, count + 1)


@functools.partial(jax.jit, static_argnames=("config", "sampling", "capacity"))
def prefill(
  params: Any,
  ids: jax.Array,
  lengths: jax.Array,
  lora: Any,
  row_keys: jax.Array,
  *,
  config: TransformerConfig,
  sampling: SamplingConfig,
  capacity: int,
) -> DecodeState:
  """Reads prompts `ids [B, T]` of `lengths [B]` into a cache and draws each row's first token."""
  cache = init_cache(config, ids.shape[0], capacity)
  out = Transformer(config).apply(
    params, ids, lengths=lengths, cache=cache, lora=lora, last_only=True
  )
  running = jnp.ones(ids.shape[0], bool)
  return _draw(out.logits, out.cache, row_keys, jnp.int32(0), running, sampling)


@functools.partial(
  jax.jit, static_argnames=("config", "sampling", "num_steps"), donate_argnames=("state",)
)
def decode(
  params: Any,
  state: DecodeState,
  lora: Any,
  row_keys: jax.Array,
  *,
  config: TransformerConfig,
  sampling: SamplingConfig,
  num_steps: int,
) -> tuple[DecodeState, tuple[jax.Array, ...]]:
  """Draws `num_steps` more tokens: the state, and `(token, drawn, own, valid)`, each `[N, B]`.

  The state that is passed is used up.
  """

  def step(state: DecodeState, _: None) -> tuple[DecodeState, tuple[jax.Array, ...]]:
    running = ~state.done
    # A row that is done writes nothing: its length stays.
    out = Transformer(config).apply(
      params,
      state.token[:, None],
      lengths=running.astype(jnp.int32),
      cache=state.cache,
      lora=lora,
      last_only=True,
    )
    new = _draw(out.logits, out.cache, row_keys, state.count, running, sampling)
    return new, _emitted(new)

  return jax.lax.scan(step, state, None, length=num_steps)


def _check_prompts(
  prompts: Sequence[Sequence[int]], config: TransformerConfig
) -> tuple[np.ndarray, np.ndarray]:
  if not len(prompts):
    raise ValueError("prompts is empty; expected at least one list of ids")
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if lengths.min() < 1:
    raise ValueError(f"prompt {int(lengths.argmin())} is empty; expected at least one id")
  if lengths.max() >= config.max_positions:
    raise ValueError(
      f"prompt {int(lengths.argmax())} has {lengths.max()} ids; the model's context is "
      f"{config.max_positions} and a new token needs room. Shorten the prompt"
    )
  ids = np.zeros((len(prompts), int(lengths.max())), np.int32)
  for row, prompt in zip(ids, prompts, strict=True):
    row[: len(prompt)] = prompt
  bad = (ids < 0) | (ids >= config.vocab_size)
  if bad.any():
    row, place = np.argwhere(bad)[0]
    raise ValueError(
      f"id {ids[row, place]} at place {place} of prompt {row}; expected 0..{config.vocab_size - 1}"
    )
  return ids, lengths


def _bucket(length: int) -> int:
  return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
