"""``omniload image``: run, record, prefetch: starts, and the bytes that they touch."""

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.units import counted, format_bytes
from snapshot.env.store.progress import shown_progress
from snapshot.image.block.loader import RegistryTier
from snapshot.image.block.prefetch import Prefetched, prefetch_blocks
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.mount.daemon import AUTO, ImageMount, chosen_trace, mount_settings
from snapshot.image.start.namespaces import bind_of, log_of
from snapshot.image.start.run import check_machine, run_in, start_of
from snapshot.image.trace.trace import hot_blocks
from snapshot.image.tree.merge import merge
from snapshot.oci.image import Image, opened_image
from snapshot.oci.store import ImageStore
from snapshot.startup.events import stage

__all__ = ["prefetch_command", "record_command", "run_command"]

# Almost a year, because a window must be a number, and no start takes so long.
_UNTIL_THE_END = "30000000s"
_Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Given:
    """Arguments and options that ``record`` and ``run`` share."""

    image: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    variables: tuple[str, ...]
    binds: tuple[str, ...]
    scratch: str | None
    log: str | None


def _start_options(function: _Command) -> _Command:
    """Add the arguments and options of ``_Given`` to a command, which gets them as one value."""

    @click.argument("image")
    @click.argument("words", nargs=-1)
    @_OPTION
    @click.option(
        "-e",
        "--env",
        "variables",
        multiple=True,
        help="Environment variable as KEY=VALUE; KEY alone passes on its value here.",
    )
    @click.option(
        "--bind",
        "binds",
        multiple=True,
        help="HOST[:PATH][:ro]: a file or folder of this machine, at PATH, or by default at the same path.",
    )
    @click.option(
        "--scratch",
        type=click.Path(file_okay=False, exists=True),
        help="Folder for the command's writes; removed at the end.",
    )
    @click.option("--log", type=click.Path(dir_okay=False), help="Log file of the mount.")
    @functools.wraps(function)
    def command_of(**given: Any) -> None:  # noqa: ANN401
        shared = {each.name: given.pop(each.name) for each in fields(_Given)}
        function(_Given(**shared), **given)

    return command_of


_OPTION = click.option(
    "--option",
    "options",
    multiple=True,
    help="Option of the mount as KEY=VALUE; see 'omniload image mount'.",
)


@click.command("record")
@_start_options
@click.option(
    "-o",
    "--output",
    help="Trace file to write or merge into; default: a file in the folder of traces.",
)
@click.option(
    "--window", help="How long touches are recorded, such as 120s; default: until the end."
)
def record_command(given: _Given, output: str | None, window: str | None) -> None:
    """Run WORDS in IMAGE and record which bytes the command touches, in order; needs root.

    The command sees the image as its root directory, with an overlay for its writes, and the network of this machine.
    Its exit code becomes that of omniload. The new trace is merged with those of earlier starts.

    \b
    Example:
      omniload image record registry.example:5000/team/torch:2.13 -o torch.trace -- python load.py
    """  # noqa: D301 -- click's own marker
    where = str(Path(output).absolute()) if output else AUTO
    # Fetch nothing ahead, because the recording needs the times at which the command itself reads.
    changed = {"record": where, "trace": None}
    sys.exit(_started(given, window or _UNTIL_THE_END, changed))


@click.command("run")
@_start_options
@click.option("--trace", help="File of hot blocks, in place of the trace that the command finds.")
@click.option("--window", default="120s", show_default=True, help="How long touches are recorded.")
def run_command(given: _Given, trace: str | None, window: str) -> None:
    """Run WORDS in IMAGE from a lazy mount; the blocks of the last start come first; needs root.

    The trace is found by image and command; if there is none, the trace of the most similar command is used. Traces are
    in the cache, or in the folder of --option traces=FOLDER, which nodes may share. The touches of this start are
    merged into the trace.

    \b
    Example:
      omniload image run registry.example:5000/team/torch:2.13 -- python train.py
    """  # noqa: D301 -- click's own marker
    found = str(Path(trace).absolute()) if trace else AUTO
    sys.exit(_started(given, window, {"record": AUTO, "trace": found}))


@click.command("prefetch")
@click.argument("image")
@click.argument("words", nargs=-1)
@click.option("--trace", help="File of hot blocks, in place of the trace that WORDS find.")
@_OPTION
@click.option("--json", "as_json", is_flag=True)
def prefetch_command(
    image: str,
    words: tuple[str, ...],
    trace: str | None,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Fetch the blocks that a start of WORDS in IMAGE touches to this node, before the start.

    \b
    Example:
      omniload image prefetch registry.example:5000/team/torch:2.13 --trace torch.trace
      omniload image prefetch registry.example:5000/team/torch:2.13 -- python train.py
    """  # noqa: D301 -- click's own marker
    changed = {"trace": str(Path(trace).absolute()) if trace else AUTO, "command": words or None}
    settings = mount_settings(image, "", options).model_copy(update=changed)
    with _opened(settings) as (store, resolved), shown_progress(in_bytes=False) as progress:
        done = _prefetched(settings, store, resolved, functools.partial(progress, "blocks"))
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
    else:
        moved = format_bytes(sum(done.bytes_of.values()))
        click.echo(
            f"{counted(done.blocks, 'block')}, {done.here} of them here before, {moved} moved"
        )
    if done.failed:
        raise UnavailableError(
            f"{done.failed} of {counted(done.blocks, 'block')} were not to be had; see above"
        )
    # These blocks were fetched and evicted again: a start would fetch them once more without notice.
    if done.unkept:
        raise StateError(
            f"{done.unkept} of {done.blocks} blocks are not kept: the disk is full, or the cap of "
            f"{format_bytes(settings.disk)} too low; give --option disk=SIZE"
        )


def _started(given: _Given, window: str, changed: dict[str, Any]) -> int:
    """Run the command; return its exit code."""
    # Before a registry is asked, because without root its answer is of no use.
    check_machine()
    log = given.log or os.devnull
    settings = mount_settings(given.image, "", (*given.options, f"window={window}"))
    with ExitStack() as starting:
        # This stage runs next to that of the mount, which waits for hot blocks.
        starting.enter_context(stage("image"))
        logged, known = log_of()
        binds = (*logged, *map(bind_of, given.binds))
        # Resolve it once and pass it on, because the tag may move before the mount would look.
        with _opened(settings) as (_, image):
            start = start_of(image.config.config, given.words, (*known, *given.variables))
        settings = settings.model_copy(update={**changed, "command": start.words})
        start = replace(start, binds=binds)
        return run_in(
            settings,
            start,
            scratch=given.scratch,
            log_path=log,
            image=image,
            entered=starting.close,
        )


def _opened(settings: ImageMount) -> AbstractContextManager[tuple[ImageStore, Image]]:
    return opened_image(settings.image, mirrors=settings.mirrors, platform=settings.platform)


def _prefetched(
    settings: ImageMount, store: ImageStore, image: Image, report: Callable[[int, int], None]
) -> Prefetched:
    trace = chosen_trace(settings, image)
    if trace is None:
        command = " ".join(settings.command or image.config.command)
        raise ConfigError(
            f"no start of {command!r} in {settings.image} is known; give --trace, or record one "
            "with 'omniload image record'"
        )
    cache = Path(settings.cache)
    indexes = index_image(store, image, IndexCache(cache / "indexes"))
    refs = hot_blocks(trace, merge([index.entries for index in indexes]), indexes)
    return prefetch_blocks(
        {"registry": RegistryTier(store)},
        BlockStore(cache / "blocks", settings.disk),
        indexes,
        refs,
        report=report,
    )
