"""What a mix file says of its tokenizer."""

from typing import Annotated, Literal

from pydantic import Field

from omniload.base.config import LocalPath, StrictModel

__all__ = ["BpeTokenizer", "ByteTokenizer", "TokenizerConfig"]


class BpeTokenizer(StrictModel):
    """A ``tokenizer.json`` of the Hugging Face tokenizers library, or the folder of a model that holds one."""

    type: Literal["bpe"]
    path: LocalPath
    """The file, or its folder; a relative path starts at the mix file."""
    end_of_document: str | None = None
    """Special token put after every document; it must be in the vocabulary."""


class ByteTokenizer(StrictModel):
    """UTF-8 bytes as tokens 0 to 255, and 256 after every document."""

    type: Literal["bytes"]


TokenizerConfig = Annotated[BpeTokenizer | ByteTokenizer, Field(discriminator="type")]
