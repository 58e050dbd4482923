"""What a mix file says of how records become samples: one model a transform, in one closed list.

A transform keeps positions: a record gives one sample or none, decided by the record and the transform alone.
"""

from typing import Annotated, Literal

from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.units import Count

__all__ = ["ChatTransform", "ClampTransform", "FilterTransform", "TransformConfig"]

_MOST_TOKENS = 1 << 30


class ChatTransform(StrictModel):
    """Conversations to tokens, by the chat template of a model. Makes the text; sets ``loss_mask``.

    A record is a list of messages, ``[{"role": ..., "content": ...}, ...]``, or an object with the keys ``messages``,
    ``tools`` and ``documents``: as JSON, or as nested columns of a table. The template says how a conversation ends:
    the tokenizer's ``end_of_document`` is not added.
    """

    type: Literal["chat"]
    template: str | None = None
    """File of the template (Jinja); else ``chat_template.jinja`` or ``tokenizer_config.json`` beside the tokenizer."""
    loss: Literal["assistant", "all"] = "assistant"
    """Tokens that are trained on: those of the assistant's turns (what the template's ``generation`` blocks hold, or,
    where it has none, what each turn adds behind the prompt for it), or all."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = None
    """Day that ``strftime_now`` of the template gives: samples stay the same. Without it there is no such function."""


class ClampTransform(StrictModel):
    """Keeps the first tokens of a sample. Shortens samples; a mask is cut with the tokens."""

    type: Literal["clamp"]
    tokens: Count = Field(ge=1, le=_MOST_TOKENS)
    """Most tokens of a sample."""


class FilterTransform(StrictModel):
    """Leaves samples out by their length. Drops samples; the others stay as they are."""

    type: Literal["filter"]
    min_tokens: Count = Field(default=1, ge=1, le=_MOST_TOKENS)
    """Shorter samples are left out."""
    max_tokens: Count = Field(default=_MOST_TOKENS, ge=1, le=_MOST_TOKENS)
    """Longer samples are left out."""
    min_trained_tokens: Count = Field(default=0, ge=0, le=_MOST_TOKENS)
    """Samples whose mask trains on fewer tokens are left out: a conversation without an answer teaches nothing."""


# A closed list. The file names a transform, never a class to import.
TransformConfig = Annotated[
    ChatTransform | ClampTransform | FilterTransform, Field(discriminator="type")
]
