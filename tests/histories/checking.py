"""Run a history, and report the promise that it breaks."""

import gc
import json
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

from omniload.machine import queue as queue_module
from omniload.machine.plans import windows as windows_module
from omniload.mix.edits.edits_file import edits_in
from omniload.mix.state import MixState
from tests.histories.remembered import ROWS, remembering
from tests.histories.scaled import ScaledPlane
from tests.histories.worlds import STEPS, World
from tests.support.plane.messages import Moment
from tests.support.plane.reference import reference_digests

__all__ = ["Outcome", "history_of", "shrunk", "without_collection"]

LONGEST_WAIT = 6_000
"""Most messages between two batches, whatever happens.

While a planner is away and loaders are dead, most messages are constructors that ask again: 4,252 were the most in
100,000 histories, where the usual number is below 1,900.
"""
_DUE: dict[tuple[object, ...], tuple[int, ...]] = {}
_RESUMES = 8
"""One history in this many is resumed from a state in its middle, in a second world of its own."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a history."""

    broken: str | None
    """The broken promise; ``None`` if all were kept."""
    seen: Counter[str]
    """The number of times that each thing happened."""
    messages: int
    longest_wait: int
    trace: Sequence[Moment] = ()


def history_of(world: World, *, traced: bool = False) -> Outcome:
    """Run the history of a world."""
    plane: ScaledPlane | None = None
    bases = patch.object(windows_module, "_BASE_EVERY", 8) if world.small_bases else nullcontext()
    with (
        bases,
        remembering(),
        without_collection(),
        patch.object(queue_module, "_FIRST_READ", 1 + world.seed % 12),
    ):
        try:
            plane = ScaledPlane(**world.arguments(), rows=ROWS)
            plane.trace = [] if traced else None
            broken = _broken(world, plane, plane.run())
        except Exception as error:  # noqa: BLE001 -- whatever it is, a promise did not hold
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).splitlines() or [""]
            broken = f"{type(error).__name__}: {text[0]} ({where.name}, line {where.lineno})"
    return Outcome(
        broken=broken,
        seen=plane.seen if plane else Counter(),
        messages=plane.delivered if plane else 0,
        longest_wait=plane.longest_wait if plane else 0,
        trace=plane.trace or () if plane else (),
    )


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collection meanwhile: the objects that a history leaves contain no cycles.

    Around many, nothing that they share is looked through behind each of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def shrunk(world: World, broken: str) -> World:
    """Return a world to which as little is done as still breaks a promise of the same kind."""
    kind = broken.partition(":")[0]
    found = True
    while found:
        found = False
        for smaller in world.smaller():
            again = history_of(smaller).broken
            if again is not None and again.partition(":")[0] == kind:
                world, found = smaller, True
                break
    return world


def _broken(  # noqa: PLR0911 -- a promise each
    world: World, plane: ScaledPlane, digests: Sequence[int]
) -> str | None:
    due = _due(plane, world)
    if tuple(digests) != due:
        step = next(i for i, (a, b) in enumerate(zip(digests, due, strict=False)) if a != b)
        return f"samples: step {step} has others than the mix alone decides"
    if plane.published != list(range(world.steps)):
        return f"steps: {plane.published} were published"
    if [record["step"] for record in plane.journal] != list(range(world.steps)):
        return "journal: it does not hold every step once"
    if plane.on_disk() != plane.journal:
        return "journal: the disk holds other records than were told of"
    if kept := plane.served_and_kept():
        return f"memory: steps {kept} are kept, which every rank has"
    if missing := plane.missing():
        return f"roster: {missing} have not as many members as are wanted"
    if thrashed := plane.thrashed():
        return f"scaler: {thrashed}"
    if plane.longest_wait > LONGEST_WAIT:
        return f"wait: no rank had a batch for {plane.longest_wait} messages"
    if world.seed % _RESUMES == 0:
        return _resumed(world, plane, digests)
    return None


def _due(plane: ScaledPlane, world: World) -> tuple[int, ...]:
    """Return the digests of all steps as the mix and its edits alone decide them; histories share many of them."""
    texts = tuple(edit.model_dump_json() for edit in plane.history.edits)
    key = (world.scenario, bool(world.resizes), texts)
    if key not in _DUE:
        num_steps = world.steps if texts else STEPS
        _DUE[key] = tuple(reference_digests(plane.history, world.epochs, num_steps=num_steps))
    return _DUE[key][: world.steps]


def _resumed(world: World, plane: ScaledPlane, digests: Sequence[int]) -> str | None:
    """Resume from a state in the middle, in a world without faults."""
    step = sorted(plane.states)[len(plane.states) // 2]
    saved = json.loads(json.dumps(plane.states[step]))
    revision = len(edits_in(saved))
    names = plane.history.of_revision(revision).names
    found = plane.history.fingerprint_at(revision, plane.planner.fingerprint)
    calm = replace(World(seed=world.seed, scenario=world.scenario), steps=world.steps, dp=2)
    arguments = calm.arguments() | {
        "mix": world.mix,
        "epochs": world.epochs,
        "state": MixState.from_json(saved, names, found),
        "edits": plane.history.edits,
    }
    if ScaledPlane(**arguments, rows=ROWS).run() != list(digests[step:]):
        return f"resume: from step {step} on other samples come"
    return None
