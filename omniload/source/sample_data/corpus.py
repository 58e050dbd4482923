"""A small corpus of very different sources, made from the local Python installation.

It needs no network and no data set, has real text with real distributions of lengths, and is the same each time on one
installation. One source is tokenised in advance.

The texts are modules, functions, docstrings, notices and the language reference, which every installation has. Files
are visited in the order of a digest of their paths, so that even a small budget takes some from everywhere.
"""

import ast
import gzip
import hashlib
import os
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from sysconfig import get_path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from omniload.base.ragged import Ragged
from omniload.mix.config import BpeTokenizer
from omniload.source.sample_data.kept import (
    END_OF_DOCUMENT,
    MARKER,
    TOKENIZER,
    SampleCorpus,
    SampleSource,
    existing,
    marker_of,
    put_in_place,
    unfinished_beside,
)
from omniload.source.tokenize import Tokenizer, open_tokenizer

__all__ = [
    "Installation",
    "SampleCorpus",
    "Text",
    "build_sample_corpus",
    "functions_and_docstrings",
    "texts_of",
    "this_installation",
    "train_tokenizer",
]

_TRAINING_BYTES = 4 << 20
_SHARE_OF = {
    "modules": 0.35,
    "functions": 0.20,
    "docstrings": 0.08,
    "long_modules": 0.25,
    "notices": 0.08,
    "reference": 0.04,
}
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_OTHER_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_LONG_BYTES = 32 << 10
_SHORTEST_FUNCTION_LINES = 3
_SHORTEST_DOCSTRING = 40

Progress = Callable[[str, float], None]
"""Receives the present activity and the completed share of the whole, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One document, and its origin."""

    name: str
    """Path or qualified name."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A Python installation that texts are taken from."""

    stdlib: Path
    """Folder of the standard library."""
    site_packages: Path
    """Folder of installed packages."""

    def modules(self) -> list[Path]:
        """Return the modules of the standard library without its tests, in digest order."""
        return _by_digest(_walk(self.stdlib, _OTHER_FOLDERS | _TEST_FOLDERS), self.stdlib)

    def long_modules(self) -> list[Path]:
        """Return long modules, in digest order: the library's tests or, if they are missing, modules of packages.

        Some systems package the tests separately from the library.
        """
        places = (
            _walk(self.stdlib / "test", _OTHER_FOLDERS),
            _walk(self.site_packages, {"__pycache__"}),
            self.modules(),
        )
        long = ([path for path in place if _size(path) >= _LONG_BYTES] for place in places)
        return _by_digest(next(filter(None, long), []), self.stdlib)

    def notices(self) -> list[Path]:
        """Return metadata and licences of packages, and the library's own licence."""
        found = [self.stdlib / "LICENSE.txt"]
        for folder in sorted(self.site_packages.glob("*.dist-info")):
            found += [folder / "METADATA", *sorted(folder.rglob("LICEN[CS]E*"))]
        return _by_digest([path for path in found if path.is_file()], self.site_packages.parent)

    def reference(self) -> list[Text]:
        """Return the chapters of the language reference that ``help()`` shows."""
        path = self.stdlib / "pydoc_data" / "topics.py"
        if not path.is_file():
            return []
        for node in _parsed(_read(path)).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                topics: dict[str, str] = ast.literal_eval(node.value)
                return [Text(name=name, text=text) for name, text in sorted(topics.items())]
        return []


def this_installation() -> Installation:
    """Return the installation of the running Python."""
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
        ConfigError: The folder holds something else, or a corpus of another version or size, or is a mount point.
    """
    target = Path(folder).absolute()
    there = existing(target, size)
    if there is not None:
        return there
    tell = progress or (lambda _stage, _part: None)
    unfinished = unfinished_beside(target)
    try:
        texts = _gather(installation or this_installation(), size, tell)
        corpus = _write(unfinished, texts, vocab_size, tell)
        (unfinished / MARKER).write_text(marker_of(corpus, size), encoding="utf-8")
        there = put_in_place(unfinished, target, size)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    tell("done", 1.0)
    return there or replace(corpus, folder=target)


def _gather(installation: Installation, size: int, tell: Progress) -> dict[str, list[Text]]:
    budget = {name: int(size * share) for name, share in _SHARE_OF.items()}
    tell("reading modules", 0.0)
    modules = installation.modules()
    texts = {"modules": texts_of(modules, budget["modules"])}
    tell("cutting functions", 0.1)
    # From the far end, so that few functions are also in modules of the first source.
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


def _up_to(texts: Iterable[Text], budget_bytes: int) -> list[Text]:
    """Take texts up to a number of bytes, which the last text may exceed."""
    taken: list[Text] = []
    for text in texts:
        if budget_bytes <= 0:
            break
        taken.append(text)
        budget_bytes -= len(text.text.encode())
    return taken


def _write(
    folder: Path, texts: dict[str, list[Text]], vocab_size: int, tell: Progress
) -> SampleCorpus:
    tell("training the tokenizer", 0.4)
    train_tokenizer(texts, vocab_size).save(str(folder / TOKENIZER))
    tokenizer = open_tokenizer(
        BpeTokenizer(type="bpe", path=TOKENIZER, end_of_document=END_OF_DOCUMENT), folder
    )
    sources = []
    for i, (name, found) in enumerate(texts.items()):
        tell(f"writing {name}", 0.5 + 0.5 * i / len(texts))
        sources.append(_write_source(folder, name, found, tokenizer))
    return SampleCorpus(
        folder=folder, sources=tuple(sources), vocab_size=tokenizer.vocab_size, built=True
    )


def train_tokenizer(texts: dict[str, list[Text]], vocab_size: int) -> Library:
    """Train on an equal share of every source, so that no single kind of text decides the merges."""
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
            # Every byte, so that any text has tokens; sorted, because the order of a set differs between processes.
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
            # Without the time, so that the corpus is the same, byte for byte, whenever it is built.
            data = gzip.compress(data, mtime=0)
        (place / f"part-{i:03}.jsonl{suffix}").write_bytes(data)


def texts_of(paths: list[Path], budget_bytes: int) -> list[Text]:
    """Read files up to ``budget_bytes``; files that are not UTF-8 are skipped."""
    held = ((path, _read(path)) for path in paths)
    return _up_to(
        (Text(name=path.name, text=text) for path, text in held if text.strip()), budget_bytes
    )


def functions_and_docstrings(
    paths: list[Path], *, function_bytes: int, docstring_bytes: int
) -> tuple[list[Text], list[Text]]:
    """Extract functions and docstrings from modules until there are enough bytes of both."""
    functions: list[Text] = []
    docstrings: list[Text] = []
    for path in paths:
        if function_bytes <= 0 and docstring_bytes <= 0:
            break
        source = _read(path)
        tree = _parsed(source)
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if function_bytes > 0 and (cut := _function(node, lines)):
                functions.append(Text(name=f"{path.stem}.{getattr(node, 'name', '')}", text=cut))
                function_bytes -= len(cut.encode())
            if docstring_bytes > 0 and (said := _docstring(node)):
                docstrings.append(Text(name=f"{path.stem}.{getattr(node, 'name', '')}", text=said))
                docstring_bytes -= len(said.encode())
    return functions, docstrings


def _function(node: ast.AST, lines: list[str]) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
        return ""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if node.end_lineno - first + 1 < _SHORTEST_FUNCTION_LINES:
        return ""
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))


def _docstring(node: ast.AST) -> str:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    said = ast.get_docstring(node) or ""
    # An escape for a lone surrogate makes a string that no format can store.
    writable = said.encode(errors="ignore").decode() == said
    return said if writable and len(said) >= _SHORTEST_DOCSTRING else ""


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have escapes that newer Pythons warn of
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return ast.Module(body=[], type_ignores=[])


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    # Tokenizers and viewers fail at NUL, which a few test modules contain.
    return "" if "\0" in text else text


def _walk(folder: Path, left_out: set[str]) -> Iterator[Path]:
    """Yield the Python files below ``folder``, in order."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(here, name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _by_digest(paths: list[Path] | Iterator[Path], base: Path) -> list[Path]:
    def key(path: Path) -> bytes:
        return hashlib.blake2b(os.path.relpath(path, base).encode(), digest_size=8).digest()

    return sorted(paths, key=key)
