"""What the bench.py of every experiment shares: parts measured in processes of their own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from launch import environment

# Seconds and other numbers of one part, by name.
Part = Callable[[argparse.Namespace], dict[str, float]]


def run_parts(
  module: str,
  parts: Mapping[str, Part],
  arguments: argparse.Namespace,
  needs: Mapping[str, str],
) -> dict[str, dict[str, float] | None] | None:
  """Runs the parts of a bench, each in a process of its own so that its peak memory is its own.

  Args:
    module: the bench, for `python -m`; its command line has `--part`.
    parts: by name.
    arguments: the parsed command line. With `arguments.part` set, that part is run here and its
      numbers are printed for the process that asked.
    needs: package that a part cannot do without.

  Returns:
    The numbers of each part and its "memory" in MiB; None for a part whose package is missing.
    None in the process of a part.
  """
  if arguments.part:
    found = parts[arguments.part](arguments)
    print(json.dumps({**found, "memory": environment.peak_rss_mb()}))
    return None
  results: dict[str, dict[str, float] | None] = {}
  for name in parts:
    package = needs.get(name)
    if package and importlib.util.find_spec(package) is None:
      print(f"{package} is not installed, so {name} is left out")
      results[name] = None
      continue
    command = [sys.executable, "-m", module, *sys.argv[1:], f"--part={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
      raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    results[name] = json.loads(done.stdout.strip().splitlines()[-1])
  return results


def parser(description: str, parts: Mapping[str, Any]) -> argparse.ArgumentParser:
  """A command line with `--part`."""
  made = argparse.ArgumentParser(description=description)
  made.add_argument("--part", choices=tuple(parts), help="run one part here, print its numbers")
  return made
