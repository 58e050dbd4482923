"""Tampering with a saved state: whatever is changed, the run does not go on with other samples.

Each change is made twice: as damage, which the digest tells, and by somebody who makes the digest
anew. What the second gives is told by values that no run reaches, by the data, or by the journal.
"""

import copy
import itertools
import math
import threading

import orjson
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.base.errors import StateError
from omniload.batch.digest import batch_digest
from omniload.client import Client
from tests.support.plane.builders import resealed
from tests.support.plane.corpora import a_corpus
from tests.support.plane.local_runs import a_spec

LIMIT_S = 60.0


def put(*path, value):
    """Return a change that puts ``value``, or what it makes of the old one, at ``path``."""

    def change(state):
        *above, last = path
        node = state
        for part in above:
            node = node[part]
        node[last] = value(node[last]) if callable(value) else value

    return change


def without(*path):
    def change(state):
        *above, last = path
        node = state
        for part in above:
            node = node[part]
        del node[last]

    return change


def swapped_sources(state):
    sources = state["sources"]
    sources["web"], sources["code"] = sources["code"], sources["web"]


def renamed_source(state):
    state["sources"]["books"] = state["sources"].pop("web")


def doubled_source(state):
    state["sources"]["books"] = copy.deepcopy(state["sources"]["web"])


def moved_credit(by):
    def change(state):
        state["sources"]["web"]["credit"] += by
        state["sources"]["code"]["credit"] -= by

    return change


def with_piece(*changes):
    """Return a change that appends a copy of the first carried piece with other numbers."""

    def change(state):
        piece = list(state["carried"][0])
        for at, value in changes:
            piece[at] = value(piece[at]) if callable(value) else value
        state["carried"].append(piece)

    return change


def shorter_sample(state):
    """Say that the sample of a piece ends where the piece does: its last label would be lost."""
    piece = next(piece for piece in state["carried"] if piece[4] < piece[5])
    piece[5] = piece[4]


WRONG_TYPES = [None, True, "3", 3.0, math.nan, math.inf, [3], {"3": 3}]
WRONG_NUMBERS = [-1, -(1 << 31), (1 << 31) + 1, 1 << 62, 1 << 63]
NUMBERS = [
    ("step",),
    ("sources", "web", "cursor", 0),
    ("sources", "web", "cursor", 1),
    ("sources", "web", "cursor", 2),
    ("sources", "web", "drawn"),
    ("sources", "web", "credit"),
    ("carried", 0, 1),
    ("carried", 0, 2),
    ("carried", 0, 3),
    ("carried", 0, 4),
    ("carried", 0, 5),
]
KEYS = [
    ("version",),
    ("step",),
    ("mix_revision",),
    ("fingerprint",),
    ("fingerprint", "seed"),
    ("sources",),
    ("sources", "web"),
    ("sources", "web", "cursor"),
    ("sources", "web", "cursor", 2),
    ("sources", "web", "credit"),
    ("sources", "web", "drawn"),
    ("carried",),
    ("carried", 0, 5),
]

IMPOSSIBLE = {
    **{
        f"{'.'.join(map(str, path))} = {value!r}": put(*path, value=value)
        for path, value in itertools.product(NUMBERS, [*WRONG_TYPES, *WRONG_NUMBERS])
    },
    **{f"without {'.'.join(map(str, path))}": without(*path) for path in KEYS},
    **{
        f"{key} = {value!r}": put(key, value=value)
        for key, value in itertools.product(
            ["sources", "carried", "fingerprint"], [None, 3, "x", [], {}, [[]], {"web": 3}]
        )
        if (key, value) != ("carried", [])
    },
    "another version": put("version", value=1),
    "a later version": put("version", value=99),
    "cursor [5, 0, -3]": put("sources", "web", "cursor", value=[5, 0, -3]),
    "cursor of two": put("sources", "web", "cursor", value=[5, 0]),
    "cursor of four": put("sources", "web", "cursor", value=[5, 0, 0, 0]),
    "cursor within a row": put("sources", "web", "cursor", 2, value=5),
    "cursor behind its sample": put("sources", "web", "cursor", value=[3, 0, 32 * 50]),
    "cursor at a sample too many": put("sources", "web", "cursor", 1, value=2),
    "cursor at the start": put("sources", "web", "cursor", value=[0, 0, 0]),
    "cursor epochs ahead": put("sources", "web", "cursor", 0, value=10**9),
    "swapped sources": swapped_sources,
    "renamed source": renamed_source,
    "one source more": doubled_source,
    "credits that do not sum to zero": put("sources", "web", "credit", value=lambda x: x + 1),
    "credits moved": moved_credit(1 << 30),
    "credits moved far": moved_credit(1 << 61),
    "drawn more": put("sources", "web", "drawn", value=lambda x: x + 1000),
    "drawn nothing": put("sources", "web", "drawn", value=0),
    "a step later": put("step", value=lambda x: 1 << 40),
    "step 0": put("step", value=0),
    "another fingerprint": put("fingerprint", "pack", value="x"),
    "piece doubled": with_piece(),
    "piece overlapping": with_piece((3, 0), (4, lambda stop: max(1, stop - 1))),
    "piece of an unknown source": with_piece((0, "books")),
    "piece of a source number": with_piece((0, 0)),
    "piece ahead of the cursor": with_piece((1, 100)),
    "piece epochs ahead": with_piece((1, 1 << 40)),
    "piece that starts before its sample": with_piece((3, -7)),
    "piece that ends behind its sample": with_piece((4, lambda stop: stop + 10_000)),
    "piece turned round": with_piece((3, 9), (4, 2)),
    "empty piece": with_piece((3, 1), (4, 1)),
    "piece longer than a row": with_piece((3, 0), (4, 33), (5, 40)),
    "piece of a longer sample": put("carried", 0, 5, value=lambda size: size + 1),
    "piece of a shorter sample": shorter_sample,
    "piece of five": put("carried", 0, value=["web", 1, 0, 0, 5]),
    "piece of seven": put("carried", 0, value=["web", 1, 0, 0, 5, 5, 5]),
    "piece that begins within its sample": put("carried", 0, 3, value=1),
    "piece that ends within a row": put("carried", 0, 4, value=lambda stop: stop - 1),
    "pieces in another order": put("carried", value=lambda pieces: pieces[::-1]),
    "fewer pieces than rows ahead": put("carried", value=lambda pieces: pieces[:3]),
    "no pieces": put("carried", value=[]),
    "steps that draw nearly nothing": put("step", value=lambda step: 2 * step + 6),
    "a piece many times": put("carried", value=lambda pieces: pieces * 1000),
}
"""Changes that no digest hides."""

TOO_LONG = {f"{'.'.join(map(str, path))} = 10**30": put(*path, value=10**30) for path in NUMBERS}
"""Damage alone: no digest can be made of an integer of more than 64 bits."""

POSSIBLE = {
    "cursor one further": put("sources", "web", "cursor", value=lambda c: [c[0] + 1, 0, 0]),
    "cursor one back": put("sources", "web", "cursor", value=lambda c: [c[0] - 1, 0, 0]),
    "another step": put("step", value=lambda step: step + 1),
    "a piece less": put("carried", value=lambda pieces: pieces[:-1]),
    "another revision": put("mix_revision", value=1),
}
"""Changes of values to other possible ones: with a digest made anew, the journal alone tells them."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a corpus, its mix, and a state after some steps, with pieces carried and a cut sample among them."""
    folder = tmp_path_factory.mktemp("tampering")
    mix = a_corpus(folder, rows=4, length=32, pack={"lookahead_rows": 4})
    run = folder / "run"
    with LocalPlane(a_spec(folder, mix, run_dir=run)) as plane, Client(plane.handle(0)) as client:
        state = client.state_dict()
        while state["step"] < 3 or not any(piece[4] < piece[5] for piece in state["carried"]):
            assert client.next_batch() is not None
            state = orjson.loads(orjson.dumps(client.state_dict()))
    return folder, mix, run, state


def refusal_of(spec):
    """Resume and take three steps; return what the run is refused with, or fail by its limit."""
    outcome = []

    def resumed():
        try:
            with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
                outcome.append([batch_digest(batch) for batch in itertools.islice(client, 3)])
        except Exception as error:  # noqa: BLE001 -- the test judges it
            outcome.append(error)

    thread = threading.Thread(target=resumed, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert outcome, f"the run neither goes on nor is refused for {LIMIT_S:.0f} s"
    return outcome[0]


def test_there_are_more_tamperings_than_outside_checks_made():
    assert 2 * len(IMPOSSIBLE) + 2 * len(POSSIBLE) >= 58


def test_what_was_not_tampered_with_resumes(world):
    folder, mix, run, state = world

    assert len(refusal_of(a_spec(folder, mix, state=state, run_dir=run))) == 3


@pytest.mark.parametrize("name", [*IMPOSSIBLE, *TOO_LONG, *POSSIBLE])
def test_damage_is_refused(world, name):
    folder, mix, _, state = world
    changed = copy.deepcopy(state)
    (IMPOSSIBLE | TOO_LONG | POSSIBLE)[name](changed)

    assert isinstance(refusal_of(a_spec(folder, mix, state=changed)), StateError)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_run_reaches_is_refused_with_a_digest_that_fits(world, name):
    folder, mix, _, state = world
    changed = copy.deepcopy(state)
    IMPOSSIBLE[name](changed)

    refused = refusal_of(a_spec(folder, mix, state=resealed(changed)))

    assert isinstance(refused, StateError)


@pytest.mark.parametrize("name", POSSIBLE)
def test_what_another_run_might_have_reached_is_refused_by_the_journal(world, name):
    folder, mix, run, state = world
    changed = copy.deepcopy(state)
    POSSIBLE[name](changed)

    refused = refusal_of(a_spec(folder, mix, state=resealed(changed), run_dir=run))

    assert isinstance(refused, StateError)
