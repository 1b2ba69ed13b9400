"""Which of 10,033 Wikipedia articles mention which, fetched on first use."""

from experiments.datasets.wiki_mentions.builder import (
  Articles,
  WikiMentions,
  find_mentions,
  load,
  read,
)

__all__ = ["Articles", "WikiMentions", "find_mentions", "load", "read"]
