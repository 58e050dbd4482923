"""What both runtimes share: the handle of a rank, and how a planner comes to be."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from omniload.base.errors import ConfigError, system_refusals
from omniload.base.state import Json, JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.planner import Planner
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import SourceFacts, fingerprint_of
from omniload.mix.journal.file import Journal
from omniload.mix.possible import require_possible
from omniload.mix.state import MixState
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.tokenize import library_of, read_tokenizer

__all__ = [
    "JOURNAL_NAME",
    "DataPlane",
    "PlaneSpec",
    "RankHandle",
    "make_planner",
    "open_journal",
    "require_rows",
    "tokenizer_digest",
]

JOURNAL_NAME = "journal.jsonl"
"""File of a run's journal in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpec:
    """What a run knows beside its mix file."""

    mix: MixConfig
    """The declared mix."""
    base_dir: Path
    """Folder that the mix file's relative paths start at."""
    tree: ClientPlaceTree
    """The trainers."""
    run_dir: Path | None = None
    """Folder of the run, for its journal; ``None`` keeps none."""
    state: Mapping[str, Json] | None = None
    """Loader state to resume from."""
    num_steps: int | None = None
    """First step that is not planned."""
    restarts: int = 0
    """Times that its launcher has started the job again."""
    cache_dir: Path | None = None
    """Folder for indexes of sources that have none of their own."""


class RankHandle(Protocol):
    """One rank's way to its batches."""

    first_step: int
    """Step that the data plane started from."""

    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        """Wait for the batch of ``step``; ``None`` when the data ends before it.

        Args:
            step: The step; asked again after a timeout it is waited for again.
            timeout_s: Longest wait; ``None`` for the mix's ``runtime.batch_timeout``.

        Raises:
            UnavailableError: The time has passed; names the role that holds the batch up, and why.
            OmniloadError: The data plane has failed; the cause as it was raised there.
        """
        ...

    def taken(self, step: int) -> None:
        """Tell that the trainer has the batch of ``step``."""
        ...

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``."""
        ...

    def close(self) -> None:
        """Let go of the data plane; it runs on for the others."""
        ...


class DataPlane(Protocol):
    """A running data plane."""

    def handle(self, dp_rank: int, cp_rank: int = 0) -> RankHandle:
        """Return a rank's handle."""
        ...

    def close(self) -> None:
        """End everything that was started; once more, or by two threads at once, does no harm."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_planner(spec: PlaneSpec, facts_S: Sequence[SourceFacts]) -> Planner:
    """Return a planner at step 0, or where ``spec.state`` left off.

    Args:
        spec: The run.
        facts_S: What was found in each source.

    Raises:
        StateError: ``spec.state`` belongs to another mix or other data, or no run of this mix reaches it.
    """
    mix = spec.mix
    fingerprint = fingerprint_of(
        mix,
        facts_S,
        tokenizer_digest=tokenizer_digest(mix, spec.base_dir),
        tokenizer_library=library_of(mix.tokenizer),
    )
    positions_per_epoch_S = [facts.positions_per_epoch for facts in facts_S]
    state = MixState.start(len(mix.names))
    if spec.state is not None:
        state = MixState.from_json(spec.state, mix.names, fingerprint)
        require_possible(state, mix, positions_per_epoch_S)
    return Planner(
        mix=mix,
        tree=spec.tree,
        positions_per_epoch_S=positions_per_epoch_S,
        state=state,
        fingerprint=fingerprint,
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


def require_rows(spec: PlaneSpec) -> None:
    """Refuse a batch that cannot give every data-parallel rank a row.

    Raises:
        ConfigError: With the rows there are and the rows needed.
    """
    mix, dp, cp = spec.mix, spec.tree.size_of("dp"), spec.tree.size_of("cp")
    if mix.rows_per_step < dp:
        raise ConfigError(
            f"batch.tokens {mix.batch.tokens} is {mix.rows_per_step} rows of pack.length {mix.pack.length}, fewer than "
            f"the {dp} data-parallel ranks; raise batch.tokens to {dp * mix.pack.length} or more, or use fewer ranks"
        )
    if cp > 1 and mix.pack.length % (2 * cp):
        raise ConfigError(
            f"pack.length {mix.pack.length} is not a multiple of 2 * cp = {2 * cp}; change it"
        )
