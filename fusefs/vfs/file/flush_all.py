"""What becomes of files that are still open when their mount ends."""

import threading
import time
from collections.abc import Iterable

from fusefs.vfs.file.open_file import OpenFile
from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger

__all__ = ["flush_all"]

_LOG = get_logger(__name__)
_AT_ONCE = 16


def flush_all(bodies: Iterable[OpenFile], *, within_s: float) -> list[str]:
    """Publish what was written to files that nobody has closed, as they are now.

    A mount that is asked to end does what any filesystem does at its unmount: it keeps
    what was written. Call it when no request is under way any more.

    Args:
        bodies: Open files, in any order; the same one may come twice.
        within_s: Seconds after which the rest is given up; a store call under way then
            ends by its own limits.

    Returns:
        Paths of the files whose last bytes are lost; each is logged with its reason.
    """
    left = list(
        {
            id(body): body
            for body in bodies
            if body.pending.dirty and body.pending.path is not None
        }.values()
    )
    end = time.monotonic() + within_s
    waiting = iter(left)
    lock = threading.Lock()
    done: set[int] = set()

    def publish() -> None:
        while time.monotonic() < end:
            with lock:
                body = next(waiting, None)
            if body is None:
                return
            try:
                body.flush()
            except (OSError, OmniloadError) as error:
                _LOG.error("%s: what was written last is lost: %s", body.pending.path, error)
            else:
                done.add(id(body))

    threads = [
        threading.Thread(target=publish, name="fusefs-flush-all", daemon=True)
        for _ in range(min(_AT_ONCE, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    lost = sorted(body.pending.path or "" for body in left if id(body) not in done)
    if left:
        _LOG.info("published %d of %d files left open", len(done), len(left))
    if lost and any(thread.is_alive() for thread in threads):
        _LOG.error("gave up after %.0f s; what was written last is lost: %s", within_s, lost)
    return lost
