"""Training steps compile for chips that are not there and fit their memory.

Skipped where `make_envs.py` has not made the compilers' environments.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _sibling(name: str) -> types.ModuleType:
  """A file of this folder, which is no package."""
  spec = importlib.util.spec_from_file_location(f"aot_{name}", HERE / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


chips = _sibling("chips")
compile_entry = _sibling("compile_entry")
make_envs = _sibling("make_envs")
table = _sibling("table")

ENTRIES = {
  path.parent.name: compile_entry.load_entry(path.parent.name)
  for path in sorted(ROOT.glob("experiments/*/aot.py"))
}
OVERSIZED = str(HERE / "oversized.py")
KERNELS, LORA = str(HERE / "kernels.py"), str(HERE / "qwen3_lora.py")


def _compile(entry: str, chip: str, out: Path) -> subprocess.CompletedProcess[str]:
  """Runs compile_entry.py in the environment for the chip, or skips the test."""
  kind = chips.find(chip).kind
  folder = make_envs.ENVIRONMENTS_DIR / kind
  if not make_envs.is_ready(folder, make_envs.environments()[kind]):
    pytest.skip(f"no compiler for {chip}: run {make_envs.COMMAND} {kind}")
  command = [make_envs.python_of(folder), HERE / "compile_entry.py"]
  flags = [f"--entry={entry}", f"--chip={chip}", f"--out={out}"]
  return subprocess.run(
    [*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
  )


@functools.cache
def _result(entry: str, chip: str) -> dict[str, Any]:
  """What an experiment takes on a chip; also kept for the table."""
  out = table.RESULTS_DIR / f"{Path(entry).stem}-{chip.replace(':', '-')}.json"
  out.unlink(missing_ok=True)
  done = _compile(entry, chip, out)
  assert done.returncode == 0, done.stderr
  return json.loads(out.read_text())


def _num_elements(shapes: list[str]) -> int:
  """Of all arrays together: `["f32[2,3]", "f32[]"]` have 7."""
  dims = (shape[shape.index("[") + 1 : -1] for shape in shapes)
  return sum(math.prod(int(size) for size in d.split(",") if size) for d in dims)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("entry", "chip"), [(name, chip) for name, entry in ENTRIES.items() for chip in entry.CHIPS]
)
def test_paper_step_compiles_and_fits(entry: str, chip: str):
  result = _result(entry, chip)

  assert result["num_devices"] == chips.find(chip).num_devices
  assert result["fits"], result["message"]
  # Devices that share the rows of a batch have to add up something, and independent ones nothing.
  assert bool(result["all_reduces"]) == getattr(ENTRIES[entry], "ADDS_UP", True)
  assert result["flops"] > 0
  assert result["bytes"]["arguments"] > 0
  assert table.row(result)[:2] == (entry, chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ENTRIES["jrf"].CHIPS)
def test_jrf_adds_up_group_sums_before_the_gap(chip: str):
  """The mean of the devices' gaps is not the gap: sums are added, and gradients after that.

  A model adds up s and q of two groups, and with them (the compiler may join the two) the sum of
  the losses and of the weights. A mean of gaps would be a single number for each model.
  """
  from experiments.jrf.config import get_config

  sizes = sorted(_num_elements(shapes) for shapes in _result("jrf", chip)["all_reduces"])

  models_at_once = get_config("paper").train.vmap_models
  assert any(size in (4 * models_at_once, 6 * models_at_once) for size in sizes[:-1]), sizes


@pytest.mark.slow
@pytest.mark.parametrize("chip", compile_entry.load_entry(KERNELS).CHIPS)
def test_attention_kernels_compile_at_the_shapes_of_every_family(chip: str):
  assert _result(KERNELS, chip)["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("chip", compile_entry.load_entry(LORA).CHIPS)
def test_a_lora_step_of_an_8b_decoder_fits_four_chips(chip: str):
  assert _result(LORA, chip)["fits"]


@pytest.mark.parametrize("chip", ["v5e:2x2", "H200"])
def test_what_does_not_fit_is_reported(chip: str, tmp_path: Path):
  """256 GiB a device; the TPU compiler refuses it, the GPU compiler does not."""
  done = _compile(OVERSIZED, chip, tmp_path / "result.json")

  assert done.returncode == 1, done.stderr
  result = json.loads((tmp_path / "result.json").read_text())
  assert result["fits"] is False
  assert f"on {chip} does not fit" in done.stderr
  assert "G) exceeds available HBM" in result["message"] or "bytes of" in result["message"]


def test_all_reduces_are_read_from_compiled_text():
  text = """
  %a = (f32[5,40]{1,0:T(8,128)S(1)}, /*index=1*/bf16[]) all-reduce(%x, %y), channel_id=1
  ROOT %b = s32[7]{0} all-reduce-start(%all-reduce.1), channel_id=2
  %c = f32[9]{0} all-reduce-done(%b), metadata={op_name="all-reduce("}
  %d = f32[3]{0} add(%c, %c)
  """
  found = compile_entry.all_reduces(text)

  assert found == [["f32[5,40]", "bf16[]"], ["s32[7]"]]
  assert [_num_elements(shapes) for shapes in found] == [201, 7]


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--entry=jrf", "--chip=v5e:3x3"], "chip is 'v5e:3x3' (expected one of v5e:2x2"),
    (["--entry=jfr", "--chip=A100"], "entry is 'jfr' (expected an experiment with an aot.py"),
  ],
)
def test_unknown_names_are_refused(flags: list[str], message: str, tmp_path: Path):
  out = tmp_path / "result.json"
  command = [sys.executable, HERE / "compile_entry.py", *flags, f"--out={out}"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)

  assert done.returncode == 2
  assert message in done.stderr
  assert "Traceback" not in done.stderr
  assert not out.exists()


def test_environment_adds_to_this_python_and_is_kept(tmp_path: Path):
  version = metadata.version("jax")
  wanted = make_envs.Environment((f"jax=={version}",))
  folder = tmp_path / "env"
  assert not make_envs.is_ready(folder, wanted)

  make_envs.make(folder, wanted)

  code = "import sys, jax; print(jax.__version__, jax.__file__, sys.prefix)"
  command = [make_envs.python_of(folder), "-c", code]
  printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
  assert printed == [version, importlib.util.find_spec("jax").origin, str(folder)]
  assert make_envs.is_ready(folder, wanted)
  assert not make_envs.is_ready(folder, make_envs.Environment(("jax==0.1",)))


def test_environment_says_so_when_pip_cannot_get_a_package(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
  wanted = make_envs.Environment(("reprise-has-no-such-package==1",))

  with pytest.raises(RuntimeError, match=r"env: could not install reprise-has-no-such-package==1"):
    make_envs.make(tmp_path / "env", wanted)
  assert not make_envs.is_ready(tmp_path / "env", wanted)
