"""Questions and answers of reasoning-gym as rows of tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import reasoning_gym

from models.transformer.tokenizer import Tokenizer

# The part of a question that differs from one to the next: a small model need not read the rest.
SHORT = {
  "chain_sum": r"problem: (.*)$",
  "spell_backward": r": (\w+)$",
}


@dataclasses.dataclass(frozen=True)
class Examples:
  """Rows of one or several tasks.

  Attributes:
    tokens: `[N, T]` int32: question, newline, answer, stop token, zeros.
    weights: `[N, T]` float32 of each token in the loss.
    questions: token ids of each question with its newline.
    entries: reasoning-gym's own rows, for its verifiers.
    task: name of each row's task.
  """

  tokens: np.ndarray
  weights: np.ndarray
  questions: list[list[int]]
  entries: list[dict[str, Any]]
  task: list[str]


def make_examples(
  tasks: Mapping[str, Mapping[str, Any]],
  count: int | Mapping[str, int],
  seed: int,
  words: Tokenizer,
  length: int,
  question_weight: float,
  without: Examples | None = None,
) -> Examples:
  """`count` rows of each task, or `count[task]`, less those whose question is among `without`'s.

  The same seed gives the same rows.

  Raises:
    ValueError: an unknown task, settings that reasoning-gym refuses, or a row longer than `length`.
  """
  tokens, weights, questions, entries, names = [], [], [], [], []
  stop = words.stop_ids[0]
  left_out = set(map(tuple, without.questions)) if without else set()
  for name, settings in tasks.items():
    if name not in SHORT:
      raise ValueError(f"task {name!r}; expected some of {', '.join(SHORT)}")
    try:
      size = count if isinstance(count, int) else count[name]
      data = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    except (TypeError, AssertionError) as error:
      raise ValueError(f"reasoning-gym refuses the settings of {name}: {error}") from None
    for entry in data:
      short = re.search(SHORT[name], entry["question"])
      question = words.encode(short.group(1) + "\n")
      if tuple(question) in left_out:
        continue
      answer = [*words.encode(entry["answer"]), stop]
      used = len(question) + len(answer)
      if used > length:
        raise ValueError(
          f"{short.group(1)!r} with its answer takes {used} tokens; config.length is {length}, "
          "raise it"
        )
      padding = [0] * (length - used)
      tokens.append([*question, *answer, *padding])
      weights.append([question_weight] * len(question) + [1.0] * len(answer) + padding)
      questions.append(question)
      entries.append(entry)
      names.append(name)
  return Examples(
    np.array(tokens, np.int32), np.array(weights, np.float32), questions, entries, names
  )


def scores(examples: Examples, answers: Sequence[str]) -> dict[str, np.ndarray]:
  """For each task, whether reasoning-gym's verifier gives an answer the full score."""
  verified: dict[str, list[bool]] = {}
  verifiers = {
    name: reasoning_gym.create_dataset(name, size=1, seed=0) for name in set(examples.task)
  }
  for name, entry, answer in zip(examples.task, examples.entries, answers, strict=True):
    score = verifiers[name].score_answer(answer, entry)
    verified.setdefault(name, []).append(score == 1)
  return {name: np.array(values) for name, values in verified.items()}
