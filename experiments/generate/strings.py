"""A thousand strings of many scripts for tokenizers to agree on; standard library only."""

from __future__ import annotations

import random

# First and last code points of scripts, signs, emoji and control characters.
_RANGES = (
  *((0x20, 0x7E), (0x00, 0x1F), (0x80, 0x9F), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF)),
  *((0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)),
  *((0x1100, 0x11FF), (0x2000, 0x206F), (0x2190, 0x22FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF)),
  *((0xAC00, 0xD7A3), (0xFB00, 0xFB06), (0xFE00, 0xFE0F), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)),
)
_PIECES = (
  *("the ", "Hello, world!", "'s 're 'LL ", "  ", "\n\n", "\t", "12345"),
  *("3.14", "snake_case_name"),
  *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "https://example.org/a?b=c&d=%20"),
  *("def f(x):\n    return x", "naïve café", "👩‍👩‍👧‍👦", "🇫🇷"),
  *("e\u0301", "\u200b", "\ufeff", "\r\n", "ﬁ"),
)


def strings(count: int = 1000, seed: int = 0) -> list[str]:
  """Pieces of text, runs of characters of one script, and bytes that are broken UTF-8."""
  rng = random.Random(seed)
  made = []
  for _ in range(count):
    text = ""
    for _ in range(rng.randint(1, 6)):
      kind = rng.randrange(3)
      if kind == 0:
        text += rng.choice(_PIECES)
      elif kind == 1:
        low, high = rng.choice(_RANGES)
        text += "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))
      else:
        # What a decoder makes of bytes that end in the middle of a character.
        whole = "".join(chr(rng.randint(0x80, 0xFFF)) for _ in range(4)).encode()
        text += whole[rng.randrange(3) : -1].decode(errors="replace")
    made.append(text)
  return made
