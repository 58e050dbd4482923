"""What ``omniload mix simulate`` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from omniload.base.units import format_bytes, format_count
from omniload.commands.display import Cell, say, table
from omniload.simulation.figures import Simulated, knee_of, limit_of
from omniload.simulation.profile import Profile

__all__ = ["print_knee", "print_simulated"]


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def print_simulated(console: Console, found: Simulated, profile: Profile) -> None:
    """Print one simulation: the job, its waits, and who does what on how much."""
    title = (
        f"{_many(found.ranks, 'rank')} on {_many(found.hosts, 'host')}, "
        f"{_many(found.sources, 'source')}, runtime {found.runtime}"
    )
    memory, connections = found.memory, found.connections
    rows: list[list[Cell]] = [
        [Text("wait of a step, p50", "bold"), _time(found.waits.p50_s)],
        ["the same, p99", _time(found.waits.p99_s)],
        [Text("throughput", "bold"), f"{format_count(found.tokens_per_s)} tokens/s"],
        [
            "a step",
            f"{format_count(found.tokens_per_step)} tokens, {_time(found.seconds / found.steps)}",
        ],
        [Text("planner", "bold"), f"{_time(found.planner_step_s)} a step"],
        ["", f"{found.planner_share:.1%} of a core"],
        [Text("memory of the first host", "bold"), format_bytes(memory.first_memory_bytes)],
    ]
    if found.hosts > 1:
        rows.append(["of each other host, at most", format_bytes(memory.other_memory_bytes)])
    rows += [
        [Text("connections", "bold"), f"{connections.total:,}"],
        ["if every rank opened every source", f"{connections.without:,}"],
    ]
    console.print(table(title, [("", False), ("", True)], rows))
    console.print(_roles_table(found))
    say(console, limit_of(found))
    say(
        console,
        f"costs: {profile.machine}, {_many(profile.cores, 'core')}; memory is the data plane's alone, "
        "without what ranks train with",
        "dim",
    )
    if profile.is_of_a_busy_machine:
        say(
            console,
            f"warning: load was {profile.load:.1f} on {_many(profile.cores, 'core')} as costs were measured, so waits "
            "are too long here; measure on a quiet machine, or with --profile FILE carry its figures over",
            "yellow",
        )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _roles_table(found: Simulated) -> object:
    rows: list[list[Cell]] = [
        [
            role.role,
            f"{role.count:,}",
            f"{role.cores:.2f}",
            f"{role.busiest:.0%}",
            format_bytes(role.memory_bytes),
            f"{role.connections:,}",
        ]
        for role in found.roles
    ]
    columns = [("process", False), ("number", True), ("cores, all", True)]
    columns += [("busiest, of a core", True), ("memory, largest", True), ("speaks to", True)]
    return table("processes", columns, rows)


def print_knee(console: Console, sizes: Sequence[Simulated]) -> None:
    """Print a line for each number of ranks, and where ranks begin to wait."""
    rows: list[list[Cell]] = [
        [
            f"{found.ranks:,}",
            f"{found.hosts:,}",
            _time(found.waits.p50_s),
            _time(found.waits.p99_s),
            f"{found.stalled_share:.1%}",
            f"{format_count(found.tokens_per_s)}",
            f"{found.planner_share:.1%}",
            format_bytes(found.memory.first_memory_bytes),
            f"{found.connections.total:,}",
        ]
        for found in sizes
    ]
    columns = [("ranks", True), ("hosts", True), ("wait p50", True), ("p99", True)]
    columns += [("waiting", True), ("tokens/s", True), ("planner", True)]
    columns += [("first host", True), ("connections", True)]
    console.print(table("by ranks, with as many tokens a rank", columns, rows))
    knee = knee_of(sizes)
    last = sizes[-1].ranks
    told = (
        f"no knee up to {last:,} ranks: they wait less than a twentieth of the time"
        if knee is None
        else f"the knee is at {knee:,} ranks: from there on they wait a twentieth of the time or more"
    )
    say(console, told, "green" if knee is None else "yellow")
