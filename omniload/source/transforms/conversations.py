"""Conversations in records: messages under configurable keys, tools next to them, and the input of chat templates.

A record is the JSON of a list of messages, or of an object that has the list under ``messages``, with tools and
documents.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson
from typing_extensions import TypeIs

from omniload.base.errors import IntegrityError
from omniload.mix.schema.messages import MessageNames

__all__ = [
    "AS_TEMPLATES_SAY",
    "BadConversationError",
    "begun_by",
    "doubt_of_text",
    "messages_under",
    "named",
    "require_answer",
    "shown",
    "system_in",
    "text_under",
    "texts_in",
    "variables_of",
    "with_beside",
    "with_mark",
]

AS_TEMPLATES_SAY = MessageNames()
"""Messages with the names of keys and roles that chat templates use."""
_SYSTEM = "system"
_OF_SYSTEM = (_SYSTEM, "developer")
"""Roles of messages that tell a model how to behave."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of the thoughts before an answer.

Templates read the thoughts under two of these names. As in transformers, both names receive the first one that a
message has.
"""
_SHOWN = 160
"""Letters of a value that an error message quotes."""
_SHOWN_OF_KEY = 60
"""Letters of a value that an error message quotes after its key."""


class BadConversationError(IntegrityError):
    """A record is no conversation, or its template refuses it; the message is a predicate: ``holds ..., not ...``."""


def variables_of(record: str, names: MessageNames) -> dict[str, Any]:
    """Return the variables for rendering a record with a template: messages, tools and documents.

    Raises:
        BadConversationError: The record has no list of messages under these names.
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
        none = ", as it has none" * (messages == [])
        raise BadConversationError(
            f"holds {shown(value)}, not a list of messages with {wanted}{none}"
        )
    return {
        "messages": [named(i, message, names) for i, message in enumerate(messages)],
        "tools": given.get("tools"),
        "documents": given.get("documents"),
    }


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, including keys of objects."""
    # Without recursion, because JSON may nest deeper than Python can call.
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += (*each.keys(), *each.values())
        elif isinstance(each, list):
            left += each


def doubt_of_text(messages: Iterable[Mapping[str, Any]], text: str) -> str:
    """Describe what a template probably was not meant to write of messages; empty if there is nothing.

    ``transformers`` writes the same, without a word.
    """
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(isinstance(p, dict) and (str(p) in text or json.dumps(p) in text) for p in parts):
            return (
                "its messages have lists of parts as their content, which the template writes as they stand, with "
                "brackets and keys: join the texts of the parts, or name a template that takes parts"
            )
        if any(
            _escaped(each) in text and each not in text for each in _texts_of_arguments(message)
        ):
            return (
                "its tool calls have their arguments as texts of JSON, which the template quotes once more: "
                "make them objects, or name a template that writes a text of arguments as it is"
            )
    return ""


def _texts_of_arguments(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments of tool calls that are texts; nothing for calls of another form."""
    with suppress(TypeError, AttributeError):
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str):
                yield arguments


def _escaped(text: str) -> str:
    """Return a text as JSON writes it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def with_beside(
    record: str, messages_key: str, tools_key: str | None, system_key: str | None
) -> tuple[str, str]:
    """Return a conversation with its tools in the form that ``ChatTemplate.render`` takes, and its system text.

    Args:
        record: JSON of an object with all fields as they were read; messages and tools may be texts of JSON themselves.
        messages_key: Key of the messages.
        tools_key: Key of the tools, if tools are read; null counts as none.
        system_key: Key of the system text, if it is read; null counts as none.

    Raises:
        BadConversationError: The tools are neither a list nor JSON of a list, or the system text is no text.
    """
    found = orjson.loads(record)
    messages, tools = (None if key is None else found[key] for key in (messages_key, tools_key))
    system = system_in(found, system_key)
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
            return str(messages), ""  # it is reported like any other text
    given = {"messages": messages} if isinstance(messages, list) and messages else messages
    # A record that is no conversation is reported as it is, without our keys and without tools.
    if tools is not None and isinstance(given, dict) and given.get("messages"):
        given = given | {"tools": tools}
    try:
        return orjson.dumps(given).decode(), system
    except TypeError as error:  # it writes at most 254 levels, but reads four times as many
        raise BadConversationError(f"cannot be written as JSON: {error}") from error


def system_in(found: Mapping[str, object], key: str | None) -> str:
    """Return the system text of an object with several keys; empty if it has none, or if no key is named.

    Raises:
        BadConversationError: The value is no text.
    """
    system = "" if key is None else found[key]
    if system is not None and not isinstance(system, str):
        raise BadConversationError(f"{key} is {shown(system)}, not a text")
    return system or ""


def begun_by(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages after a system message, if there is a system text and they do not begin with their own."""
    if not system or messages[0].get("role") in _OF_SYSTEM:
        return messages
    return [{"role": _SYSTEM, "content": system}, *messages]


def named(number: int, message: object, names: MessageNames) -> dict[str, Any]:
    """Return a message under the names that templates use.

    Raises:
        BadConversationError: The message lacks a named key, or its role is not among the named roles.
    """
    if (
        not isinstance(message, dict)
        or not isinstance(message.get(names.role), str)
        # Under its default name, the content may be missing, because a message that calls a tool may have none.
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
    # If two keys would get the same name, the key that the mix names counts. As in transformers, null means that a key
    # is missing: in a table, a key of one message is null in all others.
    named = {
        keys.get(key, key): value
        for key, value in given.items()
        if value is not None and (key in keys or key not in ("role", "content"))
    }
    thought = next((named[key] for key in _THOUGHTS if key in named), None)
    if thought is not None:
        named = {"thinking": thought, **named, "reasoning_content": thought}
    return named if names.roles is None else named | {"role": names.roles[role]}


def text_under(key: str, value: object) -> str:
    """Return the text under a key.

    Raises:
        BadConversationError: The value is no text, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise BadConversationError(f"{key} is {_quoted(value)}, not a text that says something")
    return value


def messages_under(
    key: str, value: object, names: MessageNames, *, role: str = "assistant"
) -> list[Any]:
    """Return the messages under a key, under the names that templates use.

    A single message, or the text of one by ``role``, counts as a list. A text that is the JSON of a list of messages is
    read as this list, because a column of texts can hold it in no other form.

    Raises:
        BadConversationError: The value is something else, or includes a message that ``named`` refuses.
    """
    if isinstance(value, str) and value:
        written = _written_in(value, names)
        if written is None:
            return [{"role": role, "content": value}]
        value = written
    given = [value] if isinstance(value, dict) else value
    if not _are_messages(given, names):
        raise BadConversationError(
            f"{key} is {_quoted(value)}, not a list of messages with {names.role} and {names.content}, nor a text that "
            "says something"
        )
    try:
        return [named(i, message, names) for i, message in enumerate(given)]
    except BadConversationError as error:
        raise BadConversationError(f"{key}: {error}") from None


def _are_messages(value: object, names: MessageNames) -> TypeIs[list[dict[str, Any]]]:
    return isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get(names.role), str) for each in value
    )


def _written_in(text: str, names: MessageNames) -> list[dict[str, Any]] | None:
    """Return the messages whose JSON a text is; ``None`` for any other text, which is the text of a message."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if found and _are_messages(found, names) else None


def require_answer(key: str, asked: list[Any], answer: list[Any], *, by: str, remedy: str) -> None:
    """Raise an error for an answer that repeats the prompt, as in data sets that also keep the prompt as a text.

    Args:
        key: Key of the answer.
        asked: Messages of the prompt.
        answer: Messages of the answer.
        by: Name of the prompt.
        remedy: Remedy for the error message.

    Raises:
        BadConversationError: The answer begins with the first message of the prompt.
    """
    if asked and answer and _said(answer[0]) == _said(asked[0]):
        raise BadConversationError(
            f"{key} begins with what {by} does: it is a whole conversation; {remedy}"
        )


def _said(message: Mapping[str, Any]) -> tuple[object, object]:
    return message.get("role"), message.get("content")


def with_mark(message: Mapping[str, Any], mark: str, *, behind: bool) -> dict[str, Any] | None:
    """Return a message with a mark before or behind its words; ``None`` for a message without words.

    The words are those of its content, or else of its last call of a tool. White space around them stays outside of
    the mark, because templates trim it.
    """
    match message:
        case {"content": str(text)} if text.strip():
            return {**message, "content": _marked(text, mark, behind=behind)}
        case {"content": [*before, {"type": "text", "text": str(text)} as part]} if text.strip():
            part = {**part, "text": _marked(text, mark, behind=behind)}
            return {**message, "content": [*before, part]}
        case {"tool_calls": [*before, {"function": {"name": str(name)} as function} as call]}:
            function = {**function, "name": _marked(name, mark, behind=behind)}
            return {**message, "tool_calls": [*before, {**call, "function": function}]}
        case _:
            return None


def _marked(text: str, mark: str, *, behind: bool) -> str:
    at = len(text.rstrip()) if behind else len(text) - len(text.lstrip())
    return text[:at] + mark + text[at:]


def _quoted(value: object) -> str:
    return orjson.dumps(value).decode()[:_SHOWN_OF_KEY]


def shown(value: object) -> str:
    """Return the beginning of a value as JSON, for an error message."""
    try:
        return json.dumps(value)[:_SHOWN]
    except RecursionError:  # JSON may be read to a depth that Python cannot write
        return "what nests too deep to be shown"
