"""Checkpoints of a long loop, on Orbax v1."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from launch.files import WorkdirError, explained

KEEP = 2


class Checkpoints:
  """Saves the state of a loop every so often and gives the last good one back.

  The state is any pytree of arrays (typed PRNG keys too). Saving is asynchronous; the last two
  checkpoints are kept, so that a newest one damaged by a crash costs one interval, not the run.
  """

  def __init__(
    self, directory: pathlib.Path, after_save: Callable[[], None] = lambda: None
  ) -> None:
    """`after_save` is called after each save was started; it may raise to stop the loop."""
    self._directory = directory
    self._after_save = after_save
    self._pending = None
    self._checkpointer: ocp.training.Checkpointer | None = None

  def _open(self) -> ocp.training.Checkpointer:
    if self._checkpointer is None:
      with explained(self._directory):
        self._directory.mkdir(parents=True, exist_ok=True)
      self._checkpointer = ocp.training.Checkpointer(
        self._directory.resolve(),
        preservation_policy=ocp.training.preservation_policies.LatestN(KEEP),
        cleanup_tmp_directories=True,
      )
    return self._checkpointer

  def save(self, step: int, state: Any) -> None:
    """Starts saving `state` as of `step`; the previous save is finished first.

    Raises:
      WorkdirError: when the previous save failed (full disk, read-only folder).
    """
    self.wait()
    with _explained(self._directory):
      self._pending = self._open().save_async(int(step), state, force=True, overwrite=True)
    self._after_save()

  def wait(self) -> None:
    """Returns when everything is on disk."""
    if self._pending is not None:
      with _explained(self._directory):
        self._pending.result()
      self._pending = None

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """The newest good checkpoint as `(step, state)`, or None when there is none.

    Args:
      like: a state of the same structure, concrete, or abstract with shardings. Arrays are put on
        the devices that its shardings name, whatever devices they were saved from.

    Raises:
      WorkdirError: when the checkpoint has other arrays than `like`, naming them.
    """
    self.wait()
    if self._checkpointer is None and not self._directory.exists():
      return None
    checkpointer = self._open()
    abstract = jax.tree.map(_abstract, like)
    steps = sorted((meta.step for meta in checkpointer.checkpoints), reverse=True)
    for step, earlier in zip(steps, [*steps[1:], None], strict=False):
      state, error, different = None, None, []
      try:
        saved = checkpointer.metadata(step).metadata
        if saved is None:  # Orbax answers None when it cannot read the description.
          raise ValueError("unreadable description")
        different = _tree_differences(saved, abstract)
        if not different:
          state = checkpointer.load(step, abstract)
      except Exception as caught:  # Orbax raises many kinds for a damaged checkpoint.
        error = caught
      if _anywhere(error is not None):
        reason = "seen by another process" if error is None else type(error).__name__
        then = "starting from the beginning" if earlier is None else f"going back to {earlier}"
        print(
          f"checkpoint {step} in {self._directory} is damaged ({reason}); {then}",
          file=sys.stderr,
          flush=True,
        )
        self._set_aside(step)
        continue
      if different:
        raise WorkdirError(
          f"the checkpoint at step {step} in {self._directory} holds another state: "
          + "; ".join(different[:8])
          + ". It was made by other code or another config; use a new --workdir."
        )
      return step, state
    return None

  def _set_aside(self, step: int) -> None:
    """Renames a damaged checkpoint, or it would count as newer than those saved from now on."""
    if jax.process_index() == 0:
      kept = self._directory / f"damaged-{step}"
      with explained(self._directory):
        if kept.exists():
          shutil.rmtree(kept)
        (self._directory / str(step)).rename(kept)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoint")
    self._open().reload()

  def close(self) -> None:
    self.wait()
    if self._checkpointer is not None:
      self._checkpointer.close()
      self._checkpointer = None

  def delete(self) -> None:
    """Removes the checkpoints of a loop that has finished."""
    self.close()
    if jax.process_index() == 0:
      shutil.rmtree(self._directory, ignore_errors=True)


def _anywhere(happened: bool) -> bool:
  """Whether it happened in any process."""
  if jax.process_count() == 1:
    return happened
  return bool(np.asarray(multihost_utils.process_allgather(np.int32(happened))).any())


def _abstract(x: Any) -> Any:
  x = x if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else jax.numpy.asarray(x)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def _tree_differences(saved: Any, like: Any) -> list[str]:
  def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_path_name(path): _stored_shape(leaf) for path, leaf in leaves}

  old, new = shapes(saved), shapes(like)
  lines = []
  for name in sorted(old.keys() | new.keys()):
    if name not in new:
      lines.append(f"{name} is only in the checkpoint")
    elif name not in old:
      lines.append(f"{name} is missing from the checkpoint")
    elif old[name] != new[name]:
      lines.append(f"{name} has shape {list(old[name])} in the checkpoint, {list(new[name])} here")
  return lines


def _stored_shape(leaf: Any) -> tuple[int, ...]:
  """Shape on disk: a typed PRNG key is stored as its words."""
  if jax.numpy.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
    leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
  return tuple(getattr(leaf, "shape", ()))


def _path_name(path: tuple[Any, ...]) -> str:
  parts = (getattr(p, "key", getattr(p, "name", getattr(p, "idx", p))) for p in path)
  return ".".join(str(part) for part in parts)


@contextlib.contextmanager
def _explained(directory: pathlib.Path) -> Iterator[None]:
  """Orbax wraps the operating system's error, or only quotes it: find it and say what to do."""
  try:
    yield
  except Exception as error:
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
      cause = cause.__cause__ or cause.__context__
    if cause is None:
      codes = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES)
      found = [code for code in codes if os.strerror(code) in str(error)]
      if not found:
        raise
      cause = OSError(found[0], os.strerror(found[0]))
    with explained(directory):
      raise cause from error
