"""The process behind one mount: ``python -m fusefs.daemon READY_FD``, configuration on standard input."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from fusefs.body import SpoolPlace
from fusefs.bridge import serving
from fusefs.bridge.daemons import run_daemon
from fusefs.bridge.operations import StoreFileSystem
from fusefs.mounting import MountConfig
from fusefs.namespace import StripedFiles
from fusefs.stores.opening import open_store
from fusefs.stores.retrying import RetryingStore
from omniload.base import metrics
from omniload.base.errors import StateError
from omniload.base.log import get_logger
from omniload.base.retry import backoff_s

__all__ = ["main"]

_LOG = get_logger(__name__)


def _waits_s(give_up_after_s: float) -> list[float]:
    """Return waits between attempts that together last about as long as an outage may."""
    waits: list[float] = []
    for wait in backoff_s(first_s=0.1, longest_s=5.0, attempts=1000):
        if sum(waits) + wait > give_up_after_s:
            break
        waits.append(wait)
    return waits


def serve(config: MountConfig, ready: Callable[[], None]) -> None:
    """Open the store and show it until unmounted or told to end."""
    store = RetryingStore(
        open_store(config.store, config.store_options or None),
        waits_s=_waits_s(config.give_up_after),
    )
    store.stat("")  # better said now than by the first call on the mount
    files = StripedFiles(store, config.files)
    shown = StoreFileSystem(files, SpoolPlace(config.spool_directory, config.spool_limit))
    port = config.metrics_port
    with ExitStack() as ends:
        ends.callback(files.close)
        ends.callback(shown.close)
        if not config.take_over:
            ends.callback(_answer_scrapes(port))

        def started() -> None:
            if config.take_over:
                ends.callback(_answer_scrapes_next(port))
            ready()

        serving.serve(shown, config.mountpoint, config, ready=started)


def _answer_scrapes(port: int | None) -> Callable[[], None]:
    if port is None:
        return lambda: None
    try:
        return metrics.serve(port)
    except OSError as error:
        raise StateError(
            f"metrics_port {port} cannot be bound on 127.0.0.1: {error.strerror}; give another"
        ) from error


def _answer_scrapes_next(port: int | None) -> Callable[[], None]:
    """Answer where the process that had the mount answered: it lets the port go as it ends."""
    for wait_s in backoff_s(first_s=0.02, longest_s=0.5, attempts=12):
        try:
            return _answer_scrapes(port)
        except StateError as error:
            _LOG.debug("%s", error)
            time.sleep(wait_s)
    _LOG.error("metrics_port %s is still taken: nobody answers scrapes of this mount", port)
    return lambda: None


def main() -> None:
    """Run the daemon and tell the parent how its start went."""
    run_daemon(
        lambda settings, ready: serve(MountConfig.model_validate_json(settings), ready), role="fs"
    )


if __name__ == "__main__":
    main()
