"""A file is followed, whatever edits are set for coming steps: it applies up to them, and its request comes once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.mix.edits.edit import AddSource, RetireSource, SetWeights
from omniload.mix.edits.history import History
from omniload.mix.edits.wanted import wanted_of
from omniload.mix.schedule import weights_at
from tests.support.plane.builders import a_mix

STEP, NAMES = 10, ("web", "code", "books")
SOURCES = a_mix(sources=(*NAMES, "news")).sources
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1)


@st.composite
def stages_of_files(draw):
    """Draw the stages of a run's file, and the stages of another file."""
    steps = sorted(draw(st.sets(st.integers(2, 60), max_size=3)))
    first = {"from_step": 0, "weights": dict.fromkeys(NAMES, 2)}
    stages = [first, *({"from_step": step, "weights": draw(WEIGHTS)} for step in steps)]
    now = [stage | {"weights": draw(WEIGHTS)} for stage in stages]
    return stages, draw(st.sampled_from([now, stages]))


CHANGES = st.one_of(
    st.builds(SetWeights, weights=WEIGHTS),
    st.builds(RetireSource, name=st.sampled_from(NAMES)),
    st.just(AddSource(name="news", source=SOURCES["news"], weight=2)),
)


@given(stages_of_files(), st.lists(st.tuples(CHANGES, st.integers(0, 90)), max_size=4))
def test_what_a_file_says_holds_up_to_the_first_step_of_an_edit_that_it_lacks(files, edits):
    of_run, of_file = files
    history = History(a_mix(sources=NAMES, mix={"stages": of_run}))
    for change, step in edits:
        try:
            history = history.edited(change, step)
        except ConfigError:
            continue
    names = sorted({name for stage in of_file for name in stage["weights"]})
    file = a_mix(sources=names, mix={"stages": of_file})

    def found(history):
        return wanted_of(file, history.base, history, STEP, (lambda s: s, lambda s: s))

    after = history
    for change, at in found(history).changes:
        after = after.edited(change, STEP if at is None else at)

    assert found(after).changes == ()
    assert found(after).refused == ()
    told = [
        int(each.said.split(" is set for step ")[1].split(",")[0])
        for each in found(after).scheduled
    ]
    for step in range(STEP, min(told, default=90)):
        said = zip(names, weights_at(file.mix.stages, names, step), strict=True)
        drawn = {name: share for name, share in after.shares_at(step).items() if share}
        assert drawn == pytest.approx({name: share for name, share in said if share})
