"""The local runtime: planner, loader and constructor as threads of this process, and its ranks' handles. No Ray."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from typing_extensions import override

from omniload.actors.address import check_rank
from omniload.actors.answering_edits import answer_edits, last_question
from omniload.actors.claim import claim
from omniload.actors.gate import CLOSED
from omniload.actors.heartbeat_board import Activity, MemoryBoard
from omniload.actors.patience import note_taken, taken_within, wait_for_opening, wait_until
from omniload.actors.plane import (
    DataPlane,
    PlaneSpec,
    RankHandle,
    join_world,
)
from omniload.actors.planner_journal import open_journal
from omniload.actors.planning import make_planner
from omniload.actors.roles.constructor import ConstructorShell
from omniload.actors.roles.links import ConstructorLink, LoaderLink
from omniload.actors.roles.loader import LoaderShell
from omniload.actors.roles.planner import PlannerShell
from omniload.actors.roles.planner_metrics import serve_metrics
from omniload.actors.status_file import write_status
from omniload.actors.versions import with_versions
from omniload.base.concurrency.calls_under_way import calls_under_way
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.linux.freed_memory import keep_freed
from omniload.base.log import RoleLogs, get_logger, logs_folder
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    ChangeAsked,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    ResizeAsked,
    SamplesReported,
    TakeOver,
)
from omniload.machine.progress import rank_name
from omniload.machine.waiting import Wait
from omniload.mix.edits.answers import EditRequest, EditTaken
from omniload.mix.edits.edit import AddSource, SkipShard
from omniload.mix.edits.shards import shard_meant
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed, World, WorldRank, require_rows
from omniload.source.parts.divided import ThreadReader

__all__ = ["LocalHandle", "LocalPlane"]

_LOG = get_logger(__name__)
_READER_THREADS = 2
"""Decoding releases the interpreter lock, so two readers keep a second core busy."""
_CLOSE_S = 10.0
_LOADER, _CONSTRUCTOR = "loader-0", "constructor-0"
"""Names of the only loader and the only data constructor."""
Found = TypeVar("Found")


class LocalPlane(DataPlane):
    """A data plane of threads, for the ranks of this process: some read ahead, one plans, and one builds."""

    def __init__(self, spec: PlaneSpec) -> None:
        """Open the sources and start planning.

        Raises:
            ConfigError: A source or the batch is refused.
            StateError: ``spec.state`` does not fit the mix or the data, or the plane is open already.
            UnavailableError: A store did not answer.
        """
        require_rows(spec.mix, spec.tree)
        keep_freed()  # as in every process that reads
        self.spec, self.board = spec, MemoryBoard()
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._ranks: set[WorldRank] = set()
        self._met: set[WorldRank] = set()
        """Ranks that had a handle; a rank that joins in such a place belongs to the next generation."""
        self._closed = False
        self._readers = DaemonPool(_READER_THREADS, "omniload-reader", reads=True)
        # One thread: steps are built in the order in which they are planned, and ranks wait for the first.
        self._builder = DaemonPool(1, "omniload-builder")
        self._opened = ExitStack()
        try:
            self._asked_before = last_question(spec.run_dir)
            # Claimed first, so released last: the run cannot be opened again before these threads have ended.
            self._opened.callback(claim(spec))
            self._logs = RoleLogs(None if spec.run_dir is None else logs_folder(spec.run_dir))
            self._opened.callback(self._logs.close)
            self._opened.callback(self._end_threads)
            # Edits are read after the claim, because the previous holder may have kept one at its end.
            self.spec = spec = with_versions(spec.with_edits())
            self._open(spec)
        except BaseException:
            self._opened.close()
            raise

    def _open(self, spec: PlaneSpec) -> None:
        mix, tree = spec.history.latest, spec.tree
        every_source = range(len(mix.names))
        activity = self.activity_of(_LOADER, reads=True)
        self.loader = self._patiently(
            self._readers.submit(
                lambda: LoaderShell(
                    mix,
                    every_source,
                    base_dir=spec.base_dir,
                    cache_dir=spec.cache_dir,
                    activity=activity,
                    start_reader=lambda opening, _: ThreadReader(opening.open_part),
                )
            )
        )
        facts = self.loader.facts()
        planner = make_planner(spec, [facts[s] for s in every_source])
        spec.keep()
        self.first_step = planner.state.step
        # Before the planner begins, because a port that is in use ends the start.
        self._opened.callback(serve_metrics(mix, self.board))
        dp_ranks = tuple(range(tree.size_of("dp")))
        self.constructor = ConstructorShell(
            DataConstructor.of(mix, dp_ranks, cp_size=tree.size_of("cp")),
            self.loader.ranges,
            self.activity_of(_CONSTRUCTOR),
        )
        link = _LocalLoaderLink(self.loader, self._readers)
        planning = self.activity_of("planner")
        planning.figures.note(restarts=spec.restarts)
        self.planner = PlannerShell(
            planner,
            lambda _source: link,
            [_LocalConstructorLink(self.constructor, dp_ranks, self._builder)],
            open_journal(spec.run_dir, planner),
            planning,
            spec.run_dir,
        )
        self.planner.start()
        self._opened.callback(write_status(spec.run_dir, self.board))
        # Last of all, so that a requested change finds everything that it needs.
        self._opened.callback(
            answer_edits(spec.run_dir, partial(_change_mix, self), self._asked_before)
        )

    def activity_of(self, role: str, *, reads: bool = False) -> Activity:
        """Return the activity of a role of this process, on the board and with a log."""
        return self.board.add(Activity(role, reads=reads, log=self._logs.of(role)))

    def _patiently(self, opening: "Future[Found]") -> Found:
        """Wait for sources to open, as long as there is progress."""
        limit_s = self.spec.mix.runtime.batch_timeout
        wait_for_opening(lambda s: bool(wait([opening], s).done), _LOADER, limit_s, self.board)
        return opening.result()

    @override
    def handle(
        self, dp_rank: int, cp_rank: int = 0, asked: ResizeAsked | None = None
    ) -> RankHandle:
        sizes = {axis: self.spec.tree.size_of(axis) for axis in ("dp", "cp")}
        sizes["dp"] = sizes["dp"] if asked is None else asked.dp
        dp_rank, cp_rank = check_rank(sizes, dp_rank, cp_rank)
        self.check()
        return LocalHandle(self, dp_rank, cp_rank, asked)

    def check(self) -> None:
        """Return if the plane is open; raise ``UnavailableError`` once it is closed."""
        if self._closed:
            raise UnavailableError(CLOSED)

    def resize(self, asked: ResizeAsked) -> World:
        """Change the ranks from a step on; return their world."""
        return taken_within(self.planner.resize(asked), what="other ranks")

    def was_held(self, world: World, dp_rank: int, cp_rank: int) -> bool:
        """Return whether a rank of a world had a handle once, and has none now."""
        key = WorldRank(dp_rank, cp_rank, world.generation)
        with self._lock:
            return key in self._met - self._ranks

    def claim_rank(self, world: World, dp_rank: int, cp_rank: int) -> WorldRank:
        """Claim a rank of a world.

        Raises:
            StateError: The rank has a handle already.
        """
        key = WorldRank(dp_rank, cp_rank, world.generation)
        with self._lock:
            if key in self._ranks:
                name = rank_name(dp_rank, cp_rank, world.tree.size_of("cp"))
                raise StateError(f"{name} of this data plane has a handle already; close it first")
            self._ranks.add(key)
            self._met.add(key)
        return key

    def release_rank(self, key: WorldRank) -> None:
        """Allow another handle of a rank."""
        with self._lock:
            self._ranks.discard(key)

    @override
    def close(self) -> None:
        with self._closing:  # a concurrent call waits for the end of the first
            if self._closed:
                return
            self._closed = True
            # Waiting ranks leave first, and reads that wait for a store give up; the planner is joined after both.
            self.constructor.fail(UnavailableError(CLOSED))
            self.loader.close()
            self.planner.close()
            self._opened.close()
            self.loader.keep_costs()

    def _end_threads(self) -> None:
        for pool in (self._readers, self._builder):
            if not pool.close(_CLOSE_S):
                calls = [what for what, _ in calls_under_way()]
                _LOG.warning("the data plane is closed while a call does not end: %s", calls[:1])


class LocalHandle(RankHandle):
    """A rank's link to the constructor and the planner of its own process."""

    def __init__(
        self, plane: LocalPlane, dp_rank: int, cp_rank: int, asked: ResizeAsked | None
    ) -> None:
        """Claim a rank of the plane, which has checked that it exists; ``asked`` names other ranks than the first."""
        self._plane = plane
        if asked is None:
            world, first_step = World(tree=plane.spec.tree), plane.first_step
        else:
            held = partial(plane.was_held, dp_rank=dp_rank, cp_rank=cp_rank)
            world, first_step = join_world(asked, plane.resize, held), asked.step
        self._be(plane.claim_rank(world, dp_rank, cp_rank), world, first_step)

    def _be(self, rank: WorldRank, world: World, first_step: int) -> None:
        """Become a claimed rank."""
        self._rank, self._world, self.first_step = rank, world, first_step
        self._name = rank_name(rank.dp, rank.cp, world.tree.size_of("cp"))
        self._activity = self._plane.activity_of(self._name)
        self._activity.rest("has asked for no batch")
        self._lent: tuple[Batch, tuple[int, int]] | None = None
        """A batch that was looked at before its turn, and the edition under which it is lent."""
        self._told_next = first_step
        """Step at which, at the latest, the taken steps are reported."""

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        self._plane.check()  # batches that were built before are still there
        began_s = time.monotonic()
        lent, self._lent = self._lent, None
        stands = lent and lent[0].step == step and self._plane.constructor.confirm(step, lent[1])
        batch = lent[0] if lent and stands else self._built(step, timeout_s)
        note_taken(self._activity, step, time.monotonic() - began_s, is_end=batch is None)
        return batch

    def _built(self, step: int, timeout_s: float | None) -> Batch | None:
        """Wait for a step, and take it; if it is withheld at that moment, wait again."""
        constructor, rank = self._plane.constructor, self._rank
        # The usual case: a rank that trains finds it built, and does not post a wait.
        if (built := constructor.take_built(step, rank)) is not None:
            return built
        with self._activity.doing(f"waits for step {step}", (_CONSTRUCTOR,)):
            limit_s = timeout_s or self._plane.spec.mix.runtime.batch_timeout
            wait = Wait.for_batch(self._name, step, _CONSTRUCTOR, limit_s)
            while True:
                wait_until(
                    lambda s: constructor.wait(step, s, rank.generation), wait, self._plane.board
                )
                with suppress(TimeoutError):
                    return constructor.take(step, rank, 0.0)

    @override
    def is_ready(self, step: int) -> bool:
        return self._plane.constructor.has(step, self._rank.generation)

    @override
    def lent(self, step: int, timeout_s: float | None = None) -> Batch | None:
        self._plane.check()
        try:
            lent = self._plane.constructor.lend_several(step, 1, self._rank, timeout_s=timeout_s)
        except TimeoutError:
            return None  # it was withheld after it was ready
        self._lent = (lent[0][0], lent[1]) if lent[0] else None
        return self._lent and self._lent[0]

    @override
    def taken(self, step: int) -> None:
        # Steps are planned several at a time, so reporting them as rarely is enough.
        if step < self._told_next and self.is_ready(step + 1):
            return
        self._told_next = step + self._plane.spec.mix.steps_at_once
        self._plane.planner.taken(step, self._rank)

    @override
    def state_at(self, step: int) -> JsonObject:
        return self._plane.planner.state_at(step)

    @override
    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        asked, before = asked.after(self._rank.generation), self._rank
        check_rank({"dp": asked.dp, "cp": self._world.tree.size_of("cp")}, dp_rank, before.cp)
        world = self._plane.resize(asked)
        # Everything that can fail comes before any change of this handle.
        rank = self._plane.claim_rank(world, dp_rank, before.cp)
        self._plane.release_rank(before)
        self._be(rank, world, asked.step)

    @override
    def close(self) -> None:
        self._plane.release_rank(self._rank)


def _change_mix(plane: "LocalPlane", request: EditRequest) -> EditTaken:
    """Let the planner apply a change, after opening an added source or finding the named shard.

    Raises:
        OmniloadError: The change is refused, and nothing has changed.
    """
    facts, change = None, request.change
    if isinstance(change, SkipShard):
        names = plane.planner.history().latest.names
        change = shard_meant(change, names, [plane.loader.look_for_shard(change)])
    if isinstance(change, AddSource):
        history = plane.planner.history()
        mix = history.tried(change, request.at).latest
        facts = plane.loader.open_also(len(mix.names) - 1, mix)
        # Before the planner hears of it, because it may plan the source's first rows at once.
        plane.constructor.know(mix)
    asked = ChangeAsked(change=change, at=request.at, facts=facts)
    return taken_within(plane.planner.change(asked))


class _LocalLoaderLink(LoaderLink):
    """The planner's link to the source loader."""

    name = _LOADER

    def __init__(self, shell: LoaderShell, pool: DaemonPool) -> None:
        self._shell, self._pool = shell, pool

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        return self._pool.submit(lambda: self._shell.read_ahead(command))

    @override
    def take_over(self, command: TakeOver) -> "Future[None]":
        return self._pool.submit(lambda: self._shell.take_over(command))

    @override
    def release(self, command: ReleaseSamples) -> None:
        self._shell.release(command)


class _LocalConstructorLink(ConstructorLink):
    """The planner's link to the data constructor."""

    def __init__(self, shell: ConstructorShell, dp_ranks: Sequence[int], pool: DaemonPool) -> None:
        self._shell, self.dp_ranks, self._pool = shell, dp_ranks, pool

    @override
    def build(
        self, plans: Sequence[StepPlan], served: RanksServed, released_to: int
    ) -> "Future[int]":
        # Released at once, because the building thread may still be busy with an earlier window.
        self._shell.release(ReleaseSteps(step=released_to))
        return self._pool.submit(lambda: self._shell.build(plans, served))

    @override
    def told(self, served: RanksServed) -> None:
        """Ask nothing, because the ranks of this process report to the planner directly."""

    @override
    def fence(self, edition: tuple[int, int]) -> "Future[int]":
        fenced = Future[int]()
        fenced.set_result(self._shell.fence(edition))
        return fenced

    @override
    def release(self, command: ReleaseSteps) -> None:
        self._shell.release(command)

    @override
    def end(self, step: int) -> None:
        self._shell.end(step)

    @override
    def fail(self, error: OmniloadError) -> None:
        self._shell.fail(error)
