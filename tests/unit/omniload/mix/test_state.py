"""The state of a mix: plain JSON there and back, and refusals."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from omniload.base.errors import StateError
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.pieces import PieceTable
from omniload.mix.state import SPREAD_VERSION, STATE_VERSION, MixState
from tests.support.plane.builders import pieces_of, resealed

NAMES = ("web", "code")
PRINT = {"seed": "7", "mix": "aa", "sources.web": "bb"}


def a_state(**changes):
    state = MixState(
        step=12,
        cursors_S=((40, 1, 0), (7, 0, 64)),
        credits_S=(5 * WEIGHT_ONE, -5 * WEIGHT_ONE),
        drawn_S=(1000, 990),
        carried=pieces_of([0, 31, 0, 0, 20, 20], [1, 6, 2, 32, 40, 50]),
        mix_revision=3,
    )
    return replace(state, **changes)


def test_a_state_goes_through_json_unchanged():
    saved = json.loads(json.dumps(a_state().to_json(NAMES, PRINT)))

    again = MixState.from_json(saved, NAMES, PRINT)

    assert again.to_json(NAMES, PRINT) == saved
    assert (again.step, again.cursors_S) == (12, ((40, 1, 0), (7, 0, 64)))
    assert (again.credits_S, again.drawn_S) == (a_state().credits_S, a_state().drawn_S)
    assert again.carried.rows() == [[0, 31, 0, 0, 20, 20], [1, 6, 2, 32, 40, 50]]
    assert again.mix_revision == 3


def test_bad_records_are_part_of_a_state_where_there_are_any():
    state = a_state().with_bad({1: 3})

    saved = json.loads(json.dumps(state.to_json(NAMES, PRINT)))

    assert saved["bad"] == {"code": 3}
    assert saved["version"] == STATE_VERSION
    assert MixState.from_json(saved, NAMES, PRINT).bad_S == state.bad_S == (0, 3)
    # The digest is unchanged, so a release that knows none of these keys can continue this release's journal.
    assert state.digest() == a_state().digest()
    assert state.widened(3).bad_of(1) == 3
    # Without any it is the state of a release that counted none.
    assert state.with_bad({1: 0}).to_json(NAMES, PRINT) == a_state().to_json(NAMES, PRINT)
    assert "bad" not in a_state().to_json(NAMES, PRINT)


@pytest.mark.parametrize("bad", [{}, {"web": 0}, {"web": -1}, {"other": 1}, [1, 2], {"web": "1"}])
def test_bad_records_that_are_none_are_refused(bad):
    saved = resealed(a_state().to_json(NAMES, PRINT) | {"bad": bad})

    with pytest.raises(StateError, match="damaged"):
        MixState.from_json(saved, NAMES, PRINT)


def test_the_start_owes_nothing_and_carries_nothing():
    state = MixState.start(3)

    assert state.step == 0
    assert state.cursors_S == ((0, 0, 0),) * 3
    assert sum(state.credits_S) == 0
    assert len(state.carried) == 0


def test_a_start_goes_through_json_too():
    saved = json.loads(json.dumps(MixState.start(2).to_json(NAMES, PRINT)))

    assert len(MixState.from_json(saved, NAMES, PRINT).carried) == 0


def test_every_part_of_the_mix_that_changed_is_named():
    saved = a_state().to_json(NAMES, PRINT)
    now = {"seed": "8", "mix": "aa", "sources.books": "cc"}

    with pytest.raises(StateError) as caught:
        MixState.from_json(saved, NAMES, now)

    assert "seed: 7 saved, 8 now" in str(caught.value)
    assert "sources.web: bb saved, absent now" in str(caught.value)
    assert "sources.books: absent saved, cc now" in str(caught.value)
    assert "mix:" not in str(caught.value)


def test_a_state_of_another_version_is_refused():
    saved = a_state().to_json(NAMES, PRINT) | {"version": SPREAD_VERSION + 1}

    with pytest.raises(StateError, match=f"has version {SPREAD_VERSION + 1}, this code reads"):
        MixState.from_json(saved, NAMES, PRINT)


@pytest.mark.parametrize("key", ["edits", "since"])
def test_a_state_that_lost_its_edits_to_a_template_says_how_to_keep_it(key):
    whole = a_state(since_S=(4, 5) if key == "since" else ()).to_json(NAMES, PRINT, [{"step": 3}])
    template = {
        k: v for k, v in whole.items() if k != key
    }  # loaded by DCP into a new loader's state

    with pytest.raises(StateError, match=r"save one text, json\.dumps\(loader\.state_dict\(\)\)"):
        MixState.from_json(template, NAMES, PRINT)


def test_what_is_no_state_at_all_is_refused():
    with pytest.raises(
        StateError, match="no mix state: it has no version, and holds 'a', 'b'; pass"
    ):
        MixState.from_json({"a": 1, "b": 2}, NAMES, PRINT)
    with pytest.raises(StateError, match="and holds nothing"):
        MixState.from_json({}, NAMES, PRINT)


@pytest.mark.parametrize(
    ("state", "tool"),
    [
        ({"epoch": 0, "sample_in_epoch": 96, "num_canonical_nodes": 1}, "Mosaic Streaming"),
        ({"_snapshot": {}, "_steps_since_snapshot": 0}, "torchdata's StatefulDataLoader"),
        ({"examples_iterable": {"ex_iterables": []}, "epoch": 0}, "Hugging Face datasets"),
        ({"version": 2, "shape": {}, "stage": "fresh"}, "a DataLoader over a dataset"),
    ],
)
def test_a_state_of_another_loader_is_refused_by_the_name_of_that(state, tool):
    with pytest.raises(StateError, match=f"this is a state of {tool}, .*its order of samples is"):
        MixState.from_json(state, ("web",), {})


def test_a_state_of_mosaic_is_told_how_to_be_brought_along():
    with pytest.raises(StateError, match="mix import --from llm-foundry --state"):
        MixState.from_json({"epoch": 0, "sample_in_epoch": 96}, ("web",), {})


def test_a_state_of_energon_is_refused_by_name_whatever_it_is_made_of():
    made = type("SavableDataLoaderState", (), {"__module__": "megatron.energon.savable_loader"})

    with pytest.raises(StateError, match="a state of Megatron-Energon: its order of samples"):
        MixState.from_json(made(), ("web",), {})


def test_a_state_of_energon_that_is_a_mapping_is_known_by_its_class():
    made = type("FlexState", (dict,), {"__module__": "megatron.energon.state"})

    with pytest.raises(StateError, match="of Megatron-Energon, and holds '_sample_count': its"):
        MixState.from_json(made(_sample_count=3), ("web",), {})


def damaged(path, value):
    saved = json.loads(json.dumps(a_state().to_json(NAMES, PRINT)))
    *above, last = path
    node = saved
    for part in above:
        node = node[part]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return saved


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step",), None),
        (("step",), "twelve"),
        (("fingerprint",), None),
        (("fingerprint",), 3),
        (("sources", "code"), None),
        (("sources", "web", "cursor"), [1]),
        (("sources", "web", "cursor"), ["a", 0, 0]),
        (("sources", "web", "credit"), "much"),
        (("carried",), None),
        (("carried",), [[1, 2, 3], [4, 5, 6]]),
        (("carried",), [[1, 2, 3, 4, 5, "x"]]),
        (("carried",), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_damaged_state_is_refused_and_never_guessed_at(path, value):
    with pytest.raises(StateError, match="damaged"):
        MixState.from_json(damaged(path, value), NAMES, PRINT)


def test_a_step_pays_every_source_its_share_and_takes_what_was_drawn():
    half = WEIGHT_ONE // 2

    after = MixState.start(2).after(
        cursors_S=[(3, 1, 0), (0, 0, 0)],
        served_S=[10, 0],
        weights_S=[half, half],
        carried=PieceTable.empty(),
    )

    assert after.step == 1
    assert after.credits_S == (-5 * WEIGHT_ONE, 5 * WEIGHT_ONE)
    assert after.drawn_S == (10, 0)


def test_what_is_carried_is_still_needed():
    assert a_state().floors() == [31, 6]


def test_without_anything_carried_the_cursor_is_the_floor():
    assert a_state(carried=PieceTable.empty()).floors()[0] == 40


def test_pieces_are_taken_and_joined_by_column():
    table = pieces_of([0, 1, 0, 0, 5, 5], [1, 2, 0, 0, 6, 9], [0, 3, 0, 2, 4, 8])

    joined = PieceTable.concatenated([table.take(np.array([2])), table.take(np.array([0]))])

    assert joined.rows() == [[0, 3, 0, 2, 4, 8], [0, 1, 0, 0, 5, 5]]
    assert joined.lengths_P.tolist() == [2, 5]


@pytest.mark.parametrize("state", [[], "state", b"{}", 3, [None]])
def test_what_is_no_object_is_no_state(state):
    with pytest.raises(StateError, match="not an object; give the result of state_dict"):
        MixState.from_json(state, ("web",), {})


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("sources.web.content", "of source 'web' the bytes in files of the same names and sizes"),
        ("sources.web.shards", "of source 'web' the names or sizes of its files"),
        ("sources.a.b.records", "of source 'a.b' how many records it has"),
        (
            "sources.web",
            "of source 'web' keys other than path, tags and on_error, or the splits of the mix",
        ),
        (
            "sources.a.b",
            "of source 'a.b' keys other than path, tags and on_error, or the splits of the mix",
        ),
        (
            "sources.web.transforms",
            "of source 'web' the files that its transforms read, such as a chat template",
        ),
        ("tokenizer", "the file of the tokenizer"),
        ("mix", "the section mix: weights, stages or groups"),
    ],
)
def test_what_a_digest_is_of_is_said_in_words(part, said):
    saved = a_state().to_json(NAMES, PRINT | {part: "aa"})

    with pytest.raises(StateError, match=re.escape(f"({part}: aa saved, cc now, {said}); resume")):
        MixState.from_json(saved, NAMES, PRINT | {part: "cc"})


def test_of_many_sources_that_differ_alike_the_first_are_named():
    parts = [f"sources.s{i:02}" for i in range(37)]
    saved = a_state().to_json(
        NAMES, PRINT | dict.fromkeys(parts, "aa") | {"sources.s07.order": "aa"}
    )
    now = PRINT | dict.fromkeys(parts, "cc") | {"sources.s07.order": "cc"}

    with pytest.raises(StateError) as caught:
        MixState.from_json(saved, NAMES, now)

    said = str(caught.value)
    assert [part for part in parts if f"{part}: aa saved" in said] == parts[:3]
    assert "sources.s07.order: aa saved, cc now" in said
    assert "; and of 34 more sources keys other than path" in said


def test_a_file_of_another_size_is_one_thing_that_differs():
    """The bytes, which then differ too, are only reported for files of the same sizes."""
    parts = {"sources.web.content": "aa", "sources.web.shards": "bb"}
    saved = a_state().to_json(NAMES, PRINT | parts)

    with pytest.raises(StateError) as caught:
        MixState.from_json(saved, NAMES, PRINT | dict.fromkeys(parts, "cc"))

    assert "the names or sizes of its files" in str(caught.value)
    assert "content" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["mix"], "diff RUN FILE`, and takes other weights by `omniload mix set`$"),
        (
            ["pack"],
            r"mix diff RUN FILE`\. The state is of step \d+: a new run leaves out .*-o FOLDER`$",
        ),
        (
            ["batch.tokens"],
            r"aa saved, cc now\).* start a new run\. The state is of step (\d+): .*drawn RUN --step \1 -o FOLDER`",
        ),
        (["sources.web"], "mix diff RUN FILE`$"),
        (
            ["sources.web.records", "sources.web.order"],
            "takes more files, as a source of their own, .*, once path names those that were there alone",
        ),
        (["mix", "sources.web.records"], "by `omniload mix set` and more files, as a source"),
        (["seed", "sources.web.content"], "or start a new run"),
    ],
)
def test_what_a_run_takes_as_an_edit_is_said_where_it_was_changed_in_its_file(parts, said):
    saved = a_state().to_json(NAMES, PRINT | dict.fromkeys(parts, "aa"))

    with pytest.raises(StateError, match=said) as caught:
        MixState.from_json(saved, NAMES, PRINT | dict.fromkeys(parts, "cc"))

    told_by_a_folder = {"mix", "pack", "sources.web", "sources.web.records"}
    assert ("run_dir=" in str(caught.value)) == bool(told_by_a_folder & {*parts})
