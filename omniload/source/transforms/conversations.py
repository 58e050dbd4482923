"""Conversations as records hold them: messages under any keys, tools beside them, and what a chat template is given.

A record is JSON of a list of messages, or of an object that holds one under ``messages``, with tools and documents.
"""

import json
from collections.abc import Iterator, Mapping
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
    "messages_under",
    "named",
    "require_answer",
    "shown",
    "system_in",
    "text_under",
    "texts_in",
    "texts_of_arguments",
    "variables_of",
    "with_beside",
]

AS_TEMPLATES_SAY = MessageNames()
"""Messages that call their keys and roles as chat templates do."""
_SYSTEM = "system"
_OF_SYSTEM = (_SYSTEM, "developer")
"""Roles of a message that says how a model is to behave."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of what was thought before an answer. Templates read it by two of these names, and are given the first that a
message has by both, as transformers does."""
_SHOWN = 160
"""Letters of a value that a message quotes."""
_SHOWN_OF_KEY = 60
"""Those of one that a message quotes behind its key."""


class BadConversationError(IntegrityError):
    """A record is no conversation, or its template refuses it; the message is a predicate: ``holds ..., not ...``."""


def variables_of(record: str, names: MessageNames) -> dict[str, Any]:
    """Return the variables that a template is rendered with for a record: messages, tools and documents.

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


def texts_of_arguments(record: str) -> Iterator[str]:
    """Give the arguments of tool calls in a conversation that are texts; nothing of what is none."""
    with suppress(ValueError, TypeError, AttributeError):
        value = orjson.loads(record)
        messages = value["messages"] if isinstance(value, dict) and "messages" in value else value
        for message in messages:
            for call in message.get("tool_calls") or ():
                arguments = call.get("function", call).get("arguments")
                if isinstance(arguments, str):
                    yield arguments


def with_beside(
    record: str, messages_key: str, tools_key: str | None, system_key: str | None
) -> tuple[str, str]:
    """Return a conversation and the tools beside it as what ``ChatTemplate.render`` takes; and a system text.

    Args:
        record: JSON of an object with all, as it was read; messages and tools may be texts that are JSON themselves.
        messages_key: What the record calls its messages.
        tools_key: What it calls the tools, where they are read; a null is none.
        system_key: What it calls the text of the system, where that is read; a null is none.

    Raises:
        BadConversationError: Its tools are no list, nor JSON of one, or what is said of the system is no text.
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
            return str(messages), ""  # of which is told what any other text is told
    given = {"messages": messages} if isinstance(messages, list) and messages else messages
    # What is no conversation is told as the record has it: under no key of ours, without tools.
    if tools is not None and isinstance(given, dict) and given.get("messages"):
        given = given | {"tools": tools}
    try:
        return orjson.dumps(given).decode(), system
    except TypeError as error:  # it writes what nests 254 deep, and reads four times that
        raise BadConversationError(f"cannot be written as JSON: {error}") from error


def system_in(found: Mapping[str, object], key: str | None) -> str:
    """Return what the system says by an object of several keys; empty where it says nothing, or no key is named.

    Raises:
        BadConversationError: It is no text.
    """
    system = "" if key is None else found[key]
    if system is not None and not isinstance(system, str):
        raise BadConversationError(f"{key} is {shown(system)}, not a text")
    return system or ""


def begun_by(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages behind one of the system, where there is such a text and they do not begin with their own."""
    if not system or messages[0].get("role") in _OF_SYSTEM:
        return messages
    return [{"role": _SYSTEM, "content": system}, *messages]


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


def text_under(key: str, value: object) -> str:
    """Return the text under a key.

    Raises:
        BadConversationError: It is none, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise BadConversationError(f"{key} is {_quoted(value)}, not a text that says something")
    return value


def messages_under(
    key: str, value: object, names: MessageNames, *, role: str = "assistant"
) -> list[Any]:
    """Return the messages under a key, by the names that templates know.

    A message alone, or the text of one by ``role``, stands for a list of it. A text that is JSON of a list of messages
    is that list: a column of texts can hold no other.

    Raises:
        BadConversationError: There is something else, or a message that ``named`` refuses.
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
    """Return the messages that a text is JSON of; ``None`` for any other text, which is what somebody says."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if found and _are_messages(found, names) else None


def require_answer(key: str, asked: list[Any], answer: list[Any], *, by: str, remedy: str) -> None:
    """Refuse an answer that holds the prompt once more, as sets write it that keep a text of the prompt besides.

    Args:
        key: Key of the answer.
        asked: Messages of the prompt.
        answer: Those of the answer.
        by: What the prompt is called.
        remedy: What to do about it.

    Raises:
        BadConversationError: It begins with what the prompt begins with.
    """
    if asked and answer and _said(answer[0]) == _said(asked[0]):
        raise BadConversationError(
            f"{key} begins with what {by} does: it is a whole conversation; {remedy}"
        )


def _said(message: Mapping[str, Any]) -> tuple[object, object]:
    return message.get("role"), message.get("content")


def _quoted(value: object) -> str:
    return orjson.dumps(value).decode()[:_SHOWN_OF_KEY]


def shown(value: object) -> str:
    """Return the beginning of a value as JSON, for a message."""
    try:
        return json.dumps(value)[:_SHOWN]
    except RecursionError:  # JSON of somebody's may be read to a depth at which Python writes none
        return "what nests too deep to be shown"
