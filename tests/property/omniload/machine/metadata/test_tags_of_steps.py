"""Tags that a cost reads, through whole simulated jobs with kills: each with its sample, and rows dealt alike."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.base.settings.registry import Registered
from omniload.mix.columns import SampleColumns
from omniload.mix.edits.edit import SetWeights
from omniload.plan.costs import declared
from tests.support.examples import few
from tests.support.plane import simulation as simulated_plane
from tests.support.plane.builders import a_mix
from tests.support.plane.drawn_runs import epochs, worlds
from tests.support.plane.reference import read_range, reference_digests
from tests.support.plane.simulation import Simulation

STEPS = 5
LANGS = ("de", "en", "français", "")
OWN = {
    "lang": {"column": "l", "dtype": "text", "of": "samples", "default": "en"},
    "number": {"column": "n", "dtype": "int64", "of": "samples", "default": -1},
}
LANG, NUMBER = 'lang:text:samples:"en"', "number:int64:samples:-1"


def number_of(position, sub):
    return position * 8 + sub


def lang_of(source, number):
    return LANGS[(source + number * number) % len(LANGS)]


def read_with_tags(source, epoch, start, stop, without=()):
    """Read samples of a source; two of three have tags."""
    table, columns = read_range(source, epoch, start, stop, without)
    if source == 2 or not len(table):
        return table, columns
    keys = zip(table.positions_N.tolist(), table.subs_N.tolist(), strict=True)
    numbers = [number_of(*key) for key in keys]
    texts = [np.frombuffer(lang_of(source, n).encode(), np.uint8) for n in numbers]
    tags = {
        LANG: Ragged.of(texts, np.uint8),
        NUMBER: Ragged(values_V=np.array(numbers), offsets=np.arange(len(numbers) + 1)),
    }
    return table, SampleColumns(tokens=columns.tokens, others={**columns.others, **tags})


class CountingCost:
    """A cost by tags that compares each text with the number of its sample and records the numbers of each step."""

    of = ("lengths", "sources", "columns.lang", "columns.number")

    def __init__(self):
        self.seen = []

    def __call__(self, lengths_P, sources_P, langs_P, numbers_P):
        pieces = list(zip(sources_P.tolist(), numbers_P.tolist(), strict=True))
        expected = ["en" if s == 2 else lang_of(s, n) for s, n in pieces]
        assert langs_P.tolist() == expected
        self.seen.append(Counter(pieces))
        return lengths_P * (1.0 + (langs_P == "de") * 9 + numbers_P % 5)


@contextmanager
def tagged():
    cost = CountingCost()
    known = Registered(name="counting", function=cost, distribution="lab 1")
    with ExitStack() as stack:
        stack.enter_context(patch.object(declared, "registered", lambda *_: known))
        stack.enter_context(patch.object(simulated_plane, "read_range", read_with_tags))
        yield cost


@st.composite
def mixes(draw):
    names = ("books", "code", "web")[: draw(st.integers(2, 3))]
    sources = {
        name: {"type": "parquet", "path": f"{name}.parquet", "tokens": "t"}
        | ({} if name == "web" else {"columns": OWN})
        for name in names
    }
    mix = a_mix(
        sources=sources,
        rows=8,
        length=16,
        micro_rows=draw(st.sampled_from([1, 2, 4])),
        runtime={"prefetch_steps": draw(st.sampled_from([1, 4, 16])), "elastic": True},
        balance={"cost": "counting"},
    )
    return mix.model_copy(update={"batch": mix.batch.model_copy(update={"columns": tuple(OWN)})})


short = worlds(kills=[0, 2, 5], planner_kills=[0, 2, 5], short_reads=[0.0, 0.5])


def rows_dealt(run):
    """Return the rows of each rank in each microbatch of each step."""
    return {
        at: [part.keys_K4.tolist() for part in batch.microbatches]
        for at, batch in run.batches.items()
    }


def pieces_of_step(run, step):
    keys = (
        key
        for (at, _), batch in run.batches.items()
        for part in batch.microbatches
        for key in part.keys_K4.tolist()
        if at == step
    )
    return Counter((s, -1 if s == 2 else number_of(position, sub)) for s, position, sub, _ in keys)


@few(12, 150)
@given(mixes(), st.lists(epochs, min_size=3, max_size=3), st.sampled_from([2, 4]), short, short)
def test_each_tag_stands_with_its_sample_and_kills_deal_no_row_otherwise(
    mix, lengths, dp, world, other
):
    lengths = lengths[: len(mix.names)]
    steps = {"mix": mix, "epochs": lengths, "num_steps": STEPS}
    with tagged() as cost:
        run, elsewhere = (Simulation(**steps, **at | {"dp": dp}) for at in (world, other))
        digests = run.run()

        assert elsewhere.run() == digests
    assert digests == reference_digests(mix, lengths, num_steps=STEPS)
    assert rows_dealt(run) == rows_dealt(elsewhere)
    assert all(pieces_of_step(run, step) in cost.seen for step in range(STEPS))


weights = st.builds(
    lambda **of: (SetWeights(weights=of), None), books=st.floats(0.5, 4), code=st.floats(0.5, 4)
)


@few(8, 80)
@given(
    mixes(),
    st.lists(epochs, min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from([2, 4]), st.booleans()), max_size=3),
    st.lists(weights, max_size=2),
    short,
)
def test_ranks_that_change_and_plans_that_are_taken_back_find_the_tags_of_their_steps(
    mix, lengths, resizes, changes, world
):
    lengths = lengths[: len(mix.names)]
    asked = {**world, "resizes": resizes, "changes": changes, "dp": 2}
    with tagged() as cost:
        run = Simulation(mix=mix, epochs=lengths, num_steps=STEPS, **asked)
        digests = run.run()

    assert digests == reference_digests(run.history, lengths, num_steps=STEPS)
    assert all(pieces_of_step(run, step) in cost.seen for step in range(STEPS))
