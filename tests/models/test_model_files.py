"""GGUF files, tokenizers and chat templates, good and hostile."""

import json
import pathlib
import subprocess
import sys
import time

import gguf
import jax
import jinja2
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.transformer import tokenizer
from models.transformer.chat import render_chat
from models.transformer.weights import read_folder, read_gguf

GOLDENS = pathlib.Path(__file__).parent / "goldens"
CHATML = (
  "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
  "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
  "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": 'Hi <there> & "you"'}]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
  """Puts entry i + D/2 of a head behind entry i, row by row: llama.cpp's order."""
  size = rows.shape[0] // heads
  order = [h * size + i + half for h in range(heads) for i in range(size // 2) for half in (0, size // 2)]  # fmt: skip  # noqa: E501
  return rows[order]


def write_gguf(
  path: pathlib.Path, name: str, quantised: bool = False, with_tokenizer: bool = False
) -> None:
  """The golden checkpoint of a family as a GGUF file."""
  fields = json.loads((GOLDENS / name / "config.json").read_text())
  family = fields["model_type"]
  writer = gguf.GGUFWriter(path, family)
  writer.add_block_count(fields["num_hidden_layers"])
  writer.add_context_length(fields["max_position_embeddings"])
  writer.add_embedding_length(fields["hidden_size"])
  writer.add_feed_forward_length(fields["intermediate_size"])
  writer.add_head_count(fields["num_attention_heads"])
  writer.add_head_count_kv(fields["num_key_value_heads"])
  if fields.get("head_dim"):
    writer.add_key_length(fields["head_dim"])
  writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
  if with_tokenizer:
    tokens = [*sorted(tokenizer.pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "smollm"}.get(family, "qwen2"))
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(CHATML)
  names = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
  }  # fmt: skip
  for key, array in load_file(GOLDENS / name / "model.safetensors").items():
    if family == "llama" and (".q_proj" in key or ".k_proj" in key):
      heads = "num_attention_heads" if ".q_proj" in key else "num_key_value_heads"
      array = interleave(array, fields[heads])
    for old, new in names.items():
      key = key.replace(old, new)
    if quantised and array.ndim == 2 and array.shape[1] % 32 == 0:
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
      writer.add_tensor(key, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize("name", ["smollm", "qwen2", "qwen3"])
def test_gguf_files_hold_the_same_weights(name, tmp_path):
  path = tmp_path / "model.gguf"
  write_gguf(path, name)
  config, params, metadata = read_gguf(path)
  expected_config, expected = read_folder(GOLDENS / name)
  assert config.replace(norm_eps=expected_config.norm_eps) == expected_config
  assert np.isclose(config.norm_eps, expected_config.norm_eps)
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  assert metadata["general.architecture"] == config_family(name)


def config_family(name: str) -> str:
  return "llama" if name == "smollm" else name


def test_quantised_blocks_become_numbers(tmp_path):
  path = tmp_path / "model.gguf"
  write_gguf(path, "smollm", quantised=True)
  _, params, _ = read_gguf(path)
  _, expected = read_folder(GOLDENS / "smollm")

  def close(a, b):
    np.testing.assert_allclose(a, b, atol=np.abs(b).max() / 120)

  jax.tree.map(close, params, expected)


@pytest.mark.slow
def test_damaged_model_files_are_read_or_refused(root):
  """The first of the files that the fuzz script tries; 10,000 when run by hand."""
  script = root / "tests" / "models" / "fuzz_model_files.py"
  done = subprocess.run([sys.executable, script, "--count=150"], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  assert ", 0 wrong" in done.stdout


def test_damaged_gguf_files_are_refused(tmp_path):
  path = tmp_path / "model.gguf"
  write_gguf(path, "smollm")
  data = path.read_bytes()
  for cut in (0, 3, 30, 400, len(data) // 2, len(data) - 10):
    path.write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"GGUF|tensor|claims|damaged"):
      read_gguf(path)
  with pytest.raises(ValueError, match="is not a file"):
    read_gguf(tmp_path / "none.gguf")


TEXTS = (
  "",
  "plain",
  "naïve café",
  "日本語 and 한국어",
  "🙂🏳️‍🌈",
  "tabs\tand\nlines\r\n",
  "a\x00b\x7f",
  "<|end|>",
)


def test_bytes_come_back_and_control_tokens_are_kept_apart(tmp_path):
  words = tokenizer.byte_tokenizer(("<|end|>", "<|pad|>"))
  for text in TEXTS[:-1]:
    ids = words.encode(text)
    assert len(ids) == len(text.encode())
    assert words.decode(ids) == text
  assert words.encode("<|end|>") == list(words.stop_ids) == [256]
  assert len(words.encode("<|end|>", parse_special=False)) == 7
  assert words.decode(words.encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"
  assert words.decode(words.encode("a\ud800b")) == "a?b"
  with pytest.raises(ValueError, match=r"id 258; expected 0..257"):
    words.decode([258])
  tokenizer.save(words, tmp_path)
  again = tokenizer.from_folder(tmp_path)
  assert again.stop_ids == words.stop_ids
  assert all(again.encode(text) == words.encode(text) for text in TEXTS)
  with pytest.raises(ValueError, match="no chat template"):
    words.chat(MESSAGES)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="is damaged"):
    tokenizer.from_folder(tmp_path)


def test_incomplete_gguf_tokenizers_are_refused():
  good = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1],
    "tokenizer.ggml.eos_token_id": 0,
  }
  words = tokenizer.from_gguf(good)
  assert words.encode("abba<|end|>") == [3, 2, 1, 0]
  assert words.stop_ids == (0,)
  for change in (
    {"tokenizer.ggml.model": "llama"},
    {"tokenizer.ggml.pre": "other"},
    {"tokenizer.ggml.merges": ["a"]},
    {"tokenizer.ggml.merges": ["a c"]},
    {"tokenizer.ggml.tokens": ["a", "a", "b", "ab"]},
    {"tokenizer.ggml.token_type": [1]},
  ):
    with pytest.raises(ValueError, match="tokenizer"):
      tokenizer.from_gguf(good | change)


def test_a_template_renders_as_plain_jinja_does():
  plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHATML)
  expected = plain.render(messages=MESSAGES, add_generation_prompt=True)
  assert render_chat(CHATML, MESSAGES) == expected
  assert expected.endswith("<|im_start|>assistant\n")
  without = render_chat(CHATML, MESSAGES, add_generation_prompt=False)
  assert expected == without + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
  "template",
  [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 1000000000 }}",
    "{% set x = namespace(s='aaaaaaaaaa') %}{% for i in range(40) %}"
    "{% set x.s = x.s ~ x.s %}{% endfor %}{{ x.s }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'a'.ljust(999999999) }}",
    "{% set x = namespace(s='a') %}{% for i in range(40) %}"
    "{% set x.s = x.s.replace('a', 'aaaaaaaa') %}{% endfor %}{{ x.s }}",
    "{% set x = namespace(s=[1]) %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}",
    "{{ ['a' * 1000000] * 100 | join('b' * 1000000) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{% for",
    "{{ raise_exception('only users') }}",
    "{% include 'secrets' %}",
    "{{ cycler.__init__.__globals__ }}",
  ],
)
def test_hostile_templates_end_in_an_error(template):
  began = time.monotonic()
  with pytest.raises(ValueError, match="chat template"):
    render_chat(template, MESSAGES)
  assert time.monotonic() - began < 20
