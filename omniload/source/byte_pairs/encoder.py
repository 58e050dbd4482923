"""A tokenizer of tiktoken. Only this module imports it.

Shape suffixes:
    N  texts        V  values of all texts together        T  tokens of the vocabulary
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tiktoken
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.schema.tokenizers import EncodingName
from omniload.source.byte_pairs.encodings import ENCODINGS
from omniload.source.byte_pairs.files import RANKS, named_tokens, parse_ranks, read_tokenizer
from omniload.source.byte_pairs.token_bytes import marked_ranges
from omniload.source.tokenize import PANIC, Spans, Tokenizer

__all__ = ["TiktokenEncoder", "open_tiktoken"]

_GAP = 2
"""Most that the first special token of an encoding is above the last rank of its file."""


class TiktokenEncoder(Tokenizer):
    """Ranks, the pattern of an encoding, and special tokens.

    Special tokens in the text of a document count as text, as in ``encode_ordinary``. The library releases the
    interpreter lock while it encodes a text, and returns an array instead of a list.
    """

    doubt = ""
    """Why the ranks may not be those of the encoding; empty if nothing shows it."""

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: Mapping[bytes, int],
        special: Mapping[str, int],
        *,
        around: tuple[str | None, str | None] = (None, None),
        path: Path,
    ) -> None:
        """Open an encoding; ``around`` has the special tokens that begin and end a document."""
        self._path, self._special = path, special
        self._library = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special)
        )
        self.vocab_size = self._library.n_vocab
        self.begin_of_document_id, self.end_of_document_id = (
            None if token is None else special[token] for token in around
        )
        sizes = {number: len(token) for token, number in ranks.items()}
        sizes |= {number: len(token.encode()) for token, number in special.items()}
        # Ids may have gaps, so the size of a token is found by search.
        self._ids_T = np.array(sorted(sizes), np.int64)
        self._sizes_T = np.array([sizes[number] for number in self._ids_T.tolist()], np.int64)

    @override
    def encode(self, texts: pa.Array | Sequence[str]) -> Ragged:
        batch = texts.to_pylist() if isinstance(texts, pa.Array) else texts
        ids = self._encoded(batch, special=False)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        begin, end = (
            [] if token is None else [np.array([token], np.uint32)]
            for token in (self.begin_of_document_id, self.end_of_document_id)
        )
        if begin or end:
            # Added between the arrays, which are joined once; adding tokens to each array would copy the ids of its
            # text.
            around = ((*begin, each, *end) if len(each) else (each,) for each in ids)
            ids = list(chain.from_iterable(around))
            lengths += (lengths > 0) * (len(begin) + len(end))
        return _joined(ids, lengths)

    @override
    def encode_spans(
        self, texts: Sequence[str], spans: Spans, *, special: bool = True
    ) -> tuple[Ragged, Ragged]:
        ids = self._encoded(texts, special=special)
        tokens = _joined(ids, np.fromiter(map(len, ids), np.int64, len(ids)))
        bounds: list[int] = []
        for text, each, begin, its in zip(texts, ids, tokens.offsets.tolist(), spans, strict=False):
            if its:
                bounds += (begin + np.array(self._bounds(text, each, its))).tolist()
        mask = marked_ranges(bounds, len(tokens.values_V))
        return tokens, Ragged(values_V=mask, offsets=tokens.offsets)

    @override
    def decode(self, ids_V: NDArray[np.integer[Any]], *, special: bool = False) -> str:
        ids = np.asarray(ids_V)
        known = np.isin(ids, self._ids_T)
        if not special:
            known &= ~np.isin(ids, list(self._special.values()))
        # Unknown ids are removed, because the library raises an error for them, and a model may produce them.
        return self._library.decode(ids[known].tolist())

    @override
    def id_of(self, token: str) -> int | None:
        try:
            return self._library.encode_single_token(token)
        except KeyError:
            return None

    def _encoded(self, texts: Sequence[str], *, special: bool) -> list[NDArray[np.uint32]]:
        allowed = self._library.special_tokens_set if special else set()
        found: list[NDArray[np.uint32]] = []
        with _failures_of(texts, found, self._path):
            # One text at a time, because the library's batches start threads, and a loader has one core.
            for text in texts:
                ids = self._library.encode_to_numpy(
                    # Otherwise the library refuses a document that quotes a special token.
                    text,
                    allowed_special=allowed,
                    disallowed_special=(),
                )
                found.append(ids)
        return found

    def _bounds(
        self, text: str, ids_V: NDArray[np.uint32], spans: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return the first token of each span and the token after its last, one after another.

        The bytes of the tokens of a text are the bytes of the text, in order.
        """
        ends_V = np.cumsum(self._sizes_T[np.searchsorted(self._ids_T, ids_V)])
        bounds: list[int] = []
        at = size = 0
        for first, stop in spans:
            begin = size + len(text[at:first].encode())
            at, size = stop, begin + len(text[first:stop].encode())
            if size > begin:
                held = np.searchsorted(ends_V, [begin, size - 1], side="right")
                bounds += (int(held[0]), int(held[1]) + 1)
        return bounds


@lru_cache(maxsize=8)
def open_tiktoken(
    path: Path,
    _mtime_ns: int,
    *,
    encoding: EncodingName,
    special_tokens: tuple[tuple[str, int], ...] | None,
    begin_of_document: str | None,
    end_of_document: str | None,
) -> TiktokenEncoder:
    """Read a file of ranks once for all sources of a process, because it takes tens of megabytes and can be shared.

    Raises:
        ConfigError: The file has no ranks, two tokens share an id, or a token that begins or ends documents is missing.
    """
    rules = ENCODINGS[encoding]
    special = dict(rules.special if special_tokens is None else special_tokens)
    ranks = parse_ranks(read_tokenizer(path, what=RANKS), path)
    # If a special token and a rank share an id, the library decodes one as the other.
    taken = {rank: token for token, rank in ranks.items()}
    for token, number in special.items():
        if number in taken:
            raise ConfigError(
                f"tokenizer: special token {token!r} has id {number}, which is the rank of {taken[number]!r} in "
                f"{path}; choose the file of ranks that belongs to the encoding {encoding}, or give ids of its own "
                "under special_tokens"
            )
    around = (begin_of_document, end_of_document)
    for key, wanted in zip(("begin_of_document", "end_of_document"), around, strict=True):
        if wanted is not None and wanted not in special:
            raise ConfigError(
                f"tokenizer.{key} is {wanted!r}, no special token of {encoding}; they are "
                f"{named_tokens(list(special), wanted)}"
            )
    opened = TiktokenEncoder(encoding, rules.pattern, ranks, special, path=path, around=around)
    if special_tokens is None:
        opened.doubt = _doubt_of(encoding, ranks, special, path)
    return opened


def _doubt_of(
    encoding: str, ranks: Mapping[bytes, int], special: Mapping[str, int], path: Path
) -> str:
    """Say if ranks end long before the special tokens of the encoding begin; in its own file they do not."""
    last, first = max(ranks.values()), min(special.values())
    if first - last <= _GAP:
        return ""
    return (
        f"{path} has ranks up to {last:,}, and the special tokens of {encoding} begin at {first:,}: it is probably the "
        "file of another encoding, which splits text in another way. Name that encoding, or give special_tokens if it "
        "is right"
    )


def _joined(ids: Sequence[NDArray[np.uint32]], lengths_N: NDArray[np.int64]) -> Ragged:
    values_V = np.concatenate(ids) if ids else np.zeros(0, np.uint32)
    # Ids are below 2^31, so the bits are the same.
    return Ragged(values_V=values_V.view(np.int32), offsets=offsets_of(lengths_N))


@contextmanager
def _failures_of(texts: Sequence[str], done: Sequence[object], path: Path) -> Iterator[None]:
    """Report a text that the library's regular expressions fail on.

    Raises:
        ConfigError: Gives the size of the text, and the remedy.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError) and type(error).__name__ != PANIC:
            raise
        text = texts[len(done)]
        raise ConfigError(
            f"tokenizer.path: {path}: tiktoken fails at a text of {len(text)} characters that begins with "
            f"{text[:40]!r}: {error!s:.200}; runs of white space of a hundred thousand and more do that under o200k: "
            "leave such records out by where, or shorten them by a map"
        ) from error
