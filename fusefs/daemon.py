"""The process behind one mount: ``python -m fusefs.daemon READY_FD``, configuration on standard input."""

from collections.abc import Callable

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
from omniload.base.retry import backoff_s

__all__ = ["main"]


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
    stop_metrics = _answer_scrapes(config.metrics_port)
    try:
        serving.serve(shown, config.mountpoint, config, ready=ready)
    finally:
        stop_metrics()
        shown.close()
        files.close()


def _answer_scrapes(port: int | None) -> Callable[[], None]:
    if port is None:
        return lambda: None
    try:
        return metrics.serve(port)
    except OSError as error:
        raise StateError(
            f"metrics_port {port} cannot be bound on 127.0.0.1: {error.strerror}; give another"
        ) from error


def main() -> None:
    """Run the daemon and tell the parent how its start went."""
    run_daemon(
        lambda settings, ready: serve(MountConfig.model_validate_json(settings), ready), role="fs"
    )


if __name__ == "__main__":
    main()
