"""Reads thousands of damaged model files: each has to load, or to be a ValueError, in seconds.

  python tests/models/fuzz_model_files.py                 # 10,000 files, some minutes
  python tests/models/fuzz_model_files.py --count=200 --first=700

File number i is always the same. Processes of their own read some hundred files each, with limits
on memory and time, so that a crash of the interpreter is found too. The exit status is 1 if any
file did anything else, and each of these is told with its number.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BATCH = 500
SECONDS = 5
# Of address space beyond what the libraries take at the start.
MEMORY_BYTES = 4 * 2**30

_NUMBERS = (0, -1, 1, 7, 2**31, 2**63 - 1, 10**30, 1e308, -0.5)
_VALUES = (None, True, "", "llama", [], {}, [1, 2], {"a": 1}, "\ud800")


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
  """A few changes, most of them in the header."""
  changed = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    if not changed:
      break
    end = len(changed) if rng.random() < 0.2 else min(len(changed), 3000)
    at = rng.randrange(end)
    kind = rng.randrange(5)
    if kind == 0:
      changed[at] = rng.randrange(256)
    elif kind == 1:
      size = rng.choice((4, 8))
      value = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1, rng.randrange(2**40)))
      changed[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == 2:
      del changed[at:]
    elif kind == 3:
      del changed[at : at + rng.randint(1, 40)]
    else:
      changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
  return bytes(changed)


def mutate_json(rng: random.Random, value: Any) -> Any:
  """The same with one entry, somewhere inside, changed, dropped or doubled."""
  if isinstance(value, dict) and value and rng.random() < 0.9:
    key = rng.choice(sorted(value))
    kind = rng.random()
    if kind < 0.1:
      return {k: v for k, v in value.items() if k != key}
    if kind < 0.15:
      return value | {key + "_": value[key]}
    return value | {key: mutate_json(rng, value[key])}
  if isinstance(value, list) and value and rng.random() < 0.9:
    at = rng.randrange(len(value))
    if rng.random() < 0.2:
      return value[:at] + value[at + 1 :]
    return [*value[:at], mutate_json(rng, value[at]), *value[at + 1 :]]
  return rng.choice(_NUMBERS if rng.random() < 0.6 else _VALUES)


def make(number: int, whole: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Writes damaged file or folder `number` from the whole ones."""
  rng = random.Random(number)
  name = rng.choice(sorted(path.name for path in whole.iterdir()))
  if (whole / name).is_file():
    (target / name).write_bytes(mutate_bytes(rng, (whole / name).read_bytes()))
    return target / name
  shutil.copytree(whole / name, target / name)
  file = rng.choice(sorted((target / name).iterdir()))
  if file.suffix == ".json" and rng.random() < 0.7:
    fields = json.loads(file.read_text())
    for _ in range(rng.randint(1, 3)):
      fields = mutate_json(rng, fields)
    file.write_text(json.dumps(fields))
  else:
    file.write_bytes(mutate_bytes(rng, file.read_bytes()))
  return target / name


def read(path: pathlib.Path) -> None:
  """What a user's run does with it."""
  from models.transformer import tokenizer
  from models.transformer.weights import read_folder, read_gguf

  if path.is_dir():
    read_folder(path)
    words = tokenizer.from_folder(path)
  else:
    _, _, metadata = read_gguf(path)
    words = tokenizer.from_gguf(metadata)
  words.decode(words.encode("Hello, naïve 世界 123"))
  if words.chat_template is not None:
    words.chat([{"role": "user", "content": "hello"}])


def whole_files(folder: pathlib.Path) -> None:
  """The files that are damaged: golden checkpoints with a tokenizer, as folders and as GGUF."""
  from models.transformer import tokenizer

  spec = importlib.util.spec_from_file_location("model_files", HERE / "test_model_files.py")
  files = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(files)
  words = tokenizer.byte_tokenizer()
  for name in ("smollm", "qwen2", "qwen3"):
    shutil.copytree(files.GOLDENS / name, folder / name)
    tokenizer.save(words, folder / name)
    files.write_gguf(folder / f"{name}.gguf", name, with_tokenizer=True)


def read_batch(first: int, count: int, log: pathlib.Path) -> None:
  """Reads files in this process; the log has the number in work, and what went wrong."""
  sys.path.insert(0, str(ROOT))
  signal.signal(signal.SIGALRM, _too_long)
  with tempfile.TemporaryDirectory() as made:
    whole, target = pathlib.Path(made) / "whole", pathlib.Path(made) / "target"
    whole.mkdir()
    whole_files(whole)
    for path in sorted(whole.iterdir()):
      read(path)  # An undamaged one is not refused.
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    outcomes = {"read": 0, "refused": 0}
    for number in range(first, first + count):
      log.write_text(str(number))
      shutil.rmtree(target, ignore_errors=True)
      target.mkdir()
      path = make(number, whole, target)
      signal.alarm(SECONDS)
      try:
        read(path)
        outcomes["read"] += 1
      except ValueError:
        outcomes["refused"] += 1
      except BaseException as error:
        print(f"{number}: {path.name}: {type(error).__module__}.{type(error).__name__}: {error}")
      finally:
        signal.alarm(0)
  print(json.dumps(outcomes))


def _too_long(*_: Any) -> None:
  raise TimeoutError(f"more than {SECONDS} s")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--count", type=int, default=10_000, help="files to try")
  parser.add_argument("--first", type=int, default=0, help="number of the first")
  parser.add_argument("--log", type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.log:
    read_batch(args.first, args.count, args.log)
    return 0
  totals = {"read": 0, "refused": 0}
  wrong, end = 0, args.first + args.count
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "number"
    at = args.first
    while at < end:
      size = min(BATCH, end - at)
      command = [sys.executable, __file__, f"--first={at}", f"--count={size}", f"--log={log}"]
      done = subprocess.run(command, capture_output=True, text=True, check=False)
      *told, last = done.stdout.splitlines() or [""]
      at += size
      if done.returncode:
        if not log.exists():
          sys.exit(f"no file could be read:\n{done.stderr[-2000:]}")
        number = int(log.read_text())
        told = [*told, last, f"{number}: the process ended with {done.returncode}"]
        at = number + 1
      else:
        totals = {name: totals[name] + n for name, n in json.loads(last).items()}
      wrong += len([line for line in told if line])
      print(
        "\n".join([*told, f"{at - args.first} of {args.count}: {totals}, {wrong} wrong"]),
        flush=True,
      )
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
