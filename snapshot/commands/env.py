"""``omniload env``: save, restore, run, show, umount."""

import errno
import functools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

# Each command imports what only it needs, because a warm restore is over before that would be loaded.
from omniload.base.cli import Verbs
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.units import counted, format_bytes
from snapshot.env.flow.forms import RequestedForm
from snapshot.env.flow.restore import Restored, Restorer
from snapshot.env.format.entries import Kind, Limits
from snapshot.env.key.interpreter import environment_of
from snapshot.env.key.keys import Installation
from snapshot.env.node.cache import CACHE_VARIABLE, NodeCache
from snapshot.env.store.access import StoreMissingError, opened
from snapshot.env.store.progress import shown_progress
from snapshot.env.target.environment import Environment, active_environment
from snapshot.startup.events import stage

if TYPE_CHECKING:
    from snapshot.env.format.manifest import Manifest

__all__ = ["command", "lines_of", "summary_of"]

_Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options that choose the environment and the inputs."""

    environment: Environment
    image: str
    files: tuple[str, ...]
    variables: tuple[str, ...]
    limits: Limits

    def installation(self, words: tuple[str, ...]) -> Installation:
        """Return the command with the inputs declared for it."""
        here = str(Path.cwd())
        return Installation(words, here, dict(os.environ), self.files, self.variables)


def _environment_options(function: _Command) -> _Command:
    """Add the options of ``_Options`` to a command, which gets them as one value."""

    @click.option(
        "--python", help="Interpreter or root of the environment; by default, the active one."
    )
    @click.option("--target", "targets", multiple=True, help="One more directory to capture.")
    @click.option(
        "--base-image",
        "image",
        envvar="OMNILOAD_BASE_IMAGE",
        default="",
        help="Digest of the base image. [env OMNILOAD_BASE_IMAGE]",
    )
    @click.option("--input", "files", multiple=True, help="File or folder the command reads.")
    @click.option("--input-env", "variables", multiple=True, help="Variable the command reads.")
    @click.option("--max-bytes", default=1 << 40, show_default=True, help="Refuse more bytes.")
    @click.option("--case-pairs", is_flag=True, help="Allow paths that differ by case only.")
    @functools.wraps(function)
    def command_of(**given: Any) -> None:  # noqa: ANN401
        options = _Options(
            environment=active_environment(given.pop("python"), given.pop("targets")),
            limits=Limits(raw_bytes=given.pop("max_bytes"), case_pairs=given.pop("case_pairs")),
            **{name: given.pop(name) for name in ("image", "files", "variables")},
        )
        try:
            function(options, **given)
        except OSError as error:
            raise _fault(error) from error

    return command_of


def _fault(error: OSError) -> StateError:
    """Return the error for a system call that failed in the environment or the node cache."""
    place = error.filename or "a file"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        remedy = f"free some, or name a node cache on another disk in {CACHE_VARIABLE}"
        return StateError(f"{place}: no space is left; {remedy}; the environment is as it was")
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        remedy = f"use an environment and a node cache ({CACHE_VARIABLE}) of your own"
        return StateError(f"{place}: user {os.geteuid()} may not: {error.strerror}; {remedy}")
    return StateError(f"{place}: {error.strerror}")


_HERE = __name__
_VERBS = {
    "prune": (
        "snapshot.commands.env_prune:prune_command",
        "Remove unused trees from the node cache, or the snapshots KEYS from a store.",
    ),
    "restore": (
        f"{_HERE}:restore_command",
        "Restore a snapshot into the environment; if there is none, run COMMAND and save the result.",
    ),
    "run": (f"{_HERE}:run_command", "Restore a snapshot, then exec COMMAND in the environment."),
    "save": (f"{_HERE}:save_command", "Run COMMAND and save its changes of the environment."),
    "show": (f"{_HERE}:show_command", "List the snapshots of STORE, or show one."),
    "umount": (
        f"{_HERE}:umount_command",
        "Take the snapshot off the environment, and bring back its earlier contents.",
    ),
}
"""Module of each verb, and its line in ``--help``."""


@click.group("env", cls=Verbs, verbs=_VERBS)
def command() -> None:
    """Dependency snapshots: install once, restore everywhere.

    \b
    Example:
      omniload env save -o /mnt/envs -- pip install -r requirements.txt
      omniload env show -o /mnt/envs
    """  # noqa: D301 -- click's own marker


_store_option = click.option(
    "-o",
    "--store",
    "url",
    envvar="OMNILOAD_ENV_STORE",
    required=True,
    help="Directory, hdfs://, s3://, gs:// or any fsspec URL. [env OMNILOAD_ENV_STORE]",
)
_forms = click.Choice(["auto", "mount", "link", "copy"])
_form_option = click.option("--form", type=_forms, default="auto", show_default=True)


@click.command("save")
@_store_option
@_environment_options
@click.option(
    "--byte-code/--no-byte-code",
    default=True,
    show_default=True,
    help="Keep byte code and add any that is missing, or leave it out, as uv does.",
)
@click.argument("words", nargs=-1, required=True)
def save_command(given: _Options, url: str, byte_code: bool, words: tuple[str, ...]) -> None:
    """Run COMMAND and save its changes of the environment.

    \b
    Example:
      omniload env save -o hdfs://namenode:9000/envs -- pip install -r requirements.txt
      omniload env save -o /mnt/envs --target /opt/tools --input setup.cfg -- bash setup.sh
    """  # noqa: D301 -- click's own marker
    from snapshot.env.flow.save import install_and_save  # noqa: PLC0415

    # Open the store first, so that a missing one is reported before an hour of pip.
    with stage("environment_save"), opened(url) as repository, shown_progress() as progress:
        manifest = install_and_save(
            given.environment,
            repository,
            given.installation(words),
            image=given.image,
            byte_code=byte_code,
            limits=given.limits,
            progress=progress,
        )
    head = manifest.head
    # Alone on standard output, so that a script can read it; everything else goes to standard error.
    click.echo(head.key)
    click.echo(
        f"{counted(manifest.num_files, 'file')}, {format_bytes(manifest.raw_bytes)}, {format_bytes(head.stored_bytes)} "
        f"added to the store; installed in {head.install_s:.1f} s",
        err=True,
    )
    for path in head.skipped:
        click.echo(f"warning: {path} is no file, folder or link; it is left out", err=True)


@click.command("restore")
@_store_option
@_environment_options
@click.option("--auto", is_flag=True, help="Find the key from COMMAND and its inputs.")
@_form_option
@click.option("--json", "as_json", is_flag=True)
@click.argument("words", nargs=-1, required=True, metavar="[KEY] [-- COMMAND...]")
def restore_command(
    given: _Options,
    url: str,
    auto: bool,
    form: RequestedForm,
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Restore a snapshot into the environment; if there is none, run COMMAND and save the result.

    Before linking or copying, a sample of the node's files is read again, for 20 ms; a mount reads none. Linked files
    belong to the node's cache, so damage to one affects every environment. 'env prune --verify' reads all files and
    removes damaged trees: run it once a day.

    \b
    Example:
      omniload env restore --auto -o hdfs://namenode:9000/envs -- pip install -r requirements.txt
      omniload env restore 3f9a01c2 -o /mnt/envs --form link
    """  # noqa: D301 -- click's own marker
    restored = _restored(given, url, words, auto=auto, form=form)
    click.echo(json.dumps(asdict(restored)) if as_json else _sentence(restored))


@click.command("run")
@_store_option
@_environment_options
@click.option("--auto", is_flag=True, help="Find the key from --install and its inputs.")
@click.option("--install", default="", help="Install command, for --auto and as a fallback.")
@_form_option
@click.argument("words", nargs=-1, required=True, metavar="[KEY] [-- COMMAND...]")
def run_command(
    given: _Options, url: str, auto: bool, install: str, form: RequestedForm, words: tuple[str, ...]
) -> None:
    """Restore a snapshot, then exec COMMAND in the environment.

    \b
    Example:
      omniload env run --auto --install "pip install -r requirements.txt" -o /mnt/envs -- torchrun train.py
      omniload env run 3f9a01c2 -o /mnt/envs -- python train.py
    """  # noqa: D301 -- click's own marker
    key, program = ((), words) if auto else (words[:1], words[1:])
    # Check before anything is restored, because a mistake in the command line must not cost an installation.
    if not program:
        raise ConfigError("no command to run; write it after --, such as -- torchrun train.py")
    begin = time.monotonic()
    try:
        installing = shlex.split(install)
    except ValueError as error:
        raise ConfigError(f"--install {install!r}: {error}; close it") from error
    wanted = (*key, *installing)
    restored = _restored(given, url, wanted, auto=auto, form=form, where="in --install")
    click.echo(_sentence(restored), err=True)
    click.echo(f"environment: {time.monotonic() - begin:.3f} s", err=True)
    variables = environment_of(given.environment.interpreter, os.environ)
    # Flush now, because exec runs none of Python's exit handlers, and buffered output would be lost.
    sys.stdout.flush()
    # Python ignores these signals, and a program would inherit that.
    ignored = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        os.execvpe(program[0], list(program), variables)  # noqa: S606 -- what the user asked for
    except (OSError, ValueError) as error:  # ValueError: an empty word
        for number, handler in ignored.items():
            signal.signal(number, handler)
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"{program[0]!r} cannot be run: {said}") from error


def _restored(
    given: _Options,
    url: str,
    words: tuple[str, ...],
    *,
    auto: bool,
    form: RequestedForm,
    where: str = "after --",
) -> Restored:
    """Restore by key, or by a request; ``where`` names the place for a command that installs."""
    key, installing = ("", words) if auto else (words[0], words[1:])
    with stage("environment") as tally, shown_progress() as progress:
        restorer = Restorer(
            given.environment, NodeCache(), lambda: opened(url), given.limits, progress
        )
        found = None
        if not auto:
            try:
                # A whole key may be restored from the node alone, whatever the state of its store.
                if len(key) != 64:
                    with opened(url) as repository:
                        key = repository.full_key(key)
                found = restorer.restore(key, form)
            except (UnavailableError, StoreMissingError) as error:
                # If the node already has the snapshot, the form was impossible, and installing would not help.
                here = len(key) == 64 and restorer.cache.tree(key) is not None
                if not installing or here:
                    raise
                get_logger(__name__).warning("%s; the command is run", error)
        if found is None:
            if not installing:
                known = f"no snapshot {key} in {url}" if key else "nothing says what is wanted"
                raise StateError(
                    f"{known}; give the command that installs {where}, and it is saved"
                )
            found = restorer.restore_or_install(given.installation(installing), given.image, form)
        tally.add("store", found.stored_bytes)
        if not found.stored_bytes:
            tally.add("disk", found.raw_bytes)
        tally.note("packages", found.key)
    if not auto and found.key != key:
        click.echo(f"warning: {shlex.join(installing)} has key {found.key}, not {key}", err=True)
    return found


@click.command("umount")
@_environment_options
@click.option("--lazy", is_flag=True, help="Unmount even while processes use it.")
def umount_command(given: _Options, lazy: bool) -> None:
    """Take the snapshot off the environment, and bring back its earlier contents.

    \b
    Example:
      omniload env umount --python .venv
    """  # noqa: D301 -- click's own marker
    environment = given.environment
    with environment.locked():
        record = environment.heal()
        if record is None:
            raise StateError(f"{environment.interpreter.prefix} holds no snapshot")
        environment.clear(record, lazily=lazy)
    click.echo(f"{record.key[:16]} is gone from {environment.interpreter.prefix}")


def _sentence(restored: Restored) -> str:
    spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in restored.seconds.items())
    if restored.already:
        return f"{restored.key[:16]}: there already ({restored.form})"
    if restored.form == "command":
        outcome = "saved" if restored.saved else "not saved"
        return f"{restored.key[:16]}: no snapshot, installed and {outcome}: {spent}"
    return f"{restored.key[:16]}: restored ({restored.form}): {spent}"


@click.command("show")
@_store_option
@click.option("--json", "as_json", is_flag=True)
@click.argument("key", required=False)
def show_command(url: str, as_json: bool, key: str | None) -> None:
    """List the snapshots of STORE, or show one.

    To see why two snapshots differ, compare their JSON: it lists what each was made from.

    \b
    Example:
      omniload env show -o /mnt/envs
      omniload env show 3f9a01c2 -o /mnt/envs --json
    """  # noqa: D301 -- click's own marker
    with opened(url) as repository:
        keys = [repository.full_key(key)] if key else repository.all_keys()
        # A snapshot that is pruned while the others are read is left out.
        found = [summary_of(each) for each in map(repository.manifest, keys) if each]
    if key and not found:
        raise StateError(f"no snapshot {key} in {url}; omniload env show lists them")
    if as_json:
        click.echo(json.dumps(found[0] if key else found, indent=2))
        return
    for each in found:
        for line in lines_of(each, whole=key is not None):
            click.echo(line)


def summary_of(manifest: "Manifest") -> dict[str, Any]:
    """Return the main facts about a snapshot, ready for JSON."""
    head = manifest.head
    created = datetime.fromtimestamp(head.created_ns / 1e9, UTC)
    return {
        "key": head.key,
        "created": created.isoformat(timespec="seconds"),
        "command": shlex.join(head.document.get("command", [])),
        "files": manifest.num_files,
        "deleted": sum(entry.kind is Kind.DELETED for entry in manifest.entries),
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": head.stored_bytes,
        "packs": len(head.packs),
        "install_s": head.install_s,
        "distributions": list(head.distributions),
        "skipped": list(head.skipped),
        "document": head.document,
    }


def lines_of(found: dict[str, Any], *, whole: bool) -> Iterator[str]:
    """Yield the lines of a summary for people: the ``whole`` summary, or one line."""
    raw, stored = format_bytes(found["raw_bytes"]), format_bytes(found["stored_bytes"])
    if not whole:
        key, created, command, files = (
            found[name] for name in ("key", "created", "command", "files")
        )
        yield f"{key[:16]}  {created}  {counted(files, 'file')}  {raw}  {command}"
        return
    for name in ("key", "created", "command", "files", "deleted", "packs"):
        yield f"{name:14}{found[name]}"
    yield f"{'size':14}{raw}, {stored} added to the store"
    yield f"{'installed in':14}{found['install_s']:.1f} s"
    yield f"{'distributions':14}{' '.join(found['distributions'])}"
