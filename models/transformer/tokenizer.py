"""Text to ids and back, by the `tokenizers` library, from a folder or a GGUF file's metadata."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from models.transformer.chat import render_chat
from models.transformer.weights.safetensors import read_json

# How words are cut before byte pairs are merged, by the name that GGUF gives the rule.
_QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3}
_DIGITS = ("smollm",)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer with what a chat needs.

  Attributes:
    backend: `tokenizers.Tokenizer`.
    stop_ids: ids that end a turn.
    bos_id: id put before every text, or None.
    chat_template: Jinja source, or None.
  """

  backend: tokenizers.Tokenizer
  stop_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  chat_template: str | None = None

  @property
  def vocab_size(self) -> int:
    return self.backend.get_vocab_size(with_added_tokens=True)

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    """Ids of a text.

    Args:
      text: any string; lone surrogates become "?".
      parse_special: whether "<|im_end|>" in the text is the control token. False for text of
        others, which then cannot end a turn.
    """
    text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
    # The library keeps this switch in the tokenizer; every call sets it.
    self.backend.encode_special_tokens = not parse_special
    ids = self.backend.encode(text, add_special_tokens=False).ids
    return ids if self.bos_id is None else [self.bos_id, *ids]

  def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Text of ids; bytes that are not UTF-8 become the replacement character.

    Raises:
      ValueError: an id that does not exist.
    """
    ids = [int(i) for i in ids]
    bad = [i for i in ids if not 0 <= i < self.vocab_size]
    if bad:
      raise ValueError(f"id {bad[0]}; expected 0..{self.vocab_size - 1}")
    return self.backend.decode(ids, skip_special_tokens=skip_special)

  def chat(
    self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
  ) -> str:
    """The text of a conversation by the model's template; see `chat.render_chat`.

    Raises:
      ValueError: the model has no template, or `render_chat` refuses.
    """
    if self.chat_template is None:
      raise ValueError("the model has no chat template; use plain text")

    def token(i: int | None) -> str:
      return "" if i is None else self.backend.id_to_token(i) or ""

    variables = {
      "bos_token": token(self.bos_id),
      "eos_token": token(next(iter(self.stop_ids), None)),
    }
    return render_chat(
      self.chat_template,
      messages,
      add_generation_prompt=add_generation_prompt,
      variables=variables,
    )


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
  """Builds the tokenizer that a GGUF file carries: byte-level BPE.

  Raises:
    ValueError: another kind of tokenizer or of word splitting, or lists that do not fit.
  """
  kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "smollm")
  if kind != "gpt2" or split not in (*_SPLITS, *_DIGITS):
    raise ValueError(
      f"the file's tokenizer is {kind!r} with splitting {split!r}; expected 'gpt2' with one of "
      f"{', '.join((*_SPLITS, *_DIGITS))}"
    )
  tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
  types = metadata.get("tokenizer.ggml.token_type")
  if not tokens or not merges or types is None or len(types) != len(tokens):
    raise ValueError("the file's tokenizer is incomplete; expected tokens, merges and token types")
  if not all(isinstance(text, str) for text in (*tokens, *merges)):
    raise ValueError("the file's tokenizer is damaged: tokens or merges that are not text")
  pairs = [tuple(merge.split(" ")) for merge in merges]
  if len(set(tokens)) != len(tokens) or any(len(pair) != 2 for pair in pairs):
    raise ValueError(
      "the file's tokenizer is damaged: repeated tokens or merges that are not pairs"
    )
  try:
    backend = tokenizers.Tokenizer(
      models.BPE({token: i for i, token in enumerate(tokens)}, pairs, fuse_unk=False)
    )
  except Exception as error:
    # The library raises its own Exception for merges of unknown tokens.
    raise ValueError(f"the file's tokenizer is damaged: {error}") from None
  if split in _DIGITS:
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  else:
    first = pre_tokenizers.Split(tokenizers.Regex(_SPLITS[split]), "isolated")
    second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if split == "qwen2":
      backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = pre_tokenizers.Sequence([first, second])
  backend.decoder = decoders.ByteLevel()
  control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
  backend.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in control]
  )
  stop = metadata.get("tokenizer.ggml.eos_token_id")
  stops = [i for i in (stop, metadata.get("tokenizer.ggml.eot_token_id")) if i is not None]
  bos = metadata.get("tokenizer.ggml.bos_token_id")
  add_bos = metadata.get("tokenizer.ggml.add_bos_token", False)
  template = metadata.get("tokenizer.chat_template")
  if not all(isinstance(i, int) for i in stops) or not isinstance(bos, int | None):
    raise ValueError(f"the file's tokenizer has the stop ids {stops!r}, bos {bos!r}; expected ids")
  if not isinstance(template, str | None):
    raise ValueError(f"the file's chat template is a {type(template).__name__}; expected text")
  return Tokenizer(
    backend,
    tuple(dict.fromkeys(stops)),
    bos if add_bos else None,
    template,
  )


def from_folder(folder: str | pathlib.Path) -> Tokenizer:
  """Reads tokenizer.json, tokenizer_config.json and generation_config.json of a folder.

  Raises:
    ValueError: tokenizer.json is missing or damaged.
  """
  folder = pathlib.Path(folder)
  path = folder / "tokenizer.json"
  if not path.is_file():
    raise ValueError(f"{path} does not exist; expected the tokenizer that transformers saves")
  try:
    backend = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:
    raise ValueError(f"{path} is damaged: {error}") from None

  def optional(name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).exists() else {}

  fields, generation = optional("tokenizer_config.json"), optional("generation_config.json")

  def token_id(name: str) -> int | None:
    token = fields.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
      raise ValueError(f"{name} in {folder} is {token!r}; expected a token's text")
    return None if token is None else backend.token_to_id(token)

  stops = generation.get("eos_token_id") or []
  stops = list(stops) if isinstance(stops, list) else [stops]
  if not all(isinstance(i, int) for i in stops):
    raise ValueError(f"eos_token_id in {folder} is {stops!r}; expected ids")
  if token_id("eos_token") is not None:
    stops.insert(0, token_id("eos_token"))
  template = fields.get("chat_template")
  if (folder / "chat_template.jinja").exists():
    template = (folder / "chat_template.jinja").read_text("utf-8")
  if isinstance(template, list):
    # Several named templates; the one for chats is called default.
    named = (t for t in template if isinstance(t, dict) and t.get("name") == "default")
    template = next(named, {}).get("template")
  if not isinstance(template, str | None):
    raise ValueError(f"chat_template in {folder} is a {type(template).__name__}; expected text")
  bos = token_id("bos_token") if fields.get("add_bos_token") else None
  return Tokenizer(backend, tuple(dict.fromkeys(stops)), bos, template)


def byte_tokenizer(specials: Sequence[str] = ("<|end|>",)) -> Tokenizer:
  """A tokenizer for models trained from scratch: an id for each byte, then the control tokens.

  The first control token ends a turn.
  """
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in specials])
  return Tokenizer(backend, (len(alphabet),) if specials else ())


def save(tokenizer: Tokenizer, folder: str | pathlib.Path) -> None:
  """Writes what `from_folder` reads."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.backend.save(str(folder / "tokenizer.json"))
  fields: dict[str, Any] = {"add_bos_token": tokenizer.bos_id is not None}
  if tokenizer.stop_ids:
    fields["eos_token"] = tokenizer.backend.id_to_token(tokenizer.stop_ids[0])
  if tokenizer.bos_id is not None:
    fields["bos_token"] = tokenizer.backend.id_to_token(tokenizer.bos_id)
  if tokenizer.chat_template is not None:
    fields["chat_template"] = tokenizer.chat_template
  (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
  stops = json.dumps({"eos_token_id": list(tokenizer.stop_ids)}, indent=2)
  (folder / "generation_config.json").write_text(stops + "\n", "utf-8")
