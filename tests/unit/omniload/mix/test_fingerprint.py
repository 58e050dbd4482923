"""The fingerprint changes with everything that decides membership, and with nothing else."""

import pytest

from omniload.mix.fingerprint import fingerprint_of
from tests.support.plane.builders import a_mix, some_facts

SOURCE = {"type": "parquet", "path": "web/*.parquet", "tokens": "tokens"}


def parts(
    *,
    records=(10, 10),
    order="aa",
    shards="cc",
    content="ee",
    tokenizer="none",
    library="none",
    **changes,
):
    facts = some_facts(records, order, shards, content)
    return fingerprint_of(
        a_mix(**changes), facts, tokenizer_digest=tokenizer, tokenizer_library=library
    )


def changed(**changes):
    before, after = parts(), parts(**changes)
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 8}, ["seed"]),
        ({"weights": {"web": 2, "code": 1}}, ["mix"]),
        ({"mix": {"stop": "first_exhausted"}}, ["mix"]),
        ({"mix": {"level": "sample"}}, ["mix"]),
        ({"pack": {"overlong": "drop"}}, ["pack"]),
        ({"pack": {"lookahead_rows": 2}}, ["pack"]),
        ({"rows": 8}, ["batch.tokens"]),
        ({"tokenizer": "1234"}, ["tokenizer"]),
        ({"records": (10, 11)}, ["sources.web.records"]),
        ({"order": "bb"}, ["sources.code.order", "sources.web.order"]),
        ({"content": "ff"}, ["sources.code.content", "sources.web.content"]),
        ({"library": "tokenizers 9"}, ["tokenizer.library"]),
        ({"shards": "dd"}, ["sources.code.shards", "sources.web.shards"]),
        (
            {
                "sources": {
                    "web": SOURCE | {"shuffle": {"method": "none"}},
                    "code": {**SOURCE, "path": "code/*.parquet"},
                }
            },
            ["sources.web"],
        ),
        (
            {
                "sources": {
                    "web": SOURCE | {"overlong": "drop"},
                    "code": {**SOURCE, "path": "code/*.parquet"},
                }
            },
            ["sources.web"],
        ),
    ],
)
def test_what_decides_membership_changes_the_part_that_says_so(changes, named):
    assert changed(**changes) == named


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_rows": 1},
        {"balance": {"method": "none"}},
        {"runtime": {"kind": "ray", "prefetch_steps": 9, "loaders": 2, "constructors": 3}},
        {
            "sources": {
                "web": SOURCE | {"path": "moved/*.parquet"},
                "code": {**SOURCE, "path": "code/*.parquet"},
            }
        },
        {
            "sources": {
                "web": SOURCE | {"tags": {"kind": "crawl"}, "on_error": {"policy": "skip"}},
                "code": {**SOURCE, "path": "code/*.parquet"},
            }
        },
    ],
)
def test_ranks_balance_runtime_and_labels_change_nothing(changes):
    assert changed(**changes) == []


def declared_of(kind="chat", **said):
    """Return the kept declaration of a source of conversations, or of pairs."""
    source = {"type": "jsonl", "path": "*.jsonl", "text": "messages"}
    source["transforms"] = [{"type": kind, **said}]
    mix = a_mix(sources={"web": source}, tokenizer={"type": "bytes"}, pack={"overlong": "drop"})
    return fingerprint_of(mix, some_facts((10,), "aa", "cc", "ee"))["sources.web"]


AS_EVER = {"chat": "667ca8adab37", "preference": "cb219209d2e4"}
"""Digests of transforms in releases before names of keys and roles."""


@pytest.mark.parametrize("kind", AS_EVER)
@pytest.mark.parametrize("names", [{}, {"role": "role"}, {"content": "content", "roles": None}])
def test_names_that_change_nothing_leave_the_digest_of_older_releases(kind, names):
    assert declared_of(kind) == declared_of(kind, messages=names) == AS_EVER[kind]


@pytest.mark.parametrize("kind", AS_EVER)
def test_names_of_keys_and_roles_change_the_declaration(kind):
    roles = {"human": "user", "gpt": "assistant"}
    said = [{"role": "from"}, {"content": "value"}, {"roles": roles}, {"roles": roles | {"a": "b"}}]

    assert len({AS_EVER[kind], *(declared_of(kind, messages=names) for names in said)}) == 5


def test_a_renamed_source_is_another_source():
    assert changed(sources=("web", "books")) == [
        "mix",
        "sources.books",
        "sources.books.content",
        "sources.books.order",
        "sources.books.records",
        "sources.books.shards",
        "sources.code",
        "sources.code.content",
        "sources.code.order",
        "sources.code.records",
        "sources.code.shards",
    ]


def test_every_source_needs_its_record_count():
    with pytest.raises(ValueError, match="shorter"):
        parts(records=(10,))
