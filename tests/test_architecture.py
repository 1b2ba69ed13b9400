"""Rules of the whole project, read from its files."""

import ast
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launch import config as config_lib
from launch import report

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What each top-level package may import of the project: an arrow only ever points down.
MAY_IMPORT = {
  "jaxlib_ext": set(),
  "models": {"jaxlib_ext"},
  "algorithms": {"models", "jaxlib_ext"},
  "launch": {"algorithms", "models", "jaxlib_ext"},
  "experiments": {"launch", "algorithms", "models", "jaxlib_ext"},
}

# Removed from JAX, or deprecated, between the oldest and the newest version that is supported.
# `jax.random.PRNGKey` stays in JAX, but keys are typed here.
REMOVED = {
  *("jax.tree_map", "jax.tree_leaves", "jax.tree_flatten", "jax.tree_unflatten"),
  *("jax.experimental.shard_map", "jax.experimental.pjit", "jax.experimental.maps"),
  *("jax.experimental.host_callback", "jax.experimental.enable_x64", "jax.random.PRNGKey"),
  *("jax.device_put_replicated", "jax.device_put_sharded", "jax.xla_computation"),
  *("jax.core", "jax.lib", "jax.linear_util", "jax.abstract_arrays", "jax.interpreters.xla"),
}


def project_files(*suffixes: str) -> Iterator[pathlib.Path]:
  """Files of the project with these endings, without caches and what git ignores by name."""
  yield from (p for p in ROOT.iterdir() if p.is_file() and p.suffix in suffixes)
  for folder in (*MAY_IMPORT, "tests"):
    for path in sorted((ROOT / folder).rglob("*")):
      hidden = any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
      if path.suffix in suffixes and not hidden:
        yield path


def imported(tree: ast.AST) -> set[str]:
  """Full names of the modules, and of what is taken from them, that a file imports anywhere."""
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def tops(tree: ast.AST) -> set[str]:
  return {name.partition(".")[0] for name in imported(tree)}


def wrong_arrows(package: str, source: str) -> set[str]:
  """Packages that a file of `package` imports and may not."""
  found = tops(ast.parse(source))
  wrong = (found & MAY_IMPORT.keys()) - MAY_IMPORT[package] - {package}
  if package == "jaxlib_ext":
    wrong |= found - {package, "jax", "jaxlib", "numpy"} - set(sys.stdlib_module_names)
  return wrong


def removed_names(source: str) -> set[str]:
  """Names of REMOVED that a file imports or spells out, and `with mesh:`."""
  tree = ast.parse(source)
  names = imported(tree)
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      names.add(ast.unparse(node))
    elif isinstance(node, ast.With):
      managers = (item.context_expr for item in node.items)
      names |= {"with mesh" for m in managers if isinstance(m, ast.Name) and m.id.endswith("mesh")}
  used = {bad for bad in REMOVED for name in names if name == bad or name.startswith(f"{bad}.")}
  return used | (names & {"with mesh"})


def meshes_without_axis_types(source: str) -> list[int]:
  """Lines that call `jax.make_mesh` and leave the type of its axes to the version of JAX."""
  calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
  return [
    call.lineno
    for call in calls
    if ast.unparse(call.func) == "jax.make_mesh"
    and "axis_types" not in {keyword.arg for keyword in call.keywords}
  ]


def code_of(path: pathlib.Path) -> str:
  """Python of a file; of a notebook the code cells, without shell and magic lines."""
  if path.suffix != ".ipynb":
    return path.read_text()
  cells = json.loads(path.read_text())["cells"]
  lines = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code").splitlines()
  return "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def test_imports_point_down():
  wrong = {}
  for path in project_files(".py"):
    package = path.relative_to(ROOT).parts[0]
    if package in MAY_IMPORT and (found := wrong_arrows(package, path.read_text())):
      wrong[str(path.relative_to(ROOT))] = found
  assert not wrong


@pytest.mark.parametrize(
  ("package", "source", "wrong"),
  [
    ("algorithms", "import launch", {"launch"}),
    ("algorithms", "def f():\n  from experiments.jrf import run", {"experiments"}),
    ("algorithms", "from algorithms import noise\nfrom models import mlp\nimport flax", set()),
    ("models", "from algorithms.jrf import gap", {"algorithms"}),
    ("launch", "import experiments.jrf.run as r", {"experiments"}),
    ("jaxlib_ext", "import jax, numpy, os\nfrom jax import lax\nimport flax", {"flax"}),
    ("jaxlib_ext", "from models import mlp", {"models"}),
    ("experiments", "import launch, algorithms, models", set()),
  ],
)
def test_a_wrong_arrow_is_found(package, source, wrong):
  assert wrong_arrows(package, source) == wrong


def test_no_removed_names_and_no_implicit_axis_types():
  wrong = {}
  for path in project_files(".py", ".ipynb"):
    code = code_of(path)
    found = removed_names(code) | {f"make_mesh, line {n}" for n in meshes_without_axis_types(code)}
    if found:
      wrong[str(path.relative_to(ROOT))] = found
  assert not wrong


@pytest.mark.parametrize(
  ("source", "found"),
  [
    ("jax.tree_map(f, x)", {"jax.tree_map"}),
    ("jax.tree.map(f, x)", set()),
    ("from jax.experimental import shard_map", {"jax.experimental.shard_map"}),
    ("from jax.experimental.shard_map import shard_map", {"jax.experimental.shard_map"}),
    ("with mesh:\n  pass", {"with mesh"}),
    ("with jax.set_mesh(mesh):\n  pass", set()),
  ],
)
def test_a_removed_name_is_found(source, found):
  assert removed_names(source) == found


def test_a_mesh_without_axis_types_is_found():
  source = "jax.make_mesh((1,), ('data',))\njax.make_mesh((1,), ('data',), axis_types=t)\n"
  assert meshes_without_axis_types(source) == [1]


def test_launch_is_the_package_although_launch_py_lies_beside_it():
  assert (ROOT / "launch" / "__init__.py").is_file()
  code = "import launch; from launch import main; print(launch.__file__); main.run"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert pathlib.Path(done.stdout.strip()) == ROOT / "launch" / "__init__.py"


@pytest.mark.parametrize("name", config_lib.experiment_names())
def test_an_experiment_is_complete(name):
  folder = ROOT / "experiments" / name
  wanted = ("__init__.py", "config.py", "run.py", "bench.py", "README.md", "colab.ipynb")
  missing = [part for part in (*wanted, "results.json") if not (folder / part).is_file()]
  assert not missing
  results = json.loads((folder / "results.json").read_text())
  assert (results["schema"], results["experiment"]) == (1, name)
  assert (results["preset"], results["status"]) == ("default", "complete")
  assert "smoke" in next(row.presets for row in config_lib.listings() if row.name == name)
  foreign = tops(ast.parse((folder / "config.py").read_text())) - set(sys.stdlib_module_names)
  assert foreign <= {"ml_collections"}, "a config is plain data, read at once"


def test_committed_results_are_of_the_present_config():
  stale = {}
  for name in config_lib.experiment_names():
    for path in (ROOT / "experiments" / name).glob("results*.json"):
      results = json.loads(path.read_text())
      config = config_lib.load(config_lib.resolve(f"{name}:{results['preset']}"))
      if results["config_hash"] != config_lib.config_hash(config):
        stale[str(path.relative_to(ROOT))] = f"run {name}:{results['preset']} again"
  assert not stale


def test_readme_tables_are_those_of_the_committed_results():
  made = report.documents()
  assert ROOT / "README.md" in made
  assert "<!-- methods: made by python -m launch.report -->" in (ROOT / "README.md").read_text()
  for name in config_lib.experiment_names():
    marks = (ROOT / "experiments" / name / "README.md").read_text()
    assert "<!-- claims: made by python -m launch.report -->" in marks
  stale = [str(p.relative_to(ROOT)) for p, text in made.items() if p.read_text() != text]
  assert not stale, "run python -m launch.report and commit what it writes"


# Folders of one machine, and names and numbers of hosts that only it can reach.
PRIVATE = re.compile(
  r"(?<![\w.~/-])/(?:home|root|Users|work|mnt|srv)/\w{2}"
  r"|\b[\w-]+\.(?:internal|local|corp|lan|intranet)\b(?!\()"
  r"|\b(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d{1,3}\.\d{1,3}(?:\.\d{1,3})?(?=[:/\s\"'])"
)


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("cd /home/someone/code", True),
    ("https://mirror.internal/simple", True),
    ("http://192.168.1.20:8080", True),
    ("https://github.com/jax-ml/jax", False),
    ("runs/home/x and ~/data/y and tests/data/z", False),
    ("threading.local() and jax==0.10.2", False),
  ],
)
def test_a_private_name_is_found(text, found):
  assert bool(PRIVATE.search(text)) == found


def test_no_file_names_a_private_host_or_folder():
  found = {}
  suffixes = (".py", ".md", ".toml", ".json", ".ipynb", ".jinja", ".txt", ".sh", ".yml", ".yaml")
  for path in project_files(*suffixes):
    matches = PRIVATE.findall(path.read_text())
    if matches and path != pathlib.Path(__file__).resolve():
      found[str(path.relative_to(ROOT))] = matches[:3]
  assert not found
