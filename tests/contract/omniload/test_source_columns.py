"""What a column of yours promises, whatever holds it: files are written by the libraries that others use."""

import os
import re
from itertools import chain
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import OmniloadError
from omniload.batch.microbatch import aligned_of
from omniload.batch.rows import pieces_of
from omniload.client import Client
from omniload.mix.columns import column_kind
from omniload.mix.config import OnError
from omniload.mix.schema.sources.own_columns import OwnColumn
from omniload.mix.sources import SOURCE_TYPES, SourceConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.parts.sample_block import merged
from omniload.source.parts.share import Part
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.builders import a_mix
from tests.support.plane.sources.column_kinds import COLUMN_KINDS, COLUMNS, PER_TOKEN
from tests.support.plane.sources.source_contract import expected_tokens

SHARDS, RECORDS = 2, 30


def a_record(number):
    text = f"record {number} {'é' * (number % 5)}"
    count = len(expected_tokens(text))
    return {
        "text": text,
        "lang": ["en", "dé", "", "zh:Hans"][number % 4],
        "year": 2**53 + 1 - number if number % 7 == 0 else 1900 + number,
        "score": number / 8 - 2,
        "flag": number % 3 == 0,
        # All of these are held exactly by the narrowest type that a kind stores.
        "weight": [((number + i) % 9) / 4 for i in range(count)],
        "kind": [(number * 3 + i) % 256 - 128 for i in range(count)],
    }


def records_of(shard):
    return [a_record(shard * RECORDS + i) for i in range(RECORDS)]


def fitting(kind, record):
    """Return a record with what the files of a kind can hold: some numbers of years are of 32 bits."""
    if getattr(kind, "types", {}).get("year") is np.int32:
        return record | {"year": record["year"] % 2**31}
    return record


@pytest.fixture(params=COLUMN_KINDS)
def kind(request):
    return COLUMN_KINDS[request.param]()


@pytest.fixture
def written(tmp_path, kind):
    """Write records, those of a shard changed where a test says so, and return what opens them."""

    def write(change=lambda record: record, **columns):
        for shard in range(SHARDS):
            records = [fitting(kind, record) for record in records_of(shard)]
            if shard == 1:
                records[7] = change(records[7])
            kind.write(tmp_path / f"part-{shard}{kind.suffix}", records)

        def opened(seed=3, used=None, **changes):
            config = kind.config(**columns).model_copy(update=changes)
            config = config if used is None else config.using(used)
            spec = SourceSpec("web", config, seed=seed, tokenizer=kind.tokenizer, base_dir=tmp_path)
            return open_source(spec)

        return opened

    return write


def named(others):
    return {name.partition(":")[0]: column for name, column in others.items()}


def value_of(name, values):
    if COLUMNS[name].get("dtype") == "text":
        return values.tobytes().decode()
    return values.tolist() if name in PER_TOKEN else values.item()


def by_tokens(block, names):
    """Return what each sample of a block has of some columns, by its tokens."""
    others = named(block.others)
    return {
        tuple(block.tokens[i].tolist()): {n: value_of(n, others[n][i]) for n in names}
        for i in range(len(block.tokens))
    }


def wanted_of(kind, records):
    return {
        expected_tokens(record["text"]): {name: record[name] for name in kind.names}
        for record in (fitting(kind, each) for each in records)
    }


def all_of(kind):
    return dict.fromkeys(kind.names)


EVERY = [record for shard in range(SHARDS) for record in records_of(shard)]
N = len(EVERY)


def test_each_sample_has_the_values_of_its_record_however_it_is_read(written, kind):
    opened = written(**all_of(kind))
    wanted = wanted_of(kind, EVERY)

    source = opened()

    assert by_tokens(source.read(0, N), kind.names) == wanted
    assert by_tokens(source.read(N, 2 * N), kind.names) == wanted
    for start in range(0, N, 7):
        assert by_tokens(opened().read(start, start + 3), kind.names).items() <= wanted.items()
    parts = merged([opened().read_part(0, N, Part(k, 2)) for k in range(2)])
    assert by_tokens(parts, kind.names) == wanted


def test_columns_come_in_the_types_that_they_are_named_with(written, kind):
    block = written(**all_of(kind))().read(0, 9)

    for name, column in named(block.others).items():
        dtype = COLUMNS[name]["dtype"]
        assert column.values_V.dtype == np.dtype("uint8" if dtype == "text" else dtype)
        if name in PER_TOKEN:
            assert column.lengths_N.tolist() == block.tokens.lengths_N.tolist()
    inside = {name.partition(":")[0]: name for name in block.others}
    if "weight" in inside:
        assert column_kind(inside["weight"]).of_labels


def test_a_column_that_nobody_uses_is_not_read_and_changes_no_sample(written, kind, tmp_path):
    opened = written(**all_of(kind))
    plain = written()

    block = opened(used=()).read(0, N)

    assert block.others == {}
    assert sorted(by_tokens(plain().read(0, N), ())) == sorted(by_tokens(block, ()))
    assert sorted(by_tokens(block, ())) == sorted(wanted_of(kind, EVERY))


@pytest.mark.parametrize("name", ["lang", "year", "score", "flag"])
def test_a_record_without_a_value_has_the_default_or_is_one_bad_record(written, kind, name):
    if name not in kind.names or not kind.nulls:
        pytest.skip("its records always have one")
    if name == "lang" and hasattr(kind, "delimiter"):
        pytest.skip("an empty field is a text")
    default = {"lang": "xx", "year": -1, "score": 0.5, "flag": True}[name]
    lacking = EVERY[RECORDS + 7]

    def without(record):
        return record | {name: None}

    had = written(without, **{name: {"default": default}})().read(0, N)
    opened = written(without, **{name: None})
    left = opened(on_error=OnError(policy="skip")).read(0, N)

    tokens = expected_tokens(lacking["text"])
    assert by_tokens(had, [name])[tokens] == {name: default}
    assert (had.skipped, left.skipped) == (0, 1)
    assert set(by_tokens(had, [name])) - set(by_tokens(left, [name])) == {tokens}
    with pytest.raises(OmniloadError, match=r"part-1.*(year|score|flag|lang|cls)"):
        opened().read(0, N)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lang", "x" * 4_097, "lang has 4,097 bytes of UTF-8, more than 4,096"),
        ("score", 1e300, r"score holds 1e\+300, which is more than a float32 holds"),
        ("kind", "more", "kind holds 300, which is more than a int8 holds"),
    ],
)
def test_a_value_that_its_column_does_not_hold_is_one_bad_record_told_as_it_is(
    written, kind, name, value, said
):
    stored = getattr(kind, "types", {}).get(name)
    if name not in kind.names or stored in {np.int8, np.float32}:
        pytest.skip("its files hold no such value")

    def changed(record):
        if name == "kind":
            return record | {"kind": [300, *record["kind"][1:]]}
        return record | {name: value}

    opened = written(changed, **{name: None})
    block = opened(on_error=OnError(policy="skip")).read(0, N)

    assert (block.skipped, len(block.tokens)) == (1, N - 1)
    tokens = expected_tokens(EVERY[RECORDS + 7]["text"])
    assert tokens not in by_tokens(block, [name])
    with pytest.raises(OmniloadError, match=rf"part-1.*{said}"):
        opened().read(0, N)


@pytest.mark.parametrize("by", [-1, 1])
def test_values_that_are_not_as_many_as_tokens_are_told_with_both_numbers(written, kind, by):
    if "weight" not in kind.names:
        pytest.skip("its records are text")

    def changed(record):
        values = record["weight"]
        return record | {"weight": values[:-1] if by < 0 else [*values, 1.0]}

    opened = written(changed, weight=None)
    tokens = len(expected_tokens(EVERY[RECORDS + 7]["text"]))
    if hasattr(kind, "types"):  # by position alone: no value after it would be its token's
        every = sum(len(expected_tokens(each["text"])) for each in records_of(1))
        said = rf"part-1.*holds {every + by:,} values of columns\.weight, and .*part-1.* {every:,} tokens"
    else:
        said = rf"part-1.*weight has {tokens + by} values for {tokens} tokens"

    with pytest.raises(OmniloadError, match=said):
        opened().read(0, N)


def test_a_column_that_is_nowhere_is_told_with_where_it_is_looked_for(written, kind):
    name = kind.names[0]
    places = {"*": "*.nowhere.npy", ".": ".nowhere"}
    place = kind.read_from.get(name, name)
    place = places.get(place[0], "nowhere")
    opened = written(**all_of(kind))
    column = kind.config(**{name: None}).own_columns[name].model_copy(update={"column": place})

    with pytest.raises(OmniloadError, match=re.escape(place.removeprefix("*"))):
        opened(columns={name: column}).read(0, N)


def documents_of(batch):
    """Return the documents of a batch, each with its tags, and with the values of its tokens where it lies."""
    found = []
    for part in batch.microbatches:
        bounds, aligned = part.cu_seqlens.tolist(), aligned_of(part)
        for i, piece in zip(np.flatnonzero(part.sources_D >= 0), pieces_of(part), strict=True):
            values = {name: column.tolist() for name, column in piece.columns.items()}
            for name, column in aligned.items():
                values[name] = column.reshape(-1)[bounds[i] : bounds[i + 1]].tolist()
            found.append((tuple(piece.tokens.tolist()), values))
    return found


def laid_out(record):
    """Return the values of a record as a batch has them: texts as UTF-8, and of labels one to the left."""
    found = {"lang": [*record["lang"].encode()], "kind": record["kind"]}
    found |= {name: [record[name]] for name in ("year", "score", "flag")}
    # Behind the last token of a document that is whole there is no label.
    return found | {"weight": [*record["weight"][1:], 0.0]}


def test_a_run_resumes_with_the_values_of_its_records_on_another_number_of_ranks(
    written, kind, tmp_path
):
    written(**all_of(kind))
    mix = a_mix(
        sources={"web": kind.config(**all_of(kind)).model_dump(mode="json")},
        tokenizer=kind.tokenizer,
        pack={"length": 64},
        batch={"tokens": 256, "micro_tokens": 128, "columns": [*kind.names]},
    )

    def steps(ranks, state=None, stop=6):
        tree = ClientPlaceTree.of(dp=ranks)
        spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=tree, state=state, num_steps=stop)
        with LocalPlane(spec) as plane:
            clients = [Client(plane.handle(rank)) for rank in range(ranks)]
            batches = zip(*clients, strict=True)
            found = [
                sorted(chain.from_iterable(map(documents_of, each)), key=repr) for each in batches
            ]
            return found, clients[0].state_dict()

    whole, _ = steps(1)
    _, saved = steps(2, stop=3)
    rest, _ = steps(2, saved)

    wanted = {expected_tokens(each["text"]): laid_out(fitting(kind, each)) for each in EVERY}
    seen = [document for step in whole for document in step if document[0] in wanted]
    assert rest == whole[3:]
    assert len(seen) > N
    for tokens, values in seen:
        assert values == {name: wanted[tokens][name] for name in kind.names}


def test_the_page_says_of_every_type_which_columns_it_has():
    page = Path(__file__).parents[3] / "docs/how-to/data/your-data.md"
    section = (
        page.read_text().partition("### Which type has which columns")[2].partition("\n## ")[0]
    )
    rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    told = {name: cells for first, *cells in rows for name in re.findall(r"`(\w+)`", first)}
    models = {
        get_args(model.model_fields["type"].annotation)[0]: model
        for model in get_args(get_args(SourceConfig)[0])
    }
    run = {kind().config().type: [] for kind in COLUMN_KINDS.values()}
    for kind in COLUMN_KINDS.values():
        run[kind().config().type] += kind.names

    assert told.keys() == models.keys() == {*SOURCE_TYPES}
    for name, (of_tokens, of_records, known) in told.items():
        assert ("columns" in models[name].model_fields) == (name in run)
        assert of_records.startswith("none") == (name not in run)
        assert of_tokens.startswith("none") == ("weight" not in run.get(name, ()))
        said = {*re.findall(r"`(\w+)`", known)}
        field = models[name].model_fields.get("columns")
        has_known = field is not None and get_args(field.annotation)[1] is not OwnColumn
        assert bool(said) == has_known


def test_other_values_in_files_of_their_sizes_are_other_content(written, kind, tmp_path):
    name = "weight" if "weight" in kind.names else "year"

    def changed(record):
        value = record[name]
        return record | {name: [v + 1 for v in value] if name == "weight" else value + 1}

    before = written(**{name: None})().facts.content_digest
    times = {each: each.stat() for each in tmp_path.rglob("*") if each.is_file()}
    after = written(changed, **{name: None})
    for each, status in times.items():
        if each.exists():
            os.utime(each, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert after().facts.content_digest != before
