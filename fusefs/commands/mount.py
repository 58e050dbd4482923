"""``omniload fs mount``: show a store as a tree of files."""

import os
import sys

import click

from fusefs.bridge.process.launch import followed
from fusefs.mounts.lifecycle import is_watched, start
from fusefs.mounts.options import mount_config, without_log, without_watch
from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets

__all__ = ["mount"]


@click.command("mount")
@click.argument("store")
@click.argument("mountpoint")
@click.option(
    "-c",
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="YAML file with settings under files.",
)
@click.option(
    "-o",
    "options",
    multiple=True,
    help="ro, allow_other, or a setting of the mount as KEY=VALUE; repeatable.",
)
@click.option(
    "-f", "--foreground", is_flag=True, help="Stay in the foreground until it is unmounted."
)
@click.option("--log", type=click.Path(dir_okay=False), help="Log file of the daemon.")
@click.option(
    "--bridge",
    type=click.Choice(["auto", "pyfuse3", "device"]),
    help="Binding to the kernel.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take over the mount of a running daemon, and its watch; always with bridge=device.",
)
@click.option("--watch", is_flag=True, help="Mount again each time the daemon dies.")
def mount(  # noqa: PLR0913, PLR0917 -- one per option
    store: str,
    mountpoint: str,
    config: str | None,
    options: tuple[str, ...],
    foreground: bool,
    log: str | None,
    bridge: str | None,
    take_over: bool,
    watch: bool,
) -> None:
    """Show STORE as a tree of files at MOUNTPOINT.

    \b
    Example:
      omniload fs mount hdfs://namenode:9000/jobs /mnt/jobs -o cache=1GiB
      omniload fs mount --watch --foreground hdfs://namenode:9000/jobs /mnt/jobs
      omniload fs mount --take-over hdfs://namenode:9000/jobs /mnt/jobs
    """  # noqa: D301 -- click's own marker
    if not mountpoint:
        raise ConfigError("the mount point is an empty text; name a folder")
    target = os.path.abspath(mountpoint)  # noqa: PTH100 -- resolve() would ask the mount
    folder, name = os.path.split(target)
    if not os.path.isdir(folder) or name not in os.listdir(folder):  # noqa: PTH112, PTH208 -- nor stat a dead mount
        raise ConfigError(f"{target}: no such folder; make it, then mount there")
    given = [*options, *([f"bridge={bridge}"] if bridge else [])]
    given += ["take_over"] if take_over else []
    words, asked = without_watch(given)
    words, logged = without_log(words)
    settings = mount_config(store, target, words, config)
    log = log or logged or (None if foreground else os.devnull)
    # A watch ends with the daemon that it started, so the new process gets a watch, too.
    watch = watch or asked or (settings.take_over and is_watched(target))
    process = start(settings, log_path=log, watched=watch)
    if not foreground:
        beside = ", watched" if watch else ""
        shown = without_secrets(settings.store)
        click.echo(f"{shown} at {target}, process {process.pid}{beside}")
        process.returncode = 0  # the daemon outlives this process, which does not wait for it
        return
    sys.exit(followed(process))
