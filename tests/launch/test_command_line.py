"""What a person types, and what they read back."""

import json
import os
import subprocess
import sys
import time

import pytest

from launch import config as config_lib
from launch import main
from launch.config import UsageError


@pytest.fixture
def refused(capsys):
  """`refused(*arguments)`: the message of a command line that is not accepted."""

  def message(*arguments):
    with pytest.raises(SystemExit) as stop:
      main.run(["launch.py", *map(str, arguments)])
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    return text

  return message


@pytest.mark.parametrize("flag", ["--list", "--help", "-h"])
def test_answers_at_once_and_without_jax(flag, root):
  code = (
    "import sys\nfrom launch import main\n"
    f"try: main.run(['launch.py', {flag!r}])\n"
    "except SystemExit as stop: code = stop.code\n"
    "heavy = {'jax', 'jaxlib', 'flax', 'orbax', 'scipy', 'matplotlib'} & set(sys.modules)\n"
    "sys.exit(f'status {code}, imported {heavy}' if code or heavy else 0)\n"
  )
  started = time.monotonic()
  done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
  assert time.monotonic() - started < 2
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip()


def test_help_teaches_every_flag(capsys):
  with pytest.raises(SystemExit) as stop:
    main.run(["launch.py", "--help"])
  assert stop.value.code == 0
  text = capsys.readouterr().out
  flags = ("config", "workdir", "fresh", "keys", "list", "fetch", "coordinator", "num_processes")
  for flag in (*flags, "process_id"):
    assert f"--{flag}" in text
  with pytest.raises(SystemExit) as stop:
    main.run(["launch.py"])
  assert stop.value.code == 2
  assert capsys.readouterr().out == text


def test_list_shows_every_experiment(capsys):
  with pytest.raises(SystemExit):
    main.run(["launch.py", "--list"])
  lines = capsys.readouterr().out.splitlines()
  for name in config_lib.experiment_names():
    assert any(line.startswith(f"{name} ") for line in lines)


def test_nearest_names():
  assert config_lib.nearest("jfr", ["jrf", "gate"]) == "did you mean jrf?"
  assert config_lib.nearest("SMOKE", ["smoke", "paper"]) == "did you mean smoke?"
  assert config_lib.nearest("zzz", ["b", "a"]) == "known: a, b."
  assert config_lib.nearest("zzz", []) == "there are none."


def test_unknown_experiment(refused):
  text = refused("--config=jfr")
  assert "--config=jfr: there is no experiment 'jfr'; did you mean jrf?" in text
  assert "--list" in text


def test_unknown_preset(refused, tiny):
  text = refused(f"--config={tiny}:smok")
  assert "tiny has no preset 'smok'; did you mean smoke? Presets of tiny: default, smoke." in text


def test_unknown_key(refused, tiny):
  text = refused(f"--config={tiny}", "--config.model.rat=1")
  assert "the config of tiny has no key 'model.rat'; did you mean model.rate" in text
  text = refused(f"--config={tiny}", "--config.stesp=1")
  assert "has no key 'stesp'; did you mean steps" in text


def test_unknown_flag(refused):
  assert "there is no flag --wokdir; did you mean workdir?" in refused("--wokdir=x")


def test_section_overridden_as_a_whole(refused, tiny):
  text = refused(f"--config={tiny}", "--config.model={}")
  assert "--config.model is a section; set one of its keys: model.name, model.rate" in text


@pytest.mark.parametrize("value", ["abc", "3.5", ""])
def test_wrong_type(value, refused, tiny):
  text = refused(f"--config={tiny}", f"--config.steps={value}")
  assert "config.steps" in text
  assert "--keys shows every key with its present value" in text


@pytest.mark.parametrize("arguments", [["--config"], ["--config", "--workdir=x"]])
def test_config_without_a_value(arguments, refused):
  assert "--config needs a name, as in --config=jrf" in refused(*arguments)


@pytest.mark.parametrize("text", ["", ":smoke"])
def test_config_with_an_empty_name(text, refused):
  assert "there is no experiment ''; known: " in refused(f"--config={text}")


def test_no_config(refused):
  assert "--config is missing. Name an experiment" in refused("--workdir=x")
  assert "--config.seeds needs an experiment before it" in refused("--config.seeds=3")


def test_positional_argument(refused, tiny):
  assert "'jrf' is not a flag; did you mean --config=jrf?" in refused("jrf")
  assert "'smoke' is not a flag" in refused(f"--config={tiny}", "smoke")


def test_missing_path(refused, tmp_path):
  text = refused(f"--config={tmp_path}/nowhere.py")
  assert f"there is no file {tmp_path}/nowhere.py" in text
  assert "get_config(preset)" in text


def test_folder_without_a_config(refused, tmp_path):
  assert f"there is no file {tmp_path}/config.py" in refused(f"--config={tmp_path}")


def test_file_without_get_config(refused, tmp_path):
  (tmp_path / "config.py").write_text("x = 1\n")
  assert "config.py does not define get_config(preset)" in refused(f"--config={tmp_path}")


def test_some_processes_flags_only(refused, tiny):
  text = refused(f"--config={tiny}", "--num_processes=2")
  assert "a multi-process run also needs --coordinator and --process_id" in text
  assert "--num_processes=two" in refused(f"--config={tiny}", "--num_processes=two")


def test_overrides(tiny):
  for config_flag in ([f"--config={tiny}:smoke"], ["--config", f"{tiny}:smoke"]):
    overrides = ["--config.seeds=5", "--config.model.rate=0.5", "--config.model.name=run"]
    target, config, options = main.parse(
      ["launch.py", *config_flag, *overrides, "--config.model.widths=(7, 8, 9)", "--workdir=w"]
    )
    assert (target.name, target.preset, config.preset) == ("tiny", "smoke", "smoke")
    assert (config.seeds, config.steps) == (5, 2)
    assert config.model.to_dict() == {"rate": 0.5, "name": "run", "widths": (7, 8, 9)}
    assert options.workdir == "w"


def test_one_element_of_a_tuple(refused, tiny):
  text = refused(f"--config={tiny}", "--config.model.widths[1]=9")
  assert "give all elements at once, as in --config.model.widths=[3, 4]" in text


def test_config_is_locked_and_completed(tiny):
  _, config, _ = main.parse(["launch.py", f"--config={tiny}"])
  assert (config.experiment, config.preset, config.seed) == ("tiny", "default", 0)
  assert config.mesh.to_dict() == {"data": -1, "model": 1}
  with pytest.raises(AttributeError, match="stpes"):
    config.stpes = 3


def test_keys_prints_every_key(tiny, capsys):
  with pytest.raises(SystemExit) as stop:
    main.run(["launch.py", f"--config={tiny}:smoke", "--config.seeds=7", "--keys"])
  assert stop.value.code == 0
  lines = capsys.readouterr().out.splitlines()
  assert "--config.seeds=7" in lines
  assert "--config.model.name='walk'" in lines
  assert "--config.steps=2" in lines


def test_path_to_the_file_is_path_to_its_folder(tiny):
  by_folder, by_file = (config_lib.resolve(str(path)) for path in (tiny, tiny / "config.py"))
  assert by_folder == by_file
  assert (by_folder.name, by_folder.run_folder) == ("tiny", tiny)


def test_name_of_an_experiment_wins_over_a_folder_here(tmp_path, monkeypatch):
  (tmp_path / "jrf").mkdir()
  monkeypatch.chdir(tmp_path)
  assert config_lib.resolve("jrf").run_folder == config_lib.EXPERIMENTS / "jrf"


def lone_config(folder, experiment):
  path = folder / "mine.py"
  path.write_text(
    "import ml_collections\n"
    "def get_config(preset='default'):\n"
    "  config = ml_collections.ConfigDict({'seeds': 1, 'steps': 2, 'save_every': 1})\n"
    "  config.model = {'rate': 0.1, 'widths': (1,), 'name': 'w'}\n"
    f"  {f'config.experiment = {experiment!r}' if experiment else ''}\n"
    "  return config\n"
  )
  return path


def test_lone_config_names_its_experiment(tiny, tmp_path):
  target, config, _ = main.parse(["launch.py", f"--config={lone_config(tmp_path, str(tiny))}"])
  assert (target.name, target.run_folder) == ("mine", None)
  assert config_lib.run_folder(config, target) == tiny


@pytest.mark.parametrize(("experiment", "said"), [("jfr", "did you mean jrf?"), (None, "'mine'")])
def test_lone_config_of_no_experiment(experiment, said, refused, tmp_path):
  text = refused(f"--config={lone_config(tmp_path, experiment)}")
  assert "which does not exist" in text
  assert said in text
  assert "put a run.py with run(config, run) beside the config" in text


def test_default_workdir_differs_by_config_but_not_by_mesh(tiny):
  def workdir(*overrides):
    _, config, _ = main.parse(["launch.py", f"--config={tiny}", *overrides])
    return main.default_workdir(config)

  assert workdir() == workdir("--config.mesh.data=1")
  assert workdir().startswith("runs/tiny-default-")
  assert len({workdir(), workdir("--config.seed=1"), workdir("--config.model.rate=0.2")}) == 3


def test_one_folder_is_all_a_contributor_adds(launch, tiny, tmp_path):
  """Its files import each other with `from . import x`; nothing is registered anywhere."""
  workdir = tmp_path / "run"
  done = launch(f"--config={tiny}:smoke", f"--workdir={workdir}", "--config.seeds=3")
  assert done.returncode == 0, done.stderr
  assert "reproduced  A resumed walk makes every move once" in done.stdout
  assert f"open {workdir / 'report.html'}" in done.stdout
  results = json.loads((workdir / "results.json").read_text())
  assert (results["experiment"], results["preset"]) == ("tiny", "smoke")
  assert results["status"] == "complete"
  assert results["metrics"]["norm"]["n"] == 3
  assert {p.name for p in (workdir / "figures").iterdir()} == {"end_point.png", "end_point.svg"}
  if os.name == "posix":
    assert not [p for p in workdir.rglob("*") if p.name.startswith(".tmp-")]


def test_an_impossible_mesh(launch, tiny, tmp_path):
  done = launch(f"--config={tiny}", "--config.mesh.data=3", f"--workdir={tmp_path / 'run'}")
  assert done.returncode == 2
  assert "config.mesh asks for {'data': 3, 'model': 1} but there are 1 devices" in done.stderr
  assert "Traceback" not in done.stderr


def test_errors_are_value_errors():
  assert issubclass(UsageError, ValueError)


def failing_experiment(folder, body):
  (folder / "run.py").write_text(f"import math\n\ndef run(config, run):\n  {body}\n")
  (folder / "config.py").write_text(
    "import ml_collections\n\ndef get_config(preset):\n  return ml_collections.ConfigDict()\n"
  )
  return folder


@pytest.mark.parametrize(
  ("body", "said"),
  [
    ("raise ValueError('rate = 2; expected at most 1')", "error: rate = 2; expected at most 1"),
    ("run.log(3, loss=math.nan)", "error: metric loss is nan in unit 'run' at step 3"),
  ],
)
def test_an_error_of_the_run_is_said_and_its_traceback_kept(body, said, tmp_path, capsys):
  experiment = failing_experiment(tmp_path, body)
  workdir = tmp_path / "run"
  with pytest.raises(SystemExit) as stop:
    main.run(["launch.py", f"--config={experiment}", f"--workdir={workdir}"])
  assert stop.value.code == 1
  text = capsys.readouterr().err
  assert said in text
  assert "Traceback" not in text
  assert str(workdir / "traceback.txt") in text
  assert body in (workdir / "traceback.txt").read_text()
  assert json.loads((workdir / "results.json").read_text())["status"] == "failed"


def test_an_error_before_the_workdir_is_not_hidden(tmp_path):
  experiment = failing_experiment(tmp_path, "pass")
  (experiment / "run.py").write_text("raise ValueError('while importing')\n")
  with pytest.raises(ValueError, match="while importing"):
    main.run(["launch.py", f"--config={experiment}", f"--workdir={tmp_path / 'run'}"])
  assert not (tmp_path / "run").exists()
