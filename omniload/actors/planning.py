"""How a planner comes to be: from a run and what was found in its sources."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from omniload.actors.plane import JOURNAL_NAME, PlaneSpec
from omniload.base.errors import system_refusals
from omniload.machine.planner import Planner
from omniload.mix.config import MixConfig
from omniload.mix.edits.found import require_found, require_reached
from omniload.mix.edits.kept import edits_in
from omniload.mix.fingerprint import SourceFacts, fingerprint_of
from omniload.mix.journal.file import Journal
from omniload.mix.possible import require_possible
from omniload.mix.state import MixState
from omniload.source.tokenize import library_of, read_tokenizer

__all__ = ["make_planner", "open_journal", "tokenizer_digest"]


def make_planner(spec: PlaneSpec, facts_S: Sequence[SourceFacts]) -> Planner:
    """Return a planner at step 0, or where ``spec.state`` left off.

    Args:
        spec: The run.
        facts_S: What was found in each source.

    Raises:
        StateError: ``spec.state`` belongs to another mix or other data, or no run of this mix reaches it.
    """
    mix, history = spec.mix, spec.history
    require_found(history, facts_S)
    fingerprint = fingerprint_of(
        mix,
        facts_S[: len(mix.names)],
        tokenizer_digest=tokenizer_digest(mix, spec.base_dir),
        tokenizer_library=library_of(mix.tokenizer),
    )
    positions_per_epoch_S = [facts.positions_per_epoch for facts in facts_S]
    state = MixState.start(len(mix.names))
    if spec.state is not None:
        revision = len(edits_in(spec.state))
        edited = history.of_revision(revision)
        found = history.found_by(revision, fingerprint)
        state = MixState.from_json(spec.state, edited.names, found)
        require_reached(history, state, revision)
        require_possible(state, edited, positions_per_epoch_S)
    return Planner(
        mix=mix,
        tree=spec.tree,
        positions_per_epoch_S=positions_per_epoch_S,
        state=state,
        fingerprint=fingerprint,
        edits=spec.edits,
        num_steps=spec.num_steps,
    )


@system_refusals("the run's journal")
def open_journal(run_dir: Path | None, planner: Planner) -> Journal | None:
    """Open the run's journal, continuing the one that leads up to the planner's state."""
    if run_dir is None:
        return None
    run_dir.mkdir(parents=True, exist_ok=True)
    state = planner.state
    return Journal.leading_up(run_dir / JOURNAL_NAME, planner.state_at(state.step), state.digest())


def tokenizer_digest(mix: MixConfig, base_dir: Path) -> str:
    """Return a digest of what turns text into tokens."""
    if mix.tokenizer is None:
        return "none"
    if mix.tokenizer.type == "bytes":
        return "bytes"
    path = base_dir / mix.tokenizer.path
    content = read_tokenizer(path)
    return hashlib.blake2b(content, digest_size=6).hexdigest() + (
        mix.tokenizer.end_of_document or ""
    )
