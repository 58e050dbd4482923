"""Mixes in which options meet that have tests of their own, and what they give by a plain reading of their records.

Records are made, written to files, and read here by rules that take a line each: none of the code that they are
held against is asked.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import yaml
from hypothesis import strategies as st

__all__ = ["MetMix", "Sample", "met_mixes"]

Record: TypeAlias = Mapping[str, Any]
Keys: TypeAlias = dict[str, Any]

_END = 256
_ROWS_OF_A_UNIT = 7
_RECORDS = pa.schema(
    {
        "text": pa.string(),
        "ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
        "id": pa.string(),
        "at": pa.struct({"lang": pa.string()}),
    }
)
_CONDITIONS: list[Keys] = [{}, {"where": {"at.lang": "en"}}, {"where": {"at.lang": ["en", "de"]}}]
_EQUAL: list[Keys] = [{}, {}, {"dedupe": "content"}, {"dedupe": "key"}]
_HELD_OUT: list[Keys] = [{}, {"splits": {}}, {"splits": {"eval": 0.4}}]
_ORDERS = ["none", "shards", "block", "units", "full"]
_OTHERWISE: list[Keys] = [
    {"runtime": {"prefetch_steps": 1}, "loader": {"memory": 1 << 20}},
    {"runtime": {"prefetch_steps": 8, "loaders": 2}, "loader": {}},
    {"runtime": {"prefetch_steps": 3}, "loader": {"token_cache": {"path": "kept"}}},
]
"""What runs a mix, and changes nothing of what it draws."""
_SPOILT: Record = {"text": None, "ids": [-1], "mask": [1], "id": "-", "at": {"lang": "en"}}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one record, or a sequence of several, gives."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    """The next token of each; -100 at the end of a document, and where it is not trained on."""

    @classmethod
    def of(cls, tokens: Sequence[int], trained: Sequence[bool]) -> "Sample":
        """Return a document of which some tokens are trained on."""
        behind = zip(tokens[1:], trained[1:], strict=True)
        return cls(tuple(tokens), (*(t if is_label else -100 for t, is_label in behind), -100))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetSource:
    """A source: its keys in the mix file, and its records in the order of its files."""

    name: str
    keys: Keys
    shards: list[list[Record | None]]
    """Records file by file; ``None`` stands for one that cannot be decoded."""

    def write(self, folder: Path) -> None:
        """Write the files of the source: lines, each file a unit, or tables in groups of rows."""
        for i, shard in enumerate(self.shards):
            file = folder / f"{self.name}-{i}.{self.keys['type']}"
            if self.keys["type"] == "jsonl":
                lines = ("{broken" if record is None else json.dumps(record) for record in shard)
                file.write_text("".join(f"{line}\n" for line in lines))
            else:
                table = pa.Table.from_pylist([record or _SPOILT for record in shard], _RECORDS)
                pq.write_table(table, file, row_group_size=_ROWS_OF_A_UNIT)

    def units(self) -> Iterator[list[Record | None]]:
        """Yield the records of each unit."""
        for shard in self.shards:
            each = len(shard) if self.keys["type"] == "jsonl" else _ROWS_OF_A_UNIT
            yield from (shard[start : start + each] for start in range(0, len(shard), each))

    def samples(self, mix: Keys) -> list[Sample]:
        """Return what an epoch gives that rows take: conditions come first, then equal records, then splits."""
        seen = set[str]()
        found = []
        for unit in self.units():
            drawn = [record for record in unit if record and self._draws(record, mix, seen)]
            found += self._made([self._document(record) for record in drawn])
        length, overlong = mix["pack"]["length"], self.keys.get("overlong", mix["pack"]["overlong"])
        if overlong == "truncate":
            return [Sample(each.tokens[:length], each.labels[:length]) for each in found]
        return [each for each in found if overlong == "split" or len(each.tokens) <= length]

    def _draws(self, record: Record, mix: Keys, seen: set[str]) -> bool:
        wanted = self.keys.get("where", {}).get("at.lang", record["at"]["lang"])
        if record["at"]["lang"] not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
        if by := self.keys.get("dedupe"):
            content = "ids" if "tokens" in self.keys else "text"
            known_by = str(record["id" if by == "key" else content])
            if known_by in seen:
                return False
            seen.add(known_by)
        held_out = self.keys.get("splits", mix.get("splits", {})).get("eval", 0)
        return bool(xxhash.xxh3_64_intdigest(record["id"].encode()) >= held_out * 2**64)

    def _document(self, record: Record) -> tuple[list[int], list[bool]]:
        """Return the tokens of a record, and which of them are trained on."""
        tokens = record["ids"] if "tokens" in self.keys else _tokens_of(record["text"])
        is_masked = "columns" in self.keys
        return tokens, [bool(m) for m in record["mask"]] if is_masked else [True] * len(tokens)

    def _made(self, documents: Sequence[tuple[list[int], list[bool]]]) -> list[Sample]:
        """Return the samples of a unit behind the transforms of the source."""
        documents = [document for document in documents if document[0]]
        joins = None
        for transform in self.keys.get("transforms", ()):
            if transform["type"] == "clamp":
                most = transform["tokens"]
                documents = [(tokens[:most], trained[:most]) for tokens, trained in documents]
            elif transform["type"] == "filter":
                least = transform["min_tokens"]
                documents = [document for document in documents if len(document[0]) >= least]
            else:
                joins = transform
        if joins is None:
            return [Sample.of(*document) for document in documents]
        return list(_joined(documents, joins["tokens"], joins["documents"]))


def _tokens_of(text: str) -> list[int]:
    return [*text.encode(), _END] if text else []


def _joined(
    documents: Sequence[tuple[list[int], list[bool]]], count: int, how: str
) -> Iterator[Sample]:
    """Yield the sequences of a unit; the last token of each has no label."""
    tokens = [token for document in documents for token in document[0]]
    trained = [is_trained for document in documents for is_trained in document[1]]
    if how == "apart":
        labels = [label for document in documents for label in Sample.of(*document).labels]
    else:
        labels = [*Sample.of(tokens, trained).labels] if tokens else []
    for start in range(0, len(tokens), count):
        part = slice(start, start + count)
        yield Sample(tuple(tokens[part]), (*labels[part][:-1], -100))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetMix:
    """A mix that was written as a file, with its data beside it."""

    folder: Path
    content: Keys
    sources: tuple[MetSource, ...]

    @classmethod
    def written(cls, folder: Path, drawn: tuple[Keys, tuple[MetSource, ...]]) -> "MetMix":
        """Write what ``met_mixes`` drew into a folder, in place of what lies there."""
        content, sources = drawn
        for old in [*folder.glob("*.jsonl"), *folder.glob("*.parquet"), *folder.glob("*.yaml")]:
            old.unlink()
        for source in sources:
            source.write(folder)
        (folder / "mix.yaml").write_text(yaml.safe_dump(content))
        return cls(folder=folder, content=content, sources=sources)

    @property
    def path(self) -> Path:
        """The mix file."""
        return self.folder / "mix.yaml"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return int(self.content["batch"]["tokens"] // self.content["pack"]["length"])

    def samples(self) -> dict[str, list[Sample]]:
        """Return what an epoch of each source gives."""
        return {source.name: source.samples(self.content) for source in self.sources}

    def otherwise(self, way: int) -> Path:
        """Write the same mix run in another way; return the file."""
        settings = _OTHERWISE[way % len(_OTHERWISE)]
        readers = {each.name: 1 + (way + i) % 3 for i, each in enumerate(self.sources)}
        loader = settings["loader"] | {"readers": readers}
        file = self.folder / f"otherwise-{way}.yaml"
        file.write_text(yaml.safe_dump(self.content | settings | {"loader": loader}))
        return file


@st.composite
def met_mixes(draw: st.DrawFn, *, ends: bool) -> tuple[Keys, tuple[MetSource, ...]]:
    """Draw what a mix says and what its sources hold; of one that ``ends`` everything is drawn once."""
    length, level = draw(st.sampled_from([16, 24])), draw(st.sampled_from(["token", "sample"]))
    method = draw(st.sampled_from(["best_fit", "best_fit", "concat_and_split", "none"]))
    pack = {"length": length, "method": method}
    pack["overlong"] = draw(st.sampled_from(["split", "truncate", "drop"]))
    pack["lookahead_rows"] = draw(st.sampled_from([0, 1, 3]))
    names = ["alpha", "beta", "gamma"][: draw(st.integers(1, 3))]
    sources = tuple(draw(_sources(name, pack)) for name in names)
    content: Keys = {"version": 2, "seed": draw(st.integers(0, 99)), "pack": pack}
    content |= {
        "tokenizer": {"type": "bytes"},
        "splits": draw(st.sampled_from([{}, {"eval": 0.2}])),
    }
    content["batch"] = {"tokens": draw(st.integers(3, 6)) * length, "micro_tokens": length}
    content["sources"] = {source.name: source.keys for source in sources}
    content["mix"] = {"level": level} | draw(_weights(names, content["batch"]["tokens"], ends))
    if ends and draw(st.booleans()):
        content["mix"] = {"amounts": {name: {"epochs": 1} for name in names}}
    return content, sources


@st.composite
def _weights(draw: st.DrawFn, names: list[str], batch_tokens: int, ends: bool) -> Keys:
    """Draw stages, the second by steps, tokens or epochs, with a ramp or at once, and groups of weights."""
    some = st.sampled_from([0.5, 1, 3])
    weights: list[Keys] = [{name: draw(some) for name in names} for _ in range(2)]
    if len(names) > 2 and draw(st.booleans()):
        inside = {name: weights[1].pop(name) for name in names[:2]}
        weights[1]["group"] = {"weight": draw(some), "temperature": 2, "of": inside}
    begins: list[Keys] = [{"from_step": 2}, {"from_tokens": 3 * batch_tokens - 5}]
    begins += [] if ends else [{"from_epochs": {names[0]: 0.5}}]
    ramps: list[Keys] = [{}, {"ramp_steps": 3}, {"ramp_steps": 2, "ramp": "cosine"}]
    begin, ramp = draw(st.sampled_from(begins)), draw(st.sampled_from(ramps))
    if "from_tokens" in begin and ramp:
        ramp = {"ramp_tokens": 2 * batch_tokens}
    stages = [{"weights": weights[0]}, begin | ramp | {"weights": weights[1]}]
    stop = "each_once" if ends else draw(st.sampled_from(["never", "all_exhausted"]))
    return {"stop": stop, "stages": stages[: draw(st.integers(1, 2))]}


@st.composite
def _sources(draw: st.DrawFn, name: str, pack: Keys) -> MetSource:
    kind, holds = (
        draw(st.sampled_from(["jsonl", "parquet"])),
        draw(st.sampled_from(["text", "ids"])),
    )
    keys: Keys = {"type": kind, "path": f"{name}-*.{kind}", "key": "id"}
    keys |= {"text": "text"} if holds == "text" else {"tokens": "ids"}
    if holds == "ids" and draw(st.booleans()):
        keys["columns"] = {"loss_mask": "mask"}
    for choices in (_CONDITIONS, _EQUAL, _HELD_OUT):
        keys |= draw(st.sampled_from(choices))
    keys["shuffle"] = {"method": draw(st.sampled_from(_ORDERS)), "block_units": 2}
    keys["transforms"] = draw(_transforms(pack))
    if pack["method"] != "none" and draw(st.booleans()):
        keys |= {"pack": {"cut": "never", "rows": draw(st.sampled_from(["shared", "own"]))}}
        keys["overlong"] = draw(st.sampled_from(["truncate", "drop"]))
    chance, is_spoilt = random.Random(draw(st.integers(0, 999))), draw(st.booleans())
    if is_spoilt:
        keys["on_error"] = {"policy": "skip", "limit": "50%"}
    longest = draw(st.sampled_from([8, 20, 40]))
    found = [_a_record(chance, name, i, longest) for i in range(draw(st.integers(12, 40)))]
    spoilt = [None if is_spoilt and i % 9 == 4 else record for i, record in enumerate(found)]
    first = len(found) // 3
    return MetSource(name=name, keys=keys, shards=[spoilt[:first], spoilt[first:]])


@st.composite
def _transforms(draw: st.DrawFn, pack: Keys) -> list[Keys]:
    length = pack["length"]
    some: list[list[Keys]] = [
        [],
        [{"type": "clamp", "tokens": length - 3}],
        [{"type": "filter", "min_tokens": 6}],
        [{"type": "filter", "min_tokens": 6}, {"type": "clamp", "tokens": 2 * length}],
    ]
    hows = ["joined"] if pack["method"] == "concat_and_split" else ["joined", "apart"]
    joins = [{"type": "concat", "tokens": length, "documents": how} for how in hows]
    return [*draw(st.sampled_from(some)), *draw(st.sampled_from([[], [], *([j] for j in joins)]))]


def _a_record(chance: random.Random, name: str, number: int, longest: int) -> Record:
    """Return a record; now and then one that equals others, or that is empty."""
    alike = number if chance.random() < 0.8 else number // 4
    size = chance.randrange(longest) if chance.random() < 0.95 else -1
    ids = [ord(name[0]), alike, *(chance.randrange(250) for _ in range(size))] if size >= 0 else []
    return {
        "text": f"{name[0]}{alike} {'é' * (size // 2)}" if size >= 0 else "",
        "ids": ids,
        "mask": [chance.randrange(2) for _ in ids],
        "id": f"{name}-{alike}",
        "at": {"lang": chance.choice(["en", "en", "de", "fr"])},
    }
