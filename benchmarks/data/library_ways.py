"""The ways that reading, tokenising and chat data are compared with: each reads the same files to the end.

A way returns its count of tokens or bytes of text, and the processor seconds that it used.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
import tokenizers
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.ragged import Ragged
from omniload.mix.config import BpeTokenizer, ShuffleConfig
from omniload.mix.order import Order
from omniload.mix.schema.transforms import ChatTransform
from omniload.mix.sources import JsonlSource, ParquetSource, SourceConfig
from omniload.source.formats.opening import open_format
from omniload.source.parts.share import Part
from omniload.source.record_source import RecordSource, open_source
from omniload.source.spec import SourceSpec
from omniload.source.tokenize import ByteEncoder, open_tokenizer
from omniload.source.transforms.encoders import PlainEncoder
from omniload.source.transforms.pipeline import Pipeline

__all__ = [
    "CHAT_FILE",
    "MODEL",
    "Way",
    "batch_ways",
    "chat_ways",
    "lines_ways",
    "reading_ways",
    "same_duties",
    "tokenising_ways",
]

Way = Callable[[], tuple[int, float]]
"""A function that reads everything once; returns the amount, and processor seconds of this process."""
CHAT_FILE, MODEL = "chats.jsonl", "model"
_AT_ONCE = 256
"""Records of a batch, and of a call of a tokenizer."""
_FIRST_READ, _LARGEST_READ = 16, 1 << 16
"""Records of a read before their length is known, and the most of a read, as the planner asks for them."""
_READ_BYTES = 1 << 20
"""Approximate bytes of text of a read: the planner asks for tokens, and this is a step of 256 Ki tokens."""
_FEW_ROWS = 1_024
_BLOCK_GROUPS = 4
"""Row groups of a block, the default of a source."""
_BLOCK_BYTES = 16 << 20
"""Block size for pyarrow's reader of JSON; its default of one megabyte is slower on these files."""


class _Free(ByteEncoder):
    """Makes one token of each text; the cost of that is counted and subtracted.

    Returns nothing: the release of a tokenizer's output is not part of reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spent_s = 0.0
        self.letters = 0

    @override
    def encode(self, texts: pa.Array | Sequence[str]) -> Ragged:
        began_s = time.process_time()
        assert isinstance(texts, pa.Array), "as sources hand them over"
        lengths_N = _lengths_of(texts)
        self.letters += int(lengths_N.sum())
        found = Ragged(values_V=np.ones(len(texts), np.int32), offsets=np.arange(len(texts) + 1))
        self.spent_s += time.process_time() - began_s
        return found


def _lengths_of(texts: pa.Array) -> NDArray[np.int64]:
    """Return the bytes of texts that lie end to end, or that are views."""
    if isinstance(texts, pa.StringViewArray):
        views = np.frombuffer(texts.buffers()[1], np.int32, 4 * len(texts), 16 * texts.offset)
        return views[::4].astype(np.int64)
    assert isinstance(texts, pa.LargeStringArray), "as sources hand them over"
    ends = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1, 8 * texts.offset)
    return ends[1:] - ends[:-1]


def reading_ways(folder: Path) -> dict[str, dict[str, Way]]:
    """Return the ways to read the text of ``folder``, by format; ours first."""
    parquet = ParquetSource(type="parquet", path="*.parquet", text="text")
    lines = JsonlSource(type="jsonl", path="*.jsonl.zst", text="text")
    stored = {"shuffle": ShuffleConfig(method="none")}
    shards, zipped = sorted(folder.glob("*.parquet")), sorted(folder.glob("*.jsonl.zst"))
    return {
        "parquet": {
            "omniload, shuffled, less tokenising": lambda: _ours(folder, parquet),
            "omniload, in the order of the file": lambda: _ours(
                folder, parquet.model_copy(update=stored)
            ),
            "pyarrow, ParquetFile.iter_batches": lambda: _timed(_batches_of(shards)),
            "pyarrow, read_table": lambda: _timed(_tables_of(shards)),
            "pyarrow, row groups, decoded and let go of": lambda: _timed(_decoded_groups(shards)),
            "pyarrow, row groups, shuffled by take": lambda: _timed(_shuffled_groups(shards)),
            "pyarrow, as ours: checked, shuffled over 4 groups": lambda: _timed(_blocks_of(shards)),
        },
        "jsonl.zst": {
            "omniload, shuffled, less tokenising": lambda: _ours(folder, lines),
            "omniload, in the order of the file": lambda: _ours(
                folder, lines.model_copy(update=stored)
            ),
            "pyarrow, json.read_json": lambda: _timed(_objects_of(zipped)),
        },
    }


def batch_ways(folder: Path) -> dict[str, Way]:
    """Return the ways to read a column of Parquet a batch at a time; ours first."""
    shards = sorted(folder.glob("*.parquet"))
    return {
        **_both_orders(folder, ParquetSource(type="parquet", path="*.parquet", text="text")),
        "iter_batches": lambda: _timed(_batches_of(shards)),
        "iter_batches, mapped": lambda: _timed(_batches_of(shards, memory_map=True)),
        "iter_batches, 1,024 rows": lambda: _timed(_batches_of(shards, rows=_FEW_ROWS)),
    }


def same_duties(folder: Path) -> dict[str, Way]:
    """Return the ways by pyarrow alone that do the same work as ours on a Parquet column: checked, in either order."""
    shards = sorted(folder.glob("*.parquet"))
    return {
        "in order": lambda: _timed(_checked_units_of(shards)),
        "shuffled": lambda: _timed(_taken_blocks_of(shards)),
    }


def lines_ways(folder: Path) -> dict[str, Way]:
    """Return the ways to read compressed lines; ours first."""
    zipped = sorted(folder.glob("*.jsonl.zst"))
    return {
        **_both_orders(folder, JsonlSource(type="jsonl", path="*.jsonl.zst", text="text")),
        "json.read_json": lambda: _timed(_objects_of(zipped)),
    }


def _both_orders(folder: Path, config: SourceConfig) -> dict[str, Way]:
    stored = config.model_copy(update={"shuffle": ShuffleConfig(method="none")})
    return {
        "in order": lambda: _ours(folder, stored),
        "shuffled": lambda: _ours(folder, config),
    }


def _ours(folder: Path, config: SourceConfig) -> tuple[int, float]:
    spec = SourceSpec(config.type, config, base_dir=folder, cache_dir=folder / "index")
    opened = open_format(spec)
    units, free = opened.format.units(), _Free()
    order = Order(units.rows_U, units.shards_U, seed=1, source="s", shuffle=config.shuffle)
    source = RecordSource("s", order, opened.format, pipeline=Pipeline(PlainEncoder(free), ()))
    began_s = time.process_time()
    at, records = 0, _FIRST_READ
    while at < source.positions_per_epoch:
        stop = min(at + records, source.positions_per_epoch)
        source.read(at, stop)
        at = stop
        records = max(1, min(_LARGEST_READ, at * _READ_BYTES // max(1, free.letters)))
    # A source refers to itself. Its last block would stay until the garbage collector runs, and the next turn would
    # then read into new pages of memory, unlike a run that reads on.
    source.release()
    return free.letters, time.process_time() - began_s - free.spent_s


def _timed(columns: Iterator[pa.Array | pa.ChunkedArray]) -> tuple[int, float]:
    letters, began_s = 0, time.process_time()
    for column in columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        letters += sum(_letters_of(chunk) for chunk in chunks)
    return letters, time.process_time() - began_s


def _letters_of(texts: pa.Array) -> int:
    wide = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    ends = np.frombuffer(texts.buffers()[1], wide)[texts.offset : texts.offset + len(texts) + 1]
    return int(ends[-1]) - int(ends[0])


def _batches_of(
    shards: Sequence[Path], *, rows: int = 65_536, memory_map: bool = False
) -> Iterator[pa.Array]:
    for path in shards:
        opened = pq.ParquetFile(path, memory_map=memory_map)
        for batch in opened.iter_batches(rows, columns=["text"], use_threads=False):
            yield batch.column(0)


def _tables_of(shards: Sequence[Path]) -> Iterator[pa.ChunkedArray]:
    for path in shards:
        yield pq.read_table(path, columns=["text"], use_threads=False)["text"]


def _decoded_groups(shards: Sequence[Path]) -> Iterator[pa.ChunkedArray]:
    """Yield row groups as they are decoded: code on top of pyarrow that keeps to row groups needs at least this."""
    for path in shards:
        opened = pq.ParquetFile(path, pre_buffer=False)
        for group in range(opened.num_row_groups):
            yield opened.read_row_group(group, columns=["text"], use_threads=False)["text"]


def _shuffled_groups(shards: Sequence[Path]) -> Iterator[pa.ChunkedArray]:
    rng = np.random.default_rng(0)
    for path in shards:
        opened = pq.ParquetFile(path)
        for group in range(opened.num_row_groups):
            column = opened.read_row_group(group, columns=["text"], use_threads=False)["text"]
            yield column.take(pa.array(rng.permutation(len(column))))


def _blocks_of(shards: Sequence[Path]) -> Iterator[pa.ChunkedArray]:
    """Yield the same as ours: checked UTF-8, in another order over the same number of row groups, a few at a time."""
    rng = np.random.default_rng(0)
    opened = (pq.ParquetFile(path, pre_buffer=False) for path in shards)
    groups = ((file, group) for file in opened for group in range(file.num_row_groups))
    while block := list(itertools.islice(groups, _BLOCK_GROUPS)):
        held = []
        for file, group in block:
            held.append(file.read_row_group(group, columns=["text"], use_threads=False)["text"])
            held[-1].validate(full=True)
        texts = pa.chunked_array([chunk for each in held for chunk in each.chunks])
        texts = texts.cast(pa.large_string()).combine_chunks()
        order = rng.permutation(len(texts))
        for start in range(0, len(order), _FEW_ROWS):
            yield texts.take(pa.array(order[start : start + _FEW_ROWS]))


def _checked_units_of(shards: Sequence[Path]) -> Iterator[pa.Array]:
    """Yield checked texts, about a megabyte at a time, from row groups that are one array each."""
    for column in _checked_groups(shards):
        step = max(1, len(column) * _READ_BYTES // max(1, column.nbytes))
        for start in range(0, len(column), step):
            yield column.slice(start, step)


def _taken_blocks_of(shards: Sequence[Path]) -> Iterator[pa.Array]:
    """Yield checked texts, in another order over row groups as ours, but copied, because it takes no views."""
    rng = np.random.default_rng(0)
    groups = _checked_groups(shards)
    while held := list(itertools.islice(groups, _BLOCK_GROUPS)):
        block = pa.concat_arrays([each.cast(pa.large_string()) for each in held])
        step = max(1, len(block) * _READ_BYTES // max(1, block.nbytes))
        order = rng.permutation(len(block))
        for start in range(0, len(order), step):
            yield block.take(pa.array(order[start : start + step]))


def _checked_groups(shards: Sequence[Path]) -> Iterator[pa.Array]:
    for path in shards:
        opened = pq.ParquetFile(path, pre_buffer=False)
        for group in range(opened.num_row_groups):
            column = opened.read_row_group(group, columns=["text"], use_threads=False)["text"]
            column.validate(full=True)
            # The copy leaves out the spare memory after the texts, which a reader with a memory limit cannot keep.
            yield pa.concat_arrays([*column.chunks, column.chunk(0).slice(0, 0)])


def _objects_of(shards: Sequence[Path]) -> Iterator[pa.ChunkedArray]:
    options = pj.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
    for path in shards:
        yield pj.read_json(pa.CompressedInputStream(str(path), "zstd"), options)["text"]


def tokenising_ways(folder: Path, texts: Sequence[str]) -> dict[str, Way]:
    """Return the ways to make ids of texts with the tokenizer of ``folder``; ours first."""
    ours = open_tokenizer(_tokenizer(), folder)
    library = tokenizers.Tokenizer.from_file(str(folder / MODEL / "tokenizer.json"))
    column = pa.array(texts, pa.large_string())

    def arrays() -> int:
        return sum(
            len(ours.encode(column.slice(start, _AT_ONCE)).values_V)
            for start in range(0, len(texts), _AT_ONCE)
        )

    def lists(encode: Callable[..., list[tokenizers.Encoding]]) -> int:
        count = 0
        for start in range(0, len(texts), _AT_ONCE):
            made = encode(texts[start : start + _AT_ONCE], add_special_tokens=False)
            count += sum(len(ids) for ids in [each.ids for each in made])
        return count

    return {
        "omniload, to arrays": lambda: _spent(arrays),
        "tokenizers, encode_batch, lists of ids": lambda: _spent(
            lambda: lists(library.encode_batch)
        ),
        "tokenizers, encode_batch_fast, lists of ids": lambda: _spent(
            lambda: lists(library.encode_batch_fast)
        ),
    }


def _spent(work: Callable[[], int]) -> tuple[int, float]:
    began_s = time.process_time()
    return work(), time.process_time() - began_s


def _tokenizer() -> BpeTokenizer:
    return BpeTokenizer(type="bpe", path=MODEL)


def chat_ways(folder: Path, part: int, parts: int) -> dict[str, Way]:
    """Return the ways to make tokens and masks of a part of ``CHAT_FILE``; ours first."""
    import transformers  # noqa: PLC0415 -- what the other ways need alone

    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder / MODEL)

    def read() -> int:
        source = _chats(folder)
        share, count = Part(part, parts), 0
        for start in range(0, source.positions_per_epoch, _AT_ONCE):
            stop = min(start + _AT_ONCE, source.positions_per_epoch)
            count += len(source.read_part(start, stop, share).tokens.values_V)
        return count

    def applied(at_once: int) -> int:
        every = (folder / CHAT_FILE).read_bytes().splitlines()
        mine = [orjson.loads(line)["messages"] for line in every[part::parts]]
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        if at_once == 1:
            return sum(len(theirs.apply_chat_template(c, **asked)["input_ids"]) for c in mine)
        count = 0
        for start in range(0, len(mine), at_once):
            made = theirs.apply_chat_template(mine[start : start + at_once], **asked)
            count += sum(map(len, made["input_ids"]))
        return count

    return {
        "omniload": lambda: _spent(read),
        "apply_chat_template, each": lambda: _spent(lambda: applied(1)),
        "apply_chat_template, batches": lambda: _spent(lambda: applied(_AT_ONCE)),
    }


def _chats(folder: Path) -> RecordSource:
    config = JsonlSource(
        type="jsonl",
        path=CHAT_FILE,
        text="messages",
        unit=1 << 18,
        transforms=(ChatTransform(type="chat"),),
    )
    return open_source(
        SourceSpec(
            "chats",
            config,
            seed=0,
            tokenizer=_tokenizer(),
            base_dir=folder,
            cache_dir=folder / "index",
        )
    )
