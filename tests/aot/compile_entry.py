"""Compiles one training step for a chip that is not there and reports what it takes.

  .aot/tpu/bin/python tests/aot/compile_entry.py --entry=jrf --chip=v5e:2x2 --out=FILE.json

Runs in an environment of `make_envs.py`. An entry is `experiments/<name>/aot.py` (or the path of
such a file) with `CHIPS`, the names of the slices and cards that its `:paper` preset is for, and
`lower(mesh) -> jax.stages.Lowered` for a mesh with axes ("data", "model"). `ADDS_UP = False` says
that its devices have nothing to sum.

FILE.json has for one device: bytes of arguments, temporaries, outputs and their total, FLOPs (the
body of a loop counts once), and the shapes that each all-reduce sums over devices. The exit status
is 1, with a message, if the program does not fit in the memory of the chip.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax
  from chips import Chip

ROOT = Path(__file__).resolve().parents[2]

# What an all-reduce gives in compiled text, `f32[40,2]{1,0:T(8,128)} all-reduce(` or a tuple.
_ALL_REDUCE = re.compile(r"= (.*?) all-reduce(?:-start)?\(")
_SHAPE = re.compile(r"\b[a-z]+\d+\[[\d,]*\]")


def load_entry(entry: str) -> types.ModuleType:
  """Imports the entry of an experiment, or the one in a file.

  Raises:
    ValueError: if there is no such file.
  """
  path = Path(entry) if entry.endswith(".py") else ROOT / "experiments" / entry / "aot.py"
  if not path.is_file():
    raise ValueError(
      f"entry is {entry!r} (expected an experiment with an aot.py, or the path of such a file); "
      f"there is no {path}."
    )
  spec = importlib.util.spec_from_file_location(f"aot_entry_{path.parent.name}", path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


def all_reduces(text: str) -> list[list[str]]:
  """Shapes that each all-reduce in compiled text sums over devices, as in `f32[40,2,2]`."""
  return [_SHAPE.findall(result) for result in _ALL_REDUCE.findall(text)]


def measure(entry: types.ModuleType, mesh: jax.sharding.Mesh, chip: Chip) -> dict[str, Any]:
  """Compiles an entry and says what one device needs for it.

  Some compilers refuse a program that is too large, others hand it out with its sizes; both are
  told as `fits` False and a `message`.
  """
  import chips
  import jax

  lowered = entry.lower(mesh)
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).splitlines()[0]
    return {"fits": False, "message": f"does not fit, the compiler refuses it: {reason}"}
  seconds = time.perf_counter() - start

  memory = compiled.memory_analysis()
  size = {
    "arguments": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "code": memory.generated_code_size_in_bytes,
  }
  size["total"] = sum(size.values())
  needs = f"needs {size['total']:,} bytes of {chip.memory_bytes:,} on each device"
  if size["total"] > chip.memory_bytes:
    return {"fits": False, "message": f"does not fit: {needs}", "bytes": size}

  cost = compiled.cost_analysis()
  if cost is None:
    # The GPU compiler counts no operations without a GPU; they are those on as many CPU devices.
    cost = entry.lower(chips.make_cpu_mesh()).compile().cost_analysis()
  return {
    "fits": True,
    "message": f"fits: {needs}",
    "bytes": size,
    "flops": cost["flops"],
    "compile_s": round(seconds, 2),
    "all_reduces": all_reduces(compiled.as_text()),
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--entry", required=True, help="an experiment, or the path of an aot.py")
  parser.add_argument("--chip", required=True, help="a name in tests/aot/chips.py")
  parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
  args = parser.parse_args()

  # No device is looked for: not here, and not at the metadata server of a cloud.
  os.environ.update(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_ID="0", TPU_WORKER_HOSTNAMES="localhost"
  )
  sys.path.insert(0, str(ROOT))
  import chips
  import jax

  try:
    chip = chips.find(args.chip)
    entry = load_entry(args.entry)
  except ValueError as error:
    parser.error(str(error))
  os.environ["TPU_ACCELERATOR_TYPE"] = chip.accelerator_type
  jax.config.update("jax_num_cpu_devices", chip.num_devices)

  mesh = chips.make_mesh(args.chip, chip)
  result = {
    "entry": args.entry,
    "chip": args.chip,
    "num_devices": mesh.size,
    "memory_bytes": chip.memory_bytes,
    "jax": jax.__version__,
  } | measure(entry, mesh, chip)
  args.out.parent.mkdir(parents=True, exist_ok=True)
  args.out.write_text(json.dumps(result, indent=2) + "\n")
  print(f"{args.entry} on {args.chip} {result['message']}", file=sys.stderr)
  return 0 if result["fits"] else 1


if __name__ == "__main__":
  sys.exit(main())
