"""The report of a run while it goes on: written again and again, as often as its length allows."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.log import get_logger
from trainer_integration.report.report import write_report
from trainer_integration.run.run_log import LOG_NAME

__all__ = ["kept_report"]

_LOG = get_logger(__name__)
_LEAST_S = 30.0
_SHARE = 0.02
"""Part of the time that the report may take: a long log is read and drawn more seldom."""
_END_S = 60.0


@contextmanager
def kept_report(run_dir: Path) -> Iterator[None]:
    """Write the report of a run inside, from a thread, every 30 s or more seldom; leaves the last to the caller."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_keep, args=(run_dir, ended), name="omniload-report", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_S)
        if thread.is_alive():
            _LOG.warning("the report of %s is still being written after %.0f s", run_dir, _END_S)


def _keep(run_dir: Path, ended: threading.Event) -> None:
    wait_s, seen = _LEAST_S, None
    while not ended.wait(wait_s):
        began_s = time.monotonic()
        try:
            written = (run_dir / LOG_NAME).stat().st_mtime_ns
            if written != seen:
                write_report(run_dir, reload_s=wait_s)
                seen = written
        except ConfigError as error:  # no package for it: told at the end
            _LOG.debug("no report while the run goes on: %s", error)
            return
        except (OmniloadError, OSError) as error:
            _LOG.debug("no report yet: %s", error)
        wait_s = max(_LEAST_S, (time.monotonic() - began_s) / _SHARE)
