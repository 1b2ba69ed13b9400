"""The tiny_lm experiment: its tasks, and from the command line smoke, kill and resume, mistakes."""

import json
import signal

import numpy as np
import pytest

from experiments.tiny_lm.config import get_config
from models.transformer import tokenizer

pytest.importorskip("reasoning_gym")

from experiments.tiny_lm import tasks

TASKS = {name: dict(settings) for name, settings in get_config().tasks.items()}
WORDS = tokenizer.byte_tokenizer()


def make(names=("chain_sum", "spell_backward"), count=40, seed=0, length=32, without=None):
  chosen = {name: TASKS[name] for name in names}
  return tasks.make_examples(chosen, count, seed, WORDS, length, 0.1, without)


def test_rows_are_questions_with_right_answers():
  made = make()
  assert made.tokens.shape == made.weights.shape == (80, 32)
  stop = WORDS.stop_ids[0]
  for tokens, weights, question, task in zip(
    made.tokens, made.weights, made.questions, made.task, strict=True
  ):
    start, end = len(question), int(np.flatnonzero(tokens == stop)[0])
    assert tokens[:start].tolist() == question
    np.testing.assert_array_equal(weights[:start], np.float32(0.1))
    np.testing.assert_array_equal(weights[start : end + 1], 1)
    assert not tokens[end + 1 :].any()
    assert not weights[end + 1 :].any()
    text, answer = WORDS.decode(question).strip(), WORDS.decode(tokens[start:end])
    if task == "spell_backward":
      assert answer == text[::-1]
    else:
      left, sign, right = text.removesuffix("=").split()
      assert int(answer) == int(left) + (1 if sign == "+" else -1) * int(right)


def test_a_seed_gives_its_rows_and_held_out_questions_are_left_out():
  first, again, other = make(), make(), make(seed=2**30)
  np.testing.assert_array_equal(first.tokens, again.tokens)
  assert first.questions != other.questions
  asked = set(map(tuple, first.questions))
  wide, held = make(count=3000), make(without=first)
  assert not held.questions
  rest = make(count=3000, without=first)
  assert 0 < len(rest.questions) < len(wide.questions)
  assert not asked & set(map(tuple, rest.questions))


def test_verifiers_judge():
  made = make(count=4)
  right = [entry["answer"] for entry in made.entries]
  found = tasks.scores(made, right)
  assert set(found) == {"chain_sum", "spell_backward"}
  assert all(exact.all() for exact in found.values())
  found = tasks.scores(made, ["", *right[1:4], "x" + right[4], *right[5:]])
  assert [int(exact.sum()) for exact in found.values()] == [3, 3]


def test_what_is_no_task_or_too_long_is_named():
  with pytest.raises(ValueError, match="task 'sudoku'; expected some of chain_sum"):
    tasks.make_examples({"sudoku": {}}, 1, 0, WORDS, 32, 0.1)
  with pytest.raises(ValueError, match=r"config.length is 8, raise it"):
    make(length=8)
  with pytest.raises(ValueError, match="reasoning-gym refuses the settings of chain_sum"):
    tasks.make_examples({"chain_sum": {"min_terms": 0}}, 1, 0, WORDS, 32, 0.1)


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken_and_the_model_answers(launch, tmp_path):
  whole = launch("--config=tiny_lm:smoke", f"--workdir={tmp_path / 'whole'}")
  assert whole.returncode == 0, whole.stderr

  killed = tmp_path / "killed"
  process = launch.start("--config=tiny_lm:smoke", f"--workdir={killed}")
  process.wait_until(lambda: any((killed / "checkpoints").glob("*/*/_CHECKPOINT_METADATA")))
  process.send_signal(signal.SIGKILL)
  process.wait()
  resumed = launch("--config=tiny_lm:smoke", f"--workdir={killed}")
  assert resumed.returncode == 0, resumed.stderr

  def results(workdir):
    found = json.loads((workdir / "results.json").read_text())
    found.pop("environment")
    return found

  assert results(killed) == results(tmp_path / "whole")
  assert results(killed)["status"] == "complete"
  asked = launch(
    "--config=generate",
    f"--config.model={killed / 'model'}",
    "--config.chat=False",
    "--config.prompt=3 + 4 =\n",
    "--config.max_new_tokens=4",
    f"--workdir={tmp_path / 'asked'}",
  )
  assert asked.returncode == 0, asked.stderr
