"""Prints what each compiled training step takes on one device: `python tests/aot/table.py`.

The rows are what `pytest tests/aot` wrote to `.aot/results` when it last ran. FLOPs count the body
of a loop once: for JRF they are those of one update of the models that are trained at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS_DIR = Path(__file__).resolve().parents[2] / ".aot" / "results"

_HEADER = (
  "entry",
  "chip",
  "devices",
  "arguments",
  "temporaries",
  "outputs",
  "of memory",
  "GFLOP",
  "compile",
)


def row(result: dict[str, Any]) -> tuple[str, ...]:
  """Cells for one result of compile_entry.py; bytes and FLOPs are those of one device."""
  size = result["bytes"]
  mib = [f"{size[name] / 2**20:.1f} MiB" for name in ("arguments", "temporaries", "outputs")]
  return (
    result["entry"],
    result["chip"],
    str(result["num_devices"]),
    *mib,
    f"{size['total'] / result['memory_bytes']:.2%}",
    f"{result['flops'] / 1e9:.2f}",
    f"{result['compile_s']:.1f} s",
  )


def main() -> int:
  results = [json.loads(path.read_text()) for path in sorted(RESULTS_DIR.glob("*.json"))]
  rows = [_HEADER, *(row(result) for result in results if result["fits"])]
  widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
  for cells in rows:
    pairs = zip(cells, widths, strict=True)
    print("  ".join(cell.ljust(width) for cell, width in pairs).rstrip())
  for result in results:
    if not result["fits"]:
      print(f"{result['entry']} on {result['chip']} {result['message']}")
  if not results:
    print(f"no results in {RESULTS_DIR}: run python tests/aot/make_envs.py, then pytest tests/aot")
  return 0


if __name__ == "__main__":
  sys.exit(main())
