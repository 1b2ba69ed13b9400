"""Language models by name or path, for all experiments."""

from __future__ import annotations

import pathlib
from typing import Any

from launch.artifacts import ARTIFACTS, artifact
from models.transformer import TransformerConfig, tokenizer
from models.transformer.weights import read_folder, read_gguf


def load(
  name: str, *, scan_layers: bool = False, dtype: str = "float32"
) -> tuple[TransformerConfig, dict[str, Any], tokenizer.Tokenizer]:
  """Reads a decoder and its tokenizer.

  Args:
    name: an artifact ("smollm2-135m"), fetched at the first use; a GGUF file; or a folder with
      config.json, safetensors and tokenizer.json.
    scan_layers: see `TransformerConfig`.
    dtype: of parameters and activations.

  Returns:
    `(config, params, tokenizer)`.

  Raises:
    ValueError: there is no such file, or it is not a model that can be read.
  """
  path = artifact(name) if name in ARTIFACTS else pathlib.Path(name).expanduser()
  if path.is_dir():
    config, params = read_folder(path, scan_layers=scan_layers, dtype=dtype)
    words = tokenizer.from_folder(path)
  elif path.is_file():
    config, params, metadata = read_gguf(path, scan_layers=scan_layers, dtype=dtype)
    words = tokenizer.from_gguf(metadata)
  else:
    raise ValueError(
      f"model = {name!r}; expected 'smollm2-135m', a GGUF file, or a folder that transformers saved"
    )
  if words.vocab_size > config.vocab_size:
    raise ValueError(
      f"the tokenizer of {name!r} has {words.vocab_size} ids, the model {config.vocab_size}; "
      "expected a tokenizer of the same model"
    )
  return config, params, words
