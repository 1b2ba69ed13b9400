"""What the READMEs and notebooks tell a reader to type works."""

import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md"))]
NOTEBOOKS = sorted(ROOT.glob("experiments/*/*.ipynb"))


def _blocks(path: pathlib.Path) -> list[str]:
  return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_in_readmes_runs(path):
  blocks = _blocks(path)
  assert blocks, f"{path} shows no use of its module in other code"
  for block in blocks:
    exec(compile(block, str(path), "exec"), {})


def test_configs_named_in_readmes_exist():
  from launch import config as config_lib

  named = set()
  for path in (*READMES, ROOT / "CONTRIBUTING.md"):
    named |= set(re.findall(r"--config=([a-z0-9_:]+)(?![a-z0-9_:/.])", path.read_text()))
  assert "jrf" in named
  for text in named:
    config_lib.load(config_lib.resolve(text))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_notebooks_execute(path):
  import nbformat
  from nbclient import NotebookClient

  notebook = nbformat.read(path, as_version=4)
  # The strict settings of our tests are not for the libraries that a notebook loads.
  os.environ.pop("JAX_NUMPY_RANK_PROMOTION", None)
  NotebookClient(
    notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}
  ).execute()
  shown = [out for cell in notebook.cells for out in cell.get("outputs", [])]
  assert any("image/png" in out.get("data", {}) for out in shown)


def test_notebooks_are_committed_without_outputs():
  import nbformat

  for path in NOTEBOOKS:
    for cell in nbformat.read(path, as_version=4).cells:
      assert not cell.get("outputs"), f"{path}: clear the outputs before committing"
