"""``omniload mix tokenise``: fills the token cache of a mix before its run, with processes of this host."""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self, cast

import click
import numpy as np
from typing_extensions import override

from omniload.actors.plane import PlaneSpec
from omniload.actors.roles.sources import Caches, SourceOpening
from omniload.base.errors import (
    ConfigError,
    DefectError,
    OmniloadError,
    UnavailableError,
    project_error,
)
from omniload.base.linux.cores import cores_here
from omniload.base.linux.freed_memory import keep_freed
from omniload.base.linux.huge_pages import spare_host
from omniload.base.linux.parent_watch import end_with
from omniload.base.units import counted, format_count
from omniload.commands.display import emit_json, output, progress, say, table
from omniload.commands.faults import sources_in_silence
from omniload.commands.opening import find_sources, open_spec
from omniload.commands.options import cache_option, json_option, mix_argument, store_option
from omniload.mix.held_out import held_out
from omniload.source.record_source import RecordSource
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.ahead import CachedUnits, Stretch, cached_units, stretches_of
from omniload.source.token_cache.opening import open_token_cache

__all__ = ["serve", "tokenise"]

_ENDS_S = 10.0
"""Time that a process has to end once it is not asked for anything more."""


class _Share(click.ParamType[tuple[int, int]]):
    """A share of the work of several hosts, such as ``3/16``."""

    name = "K/N"

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        number, _, of = str(value).partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            self.fail(
                f"{value!r} is no share; give one such as 3/16, from 1/16 to 16/16", param, ctx
            )
        return int(number), int(of)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Results for the units of a source."""

    source: str
    units: int
    """Number of all units with a record."""
    kept_before: int
    made: int
    """Number of units made by this command."""
    tokens: int
    """Number of tokens in those units."""
    why: str
    """Why tokens of the source are not kept; empty if they are."""


@click.command
@mix_argument
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Processes that tokenise; by default one per core that this process may use.",
)
@click.option(
    "--share",
    type=_Share(),
    default="1/1",
    show_default=True,
    help="This host's share of the work, of N shares, such as the array task of a scheduler.",
)
@click.option(
    "--split",
    help="Tokenise a split that the mix holds out, in place of the documents to train on.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Also read what the cache has, and make damaged entries again, as a power failure may leave.",
)
@cache_option
@store_option
@json_option
def tokenise(  # noqa: PLR0913 -- one for each option
    file: Path,
    *,
    workers: int | None,
    share: tuple[int, int],
    split: str | None,
    verify: bool,
    cache_dir: Path | None,
    store_timeout: float,
    as_json: bool,
) -> None:
    """Tokenise the text of FILE before its run, and store the tokens in its token cache.

    Tokens that are already cached are skipped, so a command that was interrupted continues where it stopped. A run that
    begins in the meantime uses the cached tokens and makes the rest itself. Several hosts that share the cache can each
    do a share of the work.

    \b
    Example:
      omniload mix tokenise mix.yaml
      omniload mix tokenise mix.yaml --workers 16 --share 3/16
    """  # noqa: D301 -- click's own marker
    spec = open_spec(file, dp=1, cache_dir=cache_dir)
    if split is not None:
        spec = replace(spec, mix=held_out(spec.mix, split))
    if spec.mix.loader.token_cache is None:
        raise ConfigError(
            f"{file}: names no token cache to fill; say loader: {{token_cache: {{path: FOLDER}}}}, where its runs "
            "take tokens from too"
        )
    # Called for its errors: a fault has a line in the file, and is reported before hours of work on tokens.
    find_sources(spec, file, sources_in_silence(spec.mix, store_timeout, file))
    began_s = time.monotonic()
    found = _found(spec)
    number, of = share
    looked = [replace(each, is_kept_U=each.is_kept_U & (not verify)) for each in found]
    stretches = [each for units in looked for each in stretches_of(units, number - 1, of)]
    made = _make(spec, found, stretches, workers or cores_here())
    seconds = time.monotonic() - began_s
    if as_json:
        emit_json({"file": str(file), "seconds": seconds, "sources": list(map(asdict, made))})
    else:
        _print(made, spec, seconds)


def _print(made: Sequence[_Made], spec: PlaneSpec, seconds: float) -> None:
    columns = [
        ("source", False),
        *((name, True) for name in ("units", "kept before", "made", "tokens")),
    ]
    rows = [
        [
            *(each.source, f"{each.units:,}", f"{each.kept_before:,}", f"{each.made:,}"),
            format_count(each.tokens) if not each.why else f"not kept: {each.why}",
        ]
        for each in made
    ]
    console, tokens = output(), sum(each.tokens for each in made)
    kept = sum(each.kept_before + each.made for each in made)
    console.print(table(counted(len(made), "source"), columns, rows))
    cache = spec.mix.loader.token_cache
    assert cache is not None, "it was filled"
    say(
        console,
        f"{format_count(tokens)} tokens made in {seconds:.0f} s, {format_count(tokens / max(seconds, 1e-9))} a second; "
        f"{kept:,} of {counted(sum(each.units for each in made), 'unit')} are kept in {cache.path}",
    )


def _found(spec: PlaneSpec) -> list[CachedUnits]:
    """Return the cached units of each source."""
    cache = open_token_cache(spec.mix.loader.token_cache, spec.mix.tokenizer, spec.base_dir)
    assert cache is not None, "the mix names one"
    found = []
    with progress("looking at sources", len(spec.mix.names)) as advance:
        for name in spec.mix.names:
            source = SourceSpec.drawn(spec.mix, name, spec.base_dir, spec.cache_dir)
            found.append(cached_units(source, cache))
            advance(1)
    return found


def _make(
    spec: PlaneSpec, found: Sequence[CachedUnits], stretches: Sequence[Stretch], workers: int
) -> list[_Made]:
    """Let processes check and make units; return the results by source.

    Raises:
        OmniloadError: A source cannot be read, the cache is full, or a process was lost.
    """
    made, tokens = dict.fromkeys(spec.mix.names, 0), dict.fromkeys(spec.mix.names, 0)
    kept = {each.source: _kept_beside(each, stretches) for each in found}
    with progress("tokenising units", sum(len(each.units) for each in stretches)) as advance:
        for source, count in _units_made(spec, stretches, workers):
            # A kept, undamaged unit does not count as made: it was only checked, or a run has made it meanwhile.
            kept[source] += count is None
            made[source] += count is not None
            tokens[source] += count or 0
            advance(1)
    return [
        _Made(
            source=each.source,
            units=len(each.units_U),
            kept_before=kept[each.source],
            made=made[each.source],
            tokens=tokens[each.source],
            why=each.why,
        )
        for each in found
    ]


def _kept_beside(units: CachedUnits, stretches: Sequence[Stretch]) -> int:
    """Return how many units of a source are kept, by their names, apart from those of ``stretches``."""
    asked = [unit for each in stretches if each.source == units.source for unit in each.units]
    return int(units.is_kept_U[~np.isin(units.units_U, asked)].sum())


def _units_made(
    spec: PlaneSpec, stretches: Sequence[Stretch], workers: int
) -> Iterator[tuple[str, int | None]]:
    """Yield the source and the tokens of each unit when it is kept; ``None`` for one that was kept and is undamaged."""
    left, limit_s = deque(stretches), spec.mix.runtime.stuck_after
    with ExitStack() as held:
        busy: dict[Connection, _Worker] = {}
        for number in range(min(workers, len(stretches))):
            worker = held.enter_context(_Worker(spec, number))
            worker.begin(left.popleft())
            busy[worker.pipe] = worker
        while busy:
            late_s = min(worker.heard_s for worker in busy.values()) + limit_s - time.monotonic()
            for pipe in cast("list[Connection]", wait([*busy], max(late_s, 0.0))):
                worker = busy[pipe]
                yield worker.stretch.source, worker.heard()
                if worker.has_more:
                    continue
                if left:
                    worker.begin(left.popleft())
                else:
                    del busy[worker.pipe]
            for worker in busy.values():
                worker.require_heard(limit_s)


class _Worker:
    """A process that makes the tokens of one stretch after another; it ends with this process."""

    def __init__(self, spec: PlaneSpec, number: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, its = spawn.Pipe()
        self._process = spawn.Process(
            target=serve, args=(spec, its, os.getpid()), name=f"worker {number}", daemon=True
        )
        # Ctrl-C reaches all processes of a terminal, and this process ends the worker. So the worker starts with the
        # signal blocked, and keeps it blocked. The resource tracker starts before, because it unblocks the signal for
        # all: the first worker would start it on its way.
        resource_tracker.ensure_running()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        its.close()
        self.heard_s, self._at = time.monotonic(), 0
        self.stretch = Stretch(source="", units=())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        # The unit under way is kept whole or not at all, and the next command makes it anew.
        self._process.kill()
        self._process.join(_ENDS_S)

    def begin(self, stretch: Stretch) -> None:
        """Let the process make a stretch."""
        self.stretch, self._at, self.heard_s = stretch, 0, time.monotonic()
        try:
            self.pipe.send(stretch)
        except OSError as error:
            raise self._lost() from error

    @property
    def has_more(self) -> bool:
        """Whether units of its stretch are still to come."""
        return self._at < len(self.stretch.units)

    def heard(self) -> int | None:
        """Return the tokens of a unit that it has made, or ``None`` for a kept one; raise the error of the process."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if isinstance(found, OmniloadError):
            raise found
        self._at, self.heard_s = self._at + 1, time.monotonic()
        return cast("int | None", found)

    def require_heard(self, limit_s: float) -> None:
        """Refuse to wait any longer for a unit."""
        if time.monotonic() - self.heard_s >= limit_s:
            raise UnavailableError(
                f"{self._doing()} has taken {limit_s:g} s, runtime.stuck_after; see whether its store answers, and "
                "whether the process is stopped: what was kept stays"
            )

    def _lost(self) -> OmniloadError:
        self._process.join(_ENDS_S)
        code = self._process.exitcode
        ended = f"{self._doing()} has ended (exit {code})"
        # A fault outside of omniload would have been sent through the pipe.
        if code is not None and code >= 0:
            return DefectError(
                f"{ended}, a fault of omniload; please report it with the lines above"
            )
        return UnavailableError(
            f"{ended}, most often for want of memory: take fewer --workers, or a smaller unit; what was kept stays, "
            "and the command goes on from there"
        )

    def _doing(self) -> str:
        unit = self.stretch.units[self._at] if self.has_more else "none"
        process = f"{self._process.name} (process {self._process.pid})"
        return f"{process}, at unit {unit} of {self.stretch.source}"


def serve(spec: PlaneSpec, pipe: Connection, opener: int) -> None:
    """Make the tokens of stretches, unit by unit, until the other end of the pipe is closed or a unit fails."""
    end_with(opener)
    spare_host()
    keep_freed()
    opened = _Opened(spec)
    with suppress(EOFError, OSError):  # no process asks any more
        while True:
            stretch: Stretch = pipe.recv()
            for unit in stretch.units:
                found = opened.tokens_of(stretch.source, unit)
                pipe.send(found)
                if isinstance(found, OmniloadError):
                    return


class _Opened:
    """The source that a process is making tokens of."""

    def __init__(self, spec: PlaneSpec) -> None:
        self._spec = spec
        self._caches: Caches | None = None
        self._source: RecordSource | None = None

    def tokens_of(self, name: str, unit: int) -> int | OmniloadError | None:
        """Keep the tokens of a unit; return their number, ``None`` if it was kept already, or the error."""
        try:
            if self._source is None or self._source.name != name:
                self._source = self._open(name)
            tokens, is_kept = self._source.make_tokens(unit)
        except Exception as error:  # noqa: BLE001 -- the asking process reports it, and a defect of ours as such
            return project_error(error, f"the tokens of unit {unit} of {name}")
        if is_kept:
            return tokens
        return ConfigError(
            f"loader.token_cache: takes no more, at unit {unit} of {name}: the log says why; raise its limit or make "
            "room; what was kept stays, and the command goes on from there"
        )

    def _open(self, name: str) -> RecordSource:
        spec = self._spec
        if self._caches is None:
            self._caches = Caches.of(spec.mix, spec.base_dir)
        opening = SourceOpening(
            mix=spec.mix,
            number=spec.mix.names.index(name),
            base_dir=spec.base_dir,
            cache_dir=spec.cache_dir,
        )
        source = opening.open(self._caches)
        source.share(self._caches.memory)
        return source
