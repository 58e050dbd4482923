"""Promises of every simulated run, whatever was changed in it and whichever role was lost."""

import json
from collections.abc import Sequence

from omniload.mix.edits.edits_file import edits_in
from omniload.mix.edits.found import require_reached
from omniload.mix.edits.history import History
from omniload.mix.journal.reading import state_before
from omniload.mix.journal.records import StepRecord
from omniload.mix.possible import require_possible
from omniload.mix.progress import weights_by_state
from omniload.mix.state import MixState
from tests.support.plane.simulation import Simulation

__all__ = [
    "require_each_sample_once",
    "require_journal_folds",
    "saved_state",
    "state_behind",
    "taken_in",
]


def saved_state(simulation: Simulation, step: int) -> MixState:
    """Return the state before a step of a run without edits, as a checkpoint keeps it."""
    content = json.loads(json.dumps(simulation.states[step]))
    return MixState.from_json(content, simulation.mix.names, simulation.planner.fingerprint)


def taken_in(simulation: Simulation, step: int, history: History) -> MixState:
    """Return the state before a step with the edits that a plane reads.

    The folder has all edits; the state has those that were made before it.
    """
    saved = json.loads(json.dumps(simulation.states[step]))
    carried = edits_in(saved)
    revision = len(carried)
    edited = history.of_revision(revision)
    found = history.fingerprint_at(revision, simulation.planner.fingerprint)
    state = MixState.from_json(saved, edited.names, found)
    require_reached(history, state, revision)
    records_S = [len(epoch) for epoch in simulation.epochs]
    require_possible(state, edited, records_S, skipped_steps=history.skipped_steps(revision))
    assert history.edits[:revision] == carried
    return state


def require_each_sample_once(
    simulation: Simulation, lengths: Sequence[Sequence[Sequence[int]]]
) -> None:
    """Check that no sample is lost or trained on twice; ``lengths`` are those of the records of every source."""
    mix, last = simulation.mix, max(simulation.states)
    pieces = [
        key
        for (step, _), batch in simulation.batches.items()
        if step < last
        for m in batch.microbatches
        for key in m.keys_K4.tolist()
    ]
    assert len({tuple(piece) for piece in pieces}) == len(pieces)
    state = simulation.states[last]
    waiting = {tuple(row[:3]) for row in state["carried"]}
    names = list(state["sources"])
    for number, name in enumerate(simulation.history.latest.names):
        if name not in names or mix.pack.method == "concat_and_split":
            continue
        position, sub, token = state["sources"][name]["cursor"]
        epoch = lengths[number]
        drawn = {
            (p, i)
            for p in range(position + 1)
            for i in range(len(epoch[p % len(epoch)]))
            if (p, i) < (position, sub) or ((p, i) == (position, sub) and token)
        }
        seen = {(k[1], k[2]) for k in pieces if k[0] == number}
        held = {(p, i) for s, p, i in waiting if s == name}
        assert seen | held == drawn


def state_behind(stop: int, simulation: Simulation) -> MixState:
    """Return the state before step ``stop`` as the journal of a run at rest gives it."""
    history = simulation.history
    read = [StepRecord.from_json(r, history.latest.names) for r in simulation.journal]
    start = MixState.start(len(history.base.names))
    return state_before(stop, start, read, weights_by_state(history), history.entering)


def require_journal_folds(simulation: Simulation) -> None:
    """Check that the journal and the edits fold to the planner's own states."""
    history, fingerprint = simulation.history, simulation.planner.fingerprint
    names = history.latest.names
    read = [StepRecord.from_json(json.loads(json.dumps(r)), names) for r in simulation.journal]
    start, weights = (
        MixState.start(len(simulation.mix.names)),
        weights_by_state(history, fingerprint),
    )
    for step, saved in simulation.states.items():
        folded = state_before(step, start, read, weights, history.entering)
        assert folded.to_json(**history.state_fields_at(folded.mix_revision, fingerprint)) == saved
