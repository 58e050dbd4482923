"""What a mix file says of how messages become samples: conversations, and prompts with one answer or with two."""

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from omniload.base.config import LocalPath, StrictModel, fault_at

__all__ = [
    "ChatTransform",
    "CompletionTransform",
    "ImageWords",
    "MessageNames",
    "MessageTransform",
    "PreferenceTransform",
]

Word = Annotated[str, Field(min_length=1, max_length=256)]
Key = Annotated[str, Field(min_length=1)]
LaterWord = Annotated[Word | None, Field(exclude_if=lambda key: key is None)]
Day = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]


class MessageNames(StrictModel):
    """Names of the keys and roles of messages: ``{role: from, content: value, roles: {human: user, gpt: assistant}}``.

    The template gets ``role`` and ``content`` under those two names, and every other key unchanged. As in
    ``transformers``, a null counts as an absent key. Reasoning is read from the first of ``reasoning_content``,
    ``thinking`` and ``reasoning`` that is present, and the template gets it as ``reasoning_content`` and as
    ``thinking``.
    """

    role: Word = "role"
    """Key of the speaker's role."""
    content: Word = "content"
    """Key of the text. If this is not ``content``, every message must have the key."""
    roles: Annotated[dict[Word, Word], Field(min_length=1)] | None = None
    """Every role that messages may have, and its name in the template. A message with another role is a bad record.
    Without this mapping, the template gets roles unchanged."""

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if self.role == self.content:
            raise fault_at(
                f"role and content are both {self.content!r}; name two keys of a message", "content"
            )
        return self


class ImageWords(StrictModel):
    """The marker that a template writes for an image, and the text that its processor puts around the placeholders."""

    marker: Annotated[str, Field(min_length=1, max_length=64)]
    """Marker that the template writes, such as ``<start_of_image>``. It is replaced by ``before``, the placeholders and
    ``after``."""
    before: Annotated[str, Field(max_length=256)] = ""
    """Text before the placeholders. It may contain special tokens, and is tokenised together with the text around
    it."""
    after: Annotated[str, Field(max_length=256)] = ""
    """Text after the placeholders."""


class _OfMessages(StrictModel):
    """What makes tokens of messages, by names that it has as ``messages``."""

    image: Annotated[str, Field(min_length=1, max_length=64)] | ImageWords | None = None
    """Marker that the template writes for an image, such as ``<|image_pad|>`` or ``<image>``. The ``images`` transform
    directly after this one replaces the marker by placeholders for the image's patches. An image is a part of a
    message, ``{type: image}``, or stands in a text where the ``marker`` of ``images`` does. If the model's processor
    puts text around the placeholders that the template does not write, give
    ``{marker: ..., before: ..., after: ...}``."""

    @property
    def image_words(self) -> ImageWords | None:
        """What the template writes for an image, however the mix says it."""
        return ImageWords(marker=self.image) if isinstance(self.image, str) else self.image

    @model_serializer(mode="wrap")
    def _as_it_is_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write names that change nothing as releases know it that had none: their runs and caches are gone on with."""
        content: dict[str, Any] = handler(self)
        if content.get("messages") == MessageNames().model_dump():
            del content["messages"]
        for key in ("tools", "system", "image"):
            if content.get(key, ()) is None:
                del content[key]
        return content


class ChatTransform(_OfMessages):
    """Turns conversations into tokens by the chat template of a model. Makes the text; sets ``loss_mask``.

    A record is a list of messages, ``[{"role": ..., "content": ...}, ...]``, or an object with the keys ``messages``,
    ``tools`` and ``documents``. Both may be JSON or nested columns of a table. The template decides how a conversation
    ends: the tokenizer's ``end_of_document`` is not added.
    """

    type: Literal["chat"]
    template: LocalPath | None = None
    """File of the Jinja template. By default, ``chat_template.jinja`` or ``tokenizer_config.json`` next to the
    tokenizer; if the latter holds several templates, the one named ``default``."""
    loss: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to train on: ``all``, those of the assistant's turns, or those of its ``last`` turn, which is all that it
    says after the last message of a user, calls of tools included. Turns are the ``generation`` blocks of the template;
    if the template has none, they are the tokens that each turn adds after the prompt for it."""
    date: Day | None = None
    """Day that ``strftime_now`` of the template returns, so that samples stay the same. Without a date, templates have
    no such function."""
    messages: MessageNames = MessageNames()
    """Names of the keys and roles of messages, if not ``role`` and ``content``."""
    tools: Word | None = None
    """Key or column of the tools that a conversation may call, if they are stored next to its messages: a list, or the
    JSON text of a list. A null, an empty list, or a line of JSON without the key means no tools. Without this setting,
    tools are not read."""
    system: Word | None = None
    """Key or column of a text that becomes the system message, if it is stored next to the messages. A null, an empty
    text, or a line of JSON without the key means no system message. A conversation that already begins with a system or
    developer message keeps that message. Without this setting, the text is not read."""

    @model_validator(mode="after")
    def _keys_beside_differ(self) -> Self:
        if self.tools is not None and self.tools == self.system:
            raise fault_at(f"tools and system are both {self.tools!r}; name two keys", "system")
        return self

    @property
    def beside(self) -> tuple[str, ...]:
        """Keys or columns beside that of the messages."""
        return (*_named(self.tools), *_named(self.system))

    @property
    def may_lack(self) -> tuple[str, ...]:
        """Those of them that a record may be without."""
        return self.beside


class CompletionTransform(StrictModel):
    """Turns prompts with one answer each, under keys of their own, into tokens. Makes the text; sets ``loss_mask``.

    The source's ``text`` names the key or column of the answer.
    """

    type: Literal["completion"]
    prompt: Key | Annotated[tuple[Key, ...], Field(min_length=1)] = "prompt"
    """Key or column of the prompt, or a list of them, such as ``[instruction, input]``, whose texts are joined by a
    blank line. In a list, a null, an empty text, or a key that a line of JSON lacks is left out. If nothing is left,
    the record is bad; only texts with ``loss: all`` may be without a prompt."""
    form: Literal["chat", "text"] = "chat"
    """Form of prompt and answer. ``chat``: lists of messages, JSON texts of such lists, or texts that stand for one
    user message and one assistant message; a chat template writes them. ``text``: texts, joined unchanged, with the
    tokenizer's end of a document after them."""
    loss: Literal["answer", "all"] = "answer"
    """Tokens to train on: those after the prompt, or all."""
    between: Annotated[str, Field(max_length=256)] = Field(default="", exclude_if=lambda it: not it)
    """For texts: the text between prompt and answer, such as a blank line below a title. It belongs to the prompt."""
    template: LocalPath | None = None
    """As in ``chat``."""
    date: Day | None = None
    """As in ``chat``."""
    messages: MessageNames = MessageNames()
    """As in ``chat``, for prompt and answer alike."""
    system: LaterWord = None
    """For messages, as in ``chat``."""

    @model_validator(mode="after")
    def _texts_have_something_between(self) -> Self:
        if self.between and self.form == "chat":
            raise fault_at(
                f"between is {self.between!r} and form is chat, where the template says what stands there; leave one "
                "of them out",
                "between",
            )
        return self

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if len(set(self.beside)) < len(self.beside):
            named = "prompt is" if self.system is None else "prompt and system are"
            raise fault_at(f"{named} {list(self.beside)}; name each key once", "prompt")
        return self

    @model_validator(mode="after")
    def _texts_have_no_names(self) -> Self:
        _require_no_names(self.form, self.messages, self.system)
        return self

    @property
    def asks(self) -> tuple[str, ...]:
        """Keys or columns of the prompt."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    @property
    def beside(self) -> tuple[str, ...]:
        """Keys or columns beside that of the answer."""
        return (*self.asks, *_named(self.system))

    @property
    def may_lack(self) -> tuple[str, ...]:
        """Those of them that a record may be without."""
        return _named(self.system) if isinstance(self.prompt, str) else self.beside


class PreferenceTransform(_OfMessages):
    """Turns preference pairs into tokens: a prompt with each of two answers. Makes the text; sets ``loss_mask``.

    The source's ``text`` names the key or column of the chosen answer. Both sides form one sample, which is never cut;
    ``batch.pairs`` says which documents they are. The loss covers the answers and not the prompts.
    """

    type: Literal["preference"]
    prompt: Key | None = "prompt"
    """Key or column of the prompt. ``null`` if both answers are whole conversations; their common beginning is then the
    prompt."""
    rejected: Key = "rejected"
    """Key or column of the rejected answer."""
    form: Literal["chat", "text"] = "chat"
    """Form of prompts and answers, as in ``completion``. With ``text``, the tokenizer's end of a document follows each
    answer, and images stand at their ``marker`` in the prompt."""
    template: LocalPath | None = None
    """As in ``chat``."""
    date: Day | None = None
    """As in ``chat``."""
    messages: MessageNames = MessageNames()
    """As in ``chat``, for prompts and answers alike."""
    system: LaterWord = None
    """For messages, as in ``chat``."""

    @model_validator(mode="after")
    def _texts_have_no_names(self) -> Self:
        _require_no_names(self.form, self.messages, self.system)
        return self

    @model_validator(mode="after")
    def _texts_have_a_prompt(self) -> Self:
        if self.form == "text" and self.prompt is None:
            raise fault_at("prompt is null and form is text; name the key of the prompt", "prompt")
        return self

    @property
    def beside(self) -> tuple[str, ...]:
        """Keys or columns beside that of the chosen answer."""
        return (self.rejected, *_named(self.prompt), *_named(self.system))

    @property
    def may_lack(self) -> tuple[str, ...]:
        """Those of them that a record may be without."""
        return _named(self.system)


MessageTransform: TypeAlias = ChatTransform | CompletionTransform | PreferenceTransform
"""What makes a sample of messages, and may read several keys or columns of a record."""


def _named(key: str | None) -> tuple[str, ...]:
    return () if key is None else (key,)


def _require_no_names(
    form: Literal["chat", "text"], messages: MessageNames, system: str | None
) -> None:
    if form == "text" and system is not None:
        raise fault_at(
            f"system is {system!r} and form is text, which has no messages; leave one of them out",
            "system",
        )
    if form == "text" and messages != MessageNames():
        raise fault_at(
            "messages names keys, and form is text, which has none; leave one of them out",
            "messages",
        )
