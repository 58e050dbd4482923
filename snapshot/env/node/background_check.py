"""Compare a whole tree with its digests some time after it was used, by a process of its own.

A restore starts that process (``recheck_later``) where the last check of its tree is a day old. The process
reads at a bounded rate and holds no lock of the tree, so that no restore waits for it. Only what looks
damaged is verified under the lock, as ``env verify --node`` does it.

The process loads nothing but the standard library and pure Python, and leaves what needs more to
short-lived children: a library that it had mapped from an environment would keep that mounted.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from omniload.base.errors import OmniloadError
from omniload.base.linux import exec_detached
from omniload.base.log import get_logger, set_up_logging
from snapshot.env.node.cache import NodeCache
from snapshot.env.node.last_check import is_due, note_check
from snapshot.env.node.locks import locked_now

__all__ = ["LOCK", "LOG", "OFF_VARIABLE", "compare", "recheck", "recheck_later"]

_LOG = get_logger(__name__)
OFF_VARIABLE = "OMNILOAD_ENV_NO_RECHECK"
"""Set to anything, no process is started."""
LOCK = "recheck"
"""Name among the locks of a node cache: held by the one process that checks."""
LOG = "recheck.log"
_LARGEST_LOG_BYTES = 1 << 20
_START_S = 30.0
_LONGEST_S = 6 * 60 * 60
"""The kernel ends a check that takes longer."""
_RATE = 64 << 20
"""Bytes read a second, at most."""
_PART_BYTES = 4 << 20


def recheck_later(cache: NodeCache, key: str) -> bool:
    """Start one process that checks the tree of ``key``, if that is due; return whether it was started.

    Nothing is started for a tree of another user, who checks it, or by process 1, which would
    get the new process as its child. A start that fails costs a warning.
    """
    folder = cache.folder / "trees" / key
    if os.environ.get(OFF_VARIABLE) or os.getpid() == 1:
        return False
    try:
        if not folder.exists():
            return False  # installed by a command, or pruned since
        if folder.stat().st_uid != os.geteuid() or not is_due(folder, time.time()):
            return False
        with locked_now(cache.lock(LOCK)) as is_free:
            if not is_free:
                return False
        _start(cache, key)
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("%s is not checked in the background: %s", folder, error)
        return False
    return True


def _start(cache: NodeCache, key: str) -> None:
    """Start the process by one that ends at once, so that it is nobody's child."""
    path = cache.folder / LOG
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(path, flags, 0o600)
    try:
        if os.fstat(log).st_size > _LARGEST_LOG_BYTES:
            os.ftruncate(log, 0)
        starter = [sys.executable, "-I", "-S", exec_detached.__file__]
        subprocess.run(  # noqa: S603 -- our own modules
            [*starter, *_words("check", cache.folder.absolute(), key)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",  # no folder of a job is kept in use
            start_new_session=True,
            check=True,
            timeout=_START_S,
        )
    finally:
        os.close(log)


def _words(what: str, folder: Path, key: str) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        "snapshot.env.node.background_check",
        what,
        str(folder),
        key,
    ]


def recheck(cache: NodeCache, key: str) -> bool | None:
    """Check a tree now; one that is damaged is removed, and fetched again by whoever wants it.

    Returns:
        Whether it is sound; ``None`` where another process checks, the check is not due any more, or the
        tree was removed meanwhile.
    """
    folder = cache.folder / "trees" / key
    with locked_now(cache.lock(LOCK)) as held:
        if not held or not is_due(folder, time.time()):
            return None
        begin = time.monotonic()
        try:
            seen = folder.stat()
            told = subprocess.run(  # noqa: S603 -- our own module
                _words("digests", cache.folder, key), stdout=subprocess.PIPE, check=False
            )
            looks_right = told.returncode == 0 and compare(folder, json.loads(told.stdout))
            now = folder.stat()
        except FileNotFoundError:
            return None
        if (seen.st_dev, seen.st_ino) != (now.st_dev, now.st_ino):
            return None  # dropped and fetched meanwhile
        if looks_right:
            note_check(folder, time.time())
            _LOG.info("%s is sound, seen in %.1f s", folder, time.monotonic() - begin)
            return True
        verified = subprocess.run(_words("verify", cache.folder, key), check=False)  # noqa: S603
        return verified.returncode == 0


def compare(
    folder: Path,
    digests: list[tuple[str, str]],
    *,
    rate: float = _RATE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Read files of a tree at a bounded rate; tell whether they have their digests.

    Args:
        folder: The tree.
        digests: Path below ``layers`` and SHA-256 of each file.
        rate: Bytes a second, at most.
        clock: The time, in seconds.
        sleep: Waits.
    """
    begin, read_bytes = clock(), 0
    for path, digest in digests:
        found = hashlib.sha256()
        try:
            for part in _parts(folder / "layers" / path):
                found.update(part)
                read_bytes += len(part)
                if (ahead_s := read_bytes / rate - (clock() - begin)) > 0:
                    sleep(ahead_s)
        except OSError as error:
            _LOG.warning("%s: %s", path, error)
            return False
        if found.hexdigest() != digest:
            _LOG.warning("%s in %s holds other bytes than were extracted", path, folder)
            return False
    return True


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART_BYTES):
            yield part


def _tell_digests(cache: NodeCache, key: str) -> int:
    """Print path and digest of every file of a tree, for the process that reads them."""
    from snapshot.env.format.entries import Kind  # noqa: PLC0415
    from snapshot.env.node.cache import Tree  # noqa: PLC0415

    tree = Tree(cache.folder / "trees" / key)
    files = (entry for entry in tree.manifest.entries if entry.kind is Kind.FILE)
    sys.stdout.write(json.dumps([(f"{f.target}/{f.path}", f.digest.hex()) for f in files]))
    return 0


def _verify(cache: NodeCache, key: str) -> int:
    """Verify a tree that looks damaged, under its lock."""
    from snapshot.env.node.verification import verify_tree  # noqa: PLC0415

    verified = verify_tree(cache, key)
    if verified is None or not verified.faults:
        return 0
    _LOG.warning(
        "%s: %d damaged, such as %s; it is removed%s",
        *(key, len(verified.faults), verified.faults[0]),
        ", and environments that are linked to it have to be restored" * verified.was_linked,
    )
    return 1


def _main(what: str, folder: str, key: str) -> int:
    """Do what a process of this module was started for: ``check``, ``digests`` or ``verify``."""
    set_up_logging()
    cache = NodeCache(Path(folder))
    if what == "check":
        signal.alarm(_LONGEST_S)
        recheck(cache, key)
        return 0
    try:
        return _tell_digests(cache, key) if what == "digests" else _verify(cache, key)
    except (OmniloadError, FileNotFoundError) as error:
        _LOG.warning("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
