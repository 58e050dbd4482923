"""Chat templates: make text of a conversation, and find the words of the assistant in it.

Templates are programs of unknown authors. They run in Jinja's immutable sandbox, with only the names that
``transformers`` defines for them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import orjson

from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.base.reading import read_small_file
from omniload.mix.schema.messages import MessageNames
from omniload.source.transforms.conversations import (
    AS_TEMPLATES_SAY,
    BadConversationError,
    begun_by,
    texts_in,
    variables_of,
    with_mark,
)

__all__ = [
    "ChatTemplate",
    "Rendered",
    "TemplateFiles",
    "read_template",
    "require_no_marks",
]

_LARGEST_BYTES = 16 << 20
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Marks around a generation block while a template runs: noncharacters, which no text may contain."""
_AT_WORDS = "\ufdd2"
"""Mark at the words of a message, which is put in to find them, and is not in the text."""
_ESCAPED = re.compile(r"\\u[fF][dD]{2}[01]")
"""A mark as JSON may escape it; after another backslash, these letters are ordinary text."""
_ASSISTANT, _USER = "assistant", "user"
_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")
_TAG_BEGUN = re.compile(r"[<\[][^<>\[\]]*\Z")
"""A tag that is not closed yet, at the end of a text."""
_FAULTS = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a running template: an operation that the values do not allow, or endless recursion."""
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, with the parts that are trained on."""

    text: str
    spans: Sequence[tuple[int, int]]
    """Parts that the assistant says, in order: first character of each part, and the first character after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFiles:
    """A template and its special tokens as they were found."""

    path: Path
    source: str
    tokens: Mapping[str, str]
    """Special tokens under the names that templates use, such as ``eos_token``."""


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, files: TemplateFiles, *, date: str | None = None) -> None:
        """Compile the template.

        Raises:
            ConfigError: The template is invalid, or Jinja is not installed.
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
            # Without a date the function is missing, because a template that uses the current day gives other tokens
            # tomorrow.
            env.globals["strftime_now"] = day.strftime
        try:
            self._template = env.from_string(files.source)
        except self._errors as error:
            raise ConfigError(
                f"{files.path}: is no chat template: {error}; name another under transforms.template"
            ) from error
        # Found in the source, because a conversation without an answer renders no mark, although its template has
        # marks.
        self._marks = bool(_BLOCK.search(files.source))

    @property
    def path(self) -> Path:
        """Path of the file in which the template was found."""
        return self._files.path

    def text_of(self, messages: list[Any]) -> str:
        """Return the text of messages alone. Raises like ``render``."""
        return self._plain({"tools": None, "documents": None}, messages)

    def render(
        self,
        record: str,
        *,
        loss: Literal["assistant", "last", "all"],
        names: MessageNames = AS_TEMPLATES_SAY,
        placed: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
        system: str = "",
    ) -> Rendered:
        """Return the text of a conversation.

        Args:
            record: JSON of a list of messages, or of an object that has one.
            loss: Words to find: those of all turns of the assistant, those behind the last message of a user, or none,
                because all are trained on. Without generation blocks in the template, this costs one rendering per
                turn.
            names: Names of keys and roles in the messages.
            placed: Replaces the variables of the template for a conversation with images.
            system: System text before the messages, unless they begin with their own; empty for none.

        Raises:
            BadConversationError: The record is no conversation, or the template refuses it.
        """
        variables = variables_of(record, names)
        variables["messages"] = begun_by(system, variables["messages"])
        # Checked before rendering, because a mark in a text would be taken for the mark of a block.
        require_no_marks(record, variables)
        if placed is not None:
            variables = placed(variables)
        marked = self._rendered(variables, variables["messages"])
        first = _behind_last_user(variables["messages"]) if loss == "last" else 0
        if _BEGIN in marked:
            rendered = _unmarked(marked)
            return self._spans_from(first, variables, rendered) if first else rendered
        spans = [] if loss == "all" or self._marks else self._spans(variables, marked, first)
        return Rendered(marked, spans)

    def render_answer(self, prompt: list[Any], answer: list[Any]) -> Rendered:
        """Return the text of a prompt with an answer, and the place of the answer in it.

        Args:
            prompt: Messages that are not trained on.
            answer: Messages that are trained on.

        Raises:
            BadConversationError: The template refuses the messages, or the text of the prompt depends on the answer.
        """
        nothing: dict[str, Any] = {"tools": None, "documents": None}
        # The answer is trained on, whatever blocks the template marks.
        messages = [*prompt, *answer]
        whole = self._plain(nothing, messages)
        begin = self._begin_of(nothing, messages, len(prompt), whole)
        if begin is None:
            raise BadConversationError(
                f"its prompt cannot be separated from its answer: the prompt that {self._files.path.name} writes "
                "depends on later messages; use a template of the model for training"
            )
        return Rendered(whole, ((begin, len(whole)),))

    def _spans_from(self, first: int, variables: dict[str, Any], rendered: Rendered) -> Rendered:
        """Return a text with only those of its generation blocks that the messages from ``first`` on wrote."""
        # Some templates end a text that no prompt for an answer follows with a token of their own.
        for prompts in (False, True):
            marked = self._rendered(variables, variables["messages"][:first], prompts=prompts)
            asked = _unmarked(marked).text
            if rendered.text.startswith(asked):
                return replace(rendered, spans=[s for s in rendered.spans if s[1] > len(asked)])
        raise BadConversationError(
            f"its last turn cannot be separated from the turns before it, because what {self._files.path.name} writes "
            "for those depends on later messages; set loss: assistant"
        )

    def _spans(self, variables: dict[str, Any], text: str, first: int = 0) -> list[tuple[int, int]]:
        """Return the span that each turn of the assistant from message ``first`` on adds after its prompt."""
        messages, spans = variables["messages"], []
        for i, message in enumerate(messages):
            if i < first or message.get("role") != _ASSISTANT:
                continue
            begin = self._begin_of(variables, messages, i, text)
            # The text ends with the last turn, so that turn is not rendered a second time.
            is_last = i == len(messages) - 1
            end = len(text) if is_last else self._end_of(variables, messages, i, text)
            if begin is None or end is None or begin > end:
                raise BadConversationError(
                    f"message {i}: the assistant's words cannot be separated from the text that the template adds, "
                    f"because that text depends on later messages; put {{% generation %}} blocks into "
                    f"{self._files.path.name}, or set loss: last or loss: all"
                )
            spans.append((begin, end))
        return spans

    def _begin_of(
        self, variables: dict[str, Any], messages: list[Any], turn: int, text: str
    ) -> int | None:
        """Return where an answer begins in ``text``; ``None`` if that is not clear."""
        before = messages[:turn]
        prompt = self._plain(variables, before, prompts=True)
        if text.startswith(prompt):
            return len(prompt)
        # Some prompts begin a thought that an answer without one does not have, such as those of DeepSeek. What the
        # prompt and the answer share is the beginning of a turn.
        earlier = self._plain(variables, before)
        shared = len(_TAG_BEGUN.sub("", text[: _shared(prompt, text)]))
        if not (text.startswith(earlier) and prompt.startswith(earlier) and shared > len(earlier)):
            return None
        words = self._place_of_words(variables, messages, turn, text, behind=False)
        return shared if words is None else min(shared, words)

    def _end_of(
        self, variables: dict[str, Any], messages: list[Any], turn: int, text: str
    ) -> int | None:
        """Return where an answer that is not the last message ends in ``text``; ``None`` if that is not clear."""
        until = messages[: turn + 1]
        through = self._plain(variables, until)
        if text.startswith(through):
            return len(through)
        # Some templates leave out the thoughts of earlier turns, so ``through`` is not the beginning of the text. What
        # follows the words of the turn is the same in both.
        words = self._place_of_words(variables, messages, turn, text, behind=True)
        there = self._place_of_words(variables, until, turn, through, behind=True)
        if words is None or there is None:
            return None
        # Behind the last message, some templates write a token that ends the text.
        for closing in ("", *self._files.tokens.values()):
            rest = through[there:].removesuffix(closing)
            if text.startswith(rest, words):
                return words + len(rest)
        return None

    def _place_of_words(
        self,
        variables: dict[str, Any],
        messages: list[Any],
        turn: int,
        text: str,
        *,
        behind: bool,
    ) -> int | None:
        """Return where the words of a message begin in the text of ``messages``, or the place behind them.

        Found by a mark, without which the template must write the same text; ``None`` if it does not.
        """
        marked = with_mark(messages[turn], _AT_WORDS, behind=behind)
        if marked is None:
            return None
        found = self._plain(variables, [*messages[:turn], marked, *messages[turn + 1 :]])
        head, mark, tail = found.partition(_AT_WORDS)
        return len(head) if mark and head + tail == text else None

    def _plain(
        self, variables: dict[str, Any], messages: list[Any], *, prompts: bool = False
    ) -> str:
        rendered = self._rendered(variables, messages, prompts=prompts)
        return rendered.replace(_BEGIN, "").replace(_END, "")

    def _rendered(
        self, variables: dict[str, Any], messages: list[Any], *, prompts: bool = False
    ) -> str:
        # ``variables`` has the whole conversation; to tell turns apart, only a part of it is rendered.
        context = {**self._files.tokens, **variables, "messages": messages}
        try:
            return str(self._template.render(context, add_generation_prompt=prompts))
        except (*_FAULTS, self._errors) as error:
            raise BadConversationError(
                f"the template {self._files.path.name} refuses it: {type(error).__name__}: {error!s:.{_SHOWN}}"
            ) from error


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def require_no_marks(record: str, value: object) -> None:
    """Raise an error for a record, the JSON of ``value``, with a text that contains the marks of generation blocks."""
    # Nearly every record contains neither mark, and needs no further check.
    if (
        _BEGIN in record
        or _END in record
        or (
            _ESCAPED.search(record)
            and any(_BEGIN in text or _END in text for text in texts_in(value))
        )
    ):
        raise BadConversationError("holds a noncharacter (U+FDD0 or U+FDD1); take it out")


def _behind_last_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the first message behind the last one of a user; 0 if no user says anything."""
    return max((i + 1 for i, m in enumerate(messages) if m.get("role") == _USER), default=0)


def _unmarked(marked: str) -> Rendered:
    """Remove the marks, and return their places; a block within another block counts as a part of it."""
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


def read_template(template: Path | None, beside: Path) -> TemplateFiles:
    """Find a template and the special tokens that it uses.

    Args:
        template: File that the mix names; ``None`` looks for one in ``beside``.
        beside: Folder of the tokenizer.

    Raises:
        ConfigError: No template is found, or a file is damaged.
    """
    config = _settings(beside / "tokenizer_config.json")
    # ``tokenizer_config.json`` takes precedence if both files name a token.
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
