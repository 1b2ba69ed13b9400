"""Writes a data set once as TFDS records in the user's cache, and reads it from there.

A builder reads local files only, writes `array_record` files and needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds

from experiments.datasets.source import DatasetError, Source
from launch import artifacts

_PREPARING_PREFIX = ".preparing-"
_ABANDONED_AFTER_S = 3600


class LocalBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A builder of local files.

  A subclass says where they are, `find_sources`, and how to read them, `_generate_examples`.

  Args:
    sources: the files to read; by default what `find_sources(None)` gives.
    file_format: of the records.
    **kwargs: of the TFDS builder, such as `data_dir`.
  """

  def __init__(
    self,
    *,
    sources: Sequence[Source] | None = None,
    file_format: str = "array_record",
    **kwargs: Any,
  ):
    self._sources = sources
    super().__init__(file_format=file_format, **kwargs)

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    """The files to read: the user's `path`, or the data set's own files."""
    raise NotImplementedError

  def sources(self) -> Sequence[Source]:
    return self._sources if self._sources is not None else self.find_sources(None)

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
    del dl_manager  # it would fetch files; ours are local
    return {"train": self._generate_examples(self.sources())}


def read(
  builder_class: type[LocalBuilder],
  name: str,
  sources: Sequence[Source],
  data_dir: str | pathlib.Path | None,
) -> list[dict[str, Any]]:
  """The records of all splits in order, written first where that is needed.

  Args:
    builder_class: of the data set.
    name: what messages call it.
    sources: files to read.
    data_dir: folder for the records of all data sets; by default `tfds` in the project's cache.

  Raises:
    DatasetError: a file is missing or damaged, or the folder cannot be written.
  """
  root = pathlib.Path(data_dir) if data_dir is not None else artifacts.cache_dir() / "tfds"
  # The folder is named after the content of the files, so another file is never mistaken for it.
  digests = "".join(source.digest() for source in sources)
  key = hashlib.sha256(digests.encode()).hexdigest()[:12]
  folder = root / f"{builder_class.name}-{builder_class.VERSION}-{key}"
  try:
    if not folder.exists():
      _prepare(builder_class, name, sources, folder)
    try:
      return _read(builder_class, folder)
    except Exception as error:  # array_record, protobuf and TFDS each have their own
      print(
        f"{name}: the records in {folder} are damaged ({error}); writing them again",
        file=sys.stderr,
      )
      shutil.rmtree(folder, ignore_errors=True)
      _prepare(builder_class, name, sources, folder)
      return _read(builder_class, folder)
  except OSError as error:
    raise DatasetError(
      f"{name}: cannot keep its records in {root}: {error}. Free some space, or "
      "choose another folder by data_dir= or the variable REPRISE_CACHE."
    ) from error


def _prepare(
  builder_class: type[LocalBuilder], name: str, sources: Sequence[Source], folder: pathlib.Path
) -> None:
  """Writes the records beside `folder` and moves them there when they are complete."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  for left in folder.parent.glob(f"{_PREPARING_PREFIX}*"):
    if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
      shutil.rmtree(left, ignore_errors=True)
  started = time.monotonic()
  with tempfile.TemporaryDirectory(prefix=_PREPARING_PREFIX, dir=folder.parent) as temporary:
    complete = pathlib.Path(temporary) / "complete"
    builder = builder_class(data_dir=complete, sources=sources)
    # TFDS announces a download and draws three bars for what takes seconds.
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
    rows = sum(split.num_examples for split in builder.info.splits.values())
    try:
      os.rename(complete, folder)
    except OSError:
      # Another process was first: its records have the same content.
      if not folder.exists():
        raise
  print(
    f"{name}: {rows:,} rows written to {folder} in {time.monotonic() - started:.0f} s (once)",
    file=sys.stderr,
  )


def _read(builder_class: type[LocalBuilder], folder: pathlib.Path) -> list[dict[str, Any]]:
  builder = builder_class(data_dir=folder)
  rows = []
  for split in builder.info.splits:
    source = builder.as_data_source(split)
    rows.extend(source.__getitems__(range(len(source))))
  if not rows:
    raise OSError("no record")
  # What array_record cannot read of a cut file comes back as nothing.
  if any(value is None for row in rows for value in row.values()):
    raise OSError("records without content")
  return rows
