"""Weights that count sequences, and documents that are joined to them: refusals, and where they are reported."""

import pytest
from pydantic import ValidationError

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import AddSource
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import fingerprint_of
from omniload.mix.schedule import MixSchedule
from tests.support.plane.builders import a_mix, some_facts

JOINED = {"type": "concat", "tokens": 32}
FILE = """\
version: 1
seed: 1
sources:
  code: {{type: numpy, path: code.bin, dtype: uint16, row_tokens: {row}}}
  web: {{type: parquet, path: web, tokens: t, transforms: [{transforms}]}}
mix:
  level: sequence
  stages: [{{weights: {{code: 1, web: 1}}}}]
pack:
  length: 32
  method: {method}
batch: {{tokens: 128, micro_tokens: 64}}
"""


def a_source(*transforms, **changes):
    keys = {"type": "parquet", "path": "x", "tokens": "t", "transforms": list(transforms)}
    return keys | changes


def a_joined_mix(**changes):
    return a_mix(
        sources={"web": a_source(JOINED), "code": a_source(JOINED)},
        mix={"level": "sequence"},
        **changes,
    )


def read(row=32, transforms="{type: concat, tokens: 32}", method="best_fit"):
    text = FILE.format(row=row, transforms=transforms, method=method)
    return parse_yaml(text, MixConfig, name="mix.yaml")


def test_sequences_are_counted_as_samples_where_every_source_gives_samples_of_a_row():
    mix = read()

    assert mix.mix.level == "sequence"
    assert MixSchedule.of(mix).level == "sample"
    assert read(method="none").mix.level == "sequence"
    assert [source.sequence_tokens for source in mix.sources.values()] == [32, 32]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"transforms": ""},
            "mix.yaml:7: mix.level: level is sequence, and sources.web has documents of any length",
        ),
        (
            {"transforms": "{type: concat, tokens: 64}"},
            "mix.yaml:7: mix.level: level is sequence, and sources.web has samples of 64 tokens",
        ),
        (
            {"row": 16},
            "mix.yaml:7: mix.level: level is sequence, and sources.code has samples of 16",
        ),
        (
            {"method": "concat_and_split"},
            "mix.yaml:11: pack.method: method is concat_and_split, which fills rows up behind each short sample",
        ),
    ],
)
def test_sources_without_samples_of_a_row_and_packing_that_cuts_them_are_refused(changes, said):
    with pytest.raises(ConfigError) as raised:
        read(**changes)

    assert said in str(raised.value)


def test_the_fault_says_what_to_write():
    with pytest.raises(ConfigError, match=r"the transform \{type: concat, tokens: 32\}, or use"):
        read(transforms="")


def test_a_source_that_is_added_is_joined_too():
    history = History(a_joined_mix())
    joined = AddSource(name="new", source=a_source(JOINED), weight=0.5)

    assert history.edited(joined, 3).latest.names == ("code", "web", "new")
    with pytest.raises(ConfigError, match=r"source 'new': level is sequence, and sources\.new has"):
        history.edited(AddSource(name="new", source=a_source(), weight=0.5), 3)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (a_source(JOINED, columns={"scores": "s"}), "the source has columns.scores, which belongs"),
        (a_source(JOINED, columns={"text": "s"}), "columns.text, which belongs to whole samples"),
        (
            {"type": "jsonl", "path": "x", "transforms": [{"type": "preference"}, JOINED]},
            "transforms[1]: concat joins documents and cuts them anywhere, and the source has preference pairs",
        ),
        (
            {
                "type": "parquet",
                "path": "x",
                "text": "t",
                "images": "i",
                "transforms": [{"type": "images", "placeholder": 1}, JOINED],
            },
            "the source has images, which belong to whole samples; leave concat out",
        ),
        (
            a_source(JOINED, {"type": "clamp", "tokens": 4}),
            "transforms[0]: clamp comes behind concat, and is of documents",
        ),
        (a_source(JOINED, JOINED), "transforms[0]: concat comes behind concat"),
        (a_source({"type": "concat", "tokens": 1}), "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_joined_is_refused(source, said):
    with pytest.raises(ValidationError) as raised:
        a_mix(sources={"web": source, "code": a_source()}, tokenizer={"type": "bytes"})

    assert said in str(raised.value)


def test_masks_chats_and_filters_go_with_joining():
    short = {"type": "filter", "min_tokens": 32}
    chat = {"type": "jsonl", "path": "x", "transforms": [{"type": "chat"}, JOINED, short]}
    masked = a_source(short, JOINED, columns={"loss_mask": "m"})

    mix = a_mix(
        sources={"web": masked, "code": chat},
        mix={"level": "sequence"},
        tokenizer={"type": "bytes"},
    )

    assert [source.sequence_tokens for source in mix.sources.values()] == [32, 32]


def test_joining_another_length_is_another_mix():
    facts = some_facts([5, 5])
    parts = [
        fingerprint_of(a_mix(sources={"web": a_source(t), "code": a_source()}), facts)
        for t in (JOINED, JOINED | {"tokens": 16})
    ]

    assert {key for key in parts[0] if parts[0][key] != parts[1][key]} == {"sources.web"}


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("by_source", [False, True])
def test_sequences_that_are_longer_than_a_row_and_would_be_lost_are_refused(overlong, by_source):
    """The message has the value, the limit, the loss, and the setting to write."""
    own = {"overlong": overlong} if by_source else {}
    pack = {} if by_source else {"overlong": overlong}
    lost = {
        "drop": "every whole sequence would be left out",
        "truncate": "8 tokens of every whole sequence would be cut off",
    }[overlong]
    said = (
        f"sequences are 40 tokens, more than pack.length 32, and overlong is {overlong}: {lost}; "
        "use 32 tokens, or overlong: split"
    )

    with pytest.raises(ValidationError) as raised:
        a_mix(sources={"web": a_source(JOINED | {"tokens": 40}, **own)}, length=32, pack=pack)

    assert said in str(raised.value)
    for tokens in (32, 16):
        a_mix(sources={"web": a_source(JOINED | {"tokens": tokens}, **own)}, length=32, pack=pack)
    a_mix(
        sources={"web": a_source(JOINED | {"tokens": 40}, overlong="split")}, length=32, pack=pack
    )


def test_the_fault_of_a_sequence_too_long_is_at_the_line_of_its_length():
    file = FILE.replace("  length: 32", "  length: 16\n  overlong: drop").replace(
        "  level: sequence\n", ""
    )

    with pytest.raises(ConfigError) as raised:
        parse_yaml(
            file.format(row=16, transforms="{type: concat, tokens: 32}", method="best_fit"),
            MixConfig,
            name="mix.yaml",
        )

    assert str(raised.value).startswith(
        "mix.yaml:5: sources.web.transforms.0.tokens: sequences are 32 tokens"
    ), str(raised.value)


BEFORE_THERE_WAS_A_CHOICE = "9799c9beb468"
"""Digest of a source that joins its documents, of the release before they could stay apart."""
APART = JOINED | {"documents": "apart"}
FLAT = {
    "type": "numpy",
    "path": "x",
    "dtype": "uint16",
    "row_tokens": 32,
    "end_of_document": 0,
}


@pytest.mark.parametrize("source", [a_source(APART), FLAT])
def test_packing_that_would_cut_documents_that_stay_apart_is_refused(source):
    with pytest.raises(ValidationError, match="method is concat_and_split, which cuts documents"):
        a_mix(sources={"web": source}, length=32, pack={"method": "concat_and_split"})
    with pytest.raises(ValidationError, match="use at most 31 tokens"):
        a_mix(sources={"web": source}, length=31)
    for method in ("best_fit", "none"):
        mix = a_mix(sources={"web": source}, length=32, pack={"method": method})
        assert mix.sources["web"].keeps_documents_apart


def test_documents_apart_are_another_mix_and_joined_ones_the_mix_they_were():
    facts = some_facts([5])

    def part(transform):
        return fingerprint_of(a_mix(sources={"web": a_source(transform)}), facts)["sources.web"]

    assert part(JOINED | {"documents": "joined"}) == part(JOINED) == BEFORE_THERE_WAS_A_CHOICE
    assert part(APART) != part(JOINED)


def test_tiles_of_an_image_that_no_row_holds_are_refused_at_what_to_lower():
    tiles = {"size": 56, "longest_edge": 112}
    images = {"type": "images", "patch": 14, "merge": 2, "placeholder": 1, "tiles": tiles}
    source = {"type": "parquet", "path": "x", "text": "t", "images": "i", "transforms": [images]}

    def mix_of(length):
        return a_mix(
            sources={"web": source, "code": a_source()}, length=length, tokenizer={"type": "bytes"}
        )

    assert mix_of(20).pack.length == 20
    with pytest.raises(ValidationError) as raised:
        mix_of(10)
    (fault,) = raised.value.errors()
    assert fault["ctx"]["at"] == ("sources", "web", "transforms", 0, "tiles", "longest_edge")
    assert "5 tiles, the thumbnail among them, which have 20 tokens" in fault["msg"]
