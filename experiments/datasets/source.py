"""Local files that data sets are made from."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

from launch import artifacts


class DatasetError(ValueError):
  """A data set was asked for wrongly, or its files are missing, damaged or of another layout."""


@dataclasses.dataclass(frozen=True)
class Source:
  """A local file; `sha256` is what it must be, None for a file of the user's own."""

  path: pathlib.Path
  sha256: str | None = None
  remedy: str = ""

  def digest(self) -> str:
    """SHA-256 of the file, checked.

    Raises:
      DatasetError: the file is missing or is not the expected one.
    """
    try:
      found = hashlib.sha256(self.path.read_bytes()).hexdigest()
    except OSError as error:
      raise DatasetError(f"cannot read {self.path}: {error.strerror}. {self.remedy}") from error
    if self.sha256 is not None and found != self.sha256:
      raise DatasetError(
        f"{self.path} is damaged: SHA-256 {found}, expected {self.sha256}. {self.remedy}"
      )
    return found

  @classmethod
  def of_artifact(cls, name: str) -> Source:
    """The file of a named artifact, downloaded on first use."""
    return cls(
      artifacts.artifact(name),
      artifacts.ARTIFACTS[name].sha256,
      f"Delete it and run `python launch.py --fetch={name}`.",
    )

  @classmethod
  def of_user(cls, path: str | pathlib.Path) -> Source:
    """A file that the user names."""
    return cls(pathlib.Path(path).expanduser(), None, "Check the path.")
