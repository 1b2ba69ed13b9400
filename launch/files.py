"""Files of a workdir: written whole or not at all, with errors in plain words."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator


class WorkdirError(RuntimeError):
  """The workdir cannot be used or written; shown without a traceback."""


TEMP_PREFIX = ".tmp-"

_REASONS = {
  errno.ENOSPC: "the disk is full; free some space there or choose another --workdir",
  errno.EDQUOT: "the disk quota is used up; free some space there or choose another --workdir",
  errno.EROFS: "the file system is read-only; choose another --workdir",
  errno.EACCES: "permission denied; choose another --workdir or change the folder's permissions",
  errno.EPERM: "permission denied; choose another --workdir or change the folder's permissions",
}


@contextlib.contextmanager
def explained(path: pathlib.Path, doing: str = "write") -> Iterator[None]:
  """Turns an OSError about `path` into a WorkdirError that says what to do."""
  try:
    yield
  except OSError as error:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    raise WorkdirError(
      f"cannot {doing} {path}: {reason}. What was saved before is intact: the same command "
      "resumes from it."
    ) from error


def write_atomic(path: pathlib.Path, data: bytes) -> None:
  """Writes `data` to `path` so that a reader, or a crash, sees the old or the new file only."""
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{TEMP_PREFIX}{os.getpid()}-{path.name}")
    try:
      with temp.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
      os.replace(temp, path)
    except BaseException:
      with contextlib.suppress(OSError):
        temp.unlink()
      raise
