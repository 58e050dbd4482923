"""The process behind one mount: ``python -m fusefs.mounts.daemon READY_FD``, configuration on standard input."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from fusefs.bridge import server
from fusefs.bridge.process.launch import run_daemon
from fusefs.bridge.process.unmount_notice import UnmountClient, UnmountNotifier
from fusefs.mounts.lifecycle import WATCHED, MountConfig
from fusefs.stores.deadlines import hanging_calls
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import check_root, open_store
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.store_filesystem import StoreFileSystem
from omniload.base import metrics
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.linux.network import why_not_bound
from omniload.base.log import get_logger
from omniload.base.retry import backoff_s
from omniload.base.units import counted

__all__ = ["main"]

_LOG = get_logger(__name__)
_BEFORE_WITHIN_S = 300.0
"""Seconds for the previous process of the mount to publish its remaining writes."""


def _waits_s(give_up_after_s: float) -> list[float]:
    """Return waits between attempts that together last about as long as the longest tolerated outage."""
    waits: list[float] = []
    for wait in backoff_s(first_s=0.1, longest_s=5.0, attempts=1000):
        if sum(waits) + wait > give_up_after_s:
            break
        waits.append(wait)
    return waits


def serve(config: MountConfig, ready: Callable[[], None], *, watched: bool = False) -> None:
    """Open the store and show it until unmounted or asked to end.

    Raises:
        IntegrityError: At the end, files could not be published.
        StateError: It is unknown whether the previous process of the mount has published everything.
    """
    # Before anything waits for the store, so that from here on a signal leaves neither a mount nor a traceback.
    mounted = _ended_once()
    _check_spool(config.spool_directory)
    store = RetryingStore(
        open_store(
            config.store, config.store_options or None, give_up_after_s=config.give_up_after
        ),
        waits_s=_waits_s(config.give_up_after),
        give_up_after_s=config.give_up_after,
    )
    if config.durable_at == "fsync" and not config.read_only:
        store.delay_syncs()
    # Report it now, rather than at the first call on the mount.
    check_root(store, begin=not config.read_only)
    # The previous process of the mount still holds the directory of the disk cache, too.
    taken = config.files.model_copy(update={"disk_cache": None}) if config.take_over else None
    files = StripedFiles(store, taken or config.files)
    shown = StoreFileSystem(files, SpoolPlace(config.spool_directory, config.spool_limit))
    stops: list[Callable[[], None]] = []
    notifier = UnmountNotifier(config.mountpoint, bridge=server.chosen(config), watched=watched)
    before = _before(config)

    def claim() -> None:
        _claimed(lambda: stops.append(_answer_scrapes(config.metrics_port)))
        if (disk := config.files.disk_cache) is not None:
            _claimed(lambda: files.use_disk_cache(disk))

    def started() -> None:
        mounted.set()
        if config.take_over:
            # In a thread of its own, next to the requests: the previous process may still publish for a while.
            threading.Thread(target=claim, name="fusefs-claim", daemon=True).start()
        # From now on a request to unmount comes to this process, because the previous one has released the name.
        _listen(notifier)
        ready()

    try:
        if not config.take_over:
            stops.append(_answer_scrapes(config.metrics_port))
        server.serve(shown, config.mountpoint, config, ready=started, let_go=notifier.let_go)
    finally:
        for stop in stops:
            stop()
        # After the mount and before the store: nobody writes any more, and pending files can still be published.
        lost = shown.close()
        files.close()
        # A process that waits for the end of the mount waits for all writes to it, also those of the previous process.
        lost += _lost_by(before) if before is not None and mounted.is_set() else ()
        # Last, when port, disk cache and store are free for the next mount.
        notifier.notify(lost)
    if lost:
        told = counted(len(lost), "file")
        raise IntegrityError(f"what was written last to {told} is lost: {lost}")


def _before(config: MountConfig) -> UnmountClient | None:
    """Return the client that waits for the end of the previous process of the mount."""
    if not config.take_over:
        return None
    try:
        return UnmountClient.of(config.mountpoint)
    except StateError as error:
        # The take-over will fail for the same reason, or that process is about to end.
        _LOG.info("%s", error)
        return None


def _lost_by(before: UnmountClient) -> Sequence[str]:
    """Wait until the previous process of the mount has ended; return the files that it could not publish.

    Raises:
        StateError: It ended without a report, or still runs.
    """
    process = before.about["process"]
    said: list[float] = []

    def report(waited_s: float) -> None:
        if not said:
            _LOG.warning(
                "waiting for at most %.0f s until process %s, which had the mount before, has published what it holds",
                _BEFORE_WITHIN_S,
                process,
            )
        said.append(waited_s)

    with closing(before):
        try:
            lost = before.wait(_BEFORE_WITHIN_S, report)
        except TimeoutError:
            raise StateError(
                f"process {process}, which had the mount before, still publishes after {_BEFORE_WITHIN_S:g} s and goes "
                "on by itself; wait for it to end, and read the mount's log"
            ) from None
    if lost is None:
        raise StateError(
            f"process {process}, which had the mount before, ended before it said that everything is published; read "
            "the mount's log, and run omniload fs verify"
        )
    return lost


def _ended_once() -> threading.Event:
    """Let a signal end this process only until the event is set.

    After that, the bindings handle the first signal. A second one (SIGHUP after SIGTERM, an impatient
    user) must not kill this process while open files are published.
    """
    mounted = threading.Event()

    def end(number: int, _: object) -> None:
        if not mounted.is_set():
            sys.exit(128 + number)
        _LOG.info("signal %s: ending already, as soon as what is open is published", number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    return mounted


def _check_spool(directory: str | None) -> None:
    """Check the directory for random writes now, so that no program is the first to find a fault."""
    if directory is not None and not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"spool_directory {directory!r} is not there or not writable; make it, or give another"
        )


def _listen(notifier: UnmountNotifier) -> None:
    """Answer processes that wait for the end; a previous process of an older release may still have the name."""
    try:
        notifier.listen()
    except StateError:
        threading.Thread(
            target=_claimed, args=(notifier.listen,), name="fusefs-claim", daemon=True
        ).start()


def _claimed(claim: Callable[[], None]) -> None:
    """Take what the previous process of the mount releases as it ends: a port, a directory."""
    for wait_s in (*backoff_s(first_s=0.02, longest_s=1.0, attempts=15), 0.0):
        try:
            claim()
        except (StateError, ConfigError) as error:
            if not wait_s:
                _LOG.error("this mount goes on without: %s", error)
            time.sleep(wait_s)
        else:
            return


def _answer_scrapes(port: int | None) -> Callable[[], None]:
    if port is None:
        return lambda: None
    try:
        return metrics.serve(port)
    except OSError as error:
        raise StateError(
            f"metrics_port {port} cannot be bound on 127.0.0.1: {why_not_bound(error, port)}; each mount of a host has "
            "another: give one, or leave it out"
        ) from error


def main() -> None:
    """Run the daemon and report the result of its start to the parent."""
    watched = WATCHED in sys.argv[2:]
    try:
        run_daemon(
            lambda settings, ready: serve(
                MountConfig.model_validate_json(settings), ready, watched=watched
            ),
            role="fs",
        )
    except SystemExit as ended:
        _leave(ended.code if isinstance(ended.code, int) else 1)
        raise
    _leave(0)


def _leave(code: int) -> None:
    """End at once if calls of a client hang, because Java, and libraries at exit, would wait for them."""
    hung = hanging_calls()
    if hung:
        _LOG.warning("this process ends beside %d calls that hang: %s", len(hung), ", ".join(hung))
        logging.shutdown()
        # Not sys.exit, with which Python and Java wait for their threads.
        os._exit(code)


if __name__ == "__main__":
    main()
