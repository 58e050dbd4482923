"""Expands patterns to files: paths, folders, globs, braces and URLs.

Shards keep the order of the patterns and, within a pattern, the natural order of their paths. Every machine therefore
numbers them in the same way, whatever the order of its file system.
"""

import errno
import glob
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.concurrency.forks import never_ended_by_a_fork
from omniload.base.concurrency.time_limit import LimitedCalls, call_within
from omniload.base.errors import ConfigError, OmniloadError, UnavailableError, system_refusal
from omniload.base.extras import missing_client
from omniload.base.linux.folders import held_in, matches_of
from omniload.base.log import get_logger
from omniload.base.secrets import note_secrets_of
from omniload.source.braces import expanded, none_at
from omniload.source.files import (
    ShardFile,
    is_file,
    is_outage,
    is_refusal,
    local_file,
    remote_file,
    said,
    shortened,
)
from omniload.source.run_files import may_be_of_run, refuse_run_files, warn_of_splits
from omniload.source.stores.listings import asked_ahead, entry_lately, list_anew

__all__ = ["LISTING_S", "FileNames", "find_files", "is_url", "listing", "natural_order"]

LISTING_S = 300.0
"""Longest time that a store or a file system may take to list a pattern: enough for millions of names."""
_NAMED = 8
"""Most names that a message lists."""
_COMPRESSED = frozenset({".gz", ".zst"})
_NUMBER = re.compile(r"\.[0-9][0-9A-Za-z_-]*")
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The names of the files of a format."""

    suffixes: frozenset[str]
    """Suffixes, in lower case, of the files that are taken from a folder."""
    compressed: bool = False
    """Whether ``.gz`` or ``.zst`` may follow the suffix."""
    never: frozenset[str] = frozenset()
    """Suffixes that no file of the format has, if a file may have any other name."""
    manifest: str = ""
    """Name of the file that lists the shards of its folder; empty if the format has none."""
    implied: str = ""
    """Suffix that a path may leave out."""

    def known(self, name: str) -> bool:
        """Return whether a glob may take this name; a name without a suffix, or with a numeric one, is accepted."""
        suffix = PurePosixPath(name).suffix.lower()
        if not suffix or _NUMBER.fullmatch(suffix):
            return True
        return suffix not in self.never if self.never else self.taken(name)

    def taken(self, name: str) -> bool:
        """Return whether a file of this name in a folder is a shard."""
        path = PurePosixPath(name)
        suffix = path.suffix.lower()
        if self.compressed and suffix in _COMPRESSED:
            suffix = PurePosixPath(path.stem).suffix.lower()
        return suffix in self.suffixes or bool(self.manifest and name == self.manifest)


def find_files(
    patterns: Sequence[str],
    base_dir: Path,
    *,
    source: str,
    names: FileNames | None = None,
    calls: LimitedCalls | None = None,
) -> tuple[ShardFile, ...]:
    """Expand patterns to files, each once, in an order that does not depend on the machine.

    Matches of a glob or folder whose name starts with ``_`` or ``.`` are skipped and logged, because writers mark files
    without data in this way, such as ``_SUCCESS`` and ``.x.crc``.

    Args:
        patterns: Paths, folders, globs (``*``, ``?``, ``[]``, ``**``), braces or URLs.
        base_dir: Folder that relative paths start from.
        source: Name of the source, for messages.
        names: Names of the format's files, for matches of a glob without a suffix, and for files in a folder. If
            absent, folders are refused.
        calls: Runs the listing, for a caller that lists many patterns; by default a thread of this call does.

    Raises:
        ConfigError: A pattern matches nothing, something that is no file, a file of an unknown name, or a file of a
            run's folder, or a store cannot be opened.
        UnavailableError: A store did not answer.
    """
    for pattern in patterns:
        # Messages of omniload and of clients quote parts of a URL that do not look like secrets by themselves.
        note_secrets_of(pattern)
    every = [each for pattern in patterns for each in _braces(pattern, base_dir, source)]

    def listed() -> list[list[ShardFile]]:
        return [_listed(each, base_dir, source, names) for each in asked_ahead(every)]

    # One thread for all patterns, because fsspec makes a client of a store for each calling thread.
    # The limit also applies to local folders, which may be mounts that do not answer; and ``/**`` has no end.
    limited = call_within if calls is None else calls.call
    lists = limited(LISTING_S, listed, what=f"sources.{source}.path, a listing")
    found: dict[str, ShardFile] = {}
    for pattern, taken in zip(every, lists, strict=True):
        where = _where(pattern, source)
        files = _usable(taken, pattern, base_dir, where, names)
        if not files:
            lost = (
                " of its store; correct the URL" if is_url(pattern) else none_at(pattern, base_dir)
            )
            raise ConfigError(f"{where} matches no file{lost}")
        if asked := [file for file in files if may_be_of_run(file.path)]:
            refuse = partial(refuse_run_files, where, asked)
            with listing(where):
                limited(LISTING_S, refuse, what=f"sources.{source}.path, files called as of a run")
        warn_of_splits(where, (file.path for file in files))
        for file in sorted(files, key=natural_order):
            # A file that two patterns match keeps its place under the first.
            found.setdefault(file.path, file)
    return tuple(found.values())


def _where(pattern: str, source: str) -> str:
    return f"sources.{source}.path: {shortened(pattern)!r}"


def _braces(pattern: str, base_dir: Path, source: str) -> list[str]:
    """Expand the braces of a pattern, unless a file has exactly this name."""
    if "{" not in pattern or (not is_url(pattern) and os.path.lexists(base_dir / pattern)):
        return [pattern]
    try:
        return expanded(pattern)
    except ValueError as error:
        raise ConfigError(f"{_where(pattern, source)}: {error}") from None


def is_url(pattern: str) -> bool:
    """Return whether a pattern names a store, not a path of this machine."""
    return "://" in pattern and not pattern.startswith("file://")


def _listed(pattern: str, base_dir: Path, source: str, names: FileNames | None) -> list[ShardFile]:
    with listing(_where(pattern, source)), under_way(f"lists {pattern}"):
        try:
            if is_url(pattern):
                return _expand_url(pattern, names)
            return _expand(pattern.removeprefix("file://"), base_dir, names)
        except FileNotFoundError:
            return []


@contextmanager
def listing(where: str) -> Iterator[None]:
    """Convert errors of a store, its client or the system in this context to errors about the pattern.

    Args:
        where: The place in the mix file, and the pattern.

    Raises:
        ConfigError: The store cannot be opened with its settings, or denies access.
        UnavailableError: The store did not answer.
    """
    begin_s = time.monotonic()
    try:
        yield
    except OmniloadError:
        raise
    except Exception as error:
        # These errors come from opening a store, because clients raise them for wrong settings.
        if isinstance(error, ImportError | PermissionError | ValueError) or is_refusal(error):
            why = missing_client(error) if isinstance(error, ImportError) else said(error)
            if isinstance(error, PermissionError) and error.filename:  # of this machine
                why += f"; let user {os.geteuid()} read its folders, or name other files"
            raise ConfigError(f"{where} cannot be opened: {why}") from error
        if not is_outage(error):
            raise
        # Without the name in the error, because the pattern shows it, and the name may be long.
        bare = OSError(error.errno, error.strerror) if isinstance(error, OSError) else None
        refusal = None if bare is None else system_refusal(bare)
        if isinstance(refusal, ConfigError):  # such as a name too long, which no retry fixes
            raise ConfigError(f"{where} cannot be listed: {refusal}") from error
        # Clients of stores retry by themselves, which takes as long as each client allows.
        asked_s = time.monotonic() - begin_s
        asked = f"it was asked for {asked_s:.0f} s; " if asked_s >= 1.0 else ""
        raise UnavailableError(
            f"{where} cannot be listed: {said(error)}; {asked}try again once it answers"
        ) from error


def _usable(
    files: list[ShardFile],
    pattern: str,
    base_dir: Path,
    where: str,
    names: FileNames | None,
) -> list[ShardFile]:
    """Remove matches of a glob that are not data; raise an error for files that the format does not know."""
    # A file that is named in full is intended, whatever its name is.
    if not glob.has_magic(pattern):
        return files
    marked = {file.path: file for file in files if _is_marked(file.path, pattern, base_dir)}
    if marked:
        passed = _names(marked)
        _LOG.info("%s: names that start with _ or . are passed over: %s", where, passed)
    rest = [file for file in files if file.path not in marked]
    suffix = PurePosixPath(pattern).suffix
    if names is None or (suffix and not glob.has_magic(suffix)):
        return rest
    strange = [file.path for file in rest if not names.known(PurePosixPath(file.path).name)]
    if strange:
        raise ConfigError(
            f"{where} takes {_names(strange)}, which this type does not read; end the pattern in a suffix, "
            "such as *.jsonl or *.parquet, or remove them"
        )
    return rest


def _is_marked(path: str, pattern: str, base_dir: Path) -> bool:
    """Return whether a glob without ``_`` or ``.`` at the start of a part matched such a part of ``path``."""
    if "://" in pattern:
        # In chained URLs, such as ``zip://*.jsonl::s3://bucket/a.zip``, the first one has the path.
        parts, fixed = _parts(pattern.partition("::")[0]), 0
    else:
        # A bracket in the name of the base folder is not part of the pattern.
        folder = [] if pattern.startswith("/") else _parts(str(base_dir))
        parts, fixed = [*folder, *(part for part in _parts(pattern) if part != ".")], len(folder)
    while fixed < len(parts) and not glob.has_magic(parts[fixed]):
        fixed += 1
    # A glob that has the mark asks for such files.
    if any(part[0] in "_." for part in parts[fixed:]):
        return False
    return any(part[0] in "_." for part in _parts(path)[fixed:])


def _parts(path: str) -> list[str]:
    scheme, given, rest = path.partition("://")
    return [part for part in (rest if given else scheme).split("/") if part]


def _names(paths: Sequence[str] | dict[str, ShardFile]) -> str:
    names = sorted(PurePosixPath(path).name for path in paths)
    # A name may have control characters for a terminal.
    shown = ", ".join(ascii(name)[1:-1] for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def _expand_url(pattern: str, names: FileNames | None) -> list[ShardFile]:
    host = pattern.partition("://")[2].partition("/")[0]
    # fsspec would split an IPv6 address at its colons, and look for a store of that name.
    if "[" in host and "::" in host:
        raise ConfigError(
            f"{pattern!r} names its host as {host!r}, and '::' joins stores in a URL; give the host by name"
        )
    # Imported here, because a mix of local files never needs it, and loading it takes a twentieth of a check.
    from fsspec.core import url_to_fs  # noqa: PLC0415

    store, path = url_to_fs(pattern)
    never_ended_by_a_fork(store)
    list_anew(store)
    if not glob.has_magic(path):
        if names is not None and names.implied and not store.exists(path):
            path += names.implied
        # Not ``isdir``: over HTTP that fetches the whole file to look for links in it.
        entry = entry_lately(store, path)
        if names is None or entry["type"] != "directory":
            return [remote_file(store, path, entry)]
        return [remote_file(store, each) for each in _of_folder(store.find(path), [], path, names)]
    # Listings and single answers of one store may format the same time differently, so stamps come from single answers.
    # Stores that cache listings answer without a request.
    found = [name for name, entry in store.glob(path, detail=True).items() if is_file(entry)]
    return [remote_file(store, name) for name in found]


def _expand(pattern: str, base_dir: Path, names: FileNames | None) -> list[ShardFile]:
    # Building a Path costs more than a look at the file, which matters with a thousand sources.
    path = str(base_dir / pattern)
    mode = _mode_of(path)
    if names is not None and stat.S_ISDIR(mode):
        return [_shard(each) for each in _of_folder(*held_in(path), path, names)]
    if names is not None and names.implied and Path(path + names.implied).exists():
        return [_shard(path + names.implied)]
    # A file may have the name of a glob.
    if not glob.has_magic(path) or mode:
        return [_shard(path)]
    # Matching starts inside the folder, so that a bracket in the folder's own name is not part of the pattern.
    found = [str(base_dir / name) for name in matches_of(pattern, base_dir)]
    # A broken link is a missing shard, not a folder.
    return [_shard(each) for each in found if stat.S_ISREG(_mode_of(each) or stat.S_IFREG)]


def _mode_of(path: str) -> int:
    """Return the mode of a path from ``os.stat``; 0 if nothing is there."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116 -- building a Path takes several times as long
    except ValueError:
        return 0
    except OSError as error:
        # Like ``Path``: these errors say that nothing is there, others that access is denied.
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}:
            raise
        return 0


def _shard(path: str) -> ShardFile:
    """Return a file of this machine, after a look at its status.

    Raises:
        ConfigError: The path is a link to nothing, or to itself; without an error, its shard would silently be missing.
        OSError: The file is missing.
    """
    try:
        return local_file(path)
    except OSError as error:
        leads_nowhere = error.errno in (errno.ENOENT, errno.ELOOP)
        if not (leads_nowhere and os.path.islink(path)):  # noqa: PTH114 -- as for listed files
            raise
        to = ascii(os.readlink(path))  # noqa: PTH115 -- likewise
        raise ConfigError(
            f"{path} is a link to {to}, which is not there; put it back, or remove the link"
        ) from None


def _of_folder(
    held: Sequence[str], links: Sequence[str], folder: str, names: FileNames
) -> list[str]:
    """Choose the shards among the files in a folder; the folder's manifest represents all of them.

    Links to other folders, ``links``, are not followed, which is logged.

    Raises:
        ConfigError: No file is a shard, or the folder has several data sets.
    """
    root = folder.rstrip("/")
    lists = [path for path in held if PurePosixPath(path).name == names.manifest]
    for path in lists:
        if PurePosixPath(path).parent == PurePosixPath(root):
            return [path]
    if lists:
        # The data set is not guessed, because another set next to it would change the run.
        sets = sorted(str(PurePosixPath(path).parent.relative_to(root)) for path in lists)
        likely = "train" if "train" in sets else sets[0]  # users train on what they copy
        raise ConfigError(
            f"{folder} holds {len(sets)} data sets, each with its {names.manifest}: {', '.join(sets[:_NAMED])}; "
            f"name those that are wanted, such as {folder}/{likely}"
        )
    taken: list[str] = []
    left: list[str] = []
    marked: list[str] = []
    for path in held:
        inside = PurePosixPath(path).relative_to(root)
        if any(part[0] in "_." for part in inside.parts):
            marked.append(path)
        else:
            (taken if names.taken(inside.name) else left).append(path)
    if not taken:
        wanted = (
            ", ".join(sorted(names.suffixes | {names.manifest} - {""})) or "any name, by a glob"
        )
        raise ConfigError(
            f"{folder} is a folder without a file of this type ({wanted}); "
            f"it holds {_names([*left, *marked, *links]) or 'no file'}: name the files, or another type"
            + "; links to folders are not followed, name where they lead"
            * bool(links)
        )
    if links:
        _LOG.warning(
            "%s: links to folders are not followed, and what lies behind %s is not read; name it in path to have it",
            folder,
            _names(links),
        )
    # Files such as _SUCCESS are not reported, because they have no data and every command would repeat the message.
    if left:
        _LOG.info("%s: of this folder not taken: %s", folder, _names(left))
    return taken


def natural_order(file: ShardFile) -> tuple[list[str | int], str]:
    """Sort ``part-2`` before ``part-10``: texts and numbers alternate, so equal places have equal types."""
    # ``01`` and ``1`` are the same number, in which case the path itself decides.
    parts = re.split(r"([0-9]+)", file.path)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.path
