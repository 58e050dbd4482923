"""Files that are there whole or not at all."""

import os
import uuid
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Put a file at ``path``, over one that may be there, by one rename.

    Args:
        path: Where; its folder is there.
        data: All of it.
        durable: Whether the bytes outlive a crash of the machine right after.
        mode: Who may read and write it, less what the process's umask takes away.

    Raises:
        OSError: It cannot be written; nothing of it is left.
    """
    partial = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:12]}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
