"""Conclusions from several looks at a running data plane: what is slow, who waits for whom, and what to change.

A look is the status of all roles at one moment. One look shows which roles wait *now*. Several looks show which roles
are waited for *mostly*, which a setting can change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omniload.base.units import counted, so_often
from omniload.commands.runs.looks import (
    lags_of,
    pace_of,
    passed_s,
    taken_steps,
    waited_share,
    waits_by_way,
)
from omniload.commands.runs.roles_view import why_ended
from omniload.machine.progress import AFTER_A_RANK, PLANNED_ALL, is_rank
from omniload.machine.scaling.measured import Reading
from omniload.machine.status import REPEATED, UNREAD, PlaneStatus, RoleLine

__all__ = [
    "OLD_S",
    "Diagnosis",
    "Finding",
    "diagnose",
    "moment_of",
    "said_of_loaders",
]

OLD_S = 5.0
"""Age of a status whose plane has ended, or whose process is stopped."""
_SHOWN_SHARE = 0.02
"""Share of the time that ranks may wait: what the paper's users accept, and the report's target."""
_BEHIND_STEPS = 2
_STOPPED = "if ps -o stat= -p {0} prints T, kill -CONT {0} resumes it"
_UNSAVED_S = 3600.0
_UNSAVED_STEPS = 100
_MORE_LOADERS = (
    "share its sources among more loaders: runtime.loaders, or runtime.scaling: {mode: auto} on Ray; give its "
    "heaviest source more readers: loader.readers; keep texts tokenised on disk (omniload mix tokenise); omniload "
    "mix plan --resources shows what each source costs"
)
_EVEN_WORK = (
    "see its compute time: if ranks get unequal work, change balance.strategy or balance.cost (omniload mix bench "
    "measures them); otherwise its host is slow"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that costs ranks time now, or will cost work after a restart."""

    role: str
    """Role or process that the finding is about."""
    what: str
    """Sentence that says what is wrong."""
    seen: str
    """Figures that show it."""
    do: str
    """Setting or command that changes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Findings of several looks."""

    findings: tuple[Finding, ...]
    """Findings, the most expensive first."""
    looks: int
    seconds: float
    """Seconds between the first look and the last."""
    waited_share: float | None
    """Share of the time between the looks that ranks waited, mean over ranks; ``None`` if no rank reports it."""
    loaders: str = ""
    """Last action of the scaler and its reason, as in ``said_of_loaders``."""


def moment_of(looks: Sequence[PlaneStatus], now_s: float, silent_s: float) -> float:
    """Return the time by the clock of the plane's host, which may differ by hours: a status seen to change is young.

    Args:
        looks: See ``diagnose``.
        now_s: Time by our clock, in seconds since 1970.
        silent_s: How long the last status has stayed unchanged, as observed here.
    """
    seen_s = looks[-1].written_at + silent_s
    return seen_s if len(looks) > 1 else max(now_s, seen_s)


def diagnose(
    looks: Sequence[PlaneStatus], now_s: float, logs: Mapping[str, str], full: str = ""
) -> Diagnosis:
    """Find what holds a plane up.

    Args:
        looks: Statuses in the order of their times, at least one.
        now_s: Result of ``moment_of``.
        logs: Last log lines of the roles that have one, by name.
        full: Why no status can be written now, from ``full_disk``.
    """
    first, last = looks[0], looks[-1]
    seconds = passed_s(first, last)
    share = waited_share(first, last)
    if last.has_ended:
        # A rank that took the last step earlier than another does not make it late, because no step follows.
        found = [_closed_plane(last, now_s, logs)]
    else:
        found = [
            *_silent_plane(last, now_s, full),
            *_roles_in_trouble(last, logs),
            *_unread_sources(last, logs),
            *_longest_wait(looks, share),
            *_rank_behind(looks),
            *_retried_reads(first, last),
            *_replacements(last),
            *_unsaved_state(last),
        ]
    return Diagnosis(
        findings=tuple(found),
        looks=len(looks),
        seconds=seconds,
        waited_share=share,
        loaders=said_of_loaders(last),
    )


def said_of_loaders(status: PlaneStatus) -> str:
    """Return how many source loaders there are, their last change and its reason; empty without a scaler."""
    scaler = next((role for role in status.roles if role.name == "scaler"), None)
    if scaler is None:
        return ""
    loaders, changes = (scaler.figures.get(name, 0) for name in ("loaders", "loader_changes_total"))
    plural = "s" * (loaders != 1)
    if not changes:
        return f"{loaders:.0f} source loader{plural}, as at first: scaler {scaler.state}"
    return (
        f"{loaders:.0f} source loader{plural} after {changes:.0f} change{'s' * (changes != 1)}, the last "
        f"{scaler.task_s:.0f} s ago: {scaler.state}"
    )


def _closed_plane(last: PlaneStatus, now_s: float, logs: Mapping[str, str]) -> Finding:
    why = "".join(f"; {role}: {line}" for role, line in why_ended(logs).items())
    says = "fix what it failed with" if why else "the trainer's output says why it ended"
    return Finding(
        role=f"process {last.pid} on {last.host}",
        what="The plane has ended.",
        seen=f"its process has closed it {max(0.0, now_s - last.written_at):.0f} s ago{why}",
        do=f"omniload mix show says what it has drawn; if it should have continued, {says}",
    )


def _silent_plane(last: PlaneStatus, now_s: float, full: str) -> Iterator[Finding]:
    if (age_s := now_s - last.written_at) <= OLD_S:
        return
    if full:
        yield Finding(
            role=f"process {last.pid} on {last.host}",
            what="No status can be written, and no journal: the disk of the run is full.",
            seen=f"the last status is {age_s:.0f} s old; {full}",
            do="free some space: a planner waits a minute for it, and continues by itself. The findings below "
            "describe the last moment that could be written",
        )
    else:
        yield Finding(
            role=f"process {last.pid} on {last.host}",
            what="The plane has ended, or the process that opened it is stopped.",
            seen=f"the last status is {age_s:.0f} s old; it is written once a second",
            do=f"look at process {last.pid} on {last.host}: {_STOPPED.format(last.pid)}; if ps prints nothing, it "
            "has ended, and the trainer's output says why. The findings below describe its last moment",
        )


def _roles_in_trouble(last: PlaneStatus, logs: Mapping[str, str]) -> Iterator[Finding]:
    for role in last.roles:
        if not role.in_trouble:
            continue
        line = f"; its last line: {logs[role.name]}" if logs.get(role.name) else ""
        what = f"{role.name} waits for a store, or holds up a rank."
        do = f"read {role.log}" if role.log else f"look at process {role.pid}"
        if role.state == "stopped":
            what = f"{role.name} gives no sign of life: it is stopped, or its machine is too busy to run it."
            do = f"look at process {role.pid} on {role.host or 'its host'}: {_STOPPED.format(role.pid)}"
        elif role.state == "ended":
            what = f"{role.name} has ended, or has closed its loader."
            do = AFTER_A_RANK
        yield Finding(
            role=role.name,
            what=what,
            seen=f"{role.state} for {role.task_s:.0f} s, heard of {role.age_s:.0f} s ago{line}",
            do=do,
        )


def _unread_sources(last: PlaneStatus, logs: Mapping[str, str]) -> Iterator[Finding]:
    for role in last.roles:
        line = f"; its last line: {logs[role.name]}" if logs.get(role.name) else ""
        for figure in role.figures:
            if figure.startswith(UNREAD):
                yield Finding(
                    role=role.name,
                    what=f"{figure.removeprefix(UNREAD)} cannot be read further, and the run ends before the first "
                    "step that needs more of it.",
                    seen=f"steps are planned to {role.figures.get('planned_step', 0.0):.0f}{line}",
                    do=f"read {role.log or 'its log'} for the name of the file; leave that file out before the run "
                    "ends, by omniload mix skip RUN --shard FILE, or repair it and resume",
                )


def _longest_wait(looks: Sequence[PlaneStatus], share: float | None) -> Iterator[Finding]:
    """Yield the role at the end of most waits of ranks, if ranks wait for longer than they should."""
    if share is not None and share <= _SHOWN_SHARE:
        return
    waited = "" if share is None else f"ranks waited {share:.1%} of the time; "
    ways_s = waits_by_way(looks)
    if not ways_s:
        # Once every step is planned, none can be built further ahead.
        if share is not None and not any(r.state.startswith(PLANNED_ALL) for r in looks[-1].roles):
            yield Finding(
                role="ranks",
                what="Batches come late, in waits too short to show which role causes them.",
                seen=f"{waited}no look of {len(looks)} met one",
                do="look for longer (--seconds 30), or build further ahead: runtime.prefetch_steps",
            )
        return
    causes_s: dict[str, float] = {}
    for way, way_s in ways_s.items():
        causes_s[way[-1]] = causes_s.get(way[-1], 0.0) + way_s
    cause = max(causes_s, key=lambda role: causes_s[role])
    way = max((each for each in ways_s if each[-1] == cause), key=lambda each: ways_s[each])
    every = [
        role
        for look in looks
        for role in look.roles
        if role.name == cause and not role.state.startswith(PLANNED_ALL)
    ]
    # Chosen where its present task took longest.
    role = max(every, key=lambda role: role.task_s, default=None)
    doing = "" if role is None else f", which {role.state}"
    what, do = _remedy(cause, role)
    part = causes_s[cause] / max(sum(ways_s.values()), 1e-9)
    yield Finding(
        role=cause,
        what=what,
        seen=f"{waited}{part:.0%} of it led to {' -> '.join(way)}{doing}",
        do=do,
    )


def _remedy(cause: str, role: RoleLine | None) -> tuple[str, str]:
    """Return what is slow, in a sentence, and what changes it."""
    if cause.startswith("loader"):
        if role is not None and role.figures.get(REPEATED, 0.0) > 0:
            return (
                f"The store that {cause} reads from does not answer.",
                "see that the store can be reached from its host; reads are tried again until it does",
            )
        readings = {} if role is None else Reading.in_figures(role.figures)
        slow = [f"{name} {reading.said}" for name, reading in readings.items() if reading.is_slow]
        what = f"{cause} reads, or makes samples of what it read, too slowly"
        return "; ".join([what, *slow]) + ".", _MORE_LOADERS
    if cause.startswith("constructor"):
        return (
            f"{cause} builds batches too slowly.",
            "start more of them: runtime.constructors",
        )
    if is_rank(cause):
        return (
            f"{cause} is the slowest rank, and steps are held for it.",
            _EVEN_WORK,
        )
    return (
        f"{cause} plans too slowly.",
        "plan further ahead: runtime.prefetch_steps; take a larger step; give its process a core",
    )


def _rank_behind(looks: Sequence[PlaneStatus]) -> Iterator[Finding]:
    pace = pace_of(looks)
    lags = [lags_of(look, pace) for look in looks]
    # In every look, because ranks in lock-step report at different moments, sometimes one first and sometimes another.
    steady = {
        name: min(lag[name] for lag in lags)
        for name in lags[-1]
        if all(name in lag for lag in lags)
    }
    slowest = max(steady, key=lambda name: steady[name], default="")
    if slowest and steady[slowest] >= _BEHIND_STEPS:
        role = next(each for each in looks[-1].roles if each.name == slowest)
        yield Finding(
            role=slowest,
            what=f"{slowest} is {counted(round(lags[-1][slowest]), 'step')} behind another rank.",
            seen=f"it {role.state}, for {role.task_s:.0f} s",
            do="see what its process does: its next batches are ready, and no more are built until it takes them",
        )


def _retried_reads(first: PlaneStatus, last: PlaneStatus) -> Iterator[Finding]:
    before = {role.name: role.figures.get("retries_total", 0.0) for role in first.roles}
    for role in last.roles:
        if tried := role.figures.get("retries_total", 0.0):
            lately = tried - before.get(role.name, 0.0)
            yield Finding(
                role=role.name,
                what=f"A store did not answer {role.name} at first.",
                seen=f"{tried:.0f} reads were tried again, {lately:.0f} of them while this looked",
                do=f"read {role.log or 'its log'} for the names; if this continues, keep shards nearer",
            )


def _replacements(last: PlaneStatus) -> Iterator[Finding]:
    for role in last.roles:
        if (lives := role.figures.get("lives", 1.0)) > 1:
            yield Finding(
                role=role.name,
                what=f"{role.name} was lost and replaced.",
                seen=f"it is process number {lives:.0f} of this start",
                do="read logs/keeper.log of the run for why",
            )
        for name, reading in Reading.in_figures(role.figures).items():
            if reading.lost:
                yield Finding(
                    role=role.name,
                    what=f"{role.name} reads {name} alone: {reading.lost} readers were lost in a row.",
                    seen=f"{name} {reading.said}",
                    do=f"read {role.log or 'its log'} for why they ended, most often because memory ran out",
                )
        if restarts := role.figures.get("restarts", 0.0):
            yield Finding(
                role="job",
                what="The launcher has started the job again.",
                seen=so_often(restarts),
                do="see which rank ended first, and how: omniload train show RUN, or the launcher's log",
            )


def _unsaved_state(last: PlaneStatus) -> Iterator[Finding]:
    planner = next((role for role in last.roles if role.name == "planner"), None)
    taken = max(taken_steps(last).values(), default=0.0)
    if planner is None or taken < _UNSAVED_STEPS:
        return
    asked = planner.figures.get("state_asked_timestamp_seconds")
    if asked is None:
        yield Finding(
            role="planner",
            what="No state was ever asked for: a restart begins at the first step.",
            seen=f"{taken:.0f} steps were taken",
            do="save loader.state_dict() with every checkpoint",
        )
    elif (age_s := last.written_at - asked) > _UNSAVED_S:
        yield Finding(
            role="planner",
            what="The last state was asked for long ago.",
            seen=f"{age_s / 3600:.1f} hours",
            do="save checkpoints more often: a restart trains again on all steps after the last one",
        )
