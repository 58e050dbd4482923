"""Makes a planner from a run and the facts about its sources, at the start and after the loss of another one."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omniload.actors.plane import PlaneSpec, first_step_of
from omniload.actors.planner_journal import claimed_place
from omniload.base.errors import StateError
from omniload.machine.planner import Planner
from omniload.mix.config import MixConfig
from omniload.mix.edits.edits_file import edits_in, read_history
from omniload.mix.edits.found import of_its_run, require_found, require_reached
from omniload.mix.fingerprint import SourceFacts, fingerprint_of
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.reading import read_tail
from omniload.mix.journal.room import Room
from omniload.mix.possible import require_possible
from omniload.mix.progress import fingerprint_in, states_of
from omniload.mix.state import MixState
from omniload.plan.world import World
from omniload.source.byte_pairs.files import content_of, library_of

__all__ = ["make_planner", "make_successor", "tokenizer_digest"]


def make_planner(
    spec: PlaneSpec,
    facts_S: Sequence[SourceFacts],
    *,
    known: Sequence[MixState] = (),
    life: int = 0,
    world: World | None = None,
) -> Planner:
    """Return a planner at step 0, or where ``spec.state`` left off.

    Args:
        spec: The run.
        facts_S: Facts about each source, including sources that were opened to be added and are not added yet.
        known: States after that one, which a lost planner had reached.
        life: Number of planners before this one.
        world: The present ranks, if they differ from those of ``spec``.

    Raises:
        StateError: ``spec.state`` belongs to another mix or other data, or no run of this mix reaches it.
    """
    mix, history = spec.mix, spec.history
    facts_S = facts_S[: len(history.latest.names)]
    # First of all, because a state cannot be checked against data that is not what the edits found.
    require_found(history, facts_S)
    # Only for the file's sources; the facts about an added source are in its edit.
    fingerprint = fingerprint_of(
        mix,
        facts_S[: len(mix.names)],
        tokenizer_digest=tokenizer_digest(mix, spec.base_dir),
        tokenizer_library=library_of(mix.tokenizer),
    )
    records_S = [facts.positions_per_epoch for facts in facts_S]
    state = MixState.start(len(mix.names))
    if spec.state is not None:
        revision = len(edits_in(spec.state))
        edited = history.of_revision(revision)
        found = history.fingerprint_at(revision, fingerprint)
        state = MixState.from_json(spec.state, edited.names, found)
        require_reached(history, state, revision)
        skipped = history.skipped_steps(revision)
        state = of_its_run(history, state)
        require_possible(state, edited, records_S, skipped_steps=skipped)
    return Planner(
        mix=mix,
        world=world or World(tree=spec.tree, step=state.step),
        records_S=records_S,
        state=state,
        fingerprint=fingerprint,
        edits=spec.edits,
        known=known,
        life=life,
        num_steps=spec.num_steps,
    )


def make_successor(
    spec: PlaneSpec,
    facts_S: Sequence[SourceFacts],
    folder: Path,
    *,
    life: int,
    room: Room | None = None,
) -> tuple[Planner, Journal]:
    """Return a planner that continues where a lost one was, and the journal of both.

    Ranks can only ask for the last ``mix.steps_held`` steps of the journal, because all of them have the earlier ones.
    These last steps are planned again, for the last ranks of the journal.

    Args:
        spec: The run as it was opened, with its edits since.
        facts_S: As for ``make_planner``.
        folder: Folder of the journal.
        life: Number of planners before this one.
        room: Waits if the disk has no room, or the store does not answer; ``None`` to raise errors at once.

    Raises:
        StateError: The journal is not that of the run or finds no room, or the planner was lost while a source was
            added.
        IntegrityError: The journal is damaged.
    """
    spec = spec.with_edits()
    # Without a run folder the journal lies next to the heartbeats, and serves only the planners of this plane.
    durable = spec.run_dir is not None
    # Stages that began by epochs are edits too; if none did, the edits of the state are complete.
    if not durable and (edits := read_history(folder, spec.mix).edits):
        spec = replace(spec, edits=edits)
    history = spec.history
    if len(history.latest.names) > len(facts_S):
        raise StateError(
            f"the planner was lost while source {history.latest.names[-1]!r} was being added, and no role serves the "
            "source: start again from the last checkpoint"
        )
    place = claimed_place(folder, spec.mix.runtime.journal if durable else "", room)
    tail = read_tail(place, spec.mix.steps_held)
    # A planner never goes back before the start of the run, because no loader has read those samples.
    step = max(first_step_of(spec), tail.next_step - spec.mix.steps_held)
    world = None if tail.world is None else World.from_json(tail.world)
    # Later states are known too: ranks may be there, and a trainer may ask for such a state before it is planned again.
    begin, *known = [state for state in states_of(history, tail) if state.step >= step]
    kept = history.state_fields_at(begin.mix_revision, fingerprint_in(tail.base))
    resumed = replace(spec, state=begin.to_json(**kept))
    planner = make_planner(resumed, facts_S, known=known, life=life, world=world)
    keep_steps = spec.mix.runtime.journal_steps
    return planner, Journal.taken_over(
        place, tail, step, durable=durable, keep_steps=keep_steps, room=room
    )


def tokenizer_digest(mix: MixConfig, base_dir: Path) -> str:
    """Return a digest of the tokenizer and its settings."""
    if mix.tokenizer is None:
        return "none"
    if mix.tokenizer.type == "bytes":
        return "bytes"
    content = content_of(mix.tokenizer, base_dir)
    # The same file gives other tokens if documents begin or end with other ones.
    begin = "" if (token := mix.tokenizer.begin_of_document) is None else f"{token} "
    end = mix.tokenizer.end_of_document or ""
    return f"{hashlib.blake2b(content, digest_size=6).hexdigest()}{begin}{end}"
