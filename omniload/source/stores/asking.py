"""Ranges of a file of a store, what tells one version of it from another, and one store from another.

And whether a store answers at all. Clients of stores try again by themselves: for minutes where a host takes
connections and says nothing, as behind a firewall, or a quarter of an hour where none takes them, as of HDFS.
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
    *("modification_time", "modificationTime", "created"),  # the first two are of clients of HDFS
)
_LEAST_MS = 1e11
"""From here on a number is of milliseconds, as HDFS counts; in seconds it would be the year 5138."""
_HTTP = ("http://", "https://")
_NOT_THERE = (404, 410)
_MUCH_BYTES = 8 << 20
_TAG_OF_A_TIME = re.compile('"?([0-9a-f]{8})-[0-9a-f]+"?')
"""As nginx makes them, and others after it: seconds since 1970, and the size."""
_SETTLED_S = 60.0
"""How old a time of writing must be to tell versions apart for ever: finer than any store's, and any clock's, error."""
_GIVE_RANGES: set[str] = set()
"""Servers that gave a part of a file."""


def stamp_of(entry: Mapping[str, Any]) -> str:
    """Return what changes when a file is written again; empty where its store says nothing of it."""
    # The first that there is, a tag before any time: it changes with the content.
    return next((str(entry[key]) for key in _STAMP_KEYS if entry.get(key)), "")


def tag_of(entry: Mapping[str, Any]) -> str:
    """Return a store's tag of the content of a file; empty where it has none."""
    return next((str(entry[key]) for key in _TAG_KEYS if entry.get(key)), "")


def is_settled(stamp: str, tag: str, now_s: float) -> bool:
    """Tell whether a stamp stands for one content for ever, and not for the time until it is looked at again.

    A tag does, unless it is made of a time. A time of writing does once it is past: two writes within one second may
    bear the same one.

    Args:
        stamp: As ``stamp_of`` has it.
        tag: As ``tag_of`` has it.
        now_s: The time, in seconds since 1970.
    """
    if tag:
        if (made := _TAG_OF_A_TIME.fullmatch(tag)) is not None:
            return now_s - int(made[1], 16) > _SETTLED_S
        # A weak one stands for what means the same, not for the same bytes.
        return not tag.startswith("W/")
    written_s = _seconds_of(stamp)
    return written_s is not None and now_s - written_s > _SETTLED_S


def _seconds_of(stamp: str) -> float | None:
    """Return a time of writing in seconds since 1970; ``None`` of what is none."""
    with suppress(ValueError):
        written_s = float(stamp)
        return written_s / 1000 if written_s > _LEAST_MS else written_s
    for read in (datetime.fromisoformat, parsedate_to_datetime):  # the second as HTTP writes them
        with suppress(ValueError):
            written = read(stamp)
            return written.replace(tzinfo=written.tzinfo or UTC).timestamp()
    return None


def entry_of(store: "fsspec.AbstractFileSystem", path: str) -> dict[str, Any]:
    """Return what a store says of a path.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: What else the store's client raises.
    """
    try:
        entry: dict[str, Any] = store.info(path)
    except FileNotFoundError as error:
        raise _answer_of(error, path) from None
    return entry


def opened(store: "fsspec.AbstractFileSystem", path: str, **options: str) -> IO[bytes]:
    """Open a file of a store for reading, with options of its client.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: What else the store's client raises.
    """
    try:
        file: IO[bytes] = store.open(path, "rb", **options)
    except FileNotFoundError as error:
        raise _answer_of(error, path) from None
    return file


def _answer_of(error: FileNotFoundError, path: str) -> Exception:
    """Return what a server answered, where that is another thing than that nothing is there."""
    # fsspec says that of a server of HTTP whatever its answer was, and where it gave none.
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
    """Return the bytes of each range of a file; fewer where the file ends before it.

    Args:
        store: The store that holds it.
        path: The file.
        size_bytes: Its size, as it is known.
        ranges: First byte and the one behind the last, of each.

    Raises:
        ConfigError: It lies on a server that gives whole files alone.
        Exception: What the store's client raises.
    """
    if size_bytes > _MUCH_BYTES and path.startswith(_HTTP):
        _require_ranges(store, path)
    starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
    # All together: a client of a store asks for them side by side.
    found: list[bytes] = store.cat_ranges([path] * len(ranges), starts, stops, on_error="raise")
    for data, (start, stop) in zip(found, ranges, strict=True):
        if len(data) > stop - start:
            raise no_ranges(
                path, f"answers with {len(data)} bytes where {stop - start} were asked for"
            )
    return found


def is_other(then: tuple[int, str], now: tuple[int, str]) -> bool:
    """Tell whether size and stamp of a file are others by now."""
    # Clients quote a tag in one answer and not in another.
    return (then[0], then[1].strip('"')) != (now[0], now[1].strip('"'))


def changed(path: str, then: tuple[int, str], now: tuple[int, str]) -> IntegrityError:
    """Return what is said of a file whose size and stamp are others than when its source was opened."""
    return IntegrityError(
        f"{path}: changed since the source was opened: {then[0]} bytes written at {_when(then[1])}, now {now[0]} at "
        f"{_when(now[1])}; positions no longer hold, put back what was there, or start anew"
    )


def rewritten(path: str, size_bytes: int, since: str) -> IntegrityError:
    """Return what is said of a local file whose size and times of writing are the same, and what it holds is not.

    Args:
        path: The file.
        size_bytes: Its size.
        since: Its time of change, as a stamp.
    """
    return IntegrityError(
        f"{path}: changed since the source was opened: it has {size_bytes} bytes and its modification time as then, "
        f"and holds something else since {_when(since)}; positions no longer hold, put back what was there, or start "
        "anew"
    )


def _when(stamp: str) -> str:
    """Return a stamp for people: one that counts nanoseconds, as of local files, as a time."""
    if not re.fullmatch(r"[0-9]{18,19}", stamp):
        return stamp
    return f"{datetime.fromtimestamp(int(stamp) // 10**9, UTC):%Y-%m-%d %H:%M:%S}.{stamp[-9:]} UTC"


def no_ranges(path: str, why: str) -> ConfigError:
    """Return what is said of a server that gives whole files alone."""
    return ConfigError(
        f"{path}: is on a server that gives no parts of a file: it {why}; name a server that answers requests for "
        "ranges (206), or copy the files"
    )


def identity_of(store: "fsspec.AbstractFileSystem") -> str:
    """Return what tells a store from another: what it was opened with, but for secrets, which may change."""
    said = _plain(
        {"kind": type(store).__name__, "args": list(store.storage_args), **store.storage_options}
    )
    return orjson.dumps(said, option=orjson.OPT_SORT_KEYS).decode()


def _plain(value: object) -> object:
    """Return a setting without secrets, and without what is the same in no two processes."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if not names_secret(str(k))}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else None


def _require_ranges(store: "fsspec.AbstractFileSystem", url: str) -> None:
    """Ask a server once for a part of a file: fsspec would hold the whole of a large one before it can be told.

    Raises:
        ConfigError: It gives none.
        OSError: It cannot be asked.
    """
    host = url.partition("://")[2].partition("/")[0]
    if host in _GIVE_RANGES:
        return
    # Of the second byte: what begins at the first one may be the whole file, cut off by the client.
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
    """Return what tells the store of a URL: its scheme, and its host or its bucket."""
    scheme, _, rest = url.partition("://")
    # Without the user, who may have a password.
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def ask_store(url: str) -> None:
    """Ask the store of a pattern for the folder that it begins with, whatever that is there."""
    # Imported here: a mix of local files never needs it, and it takes a twentieth of a check to load.
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
    """Ask the stores of some sources, side by side, and return those that gave no answer.

    Args:
        patterns: Of each source, by its name.
        limit_s: Seconds that a store has to answer, or to refuse.
        ask: Asks the store of a pattern; whatever it raises is an answer.

    Returns:
        Names of the sources of each such store, by what tells it.
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

    # A thread each: one that waits for a store that says nothing carries out no other's call.
    pool = DaemonPool(len(first), "omniload-asking", reads=True)
    asked = {store: pool.submit(partial(answers, url)) for store, url in first.items()}
    wait(asked.values(), timeout=limit_s)
    # No client of a store can be made to end a call: what waits is left behind, and given up as the process ends. A
    # client that came back while the interpreter is torn down would crash it.
    pool.close(0.0)
    return {store: names[store] for store, answer in asked.items() if not answer.done()}
