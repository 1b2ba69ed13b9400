"""Tables that are made from results.json and kept in the READMEs."""

import json
import shutil
import subprocess
import sys

import pytest

from launch import report

RESULTS = {
  "claims": [
    {"verdict": "reproduced", "statement": "A | B", "source": "paper", "paper_value": "91%"}
    | {"measured": "90%", "n": 10},
    {"verdict": "not tested", "statement": "C", "source": "ours", "paper_value": ""}
    | {"measured": "", "n": None},
  ],
  "peers": [
    {"what": "fit", "name": "other", "version": "1.0", "ours": 1.0, "theirs": 5.25}
    | {"unit": "s", "ratio": 1 / 5.25}
  ],
}


def block(name, text):
  return f"<!-- {name}: made by python -m launch.report -->\n{text}\n<!-- end {name} -->"


def test_claims_table():
  lines = report.claims_table(RESULTS).splitlines()
  assert lines[2:] == [
    r"| **reproduced** | A \| B (paper) | 91% | 90% | 10 |",
    "| **not tested** | C (ours) | – |  | – |",
  ]


def test_peers_table():
  row = report.peers_table(RESULTS).splitlines()[2]
  assert row == "| fit | other 1.0 | 1 | 5.25 | s | 0.1905 |"


def test_verdict_counts():
  assert report.verdict_counts(RESULTS) == "1 reproduced, 1 not tested"
  assert report.verdict_counts({"claims": []}) == "no claims"
  assert report.verdict_counts(None) == "no committed results"


@pytest.mark.parametrize(
  ("value", "text"),
  [(None, "–"), (True, "yes"), (3, "3"), (0.123456, "0.1235"), (1e6, "1,000,000"), ("x", "x")],
)
def test_cell(value, text):
  assert report.cell(value) == text


def test_with_block():
  text = f"before\n{block('claims', 'old')}\nafter\n"
  assert report.with_block(text, "claims", "new") == f"before\n{block('claims', 'new')}\nafter\n"
  assert report.with_block(text, "peers", "new") == text
  with pytest.raises(ValueError, match="has no '<!-- end claims -->' after it"):
    report.with_block(text.replace("<!-- end claims -->", ""), "claims", "new")


def test_check_and_rewrite(root, tmp_path):
  """In a copy of the project: --check finds what is stale, the command mends it."""
  shutil.copytree(root / "launch", tmp_path / "launch")
  folder = tmp_path / "experiments" / "mine"
  folder.mkdir(parents=True)
  (folder / "config.py").write_text('"""Mine: a method."""\nPRESETS = ("default", "smoke")\n')
  (folder / "results.json").write_text(json.dumps(RESULTS))
  (folder / "results.other.json").write_text(json.dumps({"claims": [], "peers": []}))
  (folder / "README.md").write_text(
    f"# Mine\n{block('claims', 'old')}\n{block('peers', '')}\n{block('claims other', 'old')}\nend\n"
  )
  (tmp_path / "README.md").write_text(f"# All\n{block('methods', 'old')}\n")

  def run(*arguments):
    return subprocess.run(
      [sys.executable, "-m", "launch.report", *arguments],
      cwd=tmp_path,
      capture_output=True,
      text=True,
    )

  before = run("--check")
  assert before.returncode == 1
  assert "experiments/mine/README.md: differs from its results.json" in before.stdout
  assert "README.md: differs" in before.stdout
  assert "old" in (folder / "README.md").read_text()
  assert run().returncode == 0
  text = (folder / "README.md").read_text()
  assert "old" not in text
  assert report.claims_table(RESULTS) in text
  assert report.peers_table(RESULTS) in text
  assert text.endswith("end\n")
  methods = (tmp_path / "README.md").read_text()
  assert (
    "| [mine](experiments/mine/README.md) | Mine: a method. | 1 reproduced, 1 not tested | "
    "`default`, `smoke` |"
  ) in methods
  after = run("--check")
  assert (after.returncode, after.stdout) == (0, "")
