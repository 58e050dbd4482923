"""The process behind one mount: ``python -m fusefs.daemon READY_FD``, configuration on standard input."""

import os
import signal
import sys
from pathlib import Path

import trio

from fusefs.body import SpoolPlace
from fusefs.mounting import MountConfig
from fusefs.namespace import StripedFiles
from fusefs.stores.opening import open_store
from fusefs.stores.retrying import RetryingStore
from omniload.base.errors import ConfigError, OmniloadError, StateError
from omniload.base.log import get_logger, set_up_logging
from omniload.base.retry import backoff_s

try:
    import pyfuse3

    from fusefs.bridge.operations import FuseOperations
except ImportError as error:
    raise ConfigError(f"{error}; install omniload[fuse] and libfuse3") from error

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


def _tune_kernel(config: MountConfig, target: str) -> None:
    """Raise read-ahead and requests in flight where we may.

    The device comes from mountinfo: asking the mount itself would wait for us to answer.
    """
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[4].replace("\\040", " ") == target and " - fuse" in line:
            device = fields[2]
            minor = device.partition(":")[2]
            connection = Path(f"/sys/fs/fuse/connections/{minor}")
            settings = {
                Path(f"/sys/class/bdi/{device}/read_ahead_kb"): config.kernel_read_ahead >> 10,
                connection / "max_background": config.max_background,
                connection / "congestion_threshold": config.max_background * 3 // 4,
            }
            for path, value in settings.items():
                try:
                    path.write_text(str(value), encoding="ascii")
                except OSError as error:
                    _LOG.debug("%s stays as it is: %s", path, error)


async def _serve(config: MountConfig, target: str, ready: int) -> None:
    async def end_on_signal(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                _LOG.info("signal %s: unmounting %s", number, config.mountpoint)
                pyfuse3.terminate()
                return

    async with trio.open_nursery() as nursery:
        await nursery.start(end_on_signal)
        _tune_kernel(config, target)
        os.write(ready, b"ready")
        os.close(ready)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def serve(config: MountConfig, ready: int) -> None:
    """Mount, answer until unmounted or told to end, unmount."""
    store = RetryingStore(
        open_store(config.store, config.store_options or None),
        waits_s=_waits_s(config.give_up_after),
    )
    store.stat("")  # better said now than by the first call on the mount
    files = StripedFiles(store, config.files)
    place = SpoolPlace(config.spool_directory, config.spool_limit)
    target = os.path.realpath(config.mountpoint)
    options = set(pyfuse3.default_options)
    options |= {"fsname=omnifs", "subtype=omnifs", "default_permissions"}
    options |= {
        name for name, on in (("ro", config.read_only), ("allow_other", config.allow_other)) if on
    }
    try:
        pyfuse3.init(FuseOperations(files, place), config.mountpoint, options)
    except RuntimeError as error:
        raise StateError(f"{config.mountpoint!r} cannot be mounted: {error}") from error
    try:
        trio.run(_serve, config, target, ready)
    finally:
        pyfuse3.close(unmount=True)
        files.close()


def main() -> None:
    """Run the daemon and tell the parent how its start went."""
    ready = int(sys.argv[1])
    set_up_logging("INFO", role="fs")
    try:
        serve(MountConfig.model_validate_json(sys.stdin.buffer.read()), ready)
    except OmniloadError as error:
        _LOG.error("%s", error)
        try:
            os.write(ready, str(error).encode())
        except OSError:
            _LOG.debug("the parent has gone")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
