"""Chat templates: a Jinja program from a model file, run as the stranger's code that it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Steps of loops, operators and calls; making a thousand characters or items counts as one more.
_MAX_STEPS = 200_000
_MAX_SIZE = 4_000_000
_MAX_SOURCE = 1_000_000

# Text of any length from a number, which no chat template needs.
_PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map")
_PADDING_FILTERS = ("center", "indent", "format", "wordwrap")


class _Environment(ImmutableSandboxedEnvironment):
  """The sandbox, with a bound on steps and on the size of what is made."""

  intercepted_binops = frozenset(["+", "*", "**", "%"])

  def __init__(self):
    super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    self._steps = 0
    self.filters = {k: v for k, v in self.filters.items() if k not in _PADDING_FILTERS}
    self.filters["tojson"] = lambda value, indent=None: json.dumps(
      value, ensure_ascii=False, indent=None if indent is None else min(int(indent), 8)
    )
    for name in ("join", "replace"):
      self.filters[name] = self._bounded_filter(name)

  def spend(self, size: int = 0) -> None:
    """Counts a step that makes something of a size."""
    if size > _MAX_SIZE:
      raise ValueError(f"{size} characters or items made at once; at most {_MAX_SIZE} are allowed")
    self._steps += 1 + size // 1000
    if self._steps > _MAX_STEPS:
      raise ValueError(f"more than {_MAX_STEPS} steps")

  def counted(self, values: Iterable[Any]) -> list[Any]:
    """The items of a loop."""
    items = []
    for item in values:
      self.spend()
      items.append(item)
    return items

  def concatenated(self, *parts: Any) -> str:
    """The operator `~`."""
    texts = [str(part) for part in parts]
    self.spend(sum(map(len, texts)))
    return "".join(texts)

  def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
    if isinstance(obj, str) and attr in _PADDING:
      return False
    return super().is_safe_attribute(obj, attr, value)

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    if operator == "**":
      raise ValueError("'**' in a template")
    if operator == "%" and isinstance(left, str):
      raise ValueError("string formatting by '%' in a template")
    if operator == "*":
      for value, times in ((left, right), (right, left)):
        if isinstance(value, Sequence) and isinstance(times, int):
          self.spend(len(value) * max(times, 0))
      if isinstance(left, int) and isinstance(right, int):
        self.spend(left.bit_length() + right.bit_length())
    if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
      self.spend(len(left) + len(right))
    return super().call_binop(context, operator, left, right)

  def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
    self.spend()
    if isinstance(owner, str) and name in ("join", "replace") and args:
      self._spend_on(name, owner, *args)
    return super().call(context, obj, *args, **kwargs)

  def _spend_on(self, name: str, text: str, *args: Any) -> None:
    if name == "join" and isinstance(args[0], Sequence):
      self.spend(sum(len(str(x)) + len(text) for x in args[0]))
    if name == "replace" and len(args) > 1:
      # At most as many hits as there are characters, and one more.
      hits = min(text.count(str(args[0])), len(text) + 1)
      self.spend(len(text) + hits * len(str(args[1])))

  def _bounded_filter(self, name: str) -> Callable[..., str]:
    def join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
      items = [x[attribute] if attribute else x for x in values]
      self._spend_on("join", separator, items)
      return separator.join(map(str, items))

    def replace(text: str, old: str, new: str) -> str:
      self._spend_on("replace", text, old, new)
      return text.replace(old, new)

    return {"join": join, "replace": replace}[name]

  def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
    # Jinja bounds range() only, and `~` is no operator that the sandbox sees.
    tree = super()._parse(source, name, filename)
    for loop in list(tree.find_all(nodes.For)):
      loop.iter = self._call("__counted", [loop.iter], loop.lineno)
    return _Concatenations(self).visit(tree)

  def _call(self, function: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    name = nodes.Name(function, "load", lineno=line)
    call = nodes.Call(name, arguments, [], None, None, lineno=line)
    return call.set_environment(self)


class _Concatenations(NodeTransformer):
  """Turns `a ~ b` into a counted call."""

  def __init__(self, environment: _Environment):
    self.environment = environment

  def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
    self.generic_visit(node)
    return self.environment._call("__concatenated", node.nodes, node.lineno)


def render_chat(
  template: str,
  messages: Sequence[Mapping[str, str]],
  *,
  add_generation_prompt: bool = True,
  variables: Mapping[str, Any] | None = None,
) -> str:
  """The text that a model was trained to see for a conversation.

  Args:
    template: Jinja source, from the model's files.
    messages: `{"role": ..., "content": ...}`, in order.
    add_generation_prompt: end with the opening of the assistant's turn.
    variables: more that the template may use: bos_token, eos_token, tools.

  Raises:
    ValueError: the template is not Jinja, refuses the conversation, reaches for what the sandbox
      forbids, or runs beyond its bounds.
  """
  if len(template) > _MAX_SOURCE:
    raise ValueError(f"the chat template has {len(template)} characters; at most {_MAX_SOURCE}")

  def refuse(message: str) -> None:
    raise ValueError(message)

  environment = _Environment()
  try:
    compiled = environment.from_string(template)
    pieces = compiled.generate(
      messages=[dict(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      raise_exception=refuse,
      __counted=environment.counted,
      __concatenated=environment.concatenated,
      **{"bos_token": "", "eos_token": "", "tools": None, **(variables or {})},
    )
    return "".join(_bounded(pieces, environment))
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f"the chat template is not Jinja (line {error.lineno}): {error}") from None
  except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(f"the chat template cannot be used: {error}") from None
  except (RecursionError, MemoryError, OverflowError) as error:
    raise ValueError(f"the chat template ran out of bounds: {type(error).__name__}") from None


def _bounded(pieces: Iterable[str], environment: _Environment) -> Iterator[str]:
  total = 0
  for piece in pieces:
    total += len(piece)
    if total > _MAX_SIZE:
      raise ValueError(f"more than {_MAX_SIZE} characters of output")
    environment.spend(len(piece))
    yield piece
