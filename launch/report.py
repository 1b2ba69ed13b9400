"""report.html of a run, and the tables in the READMEs, all drawn from results.json.

`python -m launch.report` rewrites the tables in README.md and experiments/*/README.md from the
committed results; `--check` only says whether they agree; `--adopt WORKDIR` commits a run first.
"""

from __future__ import annotations

import argparse
import base64
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch import config as config_lib
from launch.claims import VERDICTS

TEMPLATE = pathlib.Path(__file__).with_name("report.html.jinja")


def render(results: Mapping[str, Any], config: Mapping[str, Any], figures: pathlib.Path) -> str:
  """The self-contained report of a run.

  Args:
    results: content of results.json.
    config: the flattened config.
    figures: folder with an .svg for each figure named in `results`.
  """
  import jinja2

  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  environment.filters["cell"] = cell
  embedded = []
  for name, caption in results["figures"].items():
    data = base64.b64encode((figures / f"{name}.svg").read_bytes()).decode()
    embedded.append({"name": name, "caption": caption, "data": data})
  template = environment.from_string(TEMPLATE.read_text())
  return template.render(r=results, config=config, figures=embedded)


def cell(value: Any) -> str:
  """A number with four significant digits, and anything else as it is."""
  if value is None:
    return "–"
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, float):
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
  return str(value)


def claims_table(results: Mapping[str, Any]) -> str:
  """Markdown table of the claims of one results.json."""
  lines = [
    "| verdict | claim | paper | measured | seeds |",
    "|---|---|---|---|---|",
  ]
  for claim in results["claims"]:
    fields = (
      f"**{claim['verdict']}**",
      f"{claim['statement']} ({claim['source']})",
      claim["paper_value"] or "–",
      claim["measured"],
      str(claim["n"] or "–"),
    )
    lines.append("| " + " | ".join(field.replace("|", "\\|") for field in fields) + " |")
  return "\n".join(lines)


def peers_table(results: Mapping[str, Any]) -> str:
  """Markdown table of the peers of one results.json."""
  lines = ["| what | peer | ours | theirs | unit | ours / theirs |", "|---|---|---|---|---|---|"]
  for p in results["peers"]:
    numbers = (cell(p["ours"]), cell(p["theirs"]), p["unit"], cell(p["ratio"]))
    lines.append(f"| {p['what']} | {p['name']} {p['version']} | " + " | ".join(numbers) + " |")
  return "\n".join(lines)


def verdict_counts(results: Mapping[str, Any] | None) -> str:
  """For example "4 reproduced, 1 partly"."""
  if results is None:
    return "no committed results"
  verdicts = [claim["verdict"] for claim in results["claims"]]
  counts = [f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts]
  return ", ".join(counts) or "no claims"


def methods_table() -> str:
  """Markdown table of all experiments for the top README."""
  lines = ["| method | what it is | claims | presets |", "|---|---|---|---|"]
  for row in config_lib.listings():
    link = f"[{row.name}](experiments/{row.name}/README.md)"
    presets = ", ".join(f"`{preset}`" for preset in row.presets)
    lines.append(f"| {link} | {row.summary} | {verdict_counts(row.results)} | {presets} |")
  return "\n".join(lines)


def _marked(name: str) -> tuple[str, str]:
  return f"<!-- {name}: made by python -m launch.report -->", f"<!-- end {name} -->"


def with_block(text: str, name: str, block: str) -> str:
  """`text` with the part between the marks of `name` replaced; unchanged without the marks."""
  begin, end = _marked(name)
  if begin not in text:
    return text
  head, _, rest = text.partition(begin)
  _, found, tail = rest.partition(end)
  if not found:
    raise ValueError(f"the mark {begin!r} has no {end!r} after it")
  return f"{head}{begin}\n{block}\n{end}{tail}"


def documents(root: pathlib.Path = config_lib.ROOT) -> dict[pathlib.Path, str]:
  """What each README should say, given the committed results."""
  made = {}
  top = root / "README.md"
  if top.is_file():
    made[top] = with_block(top.read_text(), "methods", methods_table())
  for readme in sorted(root.glob("experiments/*/README.md")):
    text = readme.read_text()
    for path in sorted(readme.parent.glob("results*.json")):
      results = json.loads(path.read_text())
      kind = path.stem.removeprefix("results").lstrip(".")
      suffix = f" {kind}" if kind else ""
      text = with_block(text, f"claims{suffix}", claims_table(results))
      text = with_block(text, f"peers{suffix}", peers_table(results))
    made[readme] = text
  return made


def committed(experiment: str, preset: str) -> pathlib.Path:
  """Where the last results of a preset are committed."""
  name = "results.json" if preset == "default" else f"results.{preset}.json"
  return config_lib.EXPERIMENTS / experiment / name


def adopt(workdir: pathlib.Path) -> pathlib.Path:
  """Makes the results of a finished run the committed ones, keeping the peers of bench.py.

  Raises:
    UsageError: when the run is not complete.
  """
  path = workdir / "results.json"
  results = json.loads(path.read_text()) if path.is_file() else {"status": "missing"}
  if results["status"] != "complete":
    raise config_lib.UsageError(f"{path} is {results['status']}; adopt a run that is complete.")
  target = committed(results["experiment"], results["preset"])
  if target.is_file() and not results["peers"]:
    results["peers"] = json.loads(target.read_text())["peers"]
  target.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
  return target


def write_peers(experiment: str, rows: Sequence[Mapping[str, Any]]) -> None:
  """Puts the peers that a bench.py measured into the committed results of the default preset."""
  path = committed(experiment, "default")
  results = json.loads(path.read_text())
  results["peers"] = list(rows)
  path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def main(argv: list[str] | None = None) -> int:
  """Rewrites the tables, or with --check only compares; returns the exit status."""
  parser = argparse.ArgumentParser(prog="python -m launch.report", description=__doc__)
  parser.add_argument("--check", action="store_true", help="only say whether the tables agree")
  parser.add_argument(
    "--adopt", metavar="WORKDIR", help="first make the results of this run the committed ones"
  )
  arguments = parser.parse_args(argv)
  check = arguments.check
  if arguments.adopt:
    print(f"{adopt(pathlib.Path(arguments.adopt))}: written")
  stale = [path for path, text in documents().items() if path.read_text() != text]
  for path in stale:
    if not check:
      path.write_text(documents()[path])
    verb = "differs from its results.json" if check else "rewritten"
    print(f"{path.relative_to(config_lib.ROOT)}: {verb}")
  if check and stale:
    print("run python -m launch.report and commit what it writes")
  return int(check and bool(stale))


if __name__ == "__main__":
  sys.exit(main())
