"""A stored sample corpus: its content, and the marker in its folder that describes it."""

import errno
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omniload.base.errors import ConfigError
from omniload.mix.config import BpeTokenizer

__all__ = [
    "CORPUS_VERSION",
    "END_OF_DOCUMENT",
    "MARKER",
    "TOKENIZER",
    "SampleCorpus",
    "SampleSource",
    "existing",
    "marker_of",
    "put_in_place",
    "unfinished_beside",
]

CORPUS_VERSION = 1
"""Version of the corpus and its marker file."""
END_OF_DOCUMENT = "<eos>"
"""Special token of the corpus' tokenizer."""
MARKER = "corpus.json"
"""File that describes the content of a corpus; it is written last."""
TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """One source of the corpus."""

    name: str
    """Name of the source and of its folder."""
    config: dict[str, str]
    """Entry of the source for a mix file in the corpus' folder."""
    records: int
    """Number of documents."""
    text_bytes: int
    """Bytes of their text."""
    stored_bytes: int
    """Bytes of the source's files."""
    tokens: int
    """Number of tokens, including one end-of-document token per document."""
    lengths_log2: tuple[int, ...]
    """Documents by length: entry ``i`` counts those of ``2**i`` to ``2**(i + 1) - 1`` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCorpus:
    """The corpus that ``build_sample_corpus`` made or found."""

    folder: Path
    """Folder of the corpus, which the sources' paths are relative to."""
    sources: tuple[SampleSource, ...]
    """Sources of the corpus."""
    vocab_size: int
    """Vocabulary size of its tokenizer."""
    built: bool
    """Whether the corpus was built by this call, not found."""

    @property
    def tokenizer(self) -> BpeTokenizer:
        """Entry of the tokenizer for a mix file in the corpus' folder."""
        return BpeTokenizer(type="bpe", path=TOKENIZER, end_of_document=END_OF_DOCUMENT)


def existing(target: Path, size: int) -> SampleCorpus | None:
    """Return the corpus in a folder; ``None`` if the folder is missing or empty.

    Raises:
        ConfigError: The folder has other files, or a corpus of another version or size.
    """
    # An empty folder was made for a corpus.
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / MARKER).is_file():
        raise ConfigError(f"{target} is not empty and holds no {MARKER}; choose another folder")
    marker = _read_marker(target / MARKER)
    found = {key: marker.get(key) for key in ("version", "size")}
    wanted = {"version": CORPUS_VERSION, "size": size}
    if found != wanted:
        raise ConfigError(
            f"{target} holds a corpus of {found}, not {wanted}; choose another folder"
        )
    try:
        sources = tuple(
            # A missing or unknown key raises ``TypeError``.
            SampleSource(**(source | {"lengths_log2": tuple(source["lengths_log2"])}))
            for source in marker["sources"]
        )
        vocab_size = int(marker["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{target / MARKER}: does not say what the corpus holds ({error!r:.80}); remove the folder, or choose "
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


def marker_of(corpus: SampleCorpus, size: int) -> str:
    """Return the content of the marker of a corpus."""
    sources = [asdict(source) for source in corpus.sources]
    content = {
        "version": CORPUS_VERSION,
        "size": size,
        "vocab_size": corpus.vocab_size,
        "sources": sources,
    }
    return json.dumps(content, indent=1)


def unfinished_beside(target: Path) -> Path:
    """Make and return an empty folder that can replace ``target``, which is empty or missing.

    Raises:
        ConfigError: No folder can replace it, because it is a mount point, a link, or another user's folder.
    """
    # Next to the target, because a folder of another disk could not be renamed into place.
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.mkdir(parents=True)
    if not target.is_dir():
        return unfinished
    try:
        # Tried before anything is built, because a mount of the same file system looks like any other folder.
        os.replace(unfinished, target)  # noqa: PTH105 -- as at the end
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return (
                unfinished  # somebody else has filled it meanwhile, which is looked at in the end
            )
        unfinished.rmdir()
        is_mount = error.errno in (errno.EBUSY, errno.EXDEV)
        raise ConfigError(
            f"{target}: no other folder can take its place ({'a mount point' if is_mount else error.strerror}); "
            f"name one that is not there yet, such as {target / 'corpus'}"
        ) from error
    unfinished.mkdir()
    return unfinished


def put_in_place(unfinished: Path, target: Path, size: int) -> SampleCorpus | None:
    """Rename the finished folder into place; return the corpus if another process has put one there meanwhile."""
    try:
        os.replace(unfinished, target)  # noqa: PTH105 -- replaces an empty folder in one step
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another process was faster; its corpus is the same, or is reported as something else.
        return existing(target, size)
    return None
