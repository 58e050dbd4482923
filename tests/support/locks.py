"""Locks that report which threads wait for them."""

from threading import Lock


class HeardLock:
    """A lock that sets ``comes`` when a thread is about to wait for it."""

    def __init__(self, comes):
        self.comes, self.lock = comes, Lock()

    def acquire(self, blocking=True, timeout=-1):
        if blocking:
            self.comes.set()
        return self.lock.acquire(blocking, timeout)

    def release(self):
        self.lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()
