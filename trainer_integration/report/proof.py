"""Proof that an interrupted run saw the samples of an unbroken one.

The mix and its edits are replayed on one rank, without training. Every step's digest must be the digest that the
trainers logged, in each attempt that ran the step.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import orjson
from pydantic import ValidationError

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.reading import read_kept_file
from omniload.base.state import JsonObject
from omniload.base.writing import write_whole
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.history import History
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_journal
from omniload.mix.progress import state_json_at
from omniload.mix.run_record import RunLife, read_run_record
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.access.index_folders import index_folder
from trainer_integration.run.run_log import EventLine, MemoryLine, StepLine, read_log

__all__ = [
    "PROOF_NAME",
    "Proof",
    "StepProof",
    "compared",
    "logged_digests",
    "prove",
    "read_proof",
    "replayed_digests",
]

PROOF_NAME = "proof.json"
"""File of the last proof in the run's folder."""
_MOST_BYTES = 4 << 30


class StepProof(StrictModel):
    """One step: its digest in an unbroken run, and in each attempt."""

    step: int
    replayed: str | None
    """Digest of the replay; ``None`` if the mix ends before the step."""
    logged: tuple[str, ...]
    """Digests in the order of the log; empty if the log has no such step."""

    @property
    def holds(self) -> bool:
        """Whether the step was trained, each time on these samples."""
        return bool(self.logged) and all(digest == self.replayed for digest in self.logged)


class Proof(StrictModel):
    """A comparison of a run with its replay."""

    version: Literal[1] = 1
    seconds: float
    """Duration of the replay, in seconds."""
    steps: tuple[StepProof, ...]
    """Consecutive steps."""

    @property
    def holds(self) -> bool:
        """Whether every step is proved."""
        return all(step.holds for step in self.steps)

    @property
    def num_logged(self) -> int:
        """Number of compared lines of the log, which exceeds the number of steps if steps were run again."""
        return sum(len(step.logged) for step in self.steps)

    @property
    def repeated(self) -> tuple[StepProof, ...]:
        """Steps that more than one attempt trained."""
        return tuple(step for step in self.steps if len(step.logged) > 1)

    def require(self) -> Self:
        """Return the proof, if all its steps agree.

        Raises:
            IntegrityError: The message names the first step that differs, with both digests.
        """
        first = next((step for step in self.steps if not step.holds), None)
        if first is None:
            return self
        if not first.logged:
            raise IntegrityError(
                f"step {first.step} is in no line of the log, and later steps are; an unbroken run trains it, "
                "so this run left samples out"
            )
        expected = "no samples at all" if first.replayed is None else first.replayed
        raise IntegrityError(
            f"step {first.step} was trained on samples {' and '.join(first.logged)}, an unbroken run sees "
            f"{expected}; do not trust what was trained from this step on"
        )


def compared(
    replayed: Mapping[int, str], logged: Mapping[int, Sequence[str]], seconds: float
) -> Proof:
    """Compare the digests of a replay with those of a log, over all steps from the first to the last."""
    return Proof(
        seconds=seconds,
        steps=tuple(
            StepProof(step=step, replayed=replayed.get(step), logged=tuple(logged.get(step, ())))
            # Every step in between: a step without a line was left out by the run, which is a difference too.
            for step in range(min(logged), max(logged) + 1)
        ),
    )


def prove(
    run_dir: Path,
    *,
    from_step: int = 0,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
) -> Proof:
    """Replay a run and compare; the result is also written to the run's folder.

    Args:
        run_dir: Folder of the run.
        from_step: First step to replay; above 0, the journal has its state.
        tell: Called after every step with the number of steps done and of all steps.

    Raises:
        StateError: The folder contains no run, the run recorded no digests from ``from_step`` on, or the data are not
            those of the run.
    """
    life = read_run_record(run_dir).last
    mix = _as_written(life)
    history = read_history(run_dir, mix)
    logged = logged_digests(read_log(run_dir), from_step)
    if min(logged) > from_step:
        logged[from_step] = []  # a step that the log should have
    last = max(logged)
    spec = PlaneSpec(
        # Samples do not depend on the runtime, and threads of this process need no Ray.
        mix=mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"kind": "local"})}),
        base_dir=life.base_dir,
        # The samples of a step do not depend on how many ranks share it.
        tree=ClientPlaceTree.of(dp=1),
        state=_state_at(run_dir, history, from_step) if from_step else None,
        num_steps=last + 1,
        edits=history.edits,
        cache_dir=index_folder(life.mix_path),
    )
    began_s = time.perf_counter()
    replayed: dict[int, str] = {}
    for step, digest in replayed_digests(spec):
        replayed[step] = digest
        tell(len(replayed), last + 1 - from_step)
    proof = compared(replayed, logged, time.perf_counter() - began_s)
    # Written before it is judged, because a failed proof is the one that a user will want to look at.
    write_whole(run_dir / PROOF_NAME, orjson.dumps(proof.model_dump(mode="json")))
    return proof


def logged_digests(
    lines: Sequence[StepLine | EventLine | MemoryLine], from_step: int
) -> dict[int, list[str]]:
    """Return the digests of every attempt, by step.

    Raises:
        StateError: There are none from ``from_step`` on, or a step has none.
    """
    logged: dict[int, list[str]] = {}
    for line in lines:
        if isinstance(line, StepLine) and line.step >= from_step:
            if line.digest is None:
                raise StateError(
                    f"step {line.step} has no digest; set digest: true in the training file and run it again"
                )
            # All attempts, including those whose work was lost, because each must have had the same samples.
            logged.setdefault(line.step, []).append(line.digest)
    if not logged:
        raise StateError(
            f"the log holds no step from step {from_step} on; train first, or choose an earlier step"
        )
    return logged


def replayed_digests(spec: PlaneSpec) -> Iterator[tuple[int, str]]:
    """Yield every step of a mix with the digest of its samples, on one rank in this process."""
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        for batch in client:
            # The digest is a sum over samples, so one rank with all of them has the digest of many ranks.
            yield batch.step, f"{batch_digest(batch):016x}"


def read_proof(run_dir: Path) -> Proof | None:
    """Return the last proof of a run, ``None`` without one.

    Raises:
        StateError: The file is damaged or of another version.
    """
    path = run_dir / PROOF_NAME
    try:
        return Proof.model_validate_json(
            read_kept_file(path, most_bytes=_MOST_BYTES, what="a proof")
        )
    except FileNotFoundError:
        return None
    except IntegrityError as error:
        raise StateError(str(error)) from error
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}; move it away") from error
    except ValidationError as error:
        raise StateError(
            f"{path}: not a proof of this release ({error.errors()[0]['msg']}); run `omniload train verify` again"
        ) from error


def _as_written(life: RunLife) -> MixConfig:
    try:
        return life.mix()
    except ConfigError as error:
        raise StateError(f"the run's mix is read no longer: {error}") from error


def _state_at(run_dir: Path, history: History, step: int) -> JsonObject:
    """Return the state before ``step`` from the run's journal."""
    base, records = read_journal(journal_of(run_dir), step)
    return state_json_at(history, base, records, step)
