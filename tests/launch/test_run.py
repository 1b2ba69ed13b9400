"""What an experiment gets from a Run."""

import json
import math
import re
import threading

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import ml_collections
import numpy as np
import pytest

from launch import config as config_lib
from launch import metrics, run_experiment
from launch.files import WorkdirError
from launch.mesh import make_mesh
from launch.metrics import NonFiniteError
from launch.run import CONTENTS, Run


@pytest.fixture
def opened(tmp_path):
  """`opened(seed=..., ...)`: a Run in `tmp_path / "run"` with this config."""

  def make(fresh=False, **values):
    config = ml_collections.ConfigDict({"seeds": 3, **values})
    config_lib.complete(config, experiment="test", preset="default")
    mesh = make_mesh({"data": -1}, jax.devices()[:1])
    return Run(tmp_path / "run", config, mesh, fresh=fresh)

  return make


def words(key):
  return np.asarray(jax.random.key_data(key)).tolist()


# Keys.


def test_key_is_a_function_of_seed_and_name(opened):
  with opened() as run:
    first, other = words(run.key("init")), words(run.key("noise"))
    assert words(run.key("init")) == first != other
    assert run.unit("inside a unit", lambda: words(run.key("init"))) == first
  with opened(fresh=True, seed=1) as run:
    assert words(run.key("init")) != first
  # Written down when it was made: a change here changes every committed result.
  assert first == [790810639, 762632222]


def test_key_does_not_depend_on_float64(opened):
  with opened(seed=2**32 - 1) as run:
    narrow = words(run.key("init"))
    with jax.enable_x64(True):
      assert words(run.key("init")) == narrow


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed, opened):
  with opened(seed=seed) as run, pytest.raises(ValueError, match=f"config.seed = {seed}"):
    run.key("init")


# Units.


def test_unit_is_computed_once(opened):
  calls = []

  def work(n):
    calls.append(n)
    return {"a": jnp.arange(3), "b": (1, 2.5, "x", None), "c": np.float32(2), "d": True}

  with opened() as run:
    first = run.unit("seed=0", work, 7)
  with opened() as run:
    again = run.unit("seed=0", work, 7)
  assert calls == [7]
  for result in (first, again):
    np.testing.assert_array_equal(result["a"], [0, 1, 2])
    assert (result["b"], float(result["c"]), result["d"]) == ([1, 2.5, "x", None], 2.0, True)
  assert type(first["c"]) is type(again["c"])
  assert first["a"].flags.writeable == again["a"].flags.writeable


def test_unit_that_returns_nothing_is_computed_once(opened):
  calls = []
  for _ in range(2):
    with opened() as run:
      assert run.unit("write", lambda: calls.append(1)) is None
  assert calls == [1]


def test_unit_with_other_arguments_is_computed_again(opened, capsys):
  with opened() as run:
    assert run.unit("double", lambda x: 2 * x, 3) == 6
  with opened() as run:
    assert run.unit("double", lambda x: 2 * x, 4) == 8
  assert "unit double: its arguments have changed; computing it again" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda data: data[:10], lambda data: data[:-1] + b"?"])
def test_damaged_unit_is_computed_again(damage, opened, tmp_path, capsys):
  with opened() as run:
    run.unit("double", lambda x: 2 * x, 3)
  (path,) = (tmp_path / "run" / "units").iterdir()
  path.write_bytes(damage(path.read_bytes()))
  with opened() as run:
    assert run.unit("double", lambda x: 2 * x, 3) == 6
  assert "unit double: its kept result is damaged; computing it again" in capsys.readouterr().err


def test_unit_names_that_share_a_file(opened):
  with opened() as run:
    run.unit("a/b", lambda: 1)
    with pytest.raises(ValueError, match="'a b' and 'a/b' share a file name; rename one"):
      run.unit("a b", lambda: 2)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, jax.random.key(0)])
def test_unit_result_must_be_plain(value, opened):
  with opened() as run:
    with pytest.raises(TypeError, match=r"plain data|PRNGKey"):
      run.unit("result", lambda: value)
    with pytest.raises(TypeError, match=r"plain data|PRNGKey"):
      run.unit("argument", lambda x: 0, value)


def test_checkpoints_of_nested_units_are_apart(opened, tmp_path):
  like = {"x": jnp.zeros(2)}
  with opened() as run:

    def inner():
      assert run.checkpoints.restore(like) is None
      run.checkpoints.save(1, {"x": jnp.full(2, 9.0)})
      return 0

    def outer():
      run.checkpoints.save(5, {"x": jnp.ones(2)})
      run.unit("inner", inner)
      run.checkpoints.wait()
      step, state = run.checkpoints.restore(like)
      return {"step": step, "x": state["x"]}

    found = run.unit("outer", outer)
  assert found["step"] == 5
  np.testing.assert_array_equal(found["x"], [1, 1])
  assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_checkpoints_of_other_arguments_are_not_continued(opened):
  def work(scale):
    assert run.checkpoints.restore({"x": jnp.zeros(())}) is None
    run.checkpoints.save(1, {"x": jnp.float32(scale)})
    if scale == 1:
      raise KeyboardInterrupt
    return scale

  with pytest.raises(KeyboardInterrupt), opened() as run:
    run.unit("walk", work, 1)
  with opened() as run:
    assert run.unit("walk", work, 2) == 2


def test_checkpoints_outside_a_unit_are_finished_on_leaving(opened):
  with opened() as run:
    run.checkpoints.save(3, {"x": jnp.ones(2)})
  with opened() as run:
    step, state = run.checkpoints.restore({"x": jnp.zeros(2)})
  assert step == 3
  np.testing.assert_array_equal(state["x"], [1, 1])


# Logging.


@pytest.mark.parametrize("value", [math.nan, math.inf, jnp.float32(-jnp.inf)])
def test_number_that_is_not_finite_stops_the_run(value, opened, tmp_path):
  def work():
    run.log(0, loss=1.0)
    run.log(1, accuracy=0.5, loss=value)

  pattern = rf"metric loss is {float(value)} in unit 'seed=0' at step 1"
  with pytest.raises(NonFiniteError, match=re.escape(pattern)), opened() as run:
    run.unit("seed=0", work)
  rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
  assert rows[-1] == {"unit": "seed=0", "step": 1, "accuracy": 0.5, "loss": repr(float(value))}
  assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "failed"


def test_half_written_row_is_dropped_and_the_last_row_counts(opened, tmp_path):
  path = tmp_path / "run" / "metrics.jsonl"
  with opened() as run:
    for step in range(3):
      run.log(step, loss=float(step))
  path.write_bytes(path.read_bytes()[:-5])
  with opened() as run:
    run.log(1, loss=10.0)
    run.log(2, loss=20.0)
  assert len(path.read_text().splitlines()) == 4
  last = {row["step"]: row["loss"] for row in metrics.read(path)}
  assert last == {0: 0.0, 1: 10.0, 2: 20.0}


def test_tensorboard_gets_the_same_numbers(opened, tmp_path):
  pytest.importorskip("tensorboardX")
  from tensorboardX.proto.event_pb2 import Event

  for value in (0.25, 0.5):  # A resumed run must not write over the file of the one before.
    with opened() as run:
      run.unit(f"loss={value}", lambda value=value: run.log(3, loss=value))
  read = []
  for path in (tmp_path / "run" / "tensorboard").iterdir():
    data = path.read_bytes()
    while data:  # TFRecord: length, checksum, content, checksum.
      size = int.from_bytes(data[:8], "little")
      event = Event.FromString(data[12 : 12 + size])
      read += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
      data = data[16 + size :]
  assert sorted(read) == [("loss=0.25/loss", 3, 0.25), ("loss=0.5/loss", 3, 0.5)]


def test_progress_passes_everything_through(opened, capsys):
  with opened() as run:
    assert list(run.progress([3, 1, 2], "sorting")) == [3, 1, 2]
    assert list(run.progress(iter("ab"), "letters")) == ["a", "b"]
  assert "sorting: 3/3 in 0 s" in capsys.readouterr().err


# Results.


def filled(run):
  run.metric("gap", [0.1, 0.2, 0.3], "probability")
  run.metric("time", 2.0, "s")
  run.claim(
    "gap", "The gap <b>shrinks</b>", source="ours", criteria={"gap < 1": True}, measured="0.2"
  )
  run.peer("other", "1.0", "fit", 1.0, 4.0, "s")
  run.warn("degenerate")
  run.warn("degenerate")
  run.table("rows", [{"a": np.float32(0.5), "b": jnp.int32(3), "c": math.nan, "d": "x"}], "caption")
  figure, axes = plt.subplots()
  axes.plot([0, 1])
  run.figure("gap / rate", figure, "the gap")


def test_results_json(opened, tmp_path):
  with opened() as run:
    filled(run)
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert set(results) == {
    *("schema", "experiment", "preset", "config_hash", "status", "metrics", "claims", "peers"),
    *("tables", "figures", "warnings", "environment"),
  }
  assert (results["schema"], results["status"], results["experiment"]) == (1, "complete", "test")
  gap = results["metrics"]["gap"]
  assert (gap["n"], gap["unit"]) == (3, "probability")
  assert gap["mean"] == pytest.approx(0.2)
  assert results["metrics"]["time"] == {"mean": 2.0, "ci95": None, "n": 1, "unit": "s"}
  assert results["claims"][0]["verdict"] == "reproduced"
  assert results["peers"][0]["ratio"] == 0.25
  assert results["warnings"] == ["degenerate"]
  assert results["tables"]["rows"]["rows"] == [{"a": 0.5, "b": 3, "c": None, "d": "x"}]
  known = {"jax", "devices", "cpu", "git", "wall_s", "peak_rss_mb", "processes", "python"}
  assert known <= set(results["environment"])


def test_report_is_one_file_that_shows_everything(opened, tmp_path):
  with opened() as run:
    filled(run)
  html = (tmp_path / "run" / "report.html").read_text()
  assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)[^"'>]+""", html)
  assert not re.findall(r"url\(|@import|https?://|<script", html)
  assert "The gap &lt;b&gt;shrinks&lt;/b&gt;" in html
  shown = ("reproduced", "gap &lt; 1: held", "degenerate", "the gap", "caption", "config.seeds")
  for text in shown:
    assert text in html
  assert html.count("data:image/svg+xml;base64,") == 1


def test_claim_ids_are_unique(opened):
  claim = {"source": "ours", "criteria": {"x": True}, "measured": ""}
  with opened() as run:
    run.claim("a", "first", **claim)
    with pytest.raises(ValueError, match="claim 'a' was recorded twice"):
      run.claim("a", "second", **claim)


# The workdir.


def test_workdir_of_another_config_names_the_keys(opened):
  with opened(rate=0.1, gone=1):
    pass
  with pytest.raises(WorkdirError) as caught:
    opened(rate=0.2, new="x")
  text = str(caught.value)
  for line in ("rate: 0.1 -> 0.2", "gone: 1 -> '(absent)'", "new: '(absent)' -> 'x'"):
    assert line in text
  assert "seeds" not in text
  with opened(rate=0.1, gone=1):  # The refused run holds no lock, though its error is still kept.
    assert caught.value is not None


def test_another_mesh_is_the_same_run(opened):
  with opened(mesh={"data": -1, "model": 1}) as run:
    assert run.unit("one", lambda: 1) == 1
  with opened(mesh={"data": 1, "model": 1}) as run:
    assert run.unit("one", lambda: pytest.fail("computed again")) == 1


def test_foreign_folder_is_refused(opened, tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "thesis.tex").write_text("years of work")
  with pytest.raises(WorkdirError, match=r"holds 'thesis.tex' and no config.json"):
    opened()


def test_unreadable_config_json(opened, tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text("{")
  with pytest.raises(WorkdirError, match="is damaged, or not of a run"):
    opened()


def test_second_run_in_a_workdir_in_use(opened):
  with opened():
    for fresh in (False, True):
      with pytest.raises(WorkdirError, match="another run is using"):
        opened(fresh=fresh)
  with opened():
    pass


def test_fresh_deletes_what_a_run_left(opened, tmp_path):
  with opened(rate=1) as run:
    run.unit("a", lambda: 1)
    run.checkpoints.save(1, {"x": jnp.ones(2)})
    filled(run)
  written = {p.name for p in (tmp_path / "run").iterdir()} - {".lock"}
  assert written <= set(CONTENTS)
  (tmp_path / "run" / "notes.txt").write_text("mine")
  with opened(fresh=True, rate=2) as run:
    assert run.unit("a", lambda: 2) == 2
    assert run.checkpoints.restore({"x": jnp.zeros(2)}) is None
  assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("config_json", [None, '{"model_type": "llama", "seed": 1}', "[1]", "{"])
def test_fresh_deletes_nothing_of_others(config_json, opened, tmp_path):
  folder = tmp_path / "run"
  (folder / "checkpoints").mkdir(parents=True)
  (folder / "checkpoints" / "weights").write_text("dear")
  if config_json:
    (folder / "config.json").write_text(config_json)
  with pytest.raises(WorkdirError):
    opened(fresh=True)
  assert (folder / "checkpoints" / "weights").read_text() == "dear"


def test_leftovers_of_a_kill_are_removed(opened, tmp_path):
  with opened() as run:
    run.unit("a", lambda: 1)
  left = [tmp_path / "run" / ".tmp-1-results.json", tmp_path / "run" / "units" / ".tmp-1-a.msgpack"]
  for path in left:
    path.write_text("half")
  with opened():
    assert not any(path.exists() for path in left)


# From Python.


def test_run_experiment(tiny, tmp_path):
  config = ml_collections.ConfigDict(
    {"seeds": 1, "steps": 3, "save_every": 2, "model": {"rate": 0.5}, "experiment": str(tiny)}
  )
  results = run_experiment(config, str(tmp_path / "run"))
  assert results["claims"][0]["verdict"] == "reproduced"
  assert json.loads((tmp_path / "run" / "results.json").read_text())["claims"] == results["claims"]

  def elsewhere():  # Signals can be handled in the main thread only.
    results["thread"] = run_experiment(config, str(tmp_path / "thread"))

  thread = threading.Thread(target=elsewhere)
  thread.start()
  thread.join()
  assert results["thread"]["metrics"] == results["metrics"]
