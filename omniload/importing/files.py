"""Sources of files whose content is known from their names or from the user."""

import json
from pathlib import Path

from omniload.base.errors import OmniloadError
from omniload.base.reading import read_small_file
from omniload.base.state import JsonObject
from omniload.importing.fields import Fields
from omniload.importing.imported import Asked, Imported, holds_text
from omniload.mix.config import BpeTokenizer
from omniload.source.tokenize import open_tokenizer

__all__ = [
    "ids_with_labels",
    "mixed_over_shards",
    "numpy_source",
    "of_token_files",
    "size_of",
    "source_of_path",
    "tokenizer_folder",
    "tokenizer_of_texts",
]

_MOST_SETTINGS = 16 << 20

# By the last suffix, which is .zst for x.jsonl.zst: compressed files mostly contain JSON lines.
_TYPES = {
    ".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".zst": "jsonl", ".gz": "jsonl", ".arrow": "arrow",
    ".csv": "csv", ".txt": "text", ".tar": "webdataset",
}  # fmt: skip


def of_token_files(asked: Asked) -> Imported:
    """Begin a mix of files of token ids, cut into rows as stored, or of documents if the user gives their end token."""
    if asked.documents == "apart":
        if asked.end_of_document is None:
            asked.report.refuse(
                "",
                "files of token ids say nothing of their documents, which are to stay apart; give --end-of-document "
                "ID, the token that ends each",
            )
        return Imported(base=Path.cwd(), sequences=True, documents="apart")
    if asked.end_of_document is not None and asked.documents is None:
        return Imported(base=Path.cwd(), method="concat_and_split")
    asked.report.note(
        "",
        "rows are cut from each file as it lies, across documents, as there; for documents of their own give "
        "--end-of-document ID, and --documents apart with it for such rows within which attention stays in documents",
    )
    return Imported(base=Path.cwd(), sequences=True)


def numpy_source(paths: list[str], asked: Asked, *, dtype: str | None = None) -> JsonObject:
    """Return a source of numpy tokens, of the type ``dtype`` unless the user gives another.

    Without a token that ends documents, the source is to be cut into rows; see ``Imported.sequences``.
    """
    source: JsonObject = {"type": "numpy", "path": [*paths] if len(paths) != 1 else paths[0]}
    if (known := asked.dtype or dtype) is not None:
        source["dtype"] = known
    elif any(not path.endswith(".npy") for path in paths):
        asked.report.note(
            "",
            "files other than .npy do not say the type of their ids: give --dtype",
        )
    else:
        asked.report.note(
            "",
            "files of OLMo are flat although they end in .npy: if check says so, give --dtype uint32 (or uint16)",
        )
    if asked.end_of_document is not None and asked.documents != "joined":
        source["end_of_document"] = asked.end_of_document
    return mixed_over_shards(source, asked)


def mixed_over_shards(source: JsonObject, asked: Asked) -> JsonObject:
    """Return a source in an order that is random over all its shards, like that of tools that index or load them whole.

    By default, a source here stays near the order of the files.
    """
    asked.report.note(
        "",
        "units of all shards are drawn in a random order and mixed, where the tool shuffles all that it has; "
        "shuffle.block_units of a source: how far",
    )
    return {**source, "shuffle": {"method": "units"}}


def source_of_path(path: str, fields: Fields, asked: Asked, *, key: str = "sources") -> JsonObject:
    """Return a source of the files at a path, of the type given by their names or by the user."""
    kind = asked.source_type or _kind_of(path)
    if kind is None:
        fields.refuse(
            key, f"{path!r}: its files do not tell what they hold; give --type parquet, jsonl, ..."
        )
        kind = "jsonl"
    source: JsonObject = {"type": kind, "path": path}
    if asked.tokens is not None:
        source["tokens"] = asked.tokens
    elif asked.text is not None and kind != "text":
        source["text"] = asked.text
    elif kind in ("parquet", "arrow"):
        source["text"] = "text"
        asked.report.note(
            "", "the column of text is taken to be text; give --text or --tokens NAME for another"
        )
    return source


def ids_with_labels(source: JsonObject, fields: Fields, asked: Asked) -> None:
    """Make a source read token ids and labels, as transformers stores both, for datasets without a ``type``."""
    if source["type"] not in ("parquet", "arrow", "jsonl"):
        fields.refuse(
            "type",
            "is left out, so the files hold input_ids and labels, which are read of parquet, arrow and jsonl: write "
            "them so (datasets.Dataset.to_parquet), or say what they hold",
        )
    source.pop("text", None)
    source |= {"tokens": asked.tokens or "input_ids", "columns": {"labels": "labels"}}


def tokenizer_folder(named: str, key: str, asked: Asked) -> Path | None:
    """Return the folder of the tokenizer that a key names; note a name without a ``tokenizer.json`` here instead."""
    if not named or (Path(named) / "tokenizer.json").is_file():
        return Path(named) if named else None
    asked.report.note(
        key,
        f"the tokenizer is that of {named!r}, whose tokenizer.json is not here: --tokenizer FOLDER stands for it",
    )
    return None


def tokenizer_of_texts(path: str, beside: Path, found: Imported, asked: Asked) -> JsonObject:
    """Return the section of a tokenizer, with the tool's tokens around texts; note what is unknown.

    Args:
        path: Path of the tokenizer, as written in the mix file.
        beside: Folder of the mix file.
        found: The result of reading the tool's file.
        asked: Receives the notes.
    """
    section: JsonObject = {"type": "bpe", "path": path}
    texts = [n for n, s in found.sources.items() if holds_text(s) and "transforms" not in s]
    if not texts:
        return section
    if found.around is None:
        asked.report.note(
            "tokenizer",
            "nothing is put around texts: where your code has a token before or behind each, name it under "
            "begin_of_document or end_of_document",
        )
        return section
    begin, end = "", ""
    if found.around != "eos":
        try:
            opened = open_tokenizer(BpeTokenizer(type="bpe", path=path), beside)
            begin, end = getattr(opened, "puts_around", ("", ""))
        except (OmniloadError, OSError, ValueError) as error:
            asked.report.note(
                "tokenizer",
                f"cannot be read here ({error!s:.200}): the tokens that it puts around a text by itself, as there, are "
                "to be named under begin_of_document and end_of_document",
            )
    if found.around != "special":
        end = found.end or _end_token(beside / path)
        if not end:
            asked.report.note(
                "tokenizer",
                "each text ends with its eos_token there, which no tokenizer_config.json beside it names: name it "
                "under end_of_document",
            )
    named = {"begin_of_document": begin, "end_of_document": end}
    return section | {key: token for key, token in named.items() if token}


def _end_token(tokenizer: Path) -> str:
    """Return the ``eos_token`` of the settings next to a tokenizer; empty if there are no readable settings."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        settings = folder / "tokenizer_config.json"
        content = json.loads(read_small_file(settings, most_bytes=_MOST_SETTINGS, what="settings"))
    except (OmniloadError, OSError, ValueError, RecursionError):
        return ""
    match content:
        case {"eos_token": str(token)} | {"eos_token": {"content": str(token)}}:
            return token
        case _:
            return ""


def size_of(paths: list[str]) -> float:
    """Return the total size of local files and folders in bytes."""
    total = 0
    for path in map(Path, paths):
        try:
            files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
            total += sum(file.stat().st_size for file in files)
        except (OSError, ValueError):  # the latter, since 3.13, for a text that no path can be
            continue  # ``omniload mix check`` reports why it cannot be read
    return float(total)


def _kind_of(path: str) -> str | None:
    """Return the type of the files at a path, by its suffix or, for a local folder, by the files in it."""
    if kind := _TYPES.get(Path(path).suffix):
        return kind
    folder = Path(path)
    try:
        if folder.is_dir():
            if (folder / "index.json").is_file():
                return "mds"
            found = {_TYPES.get(file.suffix) for file in folder.iterdir()} - {None}
            # A folder with two kinds of files has no obvious type.
            return found.pop() if len(found) == 1 else None
    except OSError:
        return None  # ``omniload mix check`` reports why it cannot be read
    return None
