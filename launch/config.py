"""From the text after `--config=` to an experiment and its locked config.

A config module defines `get_config(preset="default")` and `PRESETS`; it holds plain data and
imports neither JAX nor the experiment, so that reading it is instant.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import json
import pathlib
import sys
import types
from collections.abc import Iterable
from typing import Any

import ml_collections

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"

# How work is spread over devices never changes what is computed, so a run may be resumed with
# another value of these keys.
PLACEMENT_KEYS = ("mesh", "cpu_devices")


class UsageError(ValueError):
  """A mistake of the user, shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Target:
  """What `--config=` named.

  name: experiment name as shown to people.
  config_path: the Python file with `get_config`.
  run_folder: the folder whose `run.py` is run; None when the config names it by
    `config.experiment`.
  preset: preset of the config, "default" when none was given.
  """

  name: str
  config_path: pathlib.Path
  run_folder: pathlib.Path | None
  preset: str


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
  """`known` names nearest to a mistyped `word`, as the end of an error message."""
  known = sorted(set(known))
  lower = {k.lower(): k for k in known}
  matches = [lower[m] for m in difflib.get_close_matches(word.lower(), lower, n=count, cutoff=0.5)]
  if matches:
    return "did you mean " + " or ".join(matches) + "?"
  shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
  return f"known: {shown}." if known else "there are none."


def experiment_names() -> list[str]:
  return sorted(p.parent.name for p in EXPERIMENTS.glob("*/config.py"))


def resolve(text: str) -> Target:
  """Finds the experiment and preset that `text` names.

  Args:
    text: `name`, `name:preset`, or the path of a config file or experiment folder, optionally
      followed by `:preset`.

  Raises:
    UsageError: when there is no such experiment or file; the nearest names are given.
  """
  base, _, preset = text.partition(":")
  preset = preset or "default"
  named = base in experiment_names()  # also where the current folder has a folder of that name
  looks_like_path = base.endswith(".py") or "/" in base or "\\" in base
  if not named and base and (looks_like_path or pathlib.Path(base).is_dir()):
    path = pathlib.Path(base).expanduser().resolve()
    if path.is_dir():
      path = path / "config.py"
    if not path.is_file():
      raise UsageError(
        f"--config={text}: there is no file {path}. Give the path of a Python file that defines "
        "get_config(preset), or the name of an experiment; python launch.py --list shows them."
      )
    run_folder = path.parent if (path.parent / "run.py").is_file() else None
    name = path.parent.name if path.name == "config.py" else path.stem
    return Target(name, path, run_folder, preset)
  folder = EXPERIMENTS / base
  if not named:
    raise UsageError(
      f"--config={text}: there is no experiment {base!r}; {nearest(base, experiment_names())} "
      "python launch.py --list shows all of them."
    )
  return Target(base, folder / "config.py", folder, preset)


def load_module(folder: pathlib.Path, stem: str) -> types.ModuleType:
  """Imports `folder/stem.py`; built-in experiments keep their package name.

  A folder outside the project becomes a package of its own, so that its files can import each
  other with `from . import x`.
  """
  folder = folder.resolve()
  if folder.parent == EXPERIMENTS and (folder / "__init__.py").is_file():
    return importlib.import_module(f"experiments.{folder.name}.{stem}")
  package = "reprise_user_" + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
  if package not in sys.modules:
    spec = importlib.util.spec_from_loader(package, loader=None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[package] = importlib.util.module_from_spec(spec)
  return importlib.import_module(f"{package}.{stem}")


def load(target: Target) -> ml_collections.ConfigDict:
  """The locked config of `target`.

  Raises:
    UsageError: unknown preset (the nearest ones are named), or a module without get_config.
  """
  module = load_module(target.config_path.parent, target.config_path.stem)
  if not callable(getattr(module, "get_config", None)):
    raise UsageError(
      f"{target.config_path} does not define get_config(preset); "
      "experiments/jrf/config.py is an example."
    )
  presets = tuple(getattr(module, "PRESETS", ("default",)))
  if target.preset not in presets:
    raise UsageError(
      f"{target.name} has no preset {target.preset!r}; {nearest(target.preset, presets)} "
      f"Presets of {target.name}: {', '.join(presets)}."
    )
  config = module.get_config(target.preset)
  return complete(config, experiment=target.name, preset=target.preset)


def complete(
  config: ml_collections.ConfigDict, experiment: str = "", preset: str = "default"
) -> ml_collections.ConfigDict:
  """Fills the keys that every run needs and a config may leave out, and locks it."""
  with config.unlocked():
    for key, value in (
      ("experiment", experiment),
      ("preset", preset),
      ("seed", 0),
      ("cpu_devices", 1),
    ):
      if key not in config:
        config[key] = value
    if "mesh" not in config:
      config.mesh = ml_collections.ConfigDict({"data": -1, "model": 1})
  config.lock()
  return config


def run_folder(config: ml_collections.ConfigDict, target: Target | None = None) -> pathlib.Path:
  """The folder whose `run.py` runs this config.

  Raises:
    UsageError: when the config names no experiment, or an unknown one.
  """
  if target is not None and target.run_folder is not None:
    return target.run_folder
  name = str(config.get("experiment", ""))
  folder = pathlib.Path(name).expanduser()
  if name and not (folder / "run.py").is_file():
    folder = EXPERIMENTS / name
  if name and (folder / "run.py").is_file():
    return folder
  where = f"{target.config_path} has no run.py beside it and" if target else "the config"
  raise UsageError(
    f"{where} names the experiment {name!r}, which does not exist; "
    f"{nearest(name, experiment_names())} Set config.experiment to a built-in experiment, or put "
    "a run.py with run(config, run) beside the config."
  )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
  """`{"noise.rate": 0.3, ...}`: every leaf of a config as plain JSON data."""
  flat: dict[str, Any] = {}
  for key in sorted(config.keys()):
    # A field reference is read through item access, so that overrides reach it.
    value = config[key]
    if isinstance(value, ml_collections.ConfigDict | dict):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = json.loads(json.dumps(value))
  return flat


def section_names(config: ml_collections.ConfigDict, prefix: str = "") -> set[str]:
  names: set[str] = set()
  for key in config.keys():  # noqa: SIM118 (a ConfigDict iterates over its items' keys by method)
    if isinstance(config[key], ml_collections.ConfigDict):
      names.add(prefix + key)
      names |= section_names(config[key], f"{prefix}{key}.")
  return names


def check_override_keys(config: ml_collections.ConfigDict, keys: Iterable[str]) -> None:
  """Refuses `--config.key=` for keys the config does not have.

  Raises:
    UsageError: naming the key and the nearest valid ones.
  """
  leaves, sections = flatten(config), section_names(config)
  for key in keys:
    if key in sections:
      inside = ", ".join(sorted(k for k in leaves if k.startswith(key + ".")))
      raise UsageError(f"--config.{key} is a section; set one of its keys: {inside}.")
    whole = key.partition("[")[0]
    if whole != key and whole in leaves:
      raise UsageError(
        f"--config.{key}: give all elements at once, as in --config.{whole}={leaves[whole]!r}."
      )
    if key not in leaves:
      raise UsageError(
        f"--config.{key}: the config of {config.experiment} has no key {key!r}; "
        f"{nearest(key, leaves)}"
      )


def identity(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The part of the config that results depend on."""
  flat = flatten(config)
  return {k: v for k, v in flat.items() if k.partition(".")[0] not in PLACEMENT_KEYS}


def config_hash(config: ml_collections.ConfigDict) -> str:
  """12 hex digits that name the config, the same in every process and Python version."""
  text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """Lines `key: old -> new` for what differs between two identities."""
  missing = "(absent)"
  return [
    f"{key}: {old.get(key, missing)!r} -> {new.get(key, missing)!r}"
    for key in sorted(old.keys() | new.keys())
    if old.get(key, missing) != new.get(key, missing)
  ]


@dataclasses.dataclass(frozen=True)
class Listing:
  """One line of `--list`: name, first line of the config's docstring, presets, results file."""

  name: str
  summary: str
  presets: tuple[str, ...]
  results: dict[str, Any] | None


def listings() -> list[Listing]:
  """What `--list` shows, read without importing anything."""
  rows = []
  for name in experiment_names():
    path = EXPERIMENTS / name / "config.py"
    tree = ast.parse(path.read_text())
    summary = (ast.get_docstring(tree) or "").strip().partition("\n")[0]
    presets: tuple[str, ...] = ("default",)
    for node in tree.body:
      if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PRESETS":
        presets = tuple(ast.literal_eval(node.value))
    results_path = path.with_name("results.json")
    results = json.loads(results_path.read_text()) if results_path.is_file() else None
    rows.append(Listing(name, summary, presets, results))
  return rows
