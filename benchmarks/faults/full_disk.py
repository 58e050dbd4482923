"""A small disk of a run that is full for a while, and then has free space again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["full_for"]

_PAGE_BYTES = 4096
_MOST_BYTES = 256 << 20
_NAME = "filler"


@contextmanager
def full_for(folder: Path, seconds: float) -> Iterator[threading.Event]:
    """Fill the file system of a folder; yield an event that is set when the space is free again.

    Args:
        folder: A folder on its own file system, of 256 MiB at most.
        seconds: Time for which it is full.

    Raises:
        OSError: It cannot be written for another reason, or its file system is larger; no other one is filled.
    """
    filler, has_room = folder / _NAME, threading.Event()

    def give_back() -> None:
        filler.unlink(missing_ok=True)
        has_room.set()

    timer = threading.Timer(seconds, give_back)
    try:
        with filler.open("wb", buffering=0) as file:
            # Write until the disk refuses the next page.
            with suppress(OSError):
                while file.tell() < _MOST_BYTES:
                    file.write(bytes(_PAGE_BYTES))
            if file.tell() >= _MOST_BYTES:
                raise OSError(
                    f"{folder}: has more than {_MOST_BYTES} bytes; mount a smaller file system there"
                )
        timer.start()
        yield has_room
    finally:
        timer.cancel()
        give_back()
