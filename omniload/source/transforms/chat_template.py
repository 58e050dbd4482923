"""Chat templates: a conversation to text, and where in it the assistant speaks.

Templates are programs of strangers: Jinja's immutable sandbox runs them, with the names that
``transformers`` defines for them and no others.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.extras import missing_extra
from omniload.base.reading import read_small_file
from omniload.mix.schema.transforms import MessageNames

__all__ = [
    "BadConversationError",
    "ChatTemplate",
    "Rendered",
    "TemplateFiles",
    "named",
    "read_template",
    "require_no_marks",
    "shown",
    "texts_in",
    "with_tools",
]

_LARGEST_BYTES = 16 << 20
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Mark a generation block while a template runs: noncharacters, which no text may hold."""
_ESCAPED = re.compile(r"\\u[fF][dD]{2}[01]")
"""A mark as JSON of somebody's may write it; behind another backslash it is none."""
_ASSISTANT = "assistant"
_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")
_FAULTS = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What a template comes to that does with a conversation what cannot be done, or that calls itself without an end."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of what was thought before an answer: the first that a message has is given to templates by both names that they
read, as transformers gives it."""
_SHOWN = 160
_AS_TEMPLATES_SAY = MessageNames()


class BadConversationError(IntegrityError):
    """A record that is no conversation, or one that the template refuses; the message is a predicate of the record."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation."""

    text: str
    spans: Sequence[tuple[int, int]]
    """First character of what the assistant says, and first behind it, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFiles:
    """A template as it was found."""

    path: Path
    source: str
    tokens: Mapping[str, str]
    """Special tokens by the names that templates know them by, such as ``eos_token``."""


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, files: TemplateFiles, *, date: str | None = None) -> None:
        """Compile.

        Raises:
            ConfigError: It is no template, or Jinja is not installed.
        """
        try:
            jinja = import_module("omniload.source.transforms.chat_sandbox")
        except ModuleNotFoundError as error:
            raise missing_extra("a chat template", error, extra="chat") from None
        self._errors: type[Exception] = jinja.TemplateError
        self._files = files
        env = jinja.environment(_BEGIN, _END)
        if date is not None:
            day = datetime.fromisoformat(date)
            # Without a date there is no such function: a template that asks for the day would give other tokens
            # tomorrow.
            env.globals["strftime_now"] = day.strftime
        try:
            self._template = env.from_string(files.source)
        except self._errors as error:
            raise ConfigError(
                f"{files.path}: is no chat template: {error}; name another under transforms.template"
            ) from error
        # Asked of the source: a conversation in which nobody answers renders no mark, and is marked all the same.
        self._marks = bool(_BLOCK.search(files.source))

    @property
    def path(self) -> Path:
        """Where the template was found."""
        return self._files.path

    def text_of(self, messages: list[Any]) -> str:
        """Return the text of messages alone; raises as ``render``."""
        text = self._rendered({"tools": None, "documents": None}, messages)
        return text.replace(_BEGIN, "").replace(_END, "")

    def render(
        self,
        record: str,
        *,
        wants_spans: bool,
        names: MessageNames = _AS_TEMPLATES_SAY,
        placed: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> Rendered:
        """Return the text of a conversation.

        Args:
            record: JSON: a list of messages, or an object that holds one.
            wants_spans: Whether to find what the assistant says; it costs a rendering a turn where the
                template has no generation blocks.
            names: What its messages call their keys and roles.
            placed: Makes of what the template would be given what it is given, where there are images among it.

        Raises:
            BadConversationError: It is no conversation, or the template refuses it.
        """
        variables = _variables(record, names)
        # Before it is rendered: a mark in a text would be taken for that of a block.
        require_no_marks(record, variables)
        if placed is not None:
            variables = placed(variables)
        marked = self._rendered(variables, variables["messages"])
        if _BEGIN in marked:
            return _unmarked(marked)
        spans = self._spans(variables, marked) if wants_spans and not self._marks else []
        return Rendered(marked, spans)

    def render_answer(self, prompt: list[Any], answer: list[Any]) -> Rendered:
        """Return the text of a prompt and an answer to it, and where the answer stands in it.

        Args:
            prompt: Messages that are read.
            answer: Messages that are trained on.

        Raises:
            BadConversationError: The template refuses them, or what it makes of the prompt depends on the answer.
        """
        nothing: dict[str, Any] = {"tools": None, "documents": None}
        asked = self._rendered(nothing, prompt, prompts=True)
        whole = self._rendered(nothing, [*prompt, *answer])
        # Of a pair the answer is trained on, whatever blocks the template marks.
        whole = whole.replace(_BEGIN, "").replace(_END, "")
        asked = asked.replace(_BEGIN, "").replace(_END, "")
        if not whole.startswith(asked):
            raise BadConversationError(
                f"its prompt cannot be told from its answer: what {self._files.path.name} makes of the prompt depends "
                "on later messages; use a template of the model for training"
            )
        return Rendered(whole, ((len(asked), len(whole)),))

    def _spans(self, variables: dict[str, Any], text: str) -> list[tuple[int, int]]:
        """Return what each turn of the assistant adds behind the prompt for it."""
        messages, spans = variables["messages"], []
        for i, message in enumerate(messages):
            if message.get("role") != _ASSISTANT:
                continue
            prompt = self._rendered(variables, messages[:i], prompts=True)
            is_last = i == len(messages) - 1
            # The text ends with the last turn: it is not rendered a second time.
            through = text if is_last else self._rendered(variables, messages[: i + 1])
            # Some templates leave out what was thought in earlier turns, or add a system text by what comes later.
            if not (through.startswith(prompt) and text.startswith(through)):
                raise BadConversationError(
                    f"message {i}: what the assistant says cannot be told from what the template adds: its text "
                    f"depends on later messages; put {{% generation %}} blocks into {self._files.path.name}, or "
                    "set loss: all"
                )
            spans.append((len(prompt), len(through)))
        return spans

    def _rendered(
        self, variables: dict[str, Any], messages: list[Any], *, prompts: bool = False
    ) -> str:
        # ``variables`` holds the whole conversation; where turns are told apart, a part of it is rendered.
        context = {**self._files.tokens, **variables, "messages": messages}
        try:
            return str(self._template.render(context, add_generation_prompt=prompts))
        except (*_FAULTS, self._errors) as error:
            raise BadConversationError(
                f"the template {self._files.path.name} refuses it: {type(error).__name__}: {error!s:.{_SHOWN}}"
            ) from error


def _variables(record: str, names: MessageNames) -> dict[str, Any]:
    """Return what a template is given of a record.

    Raises:
        BadConversationError: It is no list of messages of those names.
    """
    wanted = f"{names.role} and {names.content}"
    try:
        value = orjson.loads(record)
    except orjson.JSONDecodeError as error:
        raise BadConversationError(
            f"holds the text {record!r:.{_SHOWN}}, not a list of messages with {wanted}, nor JSON of one"
        ) from error
    given = value if isinstance(value, dict) else {"messages": value}
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadConversationError(f"holds {shown(value)}, not a list of messages with {wanted}")
    return {
        "messages": [named(i, message, names) for i, message in enumerate(messages)],
        "tools": given.get("tools"),
        "documents": given.get("documents"),
    }


def require_no_marks(record: str, value: object) -> None:
    """Refuse a record, JSON of ``value``, in which a text holds what marks generation blocks."""
    # Nearly every record holds neither, and is looked at no further.
    if (
        _BEGIN in record
        or _END in record
        or (
            _ESCAPED.search(record)
            and any(_BEGIN in text or _END in text for text in texts_in(value))
        )
    ):
        raise BadConversationError("holds a noncharacter (U+FDD0 or U+FDD1); take it out")


def texts_in(value: object) -> Iterator[str]:
    """Give every text in a value of JSON, keys of objects too."""
    # No recursion: a value of somebody's may nest as deep as JSON may, deeper than Python's calls.
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += (*each.keys(), *each.values())
        elif isinstance(each, list):
            left += each


def with_tools(record: str, messages_key: str, tools_key: str) -> str:
    """Return a conversation and the tools beside it as the object that ``ChatTemplate.render`` takes.

    Args:
        record: JSON of an object with both, as it was read; either may be a text that is JSON itself.
        messages_key: What the record calls its messages.
        tools_key: What it calls the tools; a null is none.

    Raises:
        BadConversationError: Its tools are no list, nor JSON of one.
    """
    found = orjson.loads(record)
    messages, tools = found[messages_key], found[tools_key]
    try:
        tools = orjson.loads(tools) if isinstance(tools, str) and tools else tools or None
    except orjson.JSONDecodeError as error:
        raise BadConversationError(
            f"{tools_key} is the text {tools!r:.{_SHOWN}}, not a list of tools, nor JSON of one"
        ) from error
    if tools is not None and not isinstance(tools, list):
        raise BadConversationError(f"{tools_key} is {shown(tools)}, not a list of tools")
    if isinstance(messages, str):
        try:
            messages = orjson.loads(messages)
        except orjson.JSONDecodeError:
            return str(messages)  # of which is told what any other text is told
    given = messages if isinstance(messages, dict) else {"messages": messages}
    try:
        return orjson.dumps(given if tools is None else given | {"tools": tools}).decode()
    except TypeError as error:  # it writes what nests 254 deep, and reads four times that
        raise BadConversationError(f"cannot be written as JSON: {error}") from error


def named(number: int, message: object, names: MessageNames) -> dict[str, Any]:
    """Return a message by the names that templates know.

    Raises:
        BadConversationError: It lacks a key that is named, or its role is none of those that are.
    """
    if (
        not isinstance(message, dict)
        or not isinstance(message.get(names.role), str)
        # By its own name it may be missing: of a message that calls a tool there may be none.
        or (names.content != "content" and names.content not in message)
    ):
        raise BadConversationError(
            f"message {number} is {shown(message)}, not an object with a {names.role} and "
            f"{names.content}; messages of the transform says what its keys are called"
        )
    given: dict[str, Any] = message
    role = given[names.role]
    if names.roles is not None and role not in names.roles:
        raise BadConversationError(
            f"message {number}: {names.role} is {role!r:.{_SHOWN}}, and roles of the transform names "
            f"{', '.join(names.roles):.{_SHOWN}}; say there what the template calls it"
        )
    keys = {names.role: "role", names.content: "content"}
    # Of two keys that would have one name, that counts which the mix names. A null is no key, as to transformers: where
    # one message of a table has a key, it is a null of all others.
    named = {
        keys.get(key, key): value
        for key, value in given.items()
        if value is not None and (key in keys or key not in ("role", "content"))
    }
    thought = next((named[key] for key in _THOUGHTS if key in named), None)
    if thought is not None:
        named = {"thinking": thought, **named, "reasoning_content": thought}
    return named if names.roles is None else named | {"role": names.roles[role]}


def _unmarked(marked: str) -> Rendered:
    """Take the marks out, and say where they stood; a block within another counts as a part of it."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    at = depth = begin = 0
    for piece in marked.split(_BEGIN):
        for i, text in enumerate(piece.split(_END)):
            if i:
                depth -= 1
                if depth == 0 and at > begin:
                    spans.append((begin, at))
            parts.append(text)
            at += len(text)
        if depth == 0:
            begin = at
        depth += 1
    return Rendered("".join(parts), spans)


def shown(value: object) -> str:
    """Return the beginning of a value as JSON, for a message."""
    try:
        return json.dumps(value)[:_SHOWN]
    except RecursionError:  # JSON of somebody's may be read to a depth at which Python writes none
        return "what nests too deep to be shown"


def read_template(template: Path | None, beside: Path) -> TemplateFiles:
    """Find a template and the special tokens it uses.

    Args:
        template: The file that the mix names; ``None`` looks for one in ``beside``.
        beside: Folder of the tokenizer.

    Raises:
        ConfigError: There is none, or a file is damaged.
    """
    config = _settings(beside / "tokenizer_config.json")
    # What ``tokenizer_config.json`` says counts where both say it.
    said = {
        key: value.get("content") if isinstance(value, dict) else value
        for found in (_settings(beside / "special_tokens_map.json"), config)
        for key, value in found.items()
        if key.endswith("_token")
    }
    tokens = {key: token for key, token in said.items() if isinstance(token, str)}
    jinja = beside / "chat_template.jinja"
    path = template or (jinja if jinja.exists() else None)
    if path is not None:
        held = read_small_file(path, most_bytes=_LARGEST_BYTES, what="a chat template")
        try:
            return TemplateFiles(path=path, source=held.decode(), tokens=tokens)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not UTF-8: {error}") from error
    named = config.get("chat_template")
    if isinstance(named, list):
        templates = [each for each in named if isinstance(each, dict)]
        named = next((e.get("template") for e in templates if e.get("name") == "default"), None)
    if not isinstance(named, str):
        raise ConfigError(
            f"{beside}: has no chat_template.jinja, and no chat_template in tokenizer_config.json; name a file under "
            "template of the transform"
        )
    return TemplateFiles(path=beside / "tokenizer_config.json", source=named, tokens=tokens)


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    held = read_small_file(path, most_bytes=_LARGEST_BYTES, what="the settings of a tokenizer")
    try:
        value = orjson.loads(held)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, not an object")
    return value
