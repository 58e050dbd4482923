"""Reads ranges of a file of a store, and distinguishes versions of a file, and stores.

Also checks whether a store answers at all. Clients of stores retry by themselves: for minutes if a host accepts
connections and says nothing, as behind a firewall, or for a quarter of an hour if HDFS accepts none.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import orjson

from omniload.base.concurrency.forks import never_ended_by_a_fork
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.secrets import names_secret, note_secrets_of

if TYPE_CHECKING:
    import fsspec

__all__ = [
    "ask_store",
    "changed",
    "entry_of",
    "identity_of",
    "is_other",
    "is_settled",
    "no_ranges",
    "opened",
    "ranges_of",
    "rewritten",
    "silent_stores",
    "stamp_of",
    "store_of",
    "tag_of",
]

_TAG_KEYS = ("ETag", "etag")
_STAMP_KEYS = (
    *(*_TAG_KEYS, "mtime", "LastModified", "last_modified", "updated", "Last-Modified"),
    *("modification_time", "modificationTime", "created"),  # the first two are from clients of HDFS
)
_LEAST_MS = 1e11
"""Least number that counts milliseconds, as HDFS does; in seconds it would be the year 5138."""
_HTTP = ("http://", "https://")
_NOT_THERE = (404, 410)
_MUCH_BYTES = 8 << 20
_TAG_OF_A_TIME = re.compile('"?([0-9a-f]{8})-[0-9a-f]+"?')
"""Tag in the form of nginx and others: seconds since 1970, and the size."""
_SETTLED_S = 60.0
"""Age from which a modification time identifies a version for ever: more than any error of a store or a clock."""
_GIVE_RANGES: set[str] = set()
"""Servers that returned a part of a file."""


def stamp_of(entry: Mapping[str, Any]) -> str:
    """Return a value that changes when a file is written again; empty if its store gives none."""
    # The first existing key; tags come before times, because a tag changes with the content.
    return next((str(entry[key]) for key in _STAMP_KEYS if entry.get(key)), "")


def tag_of(entry: Mapping[str, Any]) -> str:
    """Return a store's tag of the content of a file; empty if there is none."""
    return next((str(entry[key]) for key in _TAG_KEYS if entry.get(key)), "")


def is_settled(stamp: str, tag: str, now_s: float) -> bool:
    """Return whether a stamp identifies one content for ever, not only until the next look.

    A tag does, unless it is made of a time. A modification time does once it is past, because two writes within one
    second may have the same time.

    Args:
        stamp: From ``stamp_of``.
        tag: From ``tag_of``.
        now_s: Present time, in seconds since 1970.
    """
    if tag:
        if (made := _TAG_OF_A_TIME.fullmatch(tag)) is not None:
            return now_s - int(made[1], 16) > _SETTLED_S
        # A weak tag stands for equal meaning, not for equal bytes.
        return not tag.startswith("W/")
    written_s = _seconds_of(stamp)
    return written_s is not None and now_s - written_s > _SETTLED_S


def _seconds_of(stamp: str) -> float | None:
    """Return a modification time in seconds since 1970; ``None`` for any other stamp."""
    with suppress(ValueError):
        written_s = float(stamp)
        return written_s / 1000 if written_s > _LEAST_MS else written_s
    for read in (datetime.fromisoformat, parsedate_to_datetime):  # the second reads times of HTTP
        with suppress(ValueError):
            written = read(stamp)
            return written.replace(tzinfo=written.tzinfo or UTC).timestamp()
    return None


def entry_of(store: "fsspec.AbstractFileSystem", path: str) -> dict[str, Any]:
    """Return a store's description of a path.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: Any other error of the store's client.
    """
    try:
        entry: dict[str, Any] = store.info(path)
    except FileNotFoundError as error:
        raise _answer_of(error, path) from None
    return entry


def opened(store: "fsspec.AbstractFileSystem", path: str, **options: str | int) -> IO[bytes]:
    """Open a file of a store for reading, with options of its client.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: Any other error of the store's client.
    """
    try:
        file: IO[bytes] = store.open(path, "rb", **options)
    except FileNotFoundError as error:
        raise _answer_of(error, path) from None
    return file


def _answer_of(error: FileNotFoundError, path: str) -> Exception:
    """Return the answer of a server, if it says something else than that nothing is there."""
    # fsspec raises this error for any answer of an HTTP server, and for none.
    cause = error.__cause__
    said_so = getattr(cause, "status", None) in _NOT_THERE or isinstance(cause, ValueError)
    if said_so or not isinstance(cause, Exception) or not path.startswith(_HTTP):
        return error
    return cause


def ranges_of(
    store: "fsspec.AbstractFileSystem",
    path: str,
    size_bytes: int,
    ranges: Sequence[tuple[int, int]],
) -> list[bytes]:
    """Return the bytes of each range of a file, or fewer if the file ends before the range does.

    Args:
        store: Store of the file.
        path: The file.
        size_bytes: Known size of the file.
        ranges: First byte of each range, and the byte after its last.

    Raises:
        ConfigError: The file is on a server that only sends whole files.
        Exception: What the store's client raises.
    """
    if size_bytes > _MUCH_BYTES and path.startswith(_HTTP):
        _require_ranges(store, path)
    starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
    # All at once, because a client of a store requests them in parallel.
    found: list[bytes] = store.cat_ranges([path] * len(ranges), starts, stops, on_error="raise")
    for data, (start, stop) in zip(found, ranges, strict=True):
        if len(data) > stop - start:
            raise no_ranges(
                path, f"answers with {len(data)} bytes where {stop - start} were asked for"
            )
    return found


def is_other(then: tuple[int, str], now: tuple[int, str]) -> bool:
    """Return whether the size or stamp of a file has changed."""
    # Clients quote a tag in one answer but not in another.
    return (then[0], then[1].strip('"')) != (now[0], now[1].strip('"'))


def changed(path: str, then: tuple[int, str], now: tuple[int, str]) -> IntegrityError:
    """Return the error for a file whose size or stamp has changed since its source was opened."""
    return IntegrityError(
        f"{path}: changed since the source was opened: {then[0]} bytes written at {_when(then[1])}, now {now[0]} at "
        f"{_when(now[1])}; its positions are no longer valid, so restore the old file, or start again"
    )


def rewritten(path: str, size_bytes: int, since: str) -> IntegrityError:
    """Return the error for a local file of unchanged size and modification time, but with other content.

    Args:
        path: The file.
        size_bytes: Size of the file.
        since: Its time of change, as a stamp.
    """
    return IntegrityError(
        f"{path}: changed since the source was opened: its size of {size_bytes} bytes and its modification time are "
        f"the same, but its content differs since {_when(since)}; its positions are no longer valid, so restore the "
        "old file, or start again"
    )


def _when(stamp: str) -> str:
    """Return a stamp for people: a number of nanoseconds, as for local files, becomes a time."""
    if not re.fullmatch(r"[0-9]{18,19}", stamp):
        return stamp
    return f"{datetime.fromtimestamp(int(stamp) // 10**9, UTC):%Y-%m-%d %H:%M:%S}.{stamp[-9:]} UTC"


def no_ranges(path: str, why: str) -> ConfigError:
    """Return the error for a server that only sends whole files."""
    return ConfigError(
        f"{path}: is on a server that does not send parts of a file: it {why}; name a server that answers requests "
        "for ranges (206), or copy the files"
    )


def identity_of(store: "fsspec.AbstractFileSystem") -> str:
    """Return what distinguishes a store from others: its settings, but without secrets, which may change."""
    said = _plain(
        {"kind": type(store).__name__, "args": list(store.storage_args), **store.storage_options}
    )
    return orjson.dumps(said, option=orjson.OPT_SORT_KEYS).decode()


def _plain(value: object) -> object:
    """Return a setting without secrets, and without values that differ between processes."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if not names_secret(str(k))}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else None


def _require_ranges(store: "fsspec.AbstractFileSystem", url: str) -> None:
    """Ask a server once for a part of a file, because fsspec would otherwise load a large file completely first.

    Raises:
        ConfigError: The server sends no parts.
        OSError: The server cannot be asked.
    """
    host = url.partition("://")[2].partition("/")[0]
    if host in _GIVE_RANGES:
        return
    # From the second byte, because an answer from the first byte may be a whole file that the client cut off.
    with opened(store, url, cache_type="none") as file:
        file.seek(1)
        try:
            file.read(1)
        except ValueError as error:
            raise no_ranges(url, "answers with all of it") from error
    _GIVE_RANGES.add(host)


def _is_url(pattern: str) -> bool:
    return "://" in pattern and not pattern.startswith("file://")


def store_of(url: str) -> str:
    """Return what identifies the store of a URL: its scheme, and its host or bucket."""
    scheme, _, rest = url.partition("://")
    # Without the user, which may include a password.
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def ask_store(url: str) -> None:
    """Ask the store of a pattern for the folder that the pattern begins with, whatever is there."""
    # Imported here, because a mix of local files never needs it, and loading it takes a twentieth of a check.
    from fsspec.core import url_to_fs  # noqa: PLC0415

    note_secrets_of(url)
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    # Up to the folder that a pattern begins with.
    fixed = re.split(r"[*?\[{]", path, maxsplit=1)
    folder = path if len(fixed) == 1 else fixed[0].rpartition("/")[0]
    store, found = url_to_fs(f"{scheme}://{host}{slash}{folder}")
    never_ended_by_a_fork(store)
    entry_of(store, found)


def silent_stores(
    patterns: Mapping[str, Iterable[str]],
    limit_s: float,
    ask: Callable[[str], object] = ask_store,
) -> dict[str, list[str]]:
    """Ask the stores of some sources in parallel, and return the stores that gave no answer.

    Args:
        patterns: Patterns of each source, by its name.
        limit_s: Seconds for a store to answer or refuse.
        ask: Asks the store of a pattern; any error counts as an answer.

    Returns:
        Names of the sources of each such store, by its identity.
    """
    first: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for name, each in patterns.items():
        for url in (one for one in each if _is_url(one)):
            store = store_of(url)
            first.setdefault(store, url)
            if name not in names.setdefault(store, []):
                names[store].append(name)
    if not first:
        return {}

    def answers(url: str) -> None:
        with suppress(Exception):
            ask(url)

    # One thread each, because a thread that waits for a silent store runs no other call.
    pool = DaemonPool(len(first), "omniload-asking", reads=True)
    asked = {store: pool.submit(partial(answers, url)) for store, url in first.items()}
    wait(asked.values(), timeout=limit_s)
    # A call of a store's client cannot be cancelled, so waiting threads are abandoned until the process ends. A client
    # that returned during the shutdown of the interpreter would crash it.
    pool.close(0.0)
    return {store: names[store] for store, answer in asked.items() if not answer.done()}
