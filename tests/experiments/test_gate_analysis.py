"""Logs that are odd but legal, in this process: what is estimated, left out, and said."""

import json
import pathlib

import numpy as np
import pytest

import launch
from experiments.gate.analysis import between_stages

NODES = 30


def write(folder: pathlib.Path, shares: tuple[float, ...], whole_components: bool = False):
  """Five groups of six; y = 2 + z + e, so the GATE is 2. Paths of graph and log."""
  rng = np.random.default_rng(1)
  edges = {(6 * k + i, 6 * k + (i + 1) % 6) for k in range(5) for i in range(6)}
  if not whole_components:
    edges |= {(int(a), int(b)) for a, b in rng.integers(0, NODES, (25, 2)) if a != b}
  edges = {(min(e), max(e)) for e in edges}
  near = [[b if a == i else a for a, b in edges if i in (a, b)] for i in range(NODES)]
  score = rng.permutation(5 if whole_components else NODES)
  lines = ["node,stage,share,z,y"]
  for stage, share in enumerate(shares):
    z = (score < round(score.size * share)).astype(int)
    z = z[np.arange(NODES) // 6] if whole_components else z
    lines += [
      f"{i},{stage},{share},{z[i]},{2 + z[i] + np.mean(z[near[i]]) + 0.01 * (i % 3)}"
      for i in range(NODES)
    ]
  (folder / "edges.csv").write_text("source,target\n" + "".join(f"{a},{b}\n" for a, b in edges))
  (folder / "log.csv").write_text("\n".join(lines) + "\n")
  (folder / "clusters.csv").write_text(
    "node,cluster\n" + "".join(f"{i},{i // 6}\n" for i in range(NODES))
  )


def analyse(folder: pathlib.Path, **changes) -> dict:
  config = launch.load_config("gate")
  with config.unlocked():
    config.graph, config.log = str(folder / "edges.csv"), str(folder / "log.csv")
    config.cpu_devices, config.features = 1, ("treatment", "linear")
    for key, value in changes.items():
      config[key] = value
  launch.run_experiment(config, str(folder / "run"))
  return json.loads((folder / "run" / "results.json").read_text())


def rows(found: dict) -> dict[str, dict]:
  return {row["name"]: row for row in found["tables"]["Estimates of the GATE"]["rows"]}


def test_unit_level_without_a_clusters_file(tmp_path):
  write(tmp_path, (0.0, 0.2, 0.5))
  found = analyse(tmp_path)
  assert abs(rows(found)["ols, linear, all stages"]["estimate"] - 2) < 0.05
  stages = found["tables"]["Stages"]["rows"]
  assert [row["planned share"] for row in stages] == [0, 0.2, 0.5]
  np.testing.assert_allclose([row["realised share"] for row in stages], [0, 0.2, 0.5])


def test_nothing_and_everybody(tmp_path):
  """Shares 0 and 1 show the effect itself; what needs variation inside a stage is left out."""
  write(tmp_path, (0.0, 1.0))
  found = analyse(tmp_path)
  estimates = rows(found)
  assert abs(estimates["ols, treatment, all stages"]["estimate"] - 2) < 1e-6
  assert "ols, linear, all stages" not in estimates
  assert any("left out" in text and "collinear" in text for text in found["warnings"])
  design = found["tables"]["The design"]["rows"][0]
  assert design["v_w"] == 0
  assert design["bias bound"] == 0


def test_a_trend_takes_its_part_of_the_shares(tmp_path):
  write(tmp_path, (0.0, 0.1, 0.5))
  design = analyse(tmp_path, trend=True)["tables"]["The design"]["rows"][0]
  # Shares less their line over time 0, 1, 2: residuals 0.05, -0.1 and 0.05.
  np.testing.assert_allclose(design["v_b"], (2 * 0.05**2 + 0.1**2) / 3)
  np.testing.assert_allclose(design["1 + rho h"], 1 + design["v_b"] / design["v_w"] * design["h"])


def test_two_stages_leave_nothing_beside_a_trend():
  np.testing.assert_allclose(between_stages(np.array([0.0, 0.5]), True), 0, atol=1e-15)
  np.testing.assert_allclose(between_stages(np.array([0.0, 0.5]), False), 1 / 16)


def test_clusters_that_are_whole_components(tmp_path):
  """Nobody's neighbours differ from them, so own treatment says everything."""
  write(tmp_path, (0.0, 0.4), whole_components=True)
  found = analyse(tmp_path, clusters=str(tmp_path / "clusters.csv"))
  assert abs(rows(found)["ols, treatment, all stages"]["estimate"] - 2) < 1e-6
  assert any("ols, linear, all stages is left out" in text for text in found["warnings"])


def test_isolated_nodes_are_kept_on_request(tmp_path):
  write(tmp_path, (0.0, 0.2, 0.5))
  graph, log = tmp_path / "edges.csv", tmp_path / "log.csv"
  graph.write_text(graph.read_text() + "alone,alone\n")
  log.write_text(log.read_text() + "alone,0,0.0,0,1\nalone,1,0.2,0,1\nalone,2,0.5,1,2\n")
  found = analyse(tmp_path, isolated="zero")
  assert found["tables"]["The design"]["rows"][0]["h"] is None
  assert any("influenced by nobody" in text for text in found["warnings"])


@pytest.mark.parametrize(
  ("shares", "changes", "words"),
  [
    ((0.5,), {"trend": True}, "a trend needs two or more"),
    ((0.01,), {}, "no regression can be fitted"),
  ],
)
def test_what_cannot_be_estimated_says_what_to_do(tmp_path, shares, changes, words):
  write(tmp_path, shares)
  with pytest.raises(ValueError, match=words):
    analyse(tmp_path, **changes)


def test_one_randomisation_unit_is_refused(tmp_path):
  write(tmp_path, (0.0, 0.2))
  clusters = tmp_path / "clusters.csv"
  clusters.write_text("node,cluster\n" + "".join(f"{i},all\n" for i in range(NODES)))
  with pytest.raises(ValueError, match="one randomisation unit"):
    analyse(tmp_path, clusters=str(clusters))
