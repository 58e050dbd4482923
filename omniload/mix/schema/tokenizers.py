"""What a mix file says of its tokenizer."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from omniload.base.config import LocalPath, StrictModel, fault_at

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "EncodingName",
    "TiktokenTokenizer",
    "TokenizerConfig",
]

EncodingName: TypeAlias = Literal[
    "gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony"
]
"""Encodings of tiktoken: how text is split before pairs are merged, and special tokens."""


# Left out where it is not given: a mix without it is what it was to releases that did not know it.
Beginning = Annotated[str | None, Field(exclude_if=lambda token: token is None)]


class BpeTokenizer(StrictModel):
    """A ``tokenizer.json`` of the Hugging Face tokenizers library, or the folder of a model that contains one."""

    type: Literal["bpe"]
    path: LocalPath
    """The file, or its folder; a relative path starts at the mix file."""
    begin_of_document: Beginning = None
    """Special token to put before every document, such as ``<|begin_of_text|>`` of Llama 3; it must be in the
    vocabulary. Tokens that the template of ``tokenizer.json`` would put around a text are not added."""
    end_of_document: str | None = None
    """Special token to put after every document; it must be in the vocabulary."""


class TiktokenTokenizer(StrictModel):
    """A file of ranks in tiktoken's format: every line has a token in base 64 and its rank. Nothing is downloaded."""

    type: Literal["tiktoken"]
    path: LocalPath
    """The file, such as ``cl100k_base.tiktoken``; a relative path starts at the mix file."""
    encoding: EncodingName
    """The encoding of that name decides how text is split before tokens are merged, and which special tokens there
    are."""
    special_tokens: (
        dict[Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=0, lt=1 << 31)]] | None
    ) = None
    """Special tokens and their ids, in place of those of the encoding. In a document, their names are plain text; a
    chat template writes them as tokens."""
    begin_of_document: Beginning = None
    """Special token to put before every document, such as ``<|begin_of_text|>``."""
    end_of_document: str | None = None
    """Special token to put after every document, such as ``<|endoftext|>``."""

    @model_validator(mode="after")
    def _ids_are_of_one_token(self) -> Self:
        seen: dict[int, str] = {}
        for token, number in (self.special_tokens or {}).items():
            if (other := seen.setdefault(number, token)) != token:
                raise fault_at(
                    f"special_tokens gives {other!r} and {token!r} the id {number}; give each an id of its own",
                    *("special_tokens", token),
                )
        return self


class ByteTokenizer(StrictModel):
    """UTF-8 bytes as tokens 0 to 255, and token 256 after every document."""

    type: Literal["bytes"]


TokenizerConfig = Annotated[
    BpeTokenizer | TiktokenTokenizer | ByteTokenizer, Field(discriminator="type")
]
