"""Makes the environments that can compile for TPUs and GPUs: `.aot/tpu` and `.aot/gpu`.

  python tests/aot/make_envs.py [tpu] [gpu]

Each is a virtual environment that adds a compiler to the packages of the Python that makes it.
The compilers stay out of that Python itself, because JAX would look for their devices in it. An
environment that is up to date is left alone; one made for other versions is made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

ENVIRONMENTS_DIR = Path(__file__).resolve().parents[2] / ".aot"
COMMAND = "python tests/aot/make_envs.py"


@dataclasses.dataclass(frozen=True)
class Environment:
  """What pip adds to the packages of the calling Python.

  Attributes:
    requirements: in pip's syntax.
    options: for `pip install`.
  """

  requirements: tuple[str, ...]
  options: tuple[str, ...] = ()


def environments() -> dict[str, Environment]:
  """The environments by kind, for the installed version of JAX."""
  jaxlib = metadata.version("jaxlib")
  return {
    "tpu": Environment((f"jax[tpu]=={metadata.version('jax')}",)),
    # Compiling needs none of the CUDA libraries, gigabytes of them, that these depend on.
    "gpu": Environment(
      (f"jax-cuda12-plugin=={jaxlib}", f"jax-cuda12-pjrt=={jaxlib}"), options=("--no-deps",)
    ),
  }


def python_of(folder: Path) -> Path:
  """The interpreter of an environment."""
  return folder / "bin" / "python"


def is_ready(folder: Path, environment: Environment) -> bool:
  """Whether the folder holds this environment, complete and for this Python."""
  stamp = _stamp(folder)
  current = stamp.is_file() and stamp.read_text() == _description(environment)
  return current and python_of(folder).exists()


def make(folder: Path, environment: Environment) -> None:
  """Makes an environment in a folder, in place of what was there.

  Raises:
    RuntimeError: if the virtual environment cannot be made or pip cannot get a package.
  """
  shutil.rmtree(folder, ignore_errors=True)
  wanted = " ".join(environment.requirements)
  try:
    venv.create(folder, with_pip=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    (packages / "calling_python.pth").write_text("\n".join(_package_folders()) + "\n")
    pip = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, *environment.options, *environment.requirements], check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    raise RuntimeError(
      f"{folder.name}: could not install {wanted} into {folder}: {error}. This needs Python's venv "
      "with pip, and a package index that has those packages for this Python on Linux. Until it "
      "works the tests in tests/aot that need it are skipped; all others run."
    ) from error
  _stamp(folder).write_text(_description(environment))


def _stamp(folder: Path) -> Path:
  return folder / "made_from.txt"


def _package_folders() -> list[str]:
  """Where the calling Python finds installed packages."""
  return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def _description(environment: Environment) -> str:
  lines = [sys.version, *_package_folders(), *environment.options, *environment.requirements]
  return "\n".join(lines) + "\n"


def main() -> int:
  kinds = environments()
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("kinds", nargs="*", help=f"any of {', '.join(kinds)}; all by default")
  chosen = parser.parse_args().kinds or list(kinds)
  unknown = [kind for kind in chosen if kind not in kinds]
  if unknown:
    parser.error(f"unknown environment {', '.join(unknown)} (expected any of {', '.join(kinds)})")

  failed = False
  for kind in chosen:
    folder = ENVIRONMENTS_DIR / kind
    if is_ready(folder, kinds[kind]):
      print(f"{kind}: {folder} is up to date", flush=True)
      continue
    print(f"{kind}: making {folder}; about 200 MB to download", flush=True)
    try:
      make(folder, kinds[kind])
      print(f"{kind}: made {folder}", flush=True)
    except RuntimeError as error:
      print(error, file=sys.stderr, flush=True)
      failed = True
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
