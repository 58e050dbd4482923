"""Network namespaces of tests."""

__all__ = ["inside"]

_LET_GO = """
awk '$3 ~ "^fuse" {print $2}' /proc/self/mounts | xargs -r -d '\\n' -n 1 umount -l 2>/dev/null
exec "$@"
"""


def inside(name: str) -> list[str]:
    """Return the words that put a command into a network namespace.

    ``ip`` gives the command a copy of all mounts: a mount of a test beside it would live, and its
    daemon work on, for as long as the command does. So the copies are let go first.
    """
    return ["ip", "netns", "exec", name, "sh", "-c", _LET_GO, "sh"]
