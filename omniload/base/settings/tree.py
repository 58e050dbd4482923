"""YAML as a tree of values that know their lines, with limits that are checked before memory is used.

A file is parsed once, event by event. Nesting, aliases, tags and numbers are checked as they come, so a hostile file
costs no more than its part within the limits. Plain words mean what YAML 1.2 says: ``yes`` and ``1:30`` are texts, not
a boolean and a number of seconds.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes

__all__ = ["LARGEST_TEXT_BYTES", "Node", "Value", "compose"]

LARGEST_TEXT_BYTES = 1 << 20
"""Largest size of a file of settings: people write them, and a mix of 5,000 sources is half as large."""
_DEEPEST = 32
"""Deepest nesting; none of our models has a tenth of it below its root."""
_MOST_VALUES = 100_000
"""Largest number of values with aliases expanded; as many as fit into the largest file without aliases."""
# More than any setting needs, but few, because the time of ``int`` for a text grows with the square of its digits.
_MOST_DIGITS = 40
_MERGE = "<<"

# The parser of libyaml, if PyYAML was built with it: several times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNQUOTED = re.compile(r"""(?:^|[:,{\[-])\s*(?:[*@%`]|[^\s'"#,{\[]+[{\[])""")
"""A value that people write as a text, such as a glob, but that YAML reads as something else."""
_IN_QUOTES = (
    'a text that begins with *, @ or %, or has { or [ in it, stands in quotes, as in "*.jsonl"'
)
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

Expand: TypeAlias = Callable[[str, str], str]
Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"


@dataclass(slots=True, kw_only=True)
class Node:
    """A value in the file."""

    line: int
    """Line on which it starts, from 1."""
    content: "Scalar | list[Node] | dict[str, tuple[int, Node]]"
    """A scalar, a list, or a mapping of keys to their lines and values."""
    file: str = ""
    """Name of its file in messages."""
    size: int = 1
    """Number of values in it, including itself, with aliases expanded."""

    @property
    def value(self) -> Value:
        """The plain value."""
        match self.content:
            case dict():
                return {key: node.value for key, (_, node) in self.content.items()}
            case list():
                return [node.value for node in self.content]
            case scalar:
                return scalar

    def child(self, part: str | int) -> "tuple[int, Node] | None":
        """Return the line and the value under a key or an index, if there is one."""
        match self.content:
            case dict():
                return self.content.get(str(part))
            case list() if isinstance(part, int) and 0 <= part < len(self.content):
                node = self.content[part]
                return node.line, node
            case _:
                return None


def compose(text: str, *, name: str, expand: Expand | None = None) -> Node | None:
    """Read one YAML document.

    Args:
        text: The document.
        name: Name of its file in messages.
        expand: Receives each scalar and its place, and returns the text to use instead.

    Returns:
        Its root; ``None`` if it is empty.

    Raises:
        ConfigError: The document is not YAML, exceeds a limit, has tags, or gives a key twice.
    """
    if (size := len(text.encode(errors="surrogatepass"))) > LARGEST_TEXT_BYTES:
        raise ConfigError(
            f"{name}: holds {format_bytes(size)}, more than the {format_bytes(LARGEST_TEXT_BYTES)} of a file of "
            "settings; is it the file that was meant?"
        )
    composer = _Composer(name, expand)
    try:
        root = composer.document(yaml.parse(text, Loader=_LOADER))
    except (yaml.YAMLError, UnicodeError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        line = 1 if mark is None else mark.line + 1
        # For a tab, libyaml says only that it cannot start a token, so the line is examined for the cause.
        said = "".join(text.splitlines()[line - 1 : line])
        if "\t" in said.removesuffix(said.lstrip()):
            problem += "; the line has a tab, which YAML takes no indentation of: use blanks"
        elif _UNQUOTED.search(said):
            problem += f"; {_IN_QUOTES}"
        raise composer.fault(line, problem) from error
    if composer.repeated:
        raise ConfigError("\n".join(composer.repeated))
    return root


class _Composer:
    """Builds the tree of one document."""

    def __init__(self, name: str, expand: Expand | None = None) -> None:
        self.repeated: list[str] = []
        self._name, self._expand = name, expand
        self._anchors: dict[str, Node | None] = {}
        self._path: list[str | int] = []

    def fault(self, line: int, problem: str) -> ConfigError:
        return ConfigError(f"{self._name}:{line}: not valid YAML: {problem}")

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self.fault(
                        _line_of(event), "a second document begins; keep one in a file"
                    )
                root = self._node(next(events), events)
        return root

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event]) -> Node:
        """Compose the value that begins with ``event``."""
        line = _line_of(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), line)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent), repr(event)
        if event.tag not in {None, "!"}:
            raise self.fault(
                line, f"{self._here} has the tag {event.tag}; tags are not read, leave it out"
            )
        # The depth is limited because this is recursive, and Python gives up at a thousand levels.
        if len(self._path) > _DEEPEST:
            raise self.fault(line, f"nests deeper than {_DEEPEST} levels; no setting lies there")
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # not complete yet
        node = Node(line=line, content=None, file=self._name)
        match event:
            case yaml.ScalarEvent():
                word = self._expanded(event.value, line)
                node.content = self._plain(word, line) if event.implicit[0] else word
            case yaml.SequenceStartEvent():
                node.content = self._items(node, events)
            case _:
                node.content = self._entries(node, events)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, anchor: str, line: int) -> Node:
        if anchor not in self._anchors:
            raise self.fault(
                line, f"{self._here} refers to *{anchor}, which no value is named; {_IN_QUOTES}"
            )
        node = self._anchors[anchor]
        if node is None:
            raise self.fault(line, f"{self._here} refers to what holds it")
        return node

    def _items(self, node: Node, events: Iterator[yaml.Event]) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            self._path.append(len(items))
            items.append(self._counted(node, self._node(event, events)))
            self._path.pop()
        return items

    def _entries(self, node: Node, events: Iterator[yaml.Event]) -> dict[str, tuple[int, Node]]:
        entries: dict[str, tuple[int, Node]] = {}
        merged: dict[str, tuple[int, Node]] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            line = _line_of(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise self.fault(line, "a key is a list or a mapping; write a word")
            self._path.append(event.value)
            value = self._counted(node, self._node(next(events), events))
            if event.value == _MERGE and event.implicit[0]:
                for key, entry in self._merged(value, line).items():
                    merged.setdefault(key, entry)
            elif event.value in entries:
                first, _ = entries[event.value]
                self.repeated.append(
                    f"{self._name}:{line}: {self._here}: key given twice, first in line {first}; keep one of them"
                )
            else:
                entries[event.value] = line, value
            self._path.pop()
        # A mapping's own keys take precedence, even if they stand before the merged mapping.
        return merged | entries

    def _merged(self, value: Node, line: int) -> dict[str, tuple[int, Node]]:
        found: dict[str, tuple[int, Node]] = {}
        for node in value.content if isinstance(value.content, list) else [value]:
            if not isinstance(node.content, dict):
                raise self.fault(line, f"{self._here} merges what is no mapping; give *NAME of one")
            # Of several merged mappings, the earlier one takes precedence, as in YAML 1.1.
            found = node.content | found
        return found

    def _counted(self, node: Node, inner: Node) -> Node:
        node.size += inner.size
        if node.size > _MOST_VALUES:
            raise self.fault(
                inner.line,
                f"{self._here} makes it {node.size:,} values with its aliases written out, more than "
                f"{_MOST_VALUES:,}; remove aliases of aliases",
            )
        return inner

    def _expanded(self, word: str, line: int) -> str:
        if self._expand is None or "${" not in word:
            return word
        return self._expand(word, f"{self._name}:{line}: {self._here}")

    def _plain(self, word: str, line: int) -> Scalar:
        """Return the meaning of a word without quotes in YAML 1.2."""
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        # Refused, because two readers of YAML could read two different numbers.
        if _LEADING_ZERO.fullmatch(word):
            raise self.fault(
                line,
                f"{self._here} is {word:.40}, octal in YAML 1.1 and decimal in YAML 1.2; "
                "write a number without the zero, a text in quotes",
            )
        if _INTEGER.fullmatch(word) or _BASED.fullmatch(word):
            if len(word) > _MOST_DIGITS:
                raise self.fault(
                    line,
                    f"{self._here} is a number of {len(word):,} digits, more than {_MOST_DIGITS}",
                )
            return int(word, 0)
        return float(word) if _FLOAT.fullmatch(word) else word

    @property
    def _here(self) -> str:
        return ".".join(map(str, self._path)) or "the file"


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1
