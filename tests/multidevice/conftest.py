"""8 devices are fixed before JAX is first used, so these tests run their file as a script."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def on_eight_devices(root: pathlib.Path) -> Callable[[str], None]:
  """`on_eight_devices(__file__)` runs a file in a process with 8 devices and float64."""

  def run(script: str) -> None:
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "JAX_ENABLE_X64": "1",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
      "PYTHONPATH": str(root),
    }
    result = subprocess.run(
      [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all checks passed" in result.stdout

  return run
