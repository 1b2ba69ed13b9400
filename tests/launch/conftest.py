"""Shared by the tests of launch/."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def outcome() -> Callable[[pathlib.Path], dict[str, Any]]:
  """`outcome(workdir)`: its results.json without what differs between equal runs."""

  def read(workdir: pathlib.Path) -> dict[str, Any]:
    results = json.loads((workdir / "results.json").read_text())
    del results["environment"]
    return results

  return read
