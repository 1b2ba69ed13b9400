"""Progress of long work: a bar on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

LINE_EVERY_S = 15.0


def progress(
  iterable: Iterable[T], desc: str, total: int | None = None, stream: TextIO | None = None
) -> Iterator[T]:
  """Yields from `iterable` and shows how far it is and how long it will take."""
  stream = stream or sys.stderr
  if total is None and hasattr(iterable, "__len__"):
    total = len(iterable)
  if stream.isatty():
    from tqdm import tqdm

    yield from tqdm(iterable, desc=desc, total=total, file=stream, dynamic_ncols=True)
    return
  start = last = time.monotonic()
  for done, item in enumerate(iterable, start=1):
    yield item
    now = time.monotonic()
    if now - last >= LINE_EVERY_S or done == total:
      elapsed, of = now - start, f"/{total}" if total else ""
      left = f", {elapsed / done * (total - done):.0f} s left" if total and done < total else ""
      print(f"{desc}: {done}{of} in {elapsed:.0f} s{left}", file=stream, flush=True)
      last = now
