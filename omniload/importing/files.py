"""Sources of files whose names or whose users tell what is in them."""

from pathlib import Path

from omniload.base.state import JsonObject
from omniload.importing.fields import Fields
from omniload.importing.imported import Asked, Imported

__all__ = [
    "ids_with_labels",
    "mixed_over_shards",
    "numpy_source",
    "of_token_files",
    "size_of",
    "source_of_path",
    "tokenizer_folder",
]

# By the last suffix, of x.jsonl.zst .zst: what is packed that way is most often JSON lines.
_TYPES = {
    ".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".zst": "jsonl", ".gz": "jsonl", ".arrow": "arrow",
    ".csv": "csv", ".txt": "text", ".tar": "webdataset",
}  # fmt: skip


def of_token_files(asked: Asked) -> Imported:
    """Begin a mix of files of token ids, cut into rows as they lie; of documents where the user says what ends them."""
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
    """Return a source of numpy tokens, of the type ``dtype`` if the user says no other.

    Without a token that ends documents it is to be cut into rows; see ``Imported.sequences``.
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
    """Return a source in an order that is random over all its shards, as tools draw it that index or load them whole.

    By default ours stays near the order of the files.
    """
    asked.report.note(
        "",
        "units of all shards are drawn in a random order and mixed, where the tool shuffles all that it has; "
        "shuffle.block_units of a source: how far",
    )
    return {**source, "shuffle": {"method": "units"}}


def source_of_path(path: str, fields: Fields, asked: Asked, *, key: str = "sources") -> JsonObject:
    """Return a source of the files at a path, of the type that their names tell or the user says."""
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
    """Have a source read token ids with labels beside them, as transformers keeps both; ``type`` is left out there."""
    if source["type"] not in ("parquet", "arrow", "jsonl"):
        fields.refuse(
            "type",
            "is left out, so the files hold input_ids and labels, which are read of parquet, arrow and jsonl: write "
            "them so (datasets.Dataset.to_parquet), or say what they hold",
        )
    source.pop("text", None)
    source |= {"tokens": asked.tokens or "input_ids", "columns": {"labels": "labels"}}


def tokenizer_folder(named: str, key: str, asked: Asked) -> Path | None:
    """Return the folder of a tokenizer that a key names; one of the hub, or with no ``tokenizer.json``, is noted."""
    if not named or (Path(named) / "tokenizer.json").is_file():
        return Path(named) if named else None
    asked.report.note(
        key,
        f"the tokenizer is that of {named!r}, whose tokenizer.json is not here: --tokenizer FOLDER stands for it",
    )
    return None


def size_of(paths: list[str]) -> float:
    """Return the bytes of local files and folders."""
    total = 0
    for path in map(Path, paths):
        try:
            files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
            total += sum(file.stat().st_size for file in files)
        except (OSError, ValueError):  # a text that no path can be is the latter, since Python 3.13
            continue  # check says why it cannot be read
    return float(total)


def _kind_of(path: str) -> str | None:
    """Return the type of the files at a path: by its suffix, or, of a local folder, of the files in it."""
    if kind := _TYPES.get(Path(path).suffix):
        return kind
    folder = Path(path)
    try:
        if folder.is_dir():
            if (folder / "index.json").is_file():
                return "mds"
            found = {_TYPES.get(file.suffix) for file in folder.iterdir()} - {None}
            # Of a folder of two kinds none is guessed.
            return found.pop() if len(found) == 1 else None
    except OSError:
        return None  # check says why it cannot be read
    return None
