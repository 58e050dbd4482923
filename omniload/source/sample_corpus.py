"""A small corpus of very different sources, made from the Python installation at hand.

It needs no network and no data set, holds real text of real length distributions, and
comes out the same every time on one installation. One source is tokenised beforehand.
"""

import errno
import gzip
import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from sysconfig import get_path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.mix.config import BpeTokenizer
from omniload.source.sample_texts import (
    Installation,
    Text,
    functions_and_docstrings,
    texts_of,
)
from omniload.source.tokenize import Tokenizer, open_tokenizer

__all__ = [
    "CORPUS_VERSION",
    "END_OF_DOCUMENT",
    "SampleCorpus",
    "SampleSource",
    "build_sample_corpus",
    "this_installation",
    "train_tokenizer",
]

CORPUS_VERSION = 1
"""Version of the corpus and its marker file."""
END_OF_DOCUMENT = "<eos>"
"""Special token of the corpus' tokenizer."""

_MARKER = "corpus.json"
_TOKENIZER = "tokenizer.json"
_TRAINING_BYTES = 4 << 20
_SHARE_OF = {
    "modules": 0.35,
    "functions": 0.20,
    "docstrings": 0.08,
    "long_modules": 0.25,
    "notices": 0.08,
    "reference": 0.04,
}

Progress = Callable[[str, float], None]
"""Told what is being done and which part of the whole is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """One source of the corpus."""

    name: str
    """Its name, and that of its folder."""
    config: dict[str, str]
    """What a mix file in the corpus' folder says of it."""
    records: int
    """Documents."""
    text_bytes: int
    """Bytes of their text."""
    stored_bytes: int
    """Bytes of its files."""
    tokens: int
    """Tokens, with one end-of-document token a document."""
    lengths_log2: tuple[int, ...]
    """Documents by length: entry ``i`` counts those of ``2**i`` to ``2**(i + 1) - 1`` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCorpus:
    """What ``build_sample_corpus`` made or found."""

    folder: Path
    """Where it lies; the sources' paths start here."""
    sources: tuple[SampleSource, ...]
    """Its sources."""
    vocab_size: int
    """Vocabulary of its tokenizer."""
    built: bool
    """False when it was there already."""

    @property
    def tokenizer(self) -> BpeTokenizer:
        """What a mix file in the corpus' folder says of the tokenizer."""
        return BpeTokenizer(type="bpe", path=_TOKENIZER, end_of_document=END_OF_DOCUMENT)


def this_installation() -> Installation:
    """Return the Python that runs this."""
    return Installation(stdlib=Path(get_path("stdlib")), site_packages=Path(get_path("purelib")))


def build_sample_corpus(
    folder: str | Path,
    *,
    size: int = 12 << 20,
    vocab_size: int = 8192,
    installation: Installation | None = None,
    progress: Progress | None = None,
) -> SampleCorpus:
    """Build the corpus in ``folder``, or return the one that is there.

    The folder appears whole or not at all.

    Args:
        folder: A folder that does not exist, is empty, or holds a corpus.
        size: About as many bytes of text, at most; a source may hold less than its share.
        vocab_size: Most tokens of the byte-level BPE that is trained on the corpus.
        installation: Where texts come from; the running Python by default.
        progress: Told how far it is.

    Raises:
        ConfigError: The folder holds something else, or a corpus of another version or size.
    """
    target = Path(folder).absolute()
    there = _existing(target, size)
    if there is not None:
        return there
    tell = progress or (lambda _stage, _part: None)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        texts = _gather(installation or this_installation(), size, tell)
        corpus = _write(unfinished, texts, vocab_size, tell)
        (unfinished / _MARKER).write_text(_marker(corpus, size), encoding="utf-8")
        there = _put_in_place(unfinished, target, size)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    tell("done", 1.0)
    return there or replace(corpus, folder=target)


def _put_in_place(unfinished: Path, target: Path, size: int) -> SampleCorpus | None:
    """Rename the finished folder; return the corpus that somebody else put there meanwhile."""
    try:
        os.replace(unfinished, target)  # noqa: PTH105 -- takes the place of an empty folder in one step
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return _existing(target, size)
    return None


def _existing(target: Path, size: int) -> SampleCorpus | None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / _MARKER).is_file():
        raise ConfigError(f"{target} is not empty and holds no {_MARKER}; choose another folder")
    marker = _read_marker(target / _MARKER)
    found = {key: marker.get(key) for key in ("version", "size")}
    wanted = {"version": CORPUS_VERSION, "size": size}
    if found != wanted:
        raise ConfigError(
            f"{target} holds a corpus of {found}, not {wanted}; choose another folder"
        )
    try:
        sources = tuple(
            SampleSource(**(source | {"lengths_log2": tuple(source["lengths_log2"])}))
            for source in marker["sources"]
        )
        vocab_size = int(marker["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{target / _MARKER}: does not say what the corpus holds ({error!r:.80}); remove the folder, or choose "
            "another"
        ) from error
    return SampleCorpus(folder=target, sources=sources, vocab_size=vocab_size, built=False)


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path}: is not JSON: {error}; expected the marker of a sample corpus; choose another folder"
        ) from error
    return marker if isinstance(marker, dict) else {}


def _marker(corpus: SampleCorpus, size: int) -> str:
    sources = [asdict(source) for source in corpus.sources]
    content = {
        "version": CORPUS_VERSION,
        "size": size,
        "vocab_size": corpus.vocab_size,
        "sources": sources,
    }
    return json.dumps(content, indent=1)


def _gather(installation: Installation, size: int, tell: Progress) -> dict[str, list[Text]]:
    budget = {name: int(size * share) for name, share in _SHARE_OF.items()}
    tell("reading modules", 0.0)
    modules = installation.modules()
    texts = {"modules": texts_of(modules, budget["modules"])}
    tell("cutting functions", 0.1)
    # From the far end: a function is seldom also in a module of the first source.
    texts["functions"], texts["docstrings"] = functions_and_docstrings(
        modules[::-1],
        function_bytes=budget["functions"],
        docstring_bytes=budget["docstrings"],
    )
    tell("reading long modules, notices, reference", 0.3)
    texts["long_modules"] = texts_of(installation.long_modules(), budget["long_modules"])
    texts["notices"] = texts_of(installation.notices(), budget["notices"])
    texts["reference"] = _up_to(installation.reference(), budget["reference"])
    return {name: found for name, found in texts.items() if found}


def _up_to(texts: Sequence[Text], budget_bytes: int) -> list[Text]:
    ends = np.cumsum([0, *(len(text.text.encode()) for text in texts)])
    return [
        text for text, before in zip(texts, ends.tolist(), strict=False) if before < budget_bytes
    ]


def _write(
    folder: Path, texts: dict[str, list[Text]], vocab_size: int, tell: Progress
) -> SampleCorpus:
    tell("training the tokenizer", 0.4)
    train_tokenizer(texts, vocab_size).save(str(folder / _TOKENIZER))
    tokenizer = open_tokenizer(
        BpeTokenizer(type="bpe", path=_TOKENIZER, end_of_document=END_OF_DOCUMENT), folder
    )
    sources = []
    for i, (name, found) in enumerate(texts.items()):
        tell(f"writing {name}", 0.5 + 0.5 * i / len(texts))
        sources.append(_write_source(folder, name, found, tokenizer))
    return SampleCorpus(
        folder=folder, sources=tuple(sources), vocab_size=tokenizer.vocab_size, built=True
    )


def train_tokenizer(texts: dict[str, list[Text]], vocab_size: int) -> Library:
    """Train on an even part of every source, so that no one kind of text decides the merges."""
    total = sum(len(text.text) for found in texts.values() for text in found)
    every = -(-total // _TRAINING_BYTES)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        (text.text for found in texts.values() for text in found[::every]),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return library


def _write_source(folder: Path, name: str, texts: list[Text], tokenizer: Tokenizer) -> SampleSource:
    place = folder / name
    place.mkdir()
    tokens = tokenizer.encode([text.text for text in texts])
    config: dict[str, str] = {}
    match name:
        case "modules":
            _write_parquet(place, pa.table({"text": [text.text for text in texts]}), 4, 32)
            config = {"type": "parquet", "path": f"{name}/*.parquet", "text": "text"}
        case "long_modules":
            _write_parquet(place, _token_table(tokens), 2, 8)
            config = {"type": "parquet", "path": f"{name}/*.parquet", "tokens": "tokens"}
        case "functions":
            _write_lines(place, texts, ".zst", 3)
            config = {"type": "jsonl", "path": f"{name}/*.jsonl.zst"}
        case "docstrings":
            _write_lines(place, texts, "", 2)
            config = {"type": "jsonl", "path": f"{name}/*.jsonl"}
        case "reference":
            _write_lines(place, texts, ".gz", 1)
            config = {"type": "jsonl", "path": f"{name}/*.jsonl.gz"}
        case _:
            for i, text in enumerate(texts):
                (place / f"{i:05}.txt").write_bytes(text.text.encode())
            config = {"type": "text", "path": f"{name}/*.txt"}
    lengths = tokens.lengths_N
    return SampleSource(
        name=name,
        config=config,
        records=len(texts),
        text_bytes=sum(len(text.text.encode()) for text in texts),
        stored_bytes=sum(path.stat().st_size for path in place.iterdir()),
        tokens=int(lengths.sum()),
        lengths_log2=tuple(np.bincount(np.log2(np.maximum(lengths, 1)).astype(np.int64)).tolist()),
    )


def _token_table(tokens: Ragged) -> pa.Table:
    lists = pa.ListArray.from_arrays(tokens.offsets.astype(np.int32), pa.array(tokens.values_V))
    return pa.table({"tokens": lists})


def _shards(count: int, wanted: int) -> list[tuple[int, int]]:
    cuts = np.linspace(0, count, min(wanted, count) + 1).astype(int).tolist()
    return list(pairwise(cuts))


def _write_parquet(place: Path, table: pa.Table, shards: int, group_rows: int) -> None:
    for i, (start, stop) in enumerate(_shards(len(table), shards)):
        pq.write_table(
            table.slice(start, stop - start),
            place / f"part-{i:03}.parquet",
            compression="zstd",
            row_group_size=group_rows,
        )


def _write_lines(place: Path, texts: list[Text], suffix: str, shards: int) -> None:
    for i, (start, stop) in enumerate(_shards(len(texts), shards)):
        data = b"".join(
            orjson.dumps({"name": text.name, "text": text.text}) + b"\n"
            for text in texts[start:stop]
        )
        if suffix == ".zst":
            data = zstandard.compress(data)
        elif suffix == ".gz":
            # Without the time: the corpus is the same, byte for byte, whenever it is built.
            data = gzip.compress(data, mtime=0)
        (place / f"part-{i:03}.jsonl{suffix}").write_bytes(data)
