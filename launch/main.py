"""The command line, and `run_experiment` behind it."""

from __future__ import annotations

import pathlib
import sys
import traceback
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import config as config_lib
from launch import distributed
from launch.artifacts import ArtifactError
from launch.config import UsageError, nearest
from launch.files import WorkdirError, explained

HELP = """\
Reprise runs the methods of research papers and judges their claims.

  python launch.py --list                        what there is, one line each
  python launch.py --config=jrf                  an experiment, with its default preset
  python launch.py --config=jrf:smoke            a preset of it; smoke takes seconds
  python launch.py --config=jrf --config.seeds=3 --config.train.steps=100
                                                 any key of its config.py overridden
  python launch.py --config=path/to/config.py    your own config, or a folder with config.py, run.py
  python launch.py --config=jrf --workdir=DIR    everything is written to DIR; the same command
                                                 again resumes a run that was stopped or killed
  python launch.py --fetch=list                  data and models that can be fetched for offline
  python launch.py --fetch=all                   work, and fetching them (names too, with commas)

A run leaves results.json, report.html, figures/ and metrics.jsonl in its workdir. Ctrl-C saves
and says how to resume.

Flags:
  --config=NAME[:PRESET] or PATH[:PRESET]
  --config.KEY=VALUE   override; --config=NAME --keys shows every key with its value
  --workdir=DIR        default runs/NAME-PRESET-HASH, a folder for each different config
  --fresh              delete what an earlier run left in the workdir and start anew
  --keys               print the config and stop
  --list, --fetch=all|list|NAME[,NAME], --help

Several hosts (Cloud TPU pods and Slurm are recognised without these):
  --coordinator=HOST:PORT --num_processes=N --process_id=I
"""


def run(argv: list[str] | None = None) -> None:
  """Runs the command line and exits: 0 done, 1 failed, 2 usage, 128+signal when stopped."""
  argv = list(sys.argv if argv is None else argv)
  status = 1
  try:
    status = _run(argv)
  except (UsageError, WorkdirError, ArtifactError) as error:
    print(f"error: {error}", file=sys.stderr)
    status = 2
  finally:
    if status:
      distributed.leave_soon(status)
  sys.exit(status)


def _run(argv: list[str]) -> int:
  if len(argv) == 1 or any(a in ("--help", "-h", "-help", "--helpfull") for a in argv):
    print(HELP)
    return 0 if len(argv) > 1 else 2
  target, config, options = parse(argv)
  if options.list:
    _print_list()
    return 0
  if options.fetch is not None:
    from launch import artifacts

    return artifacts.fetch(options.fetch, sys.stdout)
  if config is None:
    raise UsageError(
      "--config is missing. Name an experiment, as in python launch.py --config=jrf:smoke; "
      "--list shows them and --help explains."
    )
  if options.keys:
    for key, value in config_lib.flatten(config).items():
      print(f"--config.{key}={value!r}")
    return 0

  distributed.initialize(
    distributed.settings(options.coordinator, options.num_processes, options.process_id)
  )
  folder = config_lib.run_folder(config, target)
  workdir = options.workdir or default_workdir(config)
  command = "python launch.py " + " ".join(_without_fresh(argv[1:]))
  if options.workdir is None:
    command += f" --workdir={workdir}"
  return _execute(config, folder, pathlib.Path(workdir), options.fresh, command)


def _execute(
  config: ml_collections.ConfigDict,
  folder: pathlib.Path,
  workdir: pathlib.Path,
  fresh: bool,
  command: str,
) -> int:
  from launch.metrics import NonFiniteError
  from launch.run import Interrupted

  print(f"{config.experiment}:{config.preset} in {workdir}", file=sys.stderr, flush=True)
  try:
    results = _run_in(config, folder, workdir, fresh)
  except Interrupted as stop:
    print(f"{stop}; everything so far is saved. Resume with:\n  {command}", file=sys.stderr)
    return 128 + stop.signum
  except KeyboardInterrupt:
    print(f"stopped at once. Resume from the last save with:\n  {command}", file=sys.stderr)
    return 130
  except (NonFiniteError, ValueError) as error:
    if isinstance(error, UsageError) or not (workdir / "config.json").is_file():
      raise
    # Bad input says in its message what to do; where it was raised is kept for who needs it.
    where = workdir / "traceback.txt"
    with explained(where):
      where.write_text(traceback.format_exc())
    print(f"error: {error}\n(traceback in {where})", file=sys.stderr)
    return 1
  _print_summary(results, workdir)
  return 0


def run_experiment(
  config: ml_collections.ConfigDict, workdir: str, *, experiment: str | None = None
) -> dict[str, Any]:
  """See `launch.run_experiment`."""
  config = config_lib.complete(config)
  if experiment is not None:
    with config.unlocked():
      config.experiment = experiment
  return _run_in(config, config_lib.run_folder(config), pathlib.Path(workdir))


def _run_in(
  config: ml_collections.ConfigDict,
  folder: pathlib.Path,
  workdir: pathlib.Path,
  fresh: bool = False,
) -> dict[str, Any]:
  import jax
  from absl import logging

  from launch.mesh import make_mesh, split_cpu
  from launch.run import Run

  # Some libraries read absl's flags, which a notebook or our own parsing never hands to absl.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  logging.set_verbosity(logging.ERROR)
  experiment = config_lib.load_module(folder, "run")
  split_cpu(config.cpu_devices)
  _keep_compiled()
  mesh = make_mesh(config.mesh.to_dict())
  with jax.set_mesh(mesh), Run(workdir, config, mesh, fresh=fresh) as context:
    experiment.run(config, context)
    return context.results("complete")


def _keep_compiled() -> None:
  """Keeps compiled programs in the user's cache, where a resumed or repeated run finds them."""
  import jax

  from launch import artifacts

  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(artifacts.cache_dir() / "compiled"))
    # By default JAX keeps what took a second to compile, which leaves most of a small run out.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def default_workdir(config: ml_collections.ConfigDict) -> str:
  name = pathlib.Path(str(config.experiment)).name
  return f"runs/{name}-{config.preset}-{config_lib.config_hash(config)[:6]}"


def parse(
  argv: list[str],
) -> tuple[config_lib.Target | None, ml_collections.ConfigDict | None, flags.FlagValues]:
  """Reads a command line.

  Args:
    argv: program name and arguments.

  Returns:
    What `--config` named and its config with overrides (both None without `--config`), and the
    other flags.

  Raises:
    UsageError: unknown flag, experiment, preset or key, or a value of the wrong type.
  """
  text, arguments = _take_config(argv)
  values = flags.FlagValues()
  flags.DEFINE_bool("list", False, "", flag_values=values)
  flags.DEFINE_bool("keys", False, "", flag_values=values)
  flags.DEFINE_bool("fresh", False, "", flag_values=values)
  flags.DEFINE_string("fetch", None, "", flag_values=values)
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  flags.DEFINE_string("coordinator", None, "", flag_values=values)
  flags.DEFINE_integer("num_processes", None, "", flag_values=values)
  flags.DEFINE_integer("process_id", None, "", flag_values=values)
  known = [*values, "config", "help"]
  target = config = None
  overrides = [a.lstrip("-")[7:].partition("=")[0] for a in arguments if _is_override(a)]
  if text is not None:
    target = config_lib.resolve(text)
    config = config_lib.load(target)
    config_lib.check_override_keys(config, overrides)
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)
  elif overrides:
    raise UsageError(f"--config.{overrides[0]} needs an experiment before it, as in --config=jrf")
  try:
    rest = values(arguments)
  except flags.UnrecognizedFlagError as error:
    raise UsageError(
      f"there is no flag --{error.flagname}; {nearest(error.flagname, known)} --help explains."
    ) from None
  except (flags.Error, ValueError, TypeError) as error:
    message = " ".join(str(error).replace("flag --", "--").split())
    raise UsageError(f"{message}. --keys shows every key with its present value.") from None
  if len(rest) > 1:
    raise UsageError(
      f"{rest[1]!r} is not a flag; did you mean --config={rest[1]}? --help explains."
    )
  return target, values.config if text is not None else None, values


def _is_override(argument: str) -> bool:
  return argument.startswith(("--config.", "-config."))


def _take_config(argv: list[str]) -> tuple[str | None, list[str]]:
  """Splits `--config=TEXT` or `--config TEXT` off the command line."""
  text, rest, i = None, [], 0
  while i < len(argv):
    name, equals, value = argv[i].partition("=")
    if name in ("--config", "-config"):
      if not equals:
        i += 1
        if i == len(argv) or argv[i].startswith("-"):
          raise UsageError("--config needs a name, as in --config=jrf; --list shows them.")
        value = argv[i]
      text = value
    else:
      rest.append(argv[i])
    i += 1
  return text, rest


def _without_fresh(arguments: list[str]) -> list[str]:
  import shlex

  return [shlex.quote(a) for a in arguments if a.lstrip("-") != "fresh"]


def _print_list() -> None:
  from launch.report import verdict_counts

  rows = config_lib.listings()
  width = max((len(row.name) for row in rows), default=0)
  for row in rows:
    print(f"{row.name:<{width}}  {row.summary}")
    print(f"{'':<{width}}  {verdict_counts(row.results)}; presets: {', '.join(row.presets)}")


def _print_summary(results: dict[str, Any], workdir: pathlib.Path) -> None:
  for claim in results["claims"]:
    print(f"{claim['verdict']:>14}  {claim['statement']}\n{'':>14}  {claim['measured']}")
  seconds = results["environment"]["wall_s"]
  print(f"done in {seconds:.0f} s; open {workdir / 'report.html'}")
