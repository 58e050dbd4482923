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
    """What messages call their keys and roles: ``{role: from, content: value, roles: {human: user, gpt: assistant}}``.

    A template is given ``role`` and ``content`` by those names, and every other key as it stands. As with
    ``transformers``, a null is no key, and what was thought (``reasoning_content``, ``thinking`` or ``reasoning``, the
    first that there is) is given as ``reasoning_content`` and ``thinking``.
    """

    role: Word = "role"
    """Key of who speaks."""
    content: Word = "content"
    """Key of what is said. Named otherwise, each message has it."""
    roles: Annotated[dict[Word, Word], Field(min_length=1)] | None = None
    """Every role of the messages, and what the template calls it; a message of another is a bad record. Without it,
    roles are given to the template as they stand."""

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if self.role == self.content:
            raise fault_at(
                f"role and content are both {self.content!r}; name two keys of a message", "content"
            )
        return self


class ImageWords(StrictModel):
    """What a template writes for an image, and what the processor of its model puts around the placeholders."""

    marker: Annotated[str, Field(min_length=1, max_length=64)]
    """What the template writes, such as ``<start_of_image>``: before, placeholders and after take its place."""
    before: Annotated[str, Field(max_length=256)] = ""
    """Text before the placeholders, of special tokens too; it is tokenised with the text that it stands in."""
    after: Annotated[str, Field(max_length=256)] = ""
    """Text behind them."""


class _OfMessages(StrictModel):
    """What makes tokens of messages, by names that it has as ``messages``."""

    image: Annotated[str, Field(min_length=1, max_length=64)] | ImageWords | None = None
    """What the template writes for an image, such as ``<|image_pad|>`` or ``<image>``: there the ``images`` transform
    right behind this one puts its patches. Images are parts of messages, ``{type: image}``, or stand where the
    ``marker`` of ``images`` does in a text. Where the processor of a model puts words around its placeholders that the
    template does not write: ``{marker: ..., before: ..., after: ...}``."""

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
    """Conversations to tokens, by the chat template of a model. Makes the text; sets ``loss_mask``.

    A record is a list of messages, ``[{"role": ..., "content": ...}, ...]``, or an object with the keys ``messages``,
    ``tools`` and ``documents``: as JSON, or as nested columns of a table. The template says how a conversation ends:
    the tokenizer's ``end_of_document`` is not added.
    """

    type: Literal["chat"]
    template: LocalPath | None = None
    """File of the template (Jinja); else ``chat_template.jinja`` or ``tokenizer_config.json`` beside the tokenizer, of
    several templates there the one called ``default``."""
    loss: Literal["assistant", "all"] = "assistant"
    """Tokens that are trained on: those of the assistant's turns (what the template's ``generation`` blocks hold, or,
    where it has none, what each turn adds behind the prompt for it), or all."""
    date: Day | None = None
    """Day that ``strftime_now`` of the template gives: samples stay the same. Without it there is no such function."""
    messages: MessageNames = MessageNames()
    """What messages call their keys and roles, where that is not ``role`` and ``content``."""
    tools: Word | None = None
    """Key or column of the tools that a conversation may call, where they stand beside its messages: a list, or a text
    that is JSON of one. A null is none, and so are an empty list and a line of JSON without the key. Not named, they
    are not read."""
    system: Word | None = None
    """Key or column of a text that comes before the messages as that of the system, where it stands beside them. A null
    is none, and so are an empty text and a line of JSON without the key; messages that begin with one of the system,
    or of a developer, keep theirs. Not named, it is not read."""

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
    """Prompts with one answer each to tokens, from keys of their own. Makes the text; sets ``loss_mask``.

    The key or column under ``text`` of the source holds the answer.
    """

    type: Literal["completion"]
    prompt: Key | Annotated[tuple[Key, ...], Field(min_length=1)] = "prompt"
    """Key or column of the prompt; or a list of them, such as ``[instruction, input]``, whose texts a blank line joins.
    Of those a null or an empty text is left out, and so is a key that a line of JSON has not; where none is left, the
    record is bad, but for texts with ``loss: all``, which are then without a prompt."""
    form: Literal["chat", "text"] = "chat"
    """What prompt and answer are: lists of messages, texts that are JSON of one, or texts that stand for a message of
    the user and one of the assistant, for a chat template; or texts, joined as they are, with the tokenizer's end of a
    document behind them."""
    loss: Literal["answer", "all"] = "answer"
    """Tokens that are trained on: those behind the prompt, or all."""
    between: Annotated[str, Field(max_length=256)] = Field(default="", exclude_if=lambda it: not it)
    """Of texts, what is written between prompt and answer, such as a blank line below a title; it is of the prompt."""
    template: LocalPath | None = None
    """As of ``chat``."""
    date: Day | None = None
    """As of ``chat``."""
    messages: MessageNames = MessageNames()
    """As of ``chat``, for prompt and answer alike."""
    system: LaterWord = None
    """Of messages, as of ``chat``."""

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
    """Preference pairs to tokens: a prompt with each of two answers. Makes the text; sets ``loss_mask``.

    The key or column under ``text`` of the source holds the chosen answer. Both sides are one sample, which is never
    cut: ``batch.pairs`` says which documents they are. Answers are trained on, prompts are read.
    """

    type: Literal["preference"]
    prompt: Key | None = "prompt"
    """Key or column of the prompt; ``null`` where both answers are whole conversations: what they begin with alike is
    the prompt."""
    rejected: Key = "rejected"
    """Key or column of the rejected answer."""
    form: Literal["chat", "text"] = "chat"
    """What prompts and answers are: as of ``completion``; texts have the tokenizer's end of a document behind each
    answer. There images stand where their ``marker`` does in the prompt."""
    template: LocalPath | None = None
    """As of ``chat``."""
    date: Day | None = None
    """As of ``chat``."""
    messages: MessageNames = MessageNames()
    """As of ``chat``, for prompts and answers alike."""
    system: LaterWord = None
    """Of messages, as of ``chat``."""

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
