"""torchdata's ``StatefulDataLoader`` over a map dataset whose items are the records of files, one after another.

The file contains the arguments of its call that decide the order::

    dataset: [part-0.jsonl, part-1.jsonl]     # in the order in which the dataset counts their records
    batch_size: 8
    shuffle: true

Its state is a place in one epoch, either in the order of the files or in a permutation that torch drew from a
generator, whose state it contains. Both orders are computed here without torch.

Shape suffixes:
    F  files      N  records of the dataset      D  drawn records
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from omniload.base.errors import ConfigError, StateError
from omniload.base.settings.faults import said_of_fault
from omniload.base.state import JsonObject, shown, whole_number
from omniload.importing.fields import Fields
from omniload.importing.files import mixed_over_shards, source_of_path
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.json_states import read_json_state
from omniload.importing.tools import Tool, has_key
from omniload.mix.other_states import is_of_torchdata, place_of_torchdata
from omniload.mix.sources import SourceConfig
from omniload.source.files import ShardFile, reading
from omniload.source.formats.opening import open_format
from omniload.source.parsing.compressed import chunks_of, stream_of
from omniload.source.spec import SourceSpec

__all__ = ["TOOL", "first_of_permutation"]

_INDEXED = ("arrow", "csv", "jsonl", "parquet")
"""Types of files whose rows are the items of a dataset."""
_CONFIG: TypeAdapter[SourceConfig] = TypeAdapter(SourceConfig)
_MOST_BYTES = 16 << 20
_MOST_RECORDS = ((1 << 32) - 1) // 20
"""Number of records from which on torch permutes with other numbers than those of 32 bits."""
_WORDS = 624
_GENERATOR_BYTES = 5056
_INSTEAD = "begin a new epoch with the saved model: import the mix without --state"
_AS_JSON = (
    "write it as JSON, where the checkpoint is trusted: "
    "json.dump(loader.state_dict(), file, default=lambda tensor: tensor.tolist())"
)
_SPEED = "a matter of speed"
_BLANK_LINE = re.compile(rb"\n[^\S\n]*\n")
_OF_LOADERS = (
    *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout"),
    *("multiprocessing_context", "snapshot_every_n_steps", "in_order"),
)


def _read(document: object, asked: Asked) -> Imported:
    """Return the mix of one source that a ``StatefulDataLoader`` reads, from the arguments of its call."""
    found = Imported(base=Path.cwd())
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    files = top.texts("dataset")
    if not files:
        top.refuse("dataset", "names no file")
    for file in files:
        if not Path(file).is_file():
            top.refuse(
                "dataset",
                f"{file!r} is no file in {Path.cwd()}: name files one by one, in the order of the dataset's indices",
            )
    source = source_of_path(files[0] if files else "none.jsonl", top, asked, key="dataset")
    if source["type"] not in _INDEXED:
        top.refuse(
            "dataset", f"is of type {source['type']}; rows of {', '.join(_INDEXED)} are known"
        )
    source["path"] = files[0] if len(files) == 1 else [*files]
    name = new_name(Path(files[0]).stem if files else "", ())
    batch_size = top.take("batch_size", int, 1)
    if batch_size < 1:
        top.refuse("batch_size", f"is {batch_size}; it is a whole number from 1 on")
    shuffles = top.take("shuffle", bool, False)
    top.refuse_if_set(
        {
            **dict.fromkeys(
                ("sampler", "batch_sampler"), "its order is its own, and no state says it"
            ),
            "generator": "its state is in that of the loader",
            "collate_fn": "it is code; declare what it does as transforms",
        }
    )
    top.note(
        {
            "batch_size": "",
            "drop_last": "steps are whole; the end is a matter of mix.stop",
            **dict.fromkeys(_OF_LOADERS, _SPEED),
        }
    )
    top.end()
    asked.report.note(
        "batch_size",
        "steps are of tokens, --batch, and rows are packed; pack.method none gives each a row",
    )
    if asked.state is not None and not asked.report.faults:
        found.drawn = {
            name: _drawn(_state_in(asked.state), files, source, batch_size, shuffles, asked)
        }
        found.drawn = {name: shards for name, shards in found.drawn.items() if shards}
    found.sources[name] = (
        mixed_over_shards(source, asked) if shuffles else {**source, "shuffle": {"method": "none"}}
    )
    found.stages.append((0, {name: 1.0}))
    return found


def _state_in(path: Path) -> Mapping[str, Any]:
    """Read a state that was written as JSON.

    Raises:
        ConfigError: There is no such file, or it is too large.
        StateError: The file is a pickle, which is not loaded, or not a state of torchdata.
    """
    state = read_json_state(
        path, most_bytes=_MOST_BYTES, what="a state of StatefulDataLoader", remedy=_AS_JSON
    )
    if not isinstance(state, dict) or not is_of_torchdata(state):
        raise StateError(
            f"{path}: holds {shown(state)}, no state of StatefulDataLoader; {_AS_JSON}"
        )
    return state


def _drawn(
    state: Mapping[str, Any],
    files: Sequence[str],
    source: JsonObject,
    batch_size: int,
    shuffles: bool,
    asked: Asked,
) -> dict[str, NDArray[np.int64]]:
    """Return the records of each file that the unfinished epoch had drawn; empty if the epoch is over.

    Raises:
        StateError: The state does not show the order, belongs to another dataset or batch size, or is damaged.
    """
    where = f"{asked.state}: "
    records_F = np.array([_records_in(file, source) for file in files], np.int64)
    total = int(records_F.sum())
    try:
        place = place_of_torchdata(state)
        kept = place.main["_sampler_iter_state"] or {}
        _require_order(place.main, kept, shuffles)
        _require_batch_size(place.main, kept, batch_size, total)
        count = min(place.batches * batch_size, total)
        if place.is_over or count == total:
            asked.report.note("", "the state is of an epoch that had ended: no record is left out")
            return {}
        drawn_D = np.arange(count)
        if shuffles:
            generator = kept["sampler_iter_state"]["generator"]
            drawn_D = first_of_permutation(total, count, generator)
    except StateError as error:
        raise StateError(f"{where}{error}") from error
    except KeyError as error:
        raise StateError(f"{where}the state has no {error}; {_INSTEAD}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StateError(f"{where}the state is damaged: {error!s:.200}; {_INSTEAD}") from error
    asked.report.note(
        "", f"{count:,} of {total:,} records were drawn, and are left out of the first epoch"
    )
    ends_F = records_F.cumsum()
    files_D = ends_F.searchsorted(drawn_D, side="right")
    begins_F = ends_F - records_F
    return {
        _shard_name(files, number): np.sort(drawn_D[files_D == number] - begins_F[number])
        for number in np.unique(files_D).tolist()
    }


def _records_in(file: str, source: JsonObject) -> int:
    """Return the number of records of a file; each record is an item of the dataset.

    Raises:
        ConfigError: Its settings are not valid, or one of its lines is blank.
        OmniloadError: The file cannot be read.
    """
    try:
        config = _CONFIG.validate_python({**source, "path": file})
    except ValidationError as error:
        raise ConfigError(f"{file}: {said_of_fault(error.errors()[0])}") from error
    spec = SourceSpec("dataset", config, base_dir=Path.cwd())
    opened = open_format(spec)
    if source["type"] == "jsonl":
        for shard in opened.files:
            _require_no_blank_line(shard)
    return int(opened.format.units().rows_U.sum())


def _require_no_blank_line(file: ShardFile) -> None:
    """Refuse JSON lines with a blank line, which is a record here but which datasets may skip.

    Raises:
        ConfigError: There is a blank line; the message has its number.
        OmniloadError: The file cannot be read.
    """
    with reading(file, "blank lines"):
        number = _first_blank_line(file)
    if number is not None:
        raise ConfigError(
            f"{file.path}:{number}: is blank, which is a record here, and which the dataset may pass over; take "
            "it out"
        )


def _first_blank_line(file: ShardFile) -> int | None:
    """Return the number of the first blank line of a file, from 1; ``None`` if it has none."""
    before, held = 0, b"\n"  # as if a line had ended before the first one
    with stream_of(file) as stream:
        for chunk in chunks_of(stream, file):
            data: bytes = held + chunk.to_pybytes()
            if (found := _BLANK_LINE.search(data)) is not None:
                return before + data.count(b"\n", 0, found.start() + 1)
            before += data.count(b"\n")
            # A line whose end is not read yet may be blank. Two bytes represent it, however long it is.
            last = data.rfind(b"\n")
            held = b"" if last < 0 or data[last:].strip() else data[last : last + 2]
            before -= len(held[:1])
    return before + 1 if len(held) > 1 else None


def _shard_name(files: Sequence[str], number: int) -> str:
    """Return the name of a file, with as many of its folders as needed to distinguish it from the others."""
    parts = [Path(file).resolve().parts for file in files]
    mine = parts[number]
    told = (
        mine[-length:]
        for length in range(1, len(mine))
        if sum(other[-length:] == mine[-length:] for other in parts) == 1
    )
    # A file that is listed twice cannot be distinguished, and is refused where it is read.
    return "/".join(next(told, mine[1:]))


def _require_order(main: Mapping[str, Any], kept: Mapping[str, Any], shuffles: bool) -> None:
    """Refuse a state that does not show the order in which its records were drawn."""
    known = {"samples_yielded", "sampler_iter_state"}
    if main["_index_sampler_state"] is not None or not kept.keys() <= known:
        raise StateError(
            f"the state holds one of a sampler's own, whose order it does not say; {_INSTEAD}"
        )
    if ("sampler_iter_state" in kept) != shuffles:
        held = (
            "was shuffled"
            if not shuffles
            else "was not shuffled, or by a sampler that keeps no state"
        )
        raise StateError(
            f"the state says that the dataset {held}, and shuffle is {shuffles}; say what was"
        )


def _require_batch_size(
    main: Mapping[str, Any], kept: Mapping[str, Any], batch_size: int, total: int
) -> None:
    """Refuse a place that belongs to another batch size or another dataset."""
    drawn = whole_number(main["_sampler_iter_yielded"], below=1 << 62)
    seen = whole_number(kept["samples_yielded"], below=1 << 62)
    # Only the last batch of an epoch may be short.
    if seen != min(drawn * batch_size, total) and seen != drawn * batch_size:
        raise StateError(
            f"the state is of {seen} records in {drawn} batches; the files hold {total} records, and batch_size is "
            f"{batch_size}: name the files and the size of the run that saved"
        )
    if seen > total:
        raise StateError(
            f"the state had drawn {seen} records, and the files hold {total}: name those of the dataset"
        )


def first_of_permutation(total: int, count: int, generator: Sequence[int]) -> NDArray[np.int64]:
    """Return the first numbers of ``torch.randperm(total, generator=...)`` on a CPU.

    Args:
        total: Number of values that are permuted.
        count: Number of wanted values, ``D``.
        generator: State of the generator before the permutation, as bytes: ``get_state()``.

    Returns:
        The numbers, ``[D]``.

    Raises:
        StateError: There are more values than torch permutes in this way.
        ValueError: The generator's state is not valid.
    """
    if total >= _MOST_RECORDS:
        raise StateError(
            f"the dataset has {total} records, and the order of {_MOST_RECORDS} or more is not known; {_INSTEAD}"
        )
    raw_D = _raw_numbers(generator, count)
    # Fisher-Yates from the front; ``moved`` has the values that are no longer at their own places.
    steps = raw_D % (total - np.arange(count, dtype=np.int64))
    moved: dict[int, int] = {}
    found_D = np.empty(count, np.int64)
    for place, step in enumerate(steps.tolist()):
        other = place + step
        found_D[place] = moved.get(other, other)
        moved[other] = moved.get(place, place)
    return found_D


def _raw_numbers(generator: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return the next 32-bit numbers of torch's generator on a CPU, a Mersenne Twister.

    Args:
        generator: Its state as bytes, ``[5056]``.
        count: Number of values.

    Raises:
        ValueError: The state is not valid.
    """
    held = np.asarray(generator)
    if held.shape != (_GENERATOR_BYTES,) or held.min() < 0 or held.max() > 255:
        raise ValueError(
            f"a generator has {_GENERATOR_BYTES} bytes, found {shown(list(generator))}"
        )
    data = held.astype(np.uint8).tobytes()
    # seed (8 bytes), numbers left + 1 (4), whether it is seeded (4), the next number (8), words of 8 bytes each, and
    # the state of normal distributions.
    left = int.from_bytes(data[8:12], sys.byteorder)
    words = np.frombuffer(data, np.uint64, _WORDS, 24)
    if not 1 <= left <= _WORDS or int(words.max()) >> 32:
        raise ValueError(f"a generator has {left - 1} of {_WORDS} numbers left")
    twister = np.random.MT19937()
    key = words.astype(np.uint32)
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": key, "pos": _WORDS + 1 - left},
    }
    return twister.random_raw(count).astype(np.int64)


TOOL = Tool(
    read=_read,
    sign="dataset, the files of a map dataset",
    holds=has_key("dataset"),
    no_state="",
)
