"""Randomly damaged files and mix files, and the outcome for each: refused, a counted skip, or read."""

import itertools
import random
import signal
import struct
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
import zstandard

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError, OmniloadError
from omniload.mix.config import MixConfig
from omniload.mix.schema.sources.own_columns import OwnColumn
from omniload.mix.sources import OnError
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.in_stores import StoredShards
from tests.support.plane.sources.source_contract import expected_tokens, samples, texts_of_shard
from tests.support.plane.sources.source_kinds import (
    KINDS,
    GzipLines,
    MdsTokens,
    ParquetTokens,
    ZstdLines,
)

__all__ = ["SPOILT", "Outcomes", "damaged", "spoilt_mixes", "spoilt_shards"]

NUMBERS = (0, 1, -1, 7, 255, 2**15, 2**31 - 1, -(2**31), 2**62, -(2**63))
VALUES = (
    *(None, True, -1, 0, 0.5, 1e308, float("nan"), float("inf"), 10**30, "", " ", "x" * 3_000),
    *("\x00", "../..", "/dev/zero", "é" * 40, "s3://", "*", "{1..", "${", "12MiB", "1:30", [], {}),
    *([[]], {"a": 1}, {"type": "jsonl"}, ["", None], "2024-13-45", "!!python/name:os.system"),
)
LIMIT_S = 30
"""Limit after which a read counts as hanging."""
_LARGEST = 1 << 40
_ENTERED_BYTES = 9 << 20
"""More bytes than a compressed shard that is entered only at its first byte."""
WEIGHT = OwnColumn(column="weights")


@dataclass(slots=True)
class Outcomes:
    """Outcomes of damaged inputs of one kind."""

    how: Counter = field(default_factory=Counter)
    """Counts of ``refused``, ``skipped`` (some records counted as bad), and ``read`` (as the files are now)."""
    nameless: list = field(default_factory=list)
    """Errors that do not name the file."""
    lost: list = field(default_factory=list)
    """Files whose damage removed or changed records of the other, sound shard."""
    longest_s: float = 0.0

    @property
    def cases(self):
        return self.how.total()


def damaged(data, rng):
    """Return other bytes: a number replaced, or bytes flipped, removed, doubled or cut off."""
    data = bytearray(data)
    at = int(rng.integers(len(data)))
    if rng.random() < 0.5:  # headers are at the ends
        at = int(rng.choice([at % 256, len(data) - 1 - at % 64])) % len(data)
    length = int(rng.choice([1, 4, 8, 30]))
    match int(rng.integers(5)):
        case 0:
            number = NUMBERS[rng.integers(len(NUMBERS))]
            value = struct.pack("<q", number)[: int(rng.choice([1, 2, 4, 8]))]
            data[at : at + len(value)] = value
        case 1:
            for place in range(at, min(at + length, len(data))):
                data[place] ^= int(rng.integers(1, 256))
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = data[at : at + length]
        case 4:
            del data[at:]
    return bytes(data)


class ParquetColumns(ParquetTokens):
    """Parquet with a column of a user's own."""

    def write(self, path, texts):
        lists = [expected_tokens(text) if text else [] for text in texts]
        columns = {"tokens": pa.array(lists, pa.list_(pa.int32()))}
        columns["weights"] = pa.array([[each / 2 for each in row] for row in lists])
        pq.write_table(pa.table(columns), path, row_group_size=16, write_page_checksum=True)

    def config(self, folder):
        return super().config(folder).model_copy(update={"columns": {"weight": WEIGHT}})


class MdsColumns(MdsTokens):
    """MDS with a column of a user's own, whose arrays contain their own type and shape."""

    columns = (("tokens", "ndarray:uint16", None), ("weights", "ndarray", None))

    def sample(self, i, text):
        ids = expected_tokens(text) if text else []
        shape = bytes([1 << 2 | 1]) + struct.pack("<H", len(ids))
        arrays = [shape + np.array(ids, "<u2").tobytes()]
        arrays.append(bytes([34]) + shape + np.array(ids, "<f4").tobytes())
        return struct.pack("<2I", *map(len, arrays)) + b"".join(arrays)

    def config(self, folder):
        return super().config(folder).model_copy(update={"columns": {"weight": WEIGHT}})


class _Entered:
    """Shards long enough to be entered in their middle: each text comes with a large field that nothing reads."""

    def lines(self, texts):
        beside = "b" * (_ENTERED_BYTES // len(texts))
        return b"".join(orjson.dumps({"beside": beside, "text": text}) + b"\n" for text in texts)

    def config(self, folder):
        return super().config(folder).model_copy(update={"unit": 1 << 20})


class GzipEntered(_Entered, GzipLines):
    """Long lines of gzip."""


class ZstdEntered(_Entered, ZstdLines):
    """Long lines of zstd, in frames of one line each."""

    def write(self, path, texts):
        frames = (zstandard.compress(line) for line in self.lines(texts).splitlines(keepends=True))
        path.write_bytes(b"".join(frames))


SPOILT = KINDS | {
    "parquet-columns": ParquetColumns,
    "mds-columns": MdsColumns,
    "jsonl-gz-entered": GzipEntered,
    "jsonl-zst-entered": ZstdEntered,
}
"""Kinds whose shards are damaged: the kinds of the contract, columns of a user, and shards entered in the middle."""


def spoilt_shards(kind, folder, rng, count, root=None):
    """Damage a file of one shard after another, ``count`` times, next to a sound shard, and read both.

    With ``root``, the address of a folder in a store, they are read from there.
    """
    kind.write(folder / f"part-0{kind.suffix}", texts_of_shard(0))
    own = set(folder.iterdir())
    kind.write(folder / f"part-1{kind.suffix}", texts_of_shard(1))
    sound_alone = set(folder.iterdir()) - own
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    shared = {path for path in own if path.read_bytes() != files[path] or "part-" not in path.name}
    config = kind.config(folder).model_copy(update={"on_error": OnError(policy="skip", limit=500)})

    stored = None if root is None else StoredShards(folder, root)

    def write(path, data):
        path.write_bytes(data)
        if stored is not None:
            stored.put_one(path)

    def opened():
        if stored is not None:
            return stored.opened(config, kind.tokenizer)
        return open_source(
            SourceSpec("web", config, seed=1, tokenizer=kind.tokenizer, base_dir=folder)
        )

    whole = Counter(expected_tokens(text) for text in texts_of_shard(1))
    assert not whole - _held(opened()), "it is read as long as nothing is spoilt"
    outcomes = Outcomes()
    for path in itertools.islice(itertools.cycle(sorted(set(files) - sound_alone)), count):
        write(path, damaged(files[path], rng))
        with _watched(outcomes):
            try:
                source = opened()
                block = source.read(0, min(source.positions_per_epoch, 1_000))
            except OmniloadError as error:
                outcomes.how["refused"] += 1
                named = "part-" in str(error) or path.name in str(error)
                outcomes.nameless += [] if named else [str(error)]
            else:
                assert int(block.tokens.offsets[-1]) == len(block.tokens.values_V)
                assert block.tokens.values_V.min(initial=0) >= 0
                outcomes.how["skipped" if block.skipped else "read"] += 1
                # A list of shards that omits one describes all shards that it knows.
                if path not in shared and whole - Counter(samples(block)):
                    outcomes.lost.append(path.name)
        write(path, files[path])
    return outcomes


def _held(source):
    return Counter(samples(source.read(0, source.positions_per_epoch)))


def spoilt_mixes(kind, folder, rng, count):
    """Damage mix files with a source of a kind: keys, values, or the text itself; validate each."""
    config = kind.config(folder).model_dump(mode="json", exclude_defaults=True)
    tree = {
        "version": 1,
        "seed": 1,
        "sources": {"web": {"type": kind.config(folder).type, **config}},
        "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
        "tokenizer": {"type": "bytes"},
        "pack": {"length": 32},
        "batch": {"tokens": 128, "micro_tokens": 64},
    }
    parse_yaml(yaml.safe_dump(tree, allow_unicode=True), MixConfig, name="mix.yaml")
    drawn = random.Random(int(rng.integers(_LARGEST)))
    outcomes = Outcomes()
    for _ in range(count):
        text = _spoilt(tree, drawn)
        with _watched(outcomes):
            try:
                parse_yaml(text, MixConfig, name="mix.yaml")
            except ConfigError as error:
                outcomes.how["refused"] += 1
                said = str(error).splitlines()
                outcomes.nameless += [line for line in said if not line.startswith("mix.yaml:")]
            else:
                outcomes.how["read"] += 1
    return outcomes


def _spoilt(tree, drawn):
    """Return the text of a mix file with one to three faults."""
    spoilt = yaml.safe_load(yaml.safe_dump(tree))
    for _ in range(drawn.randint(1, 3)):
        node = drawn.choice([each for each in _nodes(spoilt) if each])
        key = drawn.choice(list(node) if isinstance(node, dict) else range(len(node)))
        match drawn.randrange(4):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[f"{key}x"] = node.pop(key)
            case 2 if isinstance(node, dict):
                node[drawn.choice(["colour", "path", "", "0"])] = drawn.choice(VALUES)
            case _:
                node[key] = drawn.choice(VALUES)
        if not spoilt:
            break
    text = yaml.safe_dump(spoilt, allow_unicode=True)
    at = drawn.randrange(len(text) + 1)
    match drawn.randrange(6):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + drawn.choice(["\t", ": ", "- ", "[", "'", "&a ", "*a ", "\x07", "#"])
        case 2:
            return text[:at] + drawn.choice(["\t", ": ", "- ", "{", '"', "*a ", "\x00"]) + text[at:]
    return text


def _nodes(value):
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _nodes(inner)


@contextmanager
def _watched(outcomes):
    """Time a case; one that hangs ends in an error of its own."""

    def hangs(*_):
        raise AssertionError(f"a case took more than {LIMIT_S} s")

    before, began_s = signal.signal(signal.SIGALRM, hangs), time.monotonic()
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        outcomes.longest_s = max(outcomes.longest_s, time.monotonic() - began_s)
