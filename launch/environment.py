"""What a result was measured on, and beside what."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
  """Versions, devices, processor and commit."""
  from importlib import metadata

  import jax

  versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
  kinds = sorted({device.device_kind for device in jax.devices()})
  return {
    "python": platform.python_version(),
    **versions,
    "devices": f"{jax.device_count()} x {', '.join(kinds)}",
    "processes": jax.process_count(),
    "cpu": f"{_cpu_name()}, {cpu_count()} cores",
    "git": git_commit(),
  }


def git_commit() -> str:
  """Short commit of the checkout, with "+" when files differ from it; "unknown" without git."""
  try:
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
  except (OSError, subprocess.SubprocessError):
    return "unknown"


def peak_rss_mb() -> int:
  """Largest resident memory of this process so far, in MiB; 0 where it cannot be read."""
  try:
    import resource
  except ImportError:
    return 0
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))


def peer_row(
  name: str, version: str, what: str, ours: float, theirs: float, unit: str
) -> dict[str, Any]:
  """The entry of a peer in results.json; ratio below 1 means less time or memory than the peer."""
  return {
    "name": name,
    "version": version,
    "what": what,
    "ours": float(ours),
    "theirs": float(theirs),
    "unit": unit,
    "ratio": float(ours) / float(theirs),
  }


def _git(*arguments: str) -> str:
  done = subprocess.run(
    ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
  )
  return done.stdout.strip()


def _cpu_name() -> str:
  info = pathlib.Path("/proc/cpuinfo")
  if info.is_file():
    for line in info.read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor() or platform.machine()


def cpu_count() -> int:
  """Cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
