"""Joins the processes of a multi-host run before anything touches a device."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Mapping

from launch.config import UsageError


@dataclasses.dataclass(frozen=True)
class Processes:
  """How this process finds the others.

  detect: let JAX read the cluster's own variables (Cloud TPU pod, Slurm, GKE).
  """

  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  detect: bool = False


def settings(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  environ: Mapping[str, str] = os.environ,
) -> Processes | None:
  """Flags first, then environment variables, then the cluster; None for a single process.

  Raises:
    UsageError: when only some of coordinator, num_processes and process_id are given.
  """
  coordinator = coordinator or environ.get("REPRISE_COORDINATOR")
  if num_processes is None:
    num_processes = _integer(environ, "REPRISE_NUM_PROCESSES")
  if process_id is None:
    process_id = _integer(environ, "REPRISE_PROCESS_ID")
  given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
  missing = [name for name, value in given.items() if value is None]
  if not missing:
    if not 0 <= process_id < num_processes:
      raise UsageError(f"--process_id={process_id}: expected 0 to {num_processes - 1}")
    return Processes(coordinator, num_processes, process_id)
  if len(missing) < len(given):
    raise UsageError(
      f"a multi-process run also needs --{' and --'.join(missing)}. Give --coordinator=HOST:PORT, "
      "--num_processes=N and a different --process_id on each host, or none of the three."
    )
  on_tpu_pod = len(environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1
  # A batch script outside srun has the other variables too, but it is a single process.
  on_slurm = (_integer(environ, "SLURM_NTASKS") or 1) > 1 and "SLURM_STEP_NODELIST" in environ
  named = "JAX_COORDINATOR_ADDRESS" in environ
  return Processes(detect=True) if on_tpu_pod or on_slurm or named else None


def _integer(environ: Mapping[str, str], name: str) -> int | None:
  if name not in environ:
    return None
  try:
    return int(environ[name])
  except ValueError:
    raise UsageError(f"{name}={environ[name]!r} in the environment: expected a number") from None


def initialize(processes: Processes | None, timeout_s: int = 300) -> None:
  """Starts `jax.distributed` and says who is there; does nothing for a single process.

  Raises:
    UsageError: when the other processes cannot be reached in time, or their number is wrong.
  """
  if processes is None:
    return
  import jax

  if jax.distributed.is_initialized():
    return
  if processes.detect:
    arguments = {}
    print("joining the processes of this cluster ...", file=sys.stderr, flush=True)
  else:
    arguments = {
      "coordinator_address": processes.coordinator,
      "num_processes": processes.num_processes,
      "process_id": processes.process_id,
    }
    print(
      f"process {processes.process_id} of {processes.num_processes}: joining at "
      f"{processes.coordinator} (waiting up to {timeout_s} s) ...",
      file=sys.stderr,
      flush=True,
    )
  try:
    jax.distributed.initialize(**arguments, initialization_timeout=timeout_s)
  except (RuntimeError, ValueError) as error:
    raise UsageError(
      f"the processes did not find each other: {error}. Check that every host was started with "
      "the same --coordinator and --num_processes, and that the port is open between them."
    ) from error
  if processes.num_processes not in (None, jax.process_count()):
    raise UsageError(
      f"{processes.num_processes} processes were asked for and {jax.process_count()} joined."
    )
  print(
    f"process {jax.process_index()} of {jax.process_count()}: "
    f"{jax.local_device_count()} of {jax.device_count()} devices are local",
    file=sys.stderr,
    flush=True,
  )


def leave_soon(status: int, wait_s: float = 10) -> None:
  """Called by a process that fails: it ends within `wait_s`, whatever the others do.

  At its end JAX waits for all processes. Those that failed too arrive at once; one that waits for
  this process in the middle of a computation never would, and learns by its end that it is alone.
  """
  if "jax" not in sys.modules:
    return
  import jax

  if jax.distributed.is_initialized():
    end = threading.Timer(wait_s, os._exit, [status])
    end.daemon = True
    end.start()
