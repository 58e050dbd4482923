"""Behaviour of a job under faults: the waits of ranks, the replacements of roles, and the samples."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.faults.machine_stops import seconds_within
from benchmarks.faults.schedule import OF_JOURNALS, Fault, together
from benchmarks.faults.striking import Blow, Job, strike
from benchmarks.report import Table
from omniload.base.errors import IntegrityError
from omniload.base.state import JsonObject
from omniload.batch.digest import batch_digest, combined
from omniload.mix.config import MixConfig

__all__ = ["CALM_STEPS", "Ordeal", "Struck", "Wait", "survive", "table_of"]

_RECOVERED_WITHIN_S = 120.0
_FIRST_STEPS = 10
CALM_STEPS = 10
"""Steps after each fault, once the plane has recovered."""


@dataclass(frozen=True, slots=True, order=True)
class Wait:
    """Longest wait of any rank for a step."""

    seconds: float
    begin_s: float
    """Time at which the first rank asked for the step: seconds of ``time.monotonic``."""
    end_s: float
    """Time at which the last rank had it."""


@dataclass(frozen=True, slots=True)
class Struck:
    """Result of faults that strike together."""

    waits: Sequence[Wait]
    """Waits for all steps after them until the plane had recovered."""
    ended_s: float | None = None
    """Time at which the last struck process had ended; ``None`` if no process was struck."""
    replaced_s: float | None = None
    """Time until each struck role had a new holder."""


@dataclass(slots=True)
class Ordeal:
    """Result of a whole script of faults."""

    digests: list[int] = field(default_factory=list)
    """Digest of each step, whatever the ranks."""
    start: list[Wait] = field(default_factory=list)
    """Waits for the first steps, while shadows start."""
    calm: list[Wait] = field(default_factory=list)
    """Waits for steps without a fault."""
    struck: dict[str, list[Struck]] = field(default_factory=dict)
    """Struck faults, by kind of fault and role."""
    refusals: list[str] = field(default_factory=list)
    """Messages of planes that ended; another plane resumed from the state before the fault."""
    others: list[int] = field(default_factory=list)
    """Repeated steps whose samples were different."""

    def note(self, step: int, digest: int) -> None:
        """Record a step, which may come again if another plane resumes from before it."""
        assert step <= len(self.digests), "steps come in order"
        if step == len(self.digests):
            self.digests.append(digest)
        elif self.digests[step] != digest:
            self.others.append(step)


def survive(
    job: Job,
    mix: MixConfig,
    script_of: Callable[[Sequence[str]], Sequence[Fault]],
    *,
    step_s: float,
    seed: int = 0,
    says: Callable[[str], None] = lambda _: None,
) -> Ordeal:
    """Take steps, and let each fault of a script strike once the plane has recovered from the one before.

    Args:
        job: The job that the faults strike.
        mix: The mix of the job.
        script_of: Returns the script from the names of the possible targets, once every shadow stands by.
        step_s: The trainer's own time for a step, in seconds.
        seed: Decides which bit of a journal is flipped.
        says: Called with each fault once it is over.

    Raises:
        TimeoutError: It did not recover in time.
        ValueError: The script strikes a target that does not exist.
        OmniloadError: The plane ended by a fault that it must survive.
    """
    ordeal, built_ahead = Ordeal(), mix.steps_ahead + mix.steps_at_once
    before: JsonObject | None = None
    """State to resume from if the plane refuses to continue, which happens only if its journal is damaged."""

    def take() -> Wait:
        nonlocal before
        begin_s, is_resumed = time.monotonic(), False
        try:
            batches = job.next_batches()
        except IntegrityError as error:
            if before is None:
                raise
            ordeal.refusals.append(str(error))
            job.resume(before)
            batches, before, is_resumed = job.next_batches(), None, True
        end_s = time.monotonic()
        ordeal.note(batches[0].step, combined(map(batch_digest, batches)))
        time.sleep(step_s)  # the trainer's own time
        return Wait(end_s - begin_s if is_resumed else job.longest_wait_s, begin_s, end_s)

    while len(ordeal.start) < _FIRST_STEPS or not job.plane.is_whole():
        ordeal.start.append(take())
    for faults in together(script_of(job.targets())):
        while len(ordeal.digests) < faults[0].step:
            ordeal.calm.append(take())
        before = job.state() if any(fault.kind in OF_JOURNALS for fault in faults) else None
        waits, after = list[Wait](), 0
        until_s = time.monotonic() + _RECOVERED_WITHIN_S + max(fault.seconds for fault in faults)
        with ExitStack() as inside:
            blow = strike(job, faults, inside, seed)
            while after < built_ahead or not job.plane.is_whole():
                waits.append(take())
                # Steps that were built before the fault prove nothing about it.
                after += blow.is_over()
                if time.monotonic() > until_s:
                    raise TimeoutError(f"{' and '.join(map(str, faults))}: not over in time")
        before = None
        what = _named(faults)
        ordeal.struck.setdefault(what, []).append(_struck_of(blow, waits))
        says(f"step {len(ordeal.digests)}, {what}: {1000 * max(waits).seconds:.0f} ms")
        ordeal.calm += [take() for _ in range(CALM_STEPS)]
    return ordeal


def _named(faults: Sequence[Fault]) -> str:
    """Return the names of faults that strike together; a repeated one has its number."""
    times = Counter(fault.what for fault in faults)
    return " and ".join(
        f"{what}, {count} times" if count > 1 else what for what, count in times.items()
    )


def _struck_of(blow: Blow, waits: Sequence[Wait]) -> Struck:
    def last_s(times_s: Sequence[float | None]) -> float | None:
        return max((each for each in times_s if each is not None), default=None)

    looked_at = (*blow.processes, *blow.starved)
    return Struck(
        waits,
        last_s([each.ended_s for each in looked_at]),
        last_s([each.replaced_s for each in looked_at]),
    )


def table_of(
    ordeal: Ordeal, same: bool, shadows: int, stops: Sequence[tuple[float, float]]
) -> Table:
    """Return the waits by kind of fault; each fault counts with its longest wait.

    Args:
        ordeal: Results of the faults.
        same: Whether all samples were those of an unbroken run.
        shadows: Number of shadows of each loader.
        stops: Times at which the machine stood still, as ``MachineStops.spans`` returns them.
    """
    spans = list(stops)

    def longest_s(waits: Sequence[Wait]) -> tuple[float, float]:
        return max(waits).seconds, max(
            max(0.0, wait.seconds - seconds_within(spans, wait.begin_s, wait.end_s))
            for wait in waits
        )

    rows = []
    for what, done in (
        ("its start", [Struck([wait]) for wait in ordeal.start]),
        ("nothing", [Struck([wait]) for wait in ordeal.calm]),
        *sorted(ordeal.struck.items()),
    ):
        felt_s, own_s = np.array([longest_s(each.waits) for each in done]).T
        _, *ended = _median_and_longest([each.ended_s for each in done])
        replaced = _median_and_longest([each.replaced_s for each in done])
        rows.append((what, str(len(done)), *_spread(felt_s), *_spread(own_s), *ended, *replaced))
    verdict = "the same samples as" if same and not ordeal.others else "OTHER SAMPLES THAN"
    return Table(
        columns=(
            *("what was done", "times", "median ms", "p99 ms", "longest ms"),
            *("less stops: median", "p99", "longest"),
            *("ended within", "replaced: median", "within"),
        ),
        rows=tuple(rows),
        caption=f"Longest wait of a rank for a step, shadows {shadows}; "
        f"{len(ordeal.digests)} steps, {verdict} in an unbroken run",
    )


def _median_and_longest(times_s: Sequence[float | None]) -> tuple[str, str]:
    known_s = [each for each in times_s if each is not None]
    median, _, longest = _spread(np.array(known_s)) if known_s else ("-", "-", "-")
    return median, longest


def _spread(waits_s: NDArray[np.float64]) -> tuple[str, ...]:
    return tuple(f"{1000 * float(np.quantile(waits_s, q)):.0f}" for q in (0.5, 0.99, 1.0))
