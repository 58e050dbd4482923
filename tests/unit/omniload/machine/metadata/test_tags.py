"""Tags that costs and strategies read: requested, reported and kept by piece, and only if something reads them."""

import pickle

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.base.settings.registry import Registered
from omniload.machine.held.blocks import SampleRange
from omniload.machine.messages import ReadAhead, SamplesReported, Started
from omniload.machine.metadata.samples import (
    MOST_WORDS,
    ReadAheadWithTags,
    ReportedTags,
    ReportWithTags,
    asked_with_tags,
)
from omniload.machine.source_loader import SamplesRead, SourceLoader
from omniload.mix.samples import Coded
from omniload.plan.costs import declared
from omniload.plan.costs.words import LONGEST_WORD
from tests.support.plane.builders import a_mix, a_planner, a_table, pieces_of

LANG, SPEECH, NUMBER = 'lang:text:samples:"en"', "speech:bool:samples:false", "n:int64:samples:-1"
ASKED = ReadAhead(source=0, start=0, stop=3, life=2, without=(1,), is_lacked=True)


def texts(*words):
    return Ragged.of([np.frombuffer(word.encode(), np.uint8) for word in words], np.uint8)


def numbers(*values, dtype=np.int64):
    return Ragged(values_V=np.array(values, dtype), offsets=np.arange(len(values) + 1))


def a_block(*lengths, start=0, **others):
    tokens = Ragged.of([np.arange(n) for n in lengths])
    return SampleRange(a_table(lengths, start=start), tokens, others)


def coded(*words):
    return Coded.of_texts(texts(*words))


def texts_of(tags):
    return [tags.words[code] for code in tags.values_N.tolist()]


def reported(block, tags=(LANG, NUMBER)):
    loader = SourceLoader(names={0: "web"})
    stop = block.table.stop
    loader.handle(asked_with_tags(ReadAhead(source=0, start=block.table.start, stop=stop), tags))
    (report,) = loader.handle(SamplesRead(source=0, block=block))
    return report


def test_a_read_of_which_no_tag_is_asked_for_is_the_plain_one():
    assert asked_with_tags(ASKED, ()) is ASKED


def test_a_read_with_tags_asks_for_the_same_range():
    asked = asked_with_tags(ASKED, (LANG,))

    assert asked == ReadAheadWithTags(
        source=0, start=0, stop=3, life=2, without=(1,), is_lacked=True, tags=(LANG,)
    )
    assert asked.is_lacked


def test_a_loader_reports_what_is_asked_for_and_the_planner_is_told_texts_as_bytes():
    block = a_block(3, 4, 5, **{LANG: texts("de", "", "de"), NUMBER: numbers(7, 8, 9)})

    report = reported(block)

    assert isinstance(report, ReportWithTags)
    assert texts_of(report.tags[LANG]) == ["de", "", "de"]
    assert report.tags[LANG].values_N.dtype == np.uint8
    assert report.tags[NUMBER].values_N.tolist() == [7, 8, 9]
    assert report.table is block.table


def test_a_loader_that_is_asked_for_no_tag_reports_as_if_there_were_none():
    tagged = a_block(3, 4, **{LANG: texts("de", "en")})

    reports = [reported(block, ()) for block in (tagged, a_block(3, 4))]

    assert {type(report) for report in reports} == {SamplesReported}
    # Only the memory size differs, because a tag is a part of it.
    sizes = {report.size_bytes for report in reports}
    assert len(sizes) == 2
    plain = [pickle.dumps((r.source, r.table, r.without), protocol=5) for r in reports]
    assert plain[0] == plain[1]


def test_what_is_held_is_reported_with_its_tags_when_it_is_asked_for_again():
    loader = SourceLoader(names={0: "web"})
    for start, words in ((0, ("de", "en")), (2, ("en", "fr"))):
        block = a_block(2, 2, start=start, **{LANG: texts(*words)})
        loader.handle(SamplesRead(source=0, block=block))

    (report,) = loader.handle(asked_with_tags(ReadAhead(source=0, start=1, stop=4), (LANG,)))

    assert texts_of(report.tags[LANG]) == ["en", "en", "fr"]
    assert len(report.table) == 3


def test_a_source_without_a_tag_reports_nothing_of_it():
    report = reported(a_block(3, 4, **{NUMBER: numbers(1, 2)}))

    assert list(report.tags) == [NUMBER]


def test_a_text_that_is_no_kind_of_documents_is_refused_with_its_source():
    reported(a_block(1, **{LANG: texts("x" * LONGEST_WORD)}))

    with pytest.raises(
        ConfigError,
        match=rf"sources\.web: balance reads columns\.lang .* one has '{'x' * 40}…' of 65 bytes, more than 64; have",
    ):
        reported(a_block(1, 1, **{LANG: texts("de", "x" * (LONGEST_WORD + 1))}))


def test_a_text_that_an_array_of_strings_would_cut_is_refused():
    reported(a_block(1, **{LANG: texts("\0de", "d\0e", "")}))

    with pytest.raises(
        ConfigError, match=r"one has 'de\\x00', which ends in NUL, .* has it without"
    ):
        reported(a_block(1, 1, **{LANG: texts("de", "de\0")}))


def test_a_tag_of_too_many_different_texts_is_refused():
    kept = ReportedTags(tags=(LANG,))
    half = [str(i) for i in range(MOST_WORDS // 2)]
    others = [f"x{i}" for i in range(MOST_WORDS // 2 - 1)]
    for source, words in enumerate((half, half, others)):
        kept.add(source, a_table([1] * len(words)), {LANG: coded(*words)})

    with pytest.raises(
        ConfigError, match=r"columns\.lang, which has more than 4,096 .* 'one more'"
    ):
        kept.add(3, a_table([1]), {LANG: coded("one more")})


def test_each_piece_has_the_tags_of_its_sample_and_others_the_default():
    kept = ReportedTags(tags=(LANG, NUMBER, SPEECH))
    kept.add(
        1, a_table([4, 5]), {LANG: coded("de", "fr"), NUMBER: Coded(values_N=np.array([7, 8]))}
    )
    kept.add(1, a_table([6], start=2), {LANG: coded("de")})
    pieces = pieces_of(
        [1, 1, 0, 2, 5, 5], [0, 0, 0, 0, 4, 4], [1, 2, 0, 0, 6, 6], [1, 0, 0, 0, 4, 4]
    )

    found = kept.of(pieces)

    assert found["columns.lang"].tolist() == ["fr", "en", "de", "de"]
    assert found["columns.n"].tolist() == [8, -1, -1, 7]
    assert found["columns.speech"].dtype == np.bool_
    assert found["columns.speech"].tolist() == [False] * 4


def test_nothing_shows_what_other_steps_had():
    kept = ReportedTags(tags=(LANG,))
    kept.add(0, a_table([4, 5]), {LANG: coded("an unusually long one", "fr")})
    alone = ReportedTags(tags=(LANG,))
    alone.add(0, a_table([5], start=1), {LANG: coded("fr")})

    first, second = (
        each.of(pieces_of([0, 1, 0, 0, 5, 5]))["columns.lang"] for each in (kept, alone)
    )

    assert (first.dtype, first.tobytes()) == (second.dtype, second.tobytes())


def test_a_report_that_is_cut_has_the_tags_of_what_is_left():
    kept = ReportedTags(tags=(NUMBER,))

    kept.add(0, a_table([4, 5]), {NUMBER: Coded(values_N=np.array([7, 8, 9]))})

    assert kept.of(pieces_of([0, 1, 0, 0, 5, 5]))["columns.n"].tolist() == [8]


def test_samples_that_are_reported_again_have_the_tags_of_the_later_report():
    kept = ReportedTags(tags=(NUMBER,))
    kept.add(0, a_table([4, 5, 6]), {NUMBER: Coded(values_N=np.array([7, 8, 9]))})

    kept.forget(0, 1)
    kept.add(0, a_table([5, 6], start=1), {NUMBER: Coded(values_N=np.array([18, 19]))})

    pieces = pieces_of([0, 0, 0, 0, 4, 4], [0, 1, 0, 0, 5, 5], [0, 2, 0, 0, 6, 6])
    assert kept.of(pieces)["columns.n"].tolist() == [7, 18, 19]


def test_what_every_rank_has_is_let_go():
    kept = ReportedTags(tags=(NUMBER,))
    kept.add(0, a_table([4, 5]), {NUMBER: Coded(values_N=np.array([7, 8]))})

    kept.release({0: 2})

    assert kept.of(pieces_of([0, 0, 0, 0, 4, 4]))["columns.n"].tolist() == [-1]


def by_language(lengths_P, langs_P):
    return lengths_P * (1.0 + (langs_P == "de"))


def a_tagged_mix(columns=("lang",)):
    own = {"lang": {"column": "l", "dtype": "text", "of": "samples", "default": "en"}}
    source = {"type": "parquet", "path": "a.parquet", "tokens": "t", "columns": own}
    mix = a_mix(sources={"web": source}, balance={"cost": "by_language"})
    return mix.model_copy(update={"batch": mix.batch.model_copy(update={"columns": columns})})


@pytest.fixture
def registered(monkeypatch):
    known = Registered(name="by_language", function=by_language, distribution="lab 1")
    monkeypatch.setattr(declared, "registered", lambda *_: known)
    monkeypatch.setattr(by_language, "of", ("lengths", "columns.lang"), raising=False)


def test_a_planner_asks_for_the_tags_that_its_cost_reads_of_a_loader_that_takes_over_too(
    registered,
):
    planner = a_planner(a_tagged_mix())

    asked = [*planner.handle(Started()), *planner.outstanding((0,))[1:]]

    assert [type(read) for read in asked] == [ReadAheadWithTags] * 2
    assert [read.tags for read in asked] == [(LANG,)] * 2


def test_a_planner_whose_cost_reads_no_tag_asks_for_none_though_batches_bring_some(
    registered, monkeypatch
):
    monkeypatch.setattr(by_language, "of", ("lengths", "sources"))
    plain = a_mix(sources=("web",))

    asked = [a_planner(mix).handle(Started()) for mix in (a_tagged_mix(), plain)]

    first, second = (pickle.dumps(commands, protocol=5) for commands in asked)
    assert first == second


@pytest.mark.parametrize(
    ("of", "columns", "says"),
    [
        (("lengths", "columns.lang"), (), "batches have no column of whole samples; name 'lang'"),
        (("columns.tongue",), ("lang",), r"batches have \['columns\.lang'\]; name 'tongue' under"),
        ("columns.lang", ("lang",), "has of='columns.lang'; give a tuple of names of columns"),
    ],
)
def test_a_cost_that_reads_what_is_not_there_is_refused_before_anything_is_read(
    registered, monkeypatch, of, columns, says
):
    monkeypatch.setattr(by_language, "of", of)

    with pytest.raises(ConfigError, match=f"balance.*{says}"):
        a_planner(a_tagged_mix(columns))
