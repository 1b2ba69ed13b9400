"""The decoder against transformers' logits, and its cache, adapters and sampling against itself."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.transformer import (
  LoRAConfig,
  SamplingConfig,
  Transformer,
  TransformerConfig,
  from_huggingface,
  generate,
  init_cache,
  init_lora,
  merge_lora,
  to_huggingface,
  truncated_logits,
)
from models.transformer.weights import read_folder, save_folder
from models.transformer.weights.names import stack_layers, unstack_layers

GOLDENS = sorted(p.parent for p in pathlib.Path(__file__).parent.glob("goldens/*/expected.npz"))
TINY = TransformerConfig(
  vocab_size=50,
  num_layers=2,
  hidden_size=32,
  mlp_size=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  max_positions=64,
)


@pytest.fixture(scope="module")
def params():
  return random_params(TINY)


def random_params(config):
  made = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
  keys = iter(jax.random.split(jax.random.key(1), 200))
  # Larger than what training starts from, so that attention is far from uniform.
  return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), made)


def compiled(config):
  """The model as users run it: op by op it would take a second a call."""
  return jax.jit(Transformer(config).apply, static_argnames=("last_only", "return_hidden"))


def draw_tokens(shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).integers(0, 50, shape), jnp.int32)


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda p: p.name)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_those_of_transformers(folder, scan_layers):
  config, loaded = read_folder(folder, scan_layers=scan_layers)
  expected = np.load(folder / "expected.npz")
  found = compiled(config)(loaded, jnp.asarray(expected["tokens"], jnp.int32)).logits
  assert np.abs(expected["logits"]).max() > 1
  np.testing.assert_allclose(found, expected["logits"], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda p: p.name)
def test_greedy_continuations_are_those_of_transformers(folder):
  config, loaded = read_folder(folder)
  expected = np.load(folder / "expected.npz")["greedy"]
  made = generate(loaded, config, expected[:, :10].tolist(), SamplingConfig(max_new_tokens=20))
  np.testing.assert_array_equal(made.tokens, expected[:, 10:])


def test_there_is_a_golden_of_every_family():
  assert {p.name for p in GOLDENS} == {"llama3", "smollm", "qwen2", "qwen3"}


def test_cached_pieces_equal_the_whole(params):
  tokens = draw_tokens((2, 12))
  run = compiled(TINY)
  whole = run(params, tokens).logits
  cache = init_cache(TINY, 2, 16)
  seen = []
  for piece in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:7], tokens[:, 7:]):
    out = run(params, piece, cache=cache)
    cache = out.cache
    seen.append(out.logits)
  np.testing.assert_allclose(jnp.concatenate(seen, axis=1), whole, atol=1e-5)
  np.testing.assert_array_equal(cache.length, [12, 12])


def test_padding_and_other_rows_do_not_matter(params):
  run = compiled(TINY)
  tokens = draw_tokens((3, 10))
  lengths = jnp.array([10, 4, 7], jnp.int32)
  padded = jnp.where(jnp.arange(10)[None] < lengths[:, None], tokens, 49)
  cache = init_cache(TINY, 3, 16)
  together = run(params, padded, lengths=lengths, cache=cache)
  step = run(params, tokens[:, :1], cache=together.cache, last_only=True)
  for row in range(3):
    n = int(lengths[row])
    alone = run(params, tokens[row : row + 1, :n], cache=init_cache(TINY, 1, 16))
    np.testing.assert_allclose(together.logits[row, :n], alone.logits[0], atol=1e-5)
    following = run(params, tokens[row : row + 1, :1], cache=alone.cache).logits[0, 0]
    np.testing.assert_allclose(step.logits[row], following, atol=1e-5)


def test_scanned_layers_equal_unrolled_ones(params):
  scanned = TINY.replace(scan_layers=True, remat=True)
  stacked = stack_layers(TINY, params)
  tokens = draw_tokens((2, 9))
  one = compiled(TINY)(params, tokens, return_hidden=True)
  other = compiled(scanned)(stacked, tokens, return_hidden=True)
  np.testing.assert_allclose(other.logits, one.logits, atol=1e-5)
  np.testing.assert_allclose(other.hidden, one.hidden, atol=1e-4)
  assert one.hidden.shape == (3, 2, 9, 32)
  jax.tree.map(np.testing.assert_array_equal, unstack_layers(TINY, stacked), params)
  with_cache = compiled(scanned)(stacked, tokens, cache=init_cache(scanned, 2, 16))
  np.testing.assert_allclose(with_cache.logits, one.logits, atol=1e-5)

  def total(config, weights):
    return jnp.sum(jnp.sin(Transformer(config).apply(weights, tokens).logits))

  gradient = jax.jit(jax.grad(lambda w: total(TINY, w)))(params)
  again = unstack_layers(TINY, jax.jit(jax.grad(lambda w: total(scanned, w)))(stacked))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=1e-3), gradient, again)


def test_embeddings_in_place_of_ids(params):
  tokens = draw_tokens((1, 6))
  soft = params["params"]["embedding"][tokens]
  run = compiled(TINY)
  one, other = run(params, tokens), run(params, embeddings=soft)
  np.testing.assert_allclose(one.logits, other.logits, atol=1e-5)
  with pytest.raises(ValueError, match="either tokens"):
    run(params, tokens, embeddings=soft)


def test_adapters(params):
  lora = init_lora(jax.random.key(2), TINY, LoRAConfig(4, 8.0, ("q", "v", "down")))
  tokens, run = draw_tokens((2, 7)), compiled(TINY)
  plain = run(params, tokens).logits
  np.testing.assert_allclose(run(params, tokens, lora=lora).logits, plain, atol=1e-5)
  keys = iter(jax.random.split(jax.random.key(3), 50))
  lora = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), lora)
  with_lora = run(params, tokens, lora=lora).logits
  assert np.abs(with_lora - plain).max() > 0.1
  merged = run(merge_lora(params, lora), tokens).logits
  np.testing.assert_allclose(merged, with_lora, atol=2e-4)
  with pytest.raises(ValueError, match="targets"):
    LoRAConfig(targets=("query",))


def test_log_probs_are_those_of_a_full_forward_pass(params):
  prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
  sampling = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=12)
  made = generate(params, TINY, prompts, sampling, key=jax.random.key(0))
  run = compiled(TINY)
  for row, prompt in enumerate(prompts):
    new = made.tokens[row]
    logits = run(params, jnp.asarray([[*prompt, *new]], jnp.int32)).logits[0]
    logits = logits[len(prompt) - 1 : -1]
    drawn = jax.nn.log_softmax(truncated_logits(logits, sampling), axis=-1)
    own = jax.nn.log_softmax(logits, axis=-1)
    place = np.arange(12)
    np.testing.assert_allclose(made.log_probs[row], drawn[place, new], atol=1e-4)
    np.testing.assert_allclose(made.model_log_probs[row], own[place, new], atol=1e-4)


def test_rows_do_not_depend_on_other_rows_or_on_calls(params):
  sampling = SamplingConfig(temperature=1.0, max_new_tokens=10, stop_ids=(7,))
  key = jax.random.key(4)
  prompts = [[1, 2, 3], [4, 5]]
  seen = []
  both = generate(
    params,
    TINY,
    prompts,
    sampling,
    key=key,
    tokens_per_call=3,
    on_tokens=lambda tokens, valid: seen.append((tokens, valid)),
  )
  alone = generate(params, TINY, prompts[:1], sampling, key=key)
  np.testing.assert_array_equal(alone.tokens[0], both.tokens[0, : alone.tokens.shape[1]])
  streamed = np.concatenate([np.where(valid, tokens, 0) for tokens, valid in seen], axis=1)
  np.testing.assert_array_equal(streamed, both.tokens)
  for row in range(2):
    n = int(both.lengths[row])
    stops = np.flatnonzero(both.tokens[row, :n] == 7)
    assert (stops.size == 1 and stops[0] == n - 1) if both.stopped[row] else stops.size == 0
    assert not both.tokens[row, n:].any()


def test_truncation_keeps_what_numpy_keeps():
  logits = np.random.default_rng(0).normal(size=(4, 30)) * 2
  kept = np.isfinite(truncated_logits(jnp.asarray(logits), SamplingConfig(1.0, 5)))
  order = np.argsort(-logits, axis=1)
  for row in range(4):
    assert set(np.flatnonzero(kept[row])) == set(order[row, :5])
  kept = np.isfinite(truncated_logits(jnp.asarray(logits), SamplingConfig(0.7, top_p=0.8)))
  for row in range(4):
    p = np.exp(logits[row] / 0.7)
    p = p[order[row]] / p.sum()
    count = 1 + int((np.cumsum(p) < 0.8).sum())
    assert set(np.flatnonzero(kept[row])) == set(order[row, :count])


def test_folders_round_trip(params, tmp_path):
  save_folder(tmp_path, TINY, params)
  config, loaded = read_folder(tmp_path)
  assert config == TINY
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert from_huggingface(to_huggingface(TINY)) == TINY
  assert sum(x.size for x in jax.tree.leaves(params)) == TINY.num_parameters


def test_broken_folders_are_named(params, tmp_path):
  save_folder(tmp_path, TINY, params)
  path = tmp_path / "model.safetensors"
  tensors = load_file(path)
  name = "model.layers.1.self_attn.k_proj.weight"
  for change, message in (
    ({name: None}, "no tensor 'model.layers.1.self_attn.k_proj.weight'"),
    ({name: tensors[name][:, :5]}, "expected"),
    ({name: np.full_like(tensors[name], np.nan)}, "NaN"),
  ):
    changed = {k: np.ascontiguousarray(v) for k, v in (tensors | change).items() if v is not None}
    save_file(changed, path)
    with pytest.raises(ValueError, match=message):
      read_folder(tmp_path)
  save_file(tensors, path)
  data = path.read_bytes()
  for cut in (0, 5, 200, len(data) - 3):
    path.write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"safetensors"):
      read_folder(tmp_path)
  path.unlink()
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  with pytest.raises(ValueError, match="pickled weights are not read"):
    read_folder(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="is not JSON"):
    read_folder(tmp_path)


@pytest.mark.parametrize(
  ("prompts", "sampling", "message"),
  [
    ([], {}, "prompts is empty"),
    ([[1], []], {}, "prompt 1 is empty"),
    ([[50]], {}, "id 50 at place 0 of prompt 0"),
    ([[1] * 64], {}, "the model's context is 64"),
    ([[1]], {"temperature": 1.0}, "needs a key"),
  ],
)
def test_bad_prompts_are_named(params, prompts, sampling, message):
  with pytest.raises(ValueError, match=message):
    generate(params, TINY, prompts, SamplingConfig(**sampling))


def test_bad_settings_are_named():
  for fields in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"max_new_tokens": 0}):
    with pytest.raises(ValueError, match=next(iter(fields))):
      SamplingConfig(**fields)
  for fields in ({"num_kv_heads": 3}, {"head_dim": 7}, {"vocab_size": 0}, {"num_layers": 10**9}):
    with pytest.raises(ValueError, match=next(iter(fields))):
      TINY.replace(**fields)
  with pytest.raises(ValueError, match="model_type = 'gpt2'"):
    from_huggingface({"model_type": "gpt2"})
  with pytest.raises(ValueError, match="capacity"):
    init_cache(TINY, 1, 65)
