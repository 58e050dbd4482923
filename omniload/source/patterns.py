"""From patterns to files: paths, folders, globs, braces and URLs.

Shards keep the order of the patterns and, within one, the natural order of their paths, so
that every machine numbers them alike whatever order its file system lists them in.
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
from omniload.source.stores.asking import entry_of
from omniload.source.stores.listings import list_anew

__all__ = ["LISTING_S", "FileNames", "find_files", "is_url", "listing", "natural_order"]

LISTING_S = 300.0
"""How long a store or a file system may take to list a pattern: some millions of names."""
_NAMED = 8
"""Names that a message lists."""
_COMPRESSED = frozenset({".gz", ".zst"})
_NUMBER = re.compile(r"\.[0-9][0-9A-Za-z_-]*")
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """What the files of a format are called."""

    suffixes: frozenset[str]
    """Suffixes, in small letters, of the files that are taken from a folder."""
    compressed: bool = False
    """Whether ``.gz`` or ``.zst`` may follow the suffix."""
    never: frozenset[str] = frozenset()
    """Where a file may have any other name: the suffixes that no file of the format has."""
    manifest: str = ""
    """Name of a file that lists the shards of its folder, where the format has one."""
    implied: str = ""
    """Suffix that a path may leave out."""

    def known(self, name: str) -> bool:
        """Whether a glob may take this name; one without a suffix, or numbered, says nothing."""
        suffix = PurePosixPath(name).suffix.lower()
        if not suffix or _NUMBER.fullmatch(suffix):
            return True
        return suffix not in self.never if self.never else self.taken(name)

    def taken(self, name: str) -> bool:
        """Whether a file of this name in a folder is a shard."""
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

    What a glob or a folder gives by a name that starts with ``_`` or ``.`` is passed over, and
    said: that is how writers mark what is no data, such as ``_SUCCESS`` and ``.x.crc``.

    Args:
        patterns: Paths, folders, globs (``*``, ``?``, ``[]``, ``**``), braces or URLs.
        base_dir: Folder that relative paths start at.
        source: Name of the source, for messages.
        names: What files of the format are called; asked of what a glob matches that does not end
            in a suffix itself, and of what lies in a folder. Without it folders are refused.
        calls: Carries out the listing, for whoever lists many; a thread of its own otherwise.

    Raises:
        ConfigError: A pattern names nothing, what is no file, a file that the format does not
            know, one that a run keeps in its folder, or a store that cannot be opened.
        UnavailableError: A store did not answer.
    """
    for pattern in patterns:
        # Messages, and those of clients, quote parts of a URL that look like no secret by themselves.
        note_secrets_of(pattern)
    every = [each for pattern in patterns for each in _braces(pattern, base_dir, source)]

    def listed() -> list[list[ShardFile]]:
        return [_listed(pattern, base_dir, source, names) for pattern in every]

    # One thread for all of them: fsspec makes a client of a store for each thread that asks.
    # Local folders have the limit too: they may be mounts that do not answer, and ``/**`` is endless.
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
            # Two patterns may take one file: it keeps its place under the first.
            found.setdefault(file.path, file)
    return tuple(found.values())


def _where(pattern: str, source: str) -> str:
    return f"sources.{source}.path: {shortened(pattern)!r}"


def _braces(pattern: str, base_dir: Path, source: str) -> list[str]:
    """Write out the braces of a pattern, unless a file is called so."""
    if "{" not in pattern or (not is_url(pattern) and os.path.lexists(base_dir / pattern)):
        return [pattern]
    try:
        return expanded(pattern)
    except ValueError as error:
        raise ConfigError(f"{_where(pattern, source)}: {error}") from None


def is_url(pattern: str) -> bool:
    """Whether a pattern names a store, and no path of this machine."""
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
    """Say what a store, its client or the system refuses inside in terms of what is listed.

    Args:
        where: Its place in the mix file, and the pattern.

    Raises:
        ConfigError: The store cannot be opened as it is set up, or does not let us in.
        UnavailableError: It did not answer.
    """
    begin_s = time.monotonic()
    try:
        yield
    except OmniloadError:
        raise
    except Exception as error:
        # These come from opening a store, whose clients raise them for wrong settings.
        if isinstance(error, ImportError | PermissionError | ValueError) or is_refusal(error):
            why = missing_client(error) if isinstance(error, ImportError) else said(error)
            if isinstance(error, PermissionError) and error.filename:  # of this machine
                why += f"; let user {os.geteuid()} read its folders, or name other files"
            raise ConfigError(f"{where} cannot be opened: {why}") from error
        if not is_outage(error):
            raise
        # Of the error without the name that it carries: the pattern says it, and it may be long.
        bare = OSError(error.errno, error.strerror) if isinstance(error, OSError) else None
        refusal = None if bare is None else system_refusal(bare)
        if isinstance(refusal, ConfigError):  # such as a name too long, which no second try mends
            raise ConfigError(f"{where} cannot be listed: {refusal}") from error
        # Clients of stores try some times by themselves, which takes as long as each of them has it.
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
    """Leave out what a glob took that is no data; refuse what the format does not know."""
    # What is named in full is meant, whatever it is called.
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
    """Whether a part of ``path`` that a glob matched starts with ``_`` or ``.``, and no part of the glob does."""
    if "://" in pattern:
        # Of stores that are joined, such as ``zip://*.jsonl::s3://bucket/a.zip``, the first says the path.
        parts, fixed = _parts(pattern.partition("::")[0]), 0
    else:
        # A bracket in the folder's own name is not a pattern.
        folder = [] if pattern.startswith("/") else _parts(str(base_dir))
        parts, fixed = [*folder, *(part for part in _parts(pattern) if part != ".")], len(folder)
    while fixed < len(parts) and not glob.has_magic(parts[fixed]):
        fixed += 1
    # Who writes the mark into a glob means it.
    if any(part[0] in "_." for part in parts[fixed:]):
        return False
    return any(part[0] in "_." for part in _parts(path)[fixed:])


def _parts(path: str) -> list[str]:
    scheme, given, rest = path.partition("://")
    return [part for part in (rest if given else scheme).split("/") if part]


def _names(paths: Sequence[str] | dict[str, ShardFile]) -> str:
    names = sorted(PurePosixPath(path).name for path in paths)
    # A name may hold what a terminal would obey.
    shown = ", ".join(ascii(name)[1:-1] for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def _expand_url(pattern: str, names: FileNames | None) -> list[ShardFile]:
    host = pattern.partition("://")[2].partition("/")[0]
    # fsspec would cut an address of IPv6 at its colons, and ask for a store of that name.
    if "[" in host and "::" in host:
        raise ConfigError(
            f"{pattern!r} names its host as {host!r}, and '::' joins stores in a URL; give the host by name"
        )
    # Imported here: a mix of local files never needs it, and it takes a twentieth of a check to load.
    from fsspec.core import url_to_fs  # noqa: PLC0415

    store, path = url_to_fs(pattern)
    never_ended_by_a_fork(store)
    list_anew(store)
    if not glob.has_magic(path):
        if names is not None and names.implied and not store.exists(path):
            path += names.implied
        # Not ``isdir``: over HTTP that fetches the whole file to look for links in it.
        entry = entry_of(store, path)
        if names is None or entry["type"] != "directory":
            return [remote_file(store, path, entry)]
        return [remote_file(store, each) for each in _of_folder(store.find(path), [], path, names)]
    # Listings and single answers of one store may write the same time differently, so the
    # stamp comes from a single answer; stores that keep listings give it without a request.
    found = [name for name, entry in store.glob(path, detail=True).items() if is_file(entry)]
    return [remote_file(store, name) for name in found]


def _expand(pattern: str, base_dir: Path, names: FileNames | None) -> list[ShardFile]:
    # A path made of parts costs more than looking at the file; of a thousand sources that is felt.
    path = str(base_dir / pattern)
    mode = _mode_of(path)
    if names is not None and stat.S_ISDIR(mode):
        return [_shard(each) for each in _of_folder(*held_in(path), path, names)]
    if names is not None and names.implied and Path(path + names.implied).exists():
        return [_shard(path + names.implied)]
    # A file may be called as a glob is written.
    if not glob.has_magic(path) or mode:
        return [_shard(path)]
    # Matching starts inside the folder: a bracket in the folder's own name is not a pattern.
    found = [str(base_dir / name) for name in matches_of(pattern, base_dir)]
    # A link that leads to nothing is a shard that is gone, not a folder.
    return [_shard(each) for each in found if stat.S_ISREG(_mode_of(each) or stat.S_IFREG)]


def _mode_of(path: str) -> int:
    """Return what lies at a path, as ``os.stat`` says it; 0 where nothing does."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116 -- a path made of parts takes several times as long
    except ValueError:
        return 0
    except OSError as error:
        # As of a ``Path``: what says that nothing is there, and not that nobody may look.
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}:
            raise
        return 0


def _shard(path: str) -> ShardFile:
    """Look at a file of this machine.

    Raises:
        ConfigError: It is a link that leads to nothing, or to itself: left out, its shard would be missed by nobody.
        OSError: It is not there.
    """
    try:
        return local_file(path)
    except OSError as error:
        leads_nowhere = error.errno in (errno.ENOENT, errno.ELOOP)
        if not (leads_nowhere and os.path.islink(path)):  # noqa: PTH114 -- as for what is listed
            raise
        to = ascii(os.readlink(path))  # noqa: PTH115 -- likewise
        raise ConfigError(
            f"{path} is a link to {to}, which is not there; put it back, or remove the link"
        ) from None


def _of_folder(
    held: Sequence[str], links: Sequence[str], folder: str, names: FileNames
) -> list[str]:
    """Choose the shards among the files under a folder; its manifest stands for all of them.

    Of ``links``, which lead to other folders, nothing is taken, and that is told.

    Raises:
        ConfigError: None of them is a shard, or several data sets lie there.
    """
    root = folder.rstrip("/")
    lists = [path for path in held if PurePosixPath(path).name == names.manifest]
    for path in lists:
        if PurePosixPath(path).parent == PurePosixPath(root):
            return [path]
    if lists:
        # Which of them is meant is not guessed: another one beside it would change the run.
        sets = sorted(str(PurePosixPath(path).parent.relative_to(root)) for path in lists)
        likely = "train" if "train" in sets else sets[0]  # what is copied from here is trained on
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
    # Not of _SUCCESS and its like: they are nobody's data, and every command would tell of them.
    if left:
        _LOG.info("%s: of this folder not taken: %s", folder, _names(left))
    return taken


def natural_order(file: ShardFile) -> tuple[list[str | int], str]:
    """Order ``part-2`` before ``part-10``: texts and numbers alternate, so they compare in kind."""
    # ``01`` and ``1`` are the same number: then the path itself decides.
    parts = re.split(r"([0-9]+)", file.path)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.path
