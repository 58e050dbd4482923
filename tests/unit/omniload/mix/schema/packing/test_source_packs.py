"""Packing options of a source: their meaning, refusals with the line, and mixes without them, which stay unchanged."""

import pytest

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import AddSource
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import fingerprint_of
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from omniload.plan.forecast.sizes import SourceSizes, rooms_left
from omniload.plan.membership import membership_of
from omniload.plan.window import window_of
from tests.support.plane.builders import a_mix, a_table, some_facts, with_packs

GOLDEN = {
    "mix": "499ce865b86e",
    "pack": "86ff65fe60cb",
    "sources.code": "a4c1bdceb37c",
    "sources.web": "da3b38309c5e",
}
GOLDEN_AMOUNTS = "c5dc80152413"
FILE = """\
version: 1
seed: 1
sources:
  chat: {{type: parquet, path: chat, tokens: t{chat}}}
  web: {{type: parquet, path: web, tokens: t}}
mix: {{level: {level}, stages: [{{weights: {{chat: 1, web: 1}}}}]}}
pack:
  length: 32
  method: {method}
batch: {{tokens: 128, micro_tokens: 64}}
"""


def read(chat="", method="best_fit", level="token"):
    text = FILE.format(chat=chat and f", {chat}", method=method, level=level)
    return parse_yaml(text, MixConfig, name="mix.yaml")


@pytest.mark.parametrize(
    ("chat", "method", "cut", "own", "alone"),
    [
        ("overlong: drop, pack: {cut: never}", "concat_and_split", [0, 1], [0, 0], [0, 0]),
        ("pack: {cut: allow}", "best_fit", [1, 0], [0, 0], [0, 0]),
        ("pack: {rows: own}", "concat_and_split", [1, 1], [1, 0], [0, 0]),
        ("pack: {rows: alone}", "concat_and_split", [0, 1], [0, 0], [1, 0]),
        ("pack: {rows: alone}", "best_fit", [0, 0], [0, 0], [1, 0]),
    ],
)
def test_a_source_says_how_it_is_packed_and_the_others_are_as_the_method_has_it(
    chat, method, cut, own, alone
):
    packing = read(chat, method).own_packing

    found = (packing.cut_S, packing.own_S, packing.alone_S)
    assert [column.tolist() for column in found] == [list(map(bool, c)) for c in (cut, own, alone)]


@pytest.mark.parametrize(
    ("chat", "method"),
    [
        ("overlong: drop, pack: {cut: never}", "best_fit"),
        ("pack: {cut: allow}", "concat_and_split"),
    ],
)
def test_a_source_that_says_what_the_method_has_is_packed_as_ever(chat, method):
    assert read(chat, method).own_packing is None


@pytest.mark.parametrize(
    ("chat", "method", "said"),
    [
        ("pack: {}", "best_fit", "mix.yaml:4: sources.chat.pack: pack says nothing; say cut"),
        (
            "pack: {cut: allow, rows: alone}",
            "best_fit",
            "mix.yaml:4: sources.chat.pack.cut: cut is allow and rows is alone",
        ),
        (
            "pack: {cut: never}",
            "concat_and_split",
            "overlong is split, which cuts documents of sources.chat that are longer than pack.length 32; say overlong",
        ),
        (
            "pack: {rows: own}",
            "none",
            "mix.yaml:4: sources.chat.pack: sources.chat has pack, and pack.method is none, which gives every document",
        ),
        (
            "pack: {cut: allow}, transforms: [{type: concat, tokens: 32, documents: apart}]",
            "best_fit",
            "mix.yaml:4: sources.chat.pack.cut: cut is allow, which cuts documents anywhere, and sources.chat joins",
        ),
        (
            "transforms: [{type: concat, tokens: 32, documents: apart}]",
            "concat_and_split",
            "or say pack: {cut: never} of this source",
        ),
    ],
)
def test_packing_that_a_source_cannot_have_is_refused_with_its_line(chat, method, said):
    with pytest.raises(ConfigError) as raised:
        read(chat, method)
    assert said in str(raised.value)


def test_a_source_whose_documents_must_not_be_cut_goes_beside_others_that_are():
    joined = "overlong: drop, transforms: [{type: concat, tokens: 32, documents: apart}], pack: {cut: never}"

    assert read(joined, "concat_and_split").own_packing.cut_S.tolist() == [False, True]


def test_a_source_that_is_added_is_held_to_its_packing():
    source = ParquetSource(type="parquet", path="n", tokens="t", pack={"cut": "never"})
    history = History(a_mix())

    with pytest.raises(ConfigError, match="source 'new': cut is never, and overlong is split"):
        history.edited(AddSource(name="new", source=source, weight=1), 4)


def test_mixes_without_packing_of_sources_have_the_digests_of_before():
    """The digests are those of releases before the packing of sources.

    Only a source that sets it has another digest.
    """
    sources = {
        "code": {"type": "parquet", "path": "c", "tokens": "t"},
        "web": {"type": "jsonl", "path": "w", "overlong": "drop"},
    }
    mix = a_mix(
        sources=sources,
        pack={"method": "concat_and_split", "overlong": "truncate"},
        tokenizer={"type": "bytes"},
    )
    packed = with_packs(mix, [{"rows": "alone"}, None])

    parts = fingerprint_of(mix, some_facts([5, 6]))
    others = fingerprint_of(packed, some_facts([5, 6]))
    assert {k: parts[k] for k in ("mix", "pack", "sources.code", "sources.web")} == GOLDEN
    assert {key for key in parts if parts[key] != others[key]} == {"sources.code"}


def test_amounts_of_a_group_have_the_digest_of_the_release_that_brought_them():
    both = {"tokens": 1001, "of": {"code": 9, "web": 1}, "temperature": 2}
    mix = a_mix(version=2, mix={"amounts": {"both": both}})

    assert fingerprint_of(mix, some_facts([5, 6]))["mix"] == GOLDEN_AMOUNTS


def test_documents_longer_than_a_row_end_the_run_at_the_step_that_draws_one():
    mix = a_mix(sources=("web",), rows=1, length=8, micro_rows=1, pack={"overlong": "refuse"})
    ahead, state = [a_table([8, 8, 8, 9, 8, 8, 8])], MixState.start(1)

    steps = window_of(mix, state, ahead, most=4)

    # One row of eight tokens, and one that waits: the fourth is drawn by the third step.
    assert [step.after.cursors_S for step in steps] == [((1, 1, 0),), ((2, 1, 0),)]
    said = r"sources.web: step 2 draws sample 0 of record 3, 9 tokens, more than pack.length 8, and pack.overlong is"
    with pytest.raises(ConfigError, match=said):
        membership_of(mix, steps[-1].after, [a_table([9, 8, 8], start=3)])


@pytest.mark.parametrize(
    ("packs", "tokens", "said"),
    [
        ([None, None], 256, []),
        # Half of the tokens are of rows that are a quarter full: 1 / (0.5 * 4 + 0.5).
        ([{"rows": "alone"}, None], 102.4, ["code lies alone in its rows, of which about 75%"]),
        ([{"rows": "own"}, {"rows": "own"}], 256, ["code, web have rows of their own"]),
    ],
)
def test_what_rows_that_are_not_shared_cost_is_foretold(packs, tokens, said):
    mix = with_packs(a_mix(sources=("code", "web"), rows=8, length=32), packs)
    sizes = SourceSizes.of(mix, [100, 100], [8, 64])

    assert sizes.tokens_per_step(mix) == pytest.approx(tokens)
    found = rooms_left(mix, sizes)
    assert [begin in each for begin, each in zip(said, found, strict=True)] == [True] * len(said)
