"""The edits of a run in its folder: what is kept is read, and what nobody of us wrote is refused."""

import orjson
import pytest

from omniload.base.errors import StateError
from omniload.base.state import sealed
from omniload.mix.edits.edit import AddSource, SetWeights, Undo
from omniload.mix.edits.edits_file import EDITS_NAME, read_history, write_history
from omniload.mix.edits.found import merged
from omniload.mix.edits.history import History
from omniload.mix.sources import ParquetSource
from tests.support.plane.builders import a_mix

BOOKS = ParquetSource(type="parquet", path="books.parquet", text="text")


@pytest.fixture
def history():
    history = History(a_mix()).edited(SetWeights(weights={"web": 3}), 5)
    history = history.edited(AddSource(name="books", source=BOOKS, weight=1), 8)
    return history.edited(Undo(), 9)


def forged(folder, history, change):
    """Write edits with a change and a digest of their own; return them."""
    write_history(folder, history)
    content = orjson.loads((folder / EDITS_NAME).read_bytes())
    content.pop("blake2b")
    change(content["edits"])
    (folder / EDITS_NAME).write_bytes(orjson.dumps(sealed(content)))


def test_what_was_kept_is_read(tmp_path, history):
    write_history(tmp_path, history)

    assert read_history(tmp_path, history.base) == history


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda edits: edits[0]["stages"][0].update(from_step=7), "begin at its step 5"),
        (lambda edits: edits[0].update(step=0), "begin at its step 0"),
        (
            lambda edits: edits[0]["stages"].append(edits[0]["stages"][0]),
            "follow each other",
        ),
        (
            lambda edits: edits[0]["stages"][0].update(weights={"books": 1}),
            "edit 1 speaks of source 'books'",
        ),
        (lambda edits: edits[0].update(undoes=1), "revisions|undoes"),
    ],
)
def test_edits_that_are_none_of_this_mix_are_refused_whoever_made_their_digest(
    tmp_path, history, change, said
):
    forged(tmp_path, history, change)

    with pytest.raises(StateError, match=said):
        read_history(tmp_path, history.base)


def test_edits_of_a_state_speak_of_the_sources_of_its_mix(history):
    carried = history.edits[:1]
    other = carried[0].model_copy(
        update={"stages": (carried[0].stages[0].model_copy(update={"weights": {"books": 1.0}}),)}
    )

    assert merged(History(history.base), carried).edits == carried
    with pytest.raises(StateError, match="in the mix state: edit 1 speaks of source 'books'"):
        merged(History(history.base), [other])
