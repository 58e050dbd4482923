"""Network namespaces of tests."""

__all__ = ["inside"]

_LET_GO = """
awk '$3 ~ "^fuse" || $2 ~ "^/(tmp|dev/shm)/" {print $2}' /proc/self/mounts |
    xargs -r -d '\\n' -n 1 umount -l 2>/dev/null
exec "$@"
"""


def inside(name: str) -> list[str]:
    """Return the words that put a command into a network namespace.

    ``ip`` gives the command a copy of all mounts. A mount of another test would live as long as the command does, and
    with it a daemon or a failed disk. So the copies are unmounted first.
    """
    return ["ip", "netns", "exec", name, "sh", "-c", _LET_GO, "sh"]
