"""Tokenizers: whole columns of text to token ids.

Shape suffixes:
    N  texts        V  values of all texts together
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import tokenizers
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.schema.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    TiktokenTokenizer,
    TokenizerConfig,
)
from omniload.source.byte_pairs.files import TOKENIZER_JSON, named_tokens, read_library
from omniload.source.byte_pairs.token_bytes import TokenBytes, marked_ranges
from omniload.source.columns import text_bytes

__all__ = [
    "PANIC",
    "BpeEncoder",
    "ByteEncoder",
    "Spans",
    "Tokenizer",
    "around_documents",
    "doubt_of_ids",
    "open_tokenizer",
]

_BYTES_END = 256
PANIC = "PanicException"
"""Class name of a Rust panic in the library: a ``BaseException`` that no module exports."""
Spans: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""For each text, ranges of its characters in order: first character, and the first after the range."""


class Tokenizer(Protocol):
    """Converts texts to token ids and back."""

    vocab_size: int
    """Highest token id plus one."""
    begin_of_document_id: int | None
    """Token before every document; ``None`` for none."""
    end_of_document_id: int | None
    """Token after every document; ``None`` for none."""

    def encode(self, texts: pa.Array | Sequence[str]) -> Ragged:
        """Return the token ids (int32) of each text, between the tokens that begin and end a document.

        A text without tokens stays empty, without the begin and end.
        """
        ...

    def encode_spans(
        self, texts: Sequence[str], spans: Spans, *, special: bool = True
    ) -> tuple[Ragged, Ragged]:
        """Return the token ids of each text, without the tokens around a document, and a mask of the spans.

        Args:
            texts: The texts.
            spans: Ranges of each text.
            special: Whether special tokens in a text are intended, as a chat template writes them. A ``tokenizer.json``
                always reads them as special tokens.

        Returns:
            Token ids (int32), and a mask (bool) of the same lengths, true from the token with the first character of a
            span to the token with its last.
        """
        ...

    def decode(self, ids_V: NDArray[np.integer[Any]], *, special: bool = False) -> str:
        """Return the text of token ids for people; special tokens are left out, unless ``special``."""
        ...

    def id_of(self, token: str) -> int | None:
        """Return the number of a token of the vocabulary; ``None`` if no token has the name."""
        ...


def open_tokenizer(config: TokenizerConfig, base_dir: Path) -> Tokenizer:
    """Open the tokenizer that a mix file names.

    Args:
        config: Entry of the tokenizer in the mix file.
        base_dir: Folder that a relative path starts from.

    Raises:
        ConfigError: The file is missing or no ``tokenizer.json``, or a token that begins or ends documents is not in
            its vocabulary.
    """
    if isinstance(config, ByteTokenizer):
        return ByteEncoder()
    if isinstance(config, TiktokenTokenizer):
        return _open_tiktoken(config, base_dir)
    return _open_bpe(config, base_dir)


def around_documents(tokens: Ragged, begin: int | None, end: int | None) -> Ragged:
    """Put tokens before and after each sequence that is not empty; for token ids and for masks."""
    there_N = tokens.lengths_N > 0
    # ``insert`` counts places before insertion, and keeps this order at one place: ends come before beginnings.
    around = [
        (bounds[there_N], token)
        for bounds, token in ((tokens.offsets[1:], end), (tokens.offsets[:-1], begin))
        if token is not None
    ]
    if not around:
        return tokens
    at = np.concatenate([bounds for bounds, _ in around])
    put = np.repeat(
        np.array([token for _, token in around], tokens.values_V.dtype), int(there_N.sum())
    )
    offsets = tokens.offsets.copy()
    offsets[1:] += np.cumsum(there_N) * len(around)
    return Ragged(values_V=np.insert(tokens.values_V, at, put), offsets=offsets)


def doubt_of_ids(ids_V: NDArray[np.integer[Any]], tokenizer: Tokenizer) -> str:
    """Say if token ids do not belong to the tokenizer of their mix; empty if they may."""
    largest = int(ids_V.max(initial=0))
    if largest < tokenizer.vocab_size:
        return ""
    return (
        f"the first records have token id {largest:,}, and the tokenizer of the mix has {tokenizer.vocab_size:,} ids: "
        "another one made them. Name that one, or size the model by hand: loader.vocab_size does not count them"
    )


class ByteEncoder(Tokenizer):
    """UTF-8 bytes as tokens 0 to 255, and 256 after every document."""

    def __init__(self) -> None:
        self.vocab_size = _BYTES_END + 1
        self.begin_of_document_id: int | None = None
        self.end_of_document_id: int | None = _BYTES_END

    @override
    def encode(self, texts: pa.Array | Sequence[str]) -> Ragged:
        column = text_bytes(texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string()))
        lengths = column.lengths_N
        ends_after = lengths > 0
        offsets = offsets_of(lengths + ends_after)
        is_end = np.zeros(int(offsets[-1]), np.bool_)
        is_end[offsets[1:][ends_after] - 1] = True
        values = np.full(len(is_end), _BYTES_END, np.int32)
        values[~is_end] = column.values_V
        return Ragged(values_V=values, offsets=offsets)

    @override
    def encode_spans(
        self, texts: Sequence[str], spans: Spans, *, special: bool = True
    ) -> tuple[Ragged, Ragged]:
        column = text_bytes(pa.array(texts, pa.string()))
        tokens = Ragged(values_V=column.values_V.astype(np.int32), offsets=column.offsets)
        bounds: list[int] = []
        for text, begin, its in zip(texts, column.offsets.tolist(), spans, strict=False):
            at, size = 0, begin
            # Counted from the previous place, because counting from the start would take quadratic time.
            for place in chain.from_iterable(its):
                size += len(text[at:place].encode())
                at = place
                bounds.append(size)
        return tokens, Ragged(
            values_V=marked_ranges(bounds, len(column.values_V)), offsets=column.offsets
        )

    @override
    def decode(self, ids_V: NDArray[np.integer[Any]], *, special: bool = False) -> str:
        ids = np.asarray(ids_V)  # its only special token, the end of a document, has no text
        return ids[ids < _BYTES_END].astype(np.uint8).tobytes().decode(errors="replace")

    @override
    def id_of(self, token: str) -> int | None:
        return None


class BpeEncoder(Tokenizer):
    """A tokenizer of the Hugging Face tokenizers library.

    Texts are encoded without the truncation and padding of the file, and without its template of special tokens,
    because the packer joins and cuts documents. The library releases the interpreter lock while it encodes (about 1 M
    tokens/s per core). It returns Python lists. Making arrays of them costs 37 ns per token, 4 % of encoding; the
    alternatives (an array per list, Arrow) cost as much or more.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        end_of_document_id: int | None,
        path: Path | None = None,
        *,
        begin_of_document_id: int | None = None,
    ) -> None:
        self._path = path
        library.no_truncation()
        library.no_padding()
        self._library = library
        # The highest id, not the number of tokens, because a vocabulary may have gaps.
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.begin_of_document_id = begin_of_document_id
        self.end_of_document_id = end_of_document_id

    @override
    def encode(self, texts: pa.Array | Sequence[str]) -> Ragged:
        ids = self._encoded(texts.to_pylist() if isinstance(texts, pa.Array) else list(texts))
        begin, end = self.begin_of_document_id, self.end_of_document_id
        # These lists may be changed, because the library makes a new list at each access of the ids.
        for sequence in filter(None, ids) if begin is not None or end is not None else ():
            if begin is not None:
                sequence.insert(0, begin)
            if end is not None:
                sequence.append(end)
        return _ids(ids)

    @cached_property
    def puts_around(self) -> tuple[str, str]:
        """Tokens that the file's own template puts before and after a text, if any; the template is not applied."""
        with _faults_of(self._path, "encodes no text"):
            plain, framed = (
                self._library.encode("a", add_special_tokens=special).ids
                for special in (False, True)
            )
        at = next((i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0)
        begin, end = framed[:at][:1], framed[at + len(plain) :][-1:]
        first, last = ("".join(map(str, map(self._library.id_to_token, e))) for e in (begin, end))
        return first, last

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        with _faults_of(self._path, "encodes no text"):
            # The fast call computes no offsets, which are not needed here.
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return TokenBytes.of(self._library)

    @override
    def encode_spans(
        self, texts: Sequence[str], spans: Spans, *, special: bool = True
    ) -> tuple[Ragged, Ragged]:
        # Offsets are only computed as a last resort, because they make the library a quarter slower.
        if not any(spans) or self._bytes is not None:
            tokens = _ids(self._encoded(texts))
            mask = (
                np.zeros(len(tokens.values_V), np.bool_)
                if self._bytes is None
                else self._bytes.mask(tokens, texts, spans)
            )
            # If the lengths do not add up, a token stands for something else than its bytes, and offsets are needed.
            if mask is not None:
                return tokens, Ragged(values_V=mask, offsets=tokens.offsets)
        with _faults_of(self._path, "encodes no text"):
            encoded = self._library.encode_batch(list(texts), add_special_tokens=False)
        tokens = _ids([encoding.ids for encoding in encoded])
        bounds: list[int] = []
        for encoding, begin, its in zip(encoded, tokens.offsets.tolist(), spans, strict=False):
            for first, stop in its:
                inside = _tokens_of(encoding, first, stop)
                if inside is not None:
                    bounds += (begin + inside[0], begin + inside[1] + 1)
        mask = marked_ranges(bounds, len(tokens.values_V))
        return tokens, Ragged(values_V=mask, offsets=tokens.offsets)

    @override
    def decode(self, ids_V: NDArray[np.integer[Any]], *, special: bool = False) -> str:
        ids = np.asarray(ids_V).tolist()
        with _faults_of(self._path, "decodes no tokens"):
            text: str = self._library.decode(ids, skip_special_tokens=not special)
        return text

    @override
    def id_of(self, token: str) -> int | None:
        found: int | None = self._library.token_to_id(token)
        return found


def _ids(ids: Sequence[Sequence[int]]) -> Ragged:
    offsets = offsets_of(np.fromiter(map(len, ids), np.int64, len(ids)))
    values = np.fromiter(chain.from_iterable(ids), np.int32, int(offsets[-1]))
    return Ragged(values_V=values, offsets=offsets)


def _tokens_of(encoding: tokenizers.Encoding, first: int, stop: int) -> tuple[int, int] | None:
    """Return the first and last token of a range of characters; ``None`` if the range has no token.

    Characters without a token (white space that a tokenizer drops) are skipped.
    """
    begin = next(
        (t for c in range(first, stop) if (t := encoding.char_to_token(c)) is not None), None
    )
    if begin is None:
        return None
    last = (
        t for c in range(stop - 1, first - 1, -1) if (t := encoding.char_to_token(c)) is not None
    )
    return begin, next(last)


@contextmanager
def _faults_of(path: Path | None, said: str) -> Iterator[None]:
    """Convert any error of the library to a fault of its file, because the library raises no specific errors.

    Raises:
        ConfigError: The library raised an error.
    """
    try:
        yield
    except (ConfigError, MemoryError, FileNotFoundError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise ConfigError(
            f"tokenizer.path: {path or 'the tokenizer'}: {said}: {error}; check the file, or write it anew with the "
            "library that made it"
        ) from error


# The key includes the modification time, so that a rewritten file is read again.
@lru_cache(maxsize=8)
def _encoder(path: Path, _mtime_ns: int, begin: str | None, end: str | None) -> BpeEncoder:
    """Read a tokenizer once for all sources of a process, because it takes megabytes and can be shared.

    The search for the largest id is also done once: for 50,000 tokens it takes as long as opening thirty sources.
    """
    library = read_library(path)
    numbers = {}
    for key, token in (("begin_of_document", begin), ("end_of_document", end)):
        numbers[key] = None if token is None else library.token_to_id(token)
        if token is not None and numbers[key] is None:
            special = [token.content for token in library.get_added_tokens_decoder().values()]
            raise ConfigError(
                f"tokenizer.{key} is {token!r}, not in the vocabulary of {path}; its special tokens are "
                f"{named_tokens(special, token)}"
            )
    return BpeEncoder(
        library,
        numbers["end_of_document"],
        path,
        begin_of_document_id=numbers["begin_of_document"],
    )


def _open_bpe(config: BpeTokenizer, base_dir: Path) -> BpeEncoder:
    # By default, the library starts a thread per core in every process that encodes. There are many loaders, each with
    # a core of its own already. An explicit setting of the user wins.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = base_dir / config.path
    path = path / TOKENIZER_JSON if path.is_dir() else path
    try:
        with _faults_of(path, "is no tokenizer.json"):
            mtime_ns = path.stat().st_mtime_ns
            return _encoder(path, mtime_ns, config.begin_of_document, config.end_of_document)
    except FileNotFoundError:
        raise ConfigError(
            f"tokenizer.path: {path}: no such file; give the path of a tokenizer.json or of its folder, relative ones "
            "start at the mix file; of a model on the Hub fetch its files first, as `hf download` does"
        ) from None


def _open_tiktoken(config: TiktokenTokenizer, base_dir: Path) -> Tokenizer:
    try:
        # Imported here, because only this module imports tiktoken, which may be missing.
        library = import_module("omniload.source.byte_pairs.encoder")
    except ModuleNotFoundError as error:
        raise missing_extra("a tokenizer of type tiktoken", error) from None
    path, special = base_dir / config.path, config.special_tokens
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0  # the call below reports the missing file
    opened: Tokenizer = library.open_tiktoken(
        path,
        stamp,
        encoding=config.encoding,
        # Opened tokenizers are cached by their arguments, which must be hashable, unlike a mapping.
        special_tokens=None if special is None else tuple(special.items()),
        begin_of_document=config.begin_of_document,
        end_of_document=config.end_of_document,
    )
    return opened
