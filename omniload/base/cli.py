"""The ``omniload`` command. Nouns are named by module and attribute, so this package imports nothing above it.

Our own nouns are listed here, and the nouns of other distributions come from entry points. A command that takes a
tenth of a second must not spend a third of it on a search through metadata.

Exit codes: 0 done, 1 a fault of ours, 2 configuration, 3 unavailable, 4 state, 5 integrity; 130 interrupted; 141 the
output has no reader, as after ``| head``.
"""

import atexit
import gc
import io
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click
from typing_extensions import override

from omniload import __version__
from omniload.base.errors import DefectError, OmniloadError, system_refusal
from omniload.base.extras import missing_extra, refuse_namesake
from omniload.base.linux.interrupts import INTERRUPTED_EXIT, ending_when_interrupted
from omniload.base.log import set_up_logging
from omniload.base.message_text import SPELT_PLAINLY, message_text
from omniload.base.units import parse_seconds

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["DURATION", "VARIABLES", "WAIT", "FiniteRange", "Verbs", "main"]

_GROUP = "omniload.commands"
_UNREAD_EXIT = 141
"""Exit code of a command whose reader has gone, as a shell reports a command that SIGPIPE ended."""
_OURS = {
    "env": (
        "snapshot.commands.env:command",
        "Dependency snapshots: install once, restore everywhere.",
    ),
    "fs": (
        "fusefs.cli:command",
        "Mount HDFS, S3 or any store as files, read and written in parallel.",
    ),
    "image": (
        "snapshot.commands.image:command",
        "Run container images whose bytes are fetched as they are read.",
    ),
    "mix": (
        "omniload.cli:command",
        "Check, plan and preview a mix file; watch, change and audit its run.",
    ),
    "train": (
        "trainer_integration.cli:command",
        "Train the included MoE model through the data plane.",
    ),
}
"""Module and attribute of each of our own nouns, which are also entry points of this distribution, and its help line.

The list of nouns is shown without loading any of them, because loading all takes over a second.
"""

_PREFIX = "OMNILOAD_"
VARIABLES = (
    "OMNILOAD_ATTEMPT",
    "OMNILOAD_BASE_IMAGE",
    "OMNILOAD_ENV_CACHE",
    "OMNILOAD_ENV_STORE",
    "OMNILOAD_JOB",
    "OMNILOAD_NODE",
    "OMNILOAD_STARTUP_LOG",
)
"""Environment variables that a user sets; packages above this one read them."""


_OF_A_SERVICE = re.compile(r"_PORT(_|$)|_SERVICE_(HOST|PORT)")
"""Variables that Kubernetes sets in every pod for a service; for one called omniload-node, ``..._NODE_PORT``."""


class _Guided(click.Group):
    """A group that suggests its nearest commands for an unknown name."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not args or not (meant := self.meant_by(ctx, args[0])):
                raise
            raise click.UsageError(
                f"{error.message} Did you mean {' or '.join(meant)}?", ctx
            ) from error

    def meant_by(self, ctx: click.Context, name: str) -> list[str]:
        """Return the commands, as typed, that ``name`` may stand for; empty if ``name`` is a command."""
        known = self.list_commands(ctx)
        return (
            [] if name in known else [f"{ctx.command_path} {each}" for each in _like(name, known)]
        )


class Nouns(_Guided):
    """A group whose commands are the installed entry points; each is loaded when it is named."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_OURS, *(point.name for point in _entry_points())})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OURS:
            place, _ = _OURS[cmd_name]
            return _loaded(place)
        for point in _entry_points(cmd_name):
            return _checked(point.load(), point.value)
        return None

    @override
    def meant_by(self, ctx: click.Context, name: str) -> list[str]:
        """Return also the verbs of our nouns, because a user who types a verb alone has left out its noun."""
        if name in _OURS:
            return []
        if nouns := super().meant_by(ctx, name):
            return nouns
        return self.verbs_like(ctx, name)

    def verbs_like(self, ctx: click.Context, name: str, *, exactly: bool = False) -> list[str]:
        """Return the verbs of our nouns, as typed, that have a name, or otherwise verbs with a similar name."""
        verbs: dict[str, list[str]] = {}
        for noun, (place, _) in _OURS.items():
            with suppress(ImportError, OmniloadError):  # a noun whose extra is not installed
                group = _loaded(place)
                verbs[noun] = group.list_commands(ctx) if isinstance(group, click.Group) else []
        has_it = {noun: [name] for noun, known in verbs.items() if name in known}
        near = (
            has_it
            if has_it or exactly
            else {noun: _like(name, known) for noun, known in verbs.items()}
        )
        return [
            f"{ctx.command_path} {noun} {each}" for noun, found in near.items() for each in found
        ]

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the nouns and their help lines from the table above; other nouns are listed by name only."""
        lines = {name: line for name, (_, line) in _OURS.items()}
        _write_commands(self.list_commands(ctx), lines, formatter)


class Verbs(_Guided):
    """A group whose commands are given by module and attribute, and loaded when they are named.

    The list of commands is shown without loading any, because loading all commands of a noun takes up to two seconds.

    Args:
        verbs: Module and attribute of each command, such as ``omniload.commands.check:check``, and its line in
            ``--help``.
    """

    def __init__(self, *, verbs: Mapping[str, tuple[str, str]], **given: Any) -> None:  # noqa: ANN401 -- click's own
        super().__init__(**given)
        self._verbs = verbs

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._verbs)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        place, _ = self._verbs[cmd_name]
        return _loaded(place)

    @override
    def meant_by(self, ctx: click.Context, name: str) -> list[str]:
        """Return also verbs of that name of other nouns, if no verb of this noun is similar."""
        near, above = super().meant_by(ctx, name), ctx.parent
        if near or name in self._verbs or above is None or not isinstance(above.command, Nouns):
            return near
        return above.command.verbs_like(above, name, exactly=True)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs and their help lines from the table."""
        lines = {name: line for name, (_, line) in self._verbs.items()}
        _write_commands(self.list_commands(ctx), lines, formatter)


def _like(name: str, known: Sequence[str]) -> list[str]:
    """Return the two most similar of the known names."""
    # Imported here, because a correctly typed command must not wait for it.
    from difflib import get_close_matches  # noqa: PLC0415

    return get_close_matches(name, known, n=2, cutoff=0.7)


def _write_commands(
    names: Iterable[str], lines: Mapping[str, str], formatter: click.HelpFormatter
) -> None:
    with formatter.section("Commands"):
        formatter.write_dl([(name, lines.get(name, "")) for name in names])


class FiniteRange(click.FloatRange):
    """A range without ``nan`` and ``inf``: in click, ``nan`` is in every range, and a wait of ``nan`` never ends."""

    @override
    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number to go by; give one such as 5", param, ctx)
        return number


class _Duration(click.ParamType[float]):
    """A duration such as ``800ms``."""

    name = "duration"

    def __init__(self, *, is_wait: bool) -> None:
        self._is_wait = is_wait

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        limits = f"more than 0, and at most {threading.TIMEOUT_MAX:.0f} s" if self._is_wait else ""
        try:
            seconds = float(str(parse_seconds(value)))
        except ValueError as error:
            self.fail(f"{error}{'; a wait is ' * self._is_wait}{limits}", param, ctx)
        if self._is_wait and not 0 < seconds <= threading.TIMEOUT_MAX:
            self.fail(
                f"{value!r} is no time to wait, which is {limits}; give one such as 30s", param, ctx
            )
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is no duration; give one such as 800ms", param, ctx)
        return seconds


DURATION = _Duration(is_wait=False)
"""Type of an option that takes a duration in seconds, or with a unit."""
WAIT = _Duration(is_wait=True)
"""Type of an option for the limit of a wait, written like a duration: above 0, and not longer than threads can wait."""


def _loaded(place: str) -> click.Command:
    module, _, name = place.partition(":")
    if module in sys.modules:
        return _checked(getattr(sys.modules[module], name), place)
    # Imported modules are never garbage, and searching them for garbage takes a tenth of a short command's time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        with ending_when_interrupted():
            return _checked(getattr(import_module(module), name), place)
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _checked(command: object, place: str) -> click.Command:
    assert isinstance(command, click.Command), f"entry point {place} is not a click command"
    return command


def _entry_points(*names: str) -> "Iterable[EntryPoint]":
    """Return the nouns of installed distributions; only those of one name if it is given."""
    # Imported here, because loading it takes longer than a whole warm restore.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=_GROUP, name=names[0]) if names else entry_points(group=_GROUP)


@click.group(cls=Nouns, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="omniload")
@click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
    help="Least severity of the log lines to print.",
)
def omniload(log_level: str) -> None:
    """The data plane of large-model training.

    \b
    Example:
      omniload mix sample demo/corpus
      omniload mix check demo/corpus/mix.yaml
    """  # noqa: D301 -- click's own marker
    set_up_logging(log_level)
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and (meant := _variable_meant(name)):
            click.echo(
                message_text(f"warning: nothing reads {name}; did you mean {meant}?"), err=True
            )


def _variable_meant(name: str) -> str | None:
    """Return the variable of ours that a name may be a mistake for; dissimilar names belong to somebody else."""
    if name in VARIABLES or _OF_A_SERVICE.search(name):
        return None
    # Compared without the common prefix, which would make all names similar.
    near = _like(name.removeprefix(_PREFIX), [each.removeprefix(_PREFIX) for each in VARIABLES])
    return f"{_PREFIX}{near[0]}" if near else None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code its errors carry."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that is not valid UTF-8 is shown with its bytes escaped instead of being refused. On a terminal
        # with another encoding, as under LC_ALL=C, bars are drawn with plain characters.
        sys.stdout.reconfigure(errors=SPELT_PLAINLY)
    # At the very end, after all other exit handlers, because the process frees the rest anyway.
    atexit.register(gc.freeze)
    written = sys.stdout
    try:
        refuse_namesake()
        code = omniload.main(
            args=None if arguments is None else list(arguments), standalone_mode=False
        )
    except click.ClickException as error:
        vars(error)["message"] = message_text(error.message)  # final to a type checker
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED_EXIT)
    except SystemExit as end:
        # If a pipe has no reader, both click, which replaces the stream, and rich exit with code 1.
        is_unread = sys.stdout is not written or isinstance(end.__context__, BrokenPipeError)
        sys.exit(_UNREAD_EXIT if is_unread else end.code)
    except Exception as error:  # noqa: BLE001 -- the outermost loop: every error is told and ends it
        sys.exit(_tell(error))
    # Outside its standalone mode, click returns the result of a command and does not exit.
    sys.exit(code if isinstance(code, int) else 0)


def _tell(error: Exception) -> int:
    """Print the error to standard error; return the exit code.

    An error that comes from outside is printed with its remedy. Anything else is a fault of ours, which is printed
    with its traceback and never as something to try again.
    """
    refusal = _refusal(error)
    if refusal is None:
        traceback.print_exception(error)
        said = f"error: a fault of omniload itself, not of what it was given: {type(error).__name__}: {error}"
        click.echo(message_text(f"{said}; please report it with the lines above"), err=True)
        return DefectError.exit_code
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    click.echo(message_text(f"error: {refusal}{notes}"), err=True)
    return refusal.exit_code


def _refusal(error: Exception) -> OmniloadError | None:
    """Return the error as one of this project, or ``None`` if the error is a fault of ours."""
    match error:
        case OmniloadError():
            return error
        case ModuleNotFoundError():
            with suppress(ModuleNotFoundError):
                return missing_extra("this command", error)
            return None
        case OSError() | MemoryError():
            return system_refusal(error)
        case _:
            return None
