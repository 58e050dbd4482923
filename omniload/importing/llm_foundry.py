"""llm-foundry's training file: named streams of MDS folders, each with a share of the samples.

::

    max_seq_len: 2048
    global_train_batch_size: 256
    train_loader:
      name: text
      dataset:
        streams:
          web: {local: data/web, split: train, proportion: 0.8}
          code: {local: data/code, split: train, proportion: 0.2}

A stream has one of ``proportion``, ``repeat`` (its epochs in one epoch of the whole) and ``choose`` (samples). Without
any of them, its size counts. If there are several streams, sizes and epochs of a stream need its number of samples,
which ``index.json`` of its folder gives. A state, which is one of Mosaic Streaming, needs these numbers too.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omniload.base.errors import OmniloadError
from omniload.base.reading import read_small_file
from omniload.base.state import JsonObject, shown
from omniload.importing.documents import interpolated
from omniload.importing.fields import Fields, is_count
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.mosaic_order import ALGORITHMS, MOST_SAMPLES, OrderSettings
from omniload.importing.mosaic_states import INSTEAD, Stream, drawn_of, read_mosaic_state
from omniload.importing.tools import Tool, has_key
from omniload.source.files import ShardFile
from omniload.source.parsing.mds_shards import shards_in

__all__ = ["TOOL", "order_settings"]

Value = TypeVar("Value")
_MOST_INDEX_BYTES = 256 << 20
_LARGEST_BLOCK = 1 << 40
_SPEED = "a matter of speed"
_OF_DATASETS = {
    "shuffle_algo": "sources are shuffled by units of all shards; their shuffle sets how far",
    "shuffle_block_size": "shuffle.block_units sets it",
    "num_canonical_nodes": "the order depends on no number of nodes",
    "predownload": _SPEED,
    "cache_limit": _SPEED,
    "download_retry": _SPEED,
    "download_timeout": _SPEED,
    "keep_zip": _SPEED,
    "partition_algo": "batches are dealt by cost",
    "batching_method": "a step always holds the whole mix",
    "sampling_method": "weights hold at every step",
    "sampling_granularity": "weights hold at every step",
    "replication": "cp peers are served by the mesh",
    "allow_unsafe_types": "nothing is unpickled",
    "validate_hash": "contents are checked on resume",
    "eos_token_id": "a sample is one document here, whatever was joined in it",
    "bos_token_id": "a sample is one document here, whatever was joined in it",
    "max_seq_len": _SPEED,
    "batch_size": "--batch is over all ranks",
    "epoch_size": "train for so many steps",
}
"""Keys of a dataset that change no sample, and the reasons."""
_OF_LOADERS = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "timeout")


def _read(document: object, asked: Asked) -> Imported:
    """Return the mix of the training file with the content ``document``."""
    # Each sample, of text or of tokens, is a row: longer samples are cut off at max_seq_len, shorter ones are padded.
    found = Imported(
        base=Path.cwd(), level="sample", method="none", overlong="truncate", around="special"
    )
    asked.report.note(
        "",
        "each sample has a row of its own, cut at max_seq_len or padded, as there; pack.method best_fit fills rows",
    )
    # llm-foundry's own files give max_seq_len once and refer to it: ${max_seq_len}, ${variables.max_seq_len}.
    content = interpolated(document)
    top = Fields(content if isinstance(content, dict) else {}, "", asked.report)
    loader = top.inner("train_loader")
    kind = loader.need("name", str, "text")
    if kind != "text":
        loader.refuse(
            "name", f"is {kind!r}; text is known: convert the samples of other loaders first"
        )
    dataset = loader.inner("dataset")
    row = top.take("max_seq_len", int, 0)
    found.row_tokens = dataset.take("max_seq_len", int, 0) or row or None
    rows = top.take("global_train_batch_size", int, 0)
    if found.row_tokens and rows > 0:
        found.step_tokens = rows * found.row_tokens
    # Read as any type: "auto" is determined on the GPU there, and the mix then gets parts of its default size.
    micro = top.take("device_train_microbatch_size", object, None)
    if found.row_tokens and isinstance(micro, int) and not isinstance(micro, bool):
        found.micro_tokens = micro * found.row_tokens
    # Streams come before the state, because a state is a place in these streams, in their number and order.
    streams = _read_streams(dataset, asked, found)
    if asked.state is not None:
        state = read_mosaic_state(asked.state)
        found.drawn = drawn_of(state, order_settings(dataset), streams, asked.report)
    seed = dataset.take("shuffle_seed", int, top.take("seed", int, 0))
    found.seed = max(seed, 0)
    dataset.note(_OF_DATASETS)
    _read_order(dataset, asked, found)
    dataset.end()
    loader.note(
        {
            "drop_last": "steps are whole; the end is a matter of mix.stop",
            **dict.fromkeys(_OF_LOADERS, _SPEED),
        }
    )
    loader.end()
    tokenizer = top.inner("tokenizer")
    if name := tokenizer.take("name", str, ""):
        asked.report.note(
            "tokenizer",
            f"{name!r} is of the hub: --tokenizer FOLDER stands for it; token ids need none",
        )
    if top.peek("eval_loader") is not None:
        top.take("eval_loader", object, None)
        asked.report.note("eval_loader", "is not read: declare it as an evaluation mix")
    top.take("variables", object, None)  # only other keys refer to it
    top.note_unread()
    return found


def order_settings(dataset: Fields) -> OrderSettings:
    """Read a dataset's settings of its order, for a state; the keys stay unread.

    A faulty key refuses the import.
    """
    shuffled = _peeked(dataset, "shuffle", bool, default=False)
    algorithm = _peeked(dataset, "shuffle_algo", str, "py1e")
    block_size = _peeked(dataset, "shuffle_block_size", int, 0)
    granularity = _peeked(dataset, "sampling_granularity", int, 1)
    epoch_size = _peeked(dataset, "epoch_size", int, 0)
    sampling = _peeked(dataset, "sampling_method", str, "balanced")
    batching = _peeked(dataset, "batching_method", str, "random")
    if algorithm not in ALGORITHMS or algorithm == "none":
        known = ", ".join(sorted(ALGORITHMS.keys() - {"none"}))
        dataset.refuse("shuffle_algo", f"is {algorithm!r:.60}; of {known} the order is known")
    if batching != "random":
        dataset.refuse(
            "batching_method",
            f"is {batching!r:.60}: its order is not known, random's is; {INSTEAD}",
        )
    if sampling not in ("balanced", "fixed"):
        dataset.refuse("sampling_method", f"is {sampling!r:.60}; balanced and fixed are known")
    ranges = {
        "shuffle_block_size": (block_size or 4, 4, _LARGEST_BLOCK),
        "sampling_granularity": (granularity, 1, MOST_SAMPLES),
        "epoch_size": (epoch_size or 1, 1, MOST_SAMPLES),
    }
    for key, (value, least, most) in ranges.items():
        if not least <= value <= most:
            dataset.refuse(key, f"is {value}; it is from {least} to {most}")
    return OrderSettings(
        algorithm=algorithm if shuffled else "none",
        block_size=block_size or None,
        balanced=sampling == "balanced",
        granularity=granularity,
        epoch_size=epoch_size or None,
    )


def _peeked(dataset: Fields, key: str, kind: type[Value], default: Value) -> Value:
    value = dataset.peek(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        dataset.refuse(
            key, f"{shown(value)} is no {kind.__name__}; what --state is of cannot be told"
        )
        return default
    return value


def _read_order(dataset: Fields, asked: Asked, found: Imported) -> None:
    """Shuffle the sources, or leave them as stored, which is the default of llm-foundry and of Mosaic Streaming."""
    where, given = dataset.at("shuffle"), dataset.peek("shuffle")
    if dataset.take("shuffle", bool, False):
        # As wide as Mosaic's shuffle, which mixes shards. By default, a source here stays near the order of the files.
        for source in found.sources.values():
            source["shuffle"] = {"method": "units"}
        said = "true is read as units of all shards in a random order, records mixed; shuffle.block_units: how far"
        asked.report.note(where, said)
        return
    for source in found.sources.values():
        source["shuffle"] = {"method": "none"}
    if given is None:
        said = "is missing and read as false, as llm-foundry does: records come as stored; write shuffle: true if not"
        asked.report.note(where, said)
    elif given is False:
        asked.report.note(where, "false is read as records in the order that they are stored in")


def _read_streams(dataset: Fields, asked: Asked, found: Imported) -> list[Stream]:
    """Read the streams, or the dataset itself as the only one; return them if a state needs them."""
    encoding = dataset.take("token_encoding_type", str, "int64")
    streams = dataset.inner("streams")
    named = [(name, streams.inner(name)) for name in streams.keys]
    single = [] if named else [(asked.file.stem, dataset)]
    shares: dict[str, _Share] = {}
    listed: list[Stream] = []
    for wanted, stream in named or single:
        name = new_name(wanted, found.sources)
        local, remote = stream.take("local", str, ""), stream.take("remote", str, "")
        folder = _folder(local, remote, stream.take("split", str, ""))
        if not folder:
            stream.refuse("local", "and remote are missing")
        index = _index(folder)
        found.sources[name] = _source(folder, index, str(encoding), asked)
        share = shares[name] = _share(stream, folder, index, alone=len(named) < 2)
        if asked.state is not None:
            listed.append(_stream(name, stream, folder, index, share))
        if named:
            stream.note({
                "download_retry": _SPEED, "download_timeout": _SPEED, "validate_hash": _SPEED, "keep_zip": _SPEED,
            })  # fmt: skip
            stream.end()
    kinds = {share.key or "repeat" for share in shares.values()}
    if "proportion" in kinds and len(kinds) > 1:
        dataset.refuse(
            "streams", f"have {', '.join(sorted(kinds))}: proportion is not mixed with others"
        )
    found.stages.append((0, {name: share.weight for name, share in shares.items()}))
    return listed


def _stream(
    name: str, stream: Fields, folder: str, index: dict[str, object] | None, share: "_Share"
) -> Stream:
    """Return a stream with its shards, whose sizes a state depends on."""
    shards: dict[str, int] = {}
    file = f"{folder}/index.json"
    if index is None:
        stream.refuse(
            "local",
            f"has no {file} to read, and a state needs the sizes of shards: run this beside the data",
        )
    else:
        try:
            described = shards_in(ShardFile(path=file, size_bytes=0, stamp=""), index)
            shards = {each.name: each.samples for each in described if each.samples}
            # By name: two shards of one name would be one entry, and every later place would belong to another record.
            if len(shards) < sum(each.samples > 0 for each in described):
                stream.refuse("local", f"has a shard twice in {file}; replace the index")
        except OmniloadError as error:
            stream.refuse("local", str(error))
    return Stream(source=name, shards=shards, key=share.key, value=share.value)


def _folder(local: str, remote: str, split: str) -> str:
    """Return the local folder of a stream if its index is there, otherwise the remote one."""
    folders = [
        folder.rstrip("/") + (f"/{split}" if split else "") for folder in (local, remote) if folder
    ]
    # By os.path, which accepts any text, while Path raises if a text is longer than a path can be.
    here = (folder for folder in folders if os.path.isfile(f"{folder}/index.json"))  # noqa: PTH113
    return next(here, folders[-1] if folders else "")


def _index(folder: str) -> dict[str, object] | None:
    """Return the index of a local MDS folder; None if it cannot be read."""
    try:
        content = read_small_file(
            Path(folder) / "index.json", most_bytes=_MOST_INDEX_BYTES, what="an index of MDS"
        )
        index = json.loads(content)
    except (OmniloadError, ValueError, RecursionError):
        return None
    return index if isinstance(index, dict) and isinstance(index.get("shards"), list) else None


def _samples(index: dict[str, object]) -> float:
    shards = index["shards"]
    assert isinstance(shards, list)
    counts = [shard.get("samples") for shard in shards if isinstance(shard, dict)]
    return sum(float(count) for count in counts if is_count(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The share of a stream."""

    key: str
    """``proportion``, ``repeat`` or ``choose``; empty for its size."""
    value: float
    weight: float
    """Its weight in samples."""


def _share(stream: Fields, folder: str, index: dict[str, object] | None, *, alone: bool) -> _Share:
    """Return the share of a stream; ``alone``: it is the only stream, so its share is the whole."""
    given = {key: stream.number(key) for key in ("proportion", "repeat", "choose")}
    given = {key: value for key, value in given.items() if value is not None}
    if len(given) > 1:
        stream.refuse(
            next(iter(given)), f"stands beside {', '.join([*given][1:])}; a stream has one of them"
        )
    key, value = next(iter(given.items()), ("", 1.0))
    assert value is not None
    if key not in ("", "repeat"):
        return _Share(key=key, value=value, weight=value)
    if index is None and alone:
        return _Share(key=key, value=value, weight=1.0)
    if index is None:
        stream.refuse(
            key or "proportion",
            f"{'counts its samples' if key else 'is not given, so its samples are its share'}, and {folder}/index.json "
            "cannot be read here: run this beside the data, or give the streams proportions",
        )
        return _Share(key=key, value=value, weight=1.0)
    return _Share(key=key, value=value, weight=value * _samples(index))


def _columns(index: dict[str, object] | None) -> dict[str, str]:
    """Return the columns in the first shard of an index, with their encodings."""
    match index:
        case {"shards": [{"column_names": list(names), "column_encodings": list(kinds)}, *_]}:
            return dict(zip(map(str, names), map(str, kinds), strict=False))
        case _:
            return {}


def _source(
    folder: str, index: dict[str, object] | None, encoding: str, asked: Asked
) -> JsonObject:
    """Return the source of an MDS folder, with its column ``tokens`` if it has one, otherwise with its text."""
    columns = _columns(index)
    tokens = asked.tokens or ("tokens" if "tokens" in columns and asked.text is None else None)
    if tokens is None:
        return {"type": "mds", "path": folder, "text": asked.text or "text"}
    source: JsonObject = {"type": "mds", "path": folder, "tokens": tokens}
    # Other encodings of MDS include the type. For bytes, nothing in the folder gives the type of the ids.
    if columns.get(tokens, "bytes") == "bytes":
        source["dtype"] = asked.dtype or encoding
    return source


TOOL = Tool(read=_read, sign="a train_loader", holds=has_key("train_loader"), no_state="")
