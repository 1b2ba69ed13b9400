"""Hugging Face folders: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.transformer.config import TransformerConfig, from_huggingface, to_huggingface
from models.transformer.weights.names import from_tensors, to_tensors

_INDEX = "model.safetensors.index.json"


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    ValueError: the file is missing, is not JSON, or is not an object.
  """
  try:
    fields = json.loads(path.read_text("utf-8"))
  except FileNotFoundError:
    raise ValueError(f"{path} does not exist; expected a folder as saved by transformers") from None
  except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from None
  if not isinstance(fields, dict):
    raise ValueError(f"{path} holds a {type(fields).__name__}; expected an object")
  return fields


def read_folder(
  folder: str | pathlib.Path, *, scan_layers: bool = False, dtype: str = "float32"
) -> tuple[TransformerConfig, dict[str, Any]]:
  """Reads a checkpoint; weights saved as pickles are refused.

  Args:
    folder: holds config.json and one or several safetensors files.
    scan_layers: see `TransformerConfig`.
    dtype: of parameters and activations.

  Returns:
    `(config, params)`.

  Raises:
    ValueError: a file is missing or damaged, or its tensors are not those the config asks for.
  """
  folder = pathlib.Path(folder)
  config = from_huggingface(read_json(folder / "config.json"))
  config = config.replace(scan_layers=scan_layers, dtype=dtype)
  files = sorted(folder.glob("*.safetensors"))
  if (folder / _INDEX).exists():
    names = read_json(folder / _INDEX).get("weight_map", {}).values()
    # A name from the index may not lead out of the folder.
    files = sorted({folder / pathlib.Path(name).name for name in names})
  if not files:
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    hint = (
      "; pickled weights are not read, save them with safe_serialization=True" if pickled else ""
    )
    raise ValueError(f"{folder} has no *.safetensors file{hint}")
  with contextlib.ExitStack() as stack:
    owner: dict[str, Any] = {}
    for file in files:
      try:
        opened = stack.enter_context(safe_open(file, framework="flax"))
        owner |= dict.fromkeys(opened.keys(), opened)
      except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or missing: {error}") from None

    def get(name: str) -> np.ndarray:
      if name not in owner:
        raise KeyError(name)
      # Shapes first: a tensor of the wrong size is refused before it is read.
      return _Lazy(owner[name].get_slice(name), owner[name], name)

    return config, from_tensors(config, get, dtype)


class _Lazy:
  """A tensor whose shape is known before its bytes are read."""

  def __init__(self, view: Any, file: Any, name: str, transposed: bool = False):
    self.shape = tuple(view.get_shape())
    self.view, self.file, self.name, self.transposed = view, file, name, transposed

  @property
  def T(self) -> _Lazy:
    return _Lazy(self.view, self.file, self.name, True)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    array = np.asarray(self.file.get_tensor(self.name))
    return array.T if self.transposed else array


def save_folder(
  folder: str | pathlib.Path, config: TransformerConfig, params: dict[str, Any]
) -> None:
  """Writes config.json and model.safetensors, which transformers reads too."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  fields = json.dumps(to_huggingface(config), indent=2)
  (folder / "config.json").write_text(fields + "\n", "utf-8")
  save_file(to_tensors(config, params), folder / "model.safetensors", metadata={"format": "pt"})
