"""The generate experiment from the command line, and the real model where it is in the cache."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pretrained
from experiments.generate import check, strings
from launch.artifacts import is_cached
from models.transformer import Transformer, TransformerConfig, tokenizer
from models.transformer.weights import save_folder

SMALL = TransformerConfig(
  vocab_size=257,
  num_layers=1,
  hidden_size=16,
  mlp_size=32,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  max_positions=128,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A random model with a tokenizer of bytes."""
  path = tmp_path_factory.mktemp("model")
  params = Transformer(SMALL).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  save_folder(path, SMALL, params)
  tokenizer.save(tokenizer.byte_tokenizer(), path)
  return path


@pytest.mark.slow
def test_smoke_from_the_command_line(launch, tmp_path):
  done = launch("--config=generate:smoke", "--config.copies=2", f"--workdir={tmp_path / 'run'}")
  assert done.returncode == 0, done.stderr
  assert "--- answer 2" in done.stdout
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert (results["status"], results["claims"]) == ("complete", [])
  assert 1 <= results["metrics"]["new_tokens"]["mean"] <= 24
  assert "probabilities" in results["figures"]
  assert "answer" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_folder_answers_and_mistakes_are_said(launch, tmp_path, folder):
  flags = ("--config=generate", "--config.chat=False", "--config.max_new_tokens=4", "--fresh")
  run = (*flags, f"--workdir={tmp_path / 'run'}")
  done = launch(*run, f"--config.model={folder}", "--config.prompt=hello")
  assert done.returncode == 0, done.stderr
  # The comparison is with the default model only.
  assert json.loads((tmp_path / "run" / "results.json").read_text())["claims"] == []
  for change, message in (
    (("--config.model=nowhere.gguf",), "expected 'smollm2-135m', a GGUF file, or a folder"),
    ((f"--config.model={folder}", "--config.prompt="), "prompt 0 is empty"),
    ((f"--config.model={folder}", f"--config.prompt={'x' * 200}"), "Shorten the prompt"),
    ((f"--config.model={folder}", "--config.chat=True"), "chat template"),
    ((f"--config.model={folder}", "--config.temperature=-1"), "temperature"),
  ):
    refused = launch(*run, *change)
    assert refused.returncode == 1, change
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
  small = SMALL.replace(vocab_size=100)
  params = Transformer(small).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  save_folder(tmp_path, small, params)
  tokenizer.save(tokenizer.byte_tokenizer(), tmp_path)
  with pytest.raises(ValueError, match="has 257 ids, the model 100"):
    pretrained.load(str(tmp_path))


def test_the_check_finds_what_differs(folder):
  """Against goldens that this model made, and against the same with one thing changed each."""
  config, params, words = pretrained.load(str(folder))
  prompts, new = ["one", "a longer prompt"], 5

  @jax.jit
  def all_logits(ids):
    return Transformer(config).apply(params, ids[None]).logits[0]

  rows = []
  for prompt in prompts:
    ids = words.encode(prompt)
    made = list(ids)
    for _ in range(new):
      # What is behind a token does not matter.
      logits = all_logits(jnp.array(made + [0] * (32 - len(made))))[len(made) - 1]
      if len(made) == len(ids):
        first = np.asarray(logits)
      made.append(int(logits.argmax()))
    row = {
      "prompt": prompt,
      "prompt_ids": ids,
      "continuation": made[len(ids) :],
      "gap": [1.0] * new,
      "logits": first[[3, 50]].tolist(),
      "largest_logit": float(abs(first).max()),
    }
    rows.append(row)
  texts = [str(words.encode(text)) for text in strings.strings()]
  assert len(set(texts)) > 950
  hashes = [check.hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
  goldens = {"rows": rows, "logit_ids": [3, 50], "token_id_hashes": hashes}

  found = check.measure(params, config, words, goldens)
  assert found["logits"].max() < 1e-5
  np.testing.assert_array_equal(found["agreed"], [new, new])
  assert found["prompt_ids"].all()
  assert found["token_ids"].all()

  other = json.loads(json.dumps(goldens))
  other["rows"][1]["continuation"][2] += 1
  other["rows"][0]["logits"][1] += 0.5 * rows[0]["largest_logit"]
  other["rows"][1]["prompt"] = "another"
  other["token_id_hashes"][7] = "0" * 8
  found = check.measure(params, config, words, other)
  np.testing.assert_allclose(found["logits"], [0.5, 0], atol=1e-5)
  np.testing.assert_array_equal(found["agreed"], [new, 2])
  np.testing.assert_allclose(found["gap"][1], 1 / rows[1]["largest_logit"])
  np.testing.assert_array_equal(found["prompt_ids"], [True, False])
  assert found["token_ids"].sum() == 999


@pytest.mark.slow
@pytest.mark.skipif(not is_cached(check.MODEL), reason="python launch.py --fetch=smollm2-135m")
def test_the_real_model_equals_transformers():
  config, params, words = pretrained.load(check.MODEL)
  found = check.measure(params, config, words)
  assert found["logits"].max() <= check.LOGITS_WITHIN
  assert found["prompt_ids"].all()
  assert found["token_ids"].all()
  # Other processors round otherwise, and a tie may fall the other way.
  whole = found["agreed"] == found["length"]
  assert np.all(found["gap"][~whole] <= check.ROUNDING)
