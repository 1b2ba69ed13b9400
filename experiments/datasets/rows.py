"""Rows of text files that users give, with errors that name the line."""

from __future__ import annotations

import csv
import gzip
import math
import pathlib
import zlib
from collections.abc import Iterator

_MAX_LINE_BYTES = 1 << 20


def text_lines(path: pathlib.Path) -> Iterator[str]:
  """Lines of a UTF-8 file, plain or `.gz`; one at a time, so that memory stays bounded.

  Raises:
    ValueError: no such file, not text, or damaged.
  """
  line = 0
  opener = gzip.open if path.suffix.lower() == ".gz" else open
  try:
    with opener(path, "rb") as file:
      while raw := file.readline(_MAX_LINE_BYTES):
        line += 1
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        if "\0" in text or (len(raw) == _MAX_LINE_BYTES and not text.endswith("\n")):
          raise ValueError(
            f"{path}, line {line}: holds a zero byte or more than {_MAX_LINE_BYTES} bytes; "
            "expected lines of text in UTF-8"
          )
        yield text
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path}, line {line}: {error.reason} at byte {error.start} of the line; expected "
      "UTF-8. Save the file in that encoding"
    ) from None
  except (EOFError, zlib.error, OSError) as error:
    raise ValueError(f"{path}: cannot be read after line {line} ({error})") from error


def csv_rows(path: pathlib.Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
  """Line number, from 1, and fields without surrounding spaces of each row that is not empty.

  Raises:
    ValueError: see `text_lines`; or quotes that do not match.
  """
  reader = csv.reader(text_lines(path), delimiter=delimiter, skipinitialspace=True, strict=True)
  try:
    for fields in reader:
      fields = [field.strip() for field in fields]
      if any(fields):
        yield reader.line_num, fields
  except csv.Error as error:
    raise ValueError(
      f"{path}, line {reader.line_num}: {error}; expected fields separated by {delimiter!r}, in "
      "double quotes where they hold one"
    ) from None


def to_number(field: str) -> float:
  """The number that `field` spells, or NaN."""
  try:
    return float(field)
  except ValueError:
    return math.nan
