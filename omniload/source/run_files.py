"""Files that a path takes and nobody meant: those of a run, and splits that were held out.

Of a run no source may take any: a journal grows as it is read, and the next start would find other data.
"""

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.mix.edits.answers import ANSWER_NAME, REQUEST_NAME
from omniload.mix.edits.edits_file import EDITS_NAME
from omniload.mix.journal.groups import GROUPS_NAME
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.run_record import RUN_RECORD_NAME
from omniload.source.braces import expanded
from omniload.source.files import ShardFile

__all__ = ["may_be_of_run", "refuse_run_files", "require_apart", "split_of", "warn_of_splits"]

_LOG = get_logger(__name__)
_SOON_THERE = (RUN_RECORD_NAME, "status.json", "logs/planner.log")
"""Files that every run has in its folder, beside its journal."""
_NAMES = frozenset(
    {
        *(RUN_RECORD_NAME, GROUPS_NAME, EDITS_NAME, REQUEST_NAME, ANSWER_NAME),
        *("status.json", "writers.json", "train.json", "log.jsonl"),
    }
)
_FOLDERS = frozenset({"logs", "losses", "rewards", "times"})
_FIRST_BYTES = 64
_OF_RUN = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"(?:base|lives)":')
"""How a journal begins, and the record of a run."""
_REMEDY = "narrow the pattern, or put run_dir elsewhere"
_TRAINED_ON = "train"
_SPLITS = {
    **dict.fromkeys(("train", "training"), _TRAINED_ON),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
"""Names of splits, in small letters, and what each is called here."""
_WORD = re.compile(r"[a-z]+")


def may_be_of_run(path: str) -> bool:
    """Whether a file is called as one of a run's folder is; what it is, its first bytes tell."""
    above, _, name = path.rpartition("/")
    is_journal = name.startswith(JOURNAL_NAME)
    return is_journal or _lies_in_run(name) or above.rpartition("/")[2] in _FOLDERS


def _lies_in_run(name: str) -> bool:
    # Decisions on groups are moved aside, as the journal is.
    return name in _NAMES or name.startswith(f"{GROUPS_NAME}.")


def refuse_run_files(where: str, files: Iterable[ShardFile]) -> None:
    """Refuse files that a run keeps in its folder, of whichever run.

    Args:
        where: What takes them: its place in the mix file, and the pattern.
        files: Those that ``may_be_of_run``.

    Raises:
        ConfigError: One of them is a run's.
    """
    folders = dict[str, bool]()
    for file in files:
        above, _, name = file.path.rpartition("/")
        if name.startswith(JOURNAL_NAME) and _begins_as_ours(file):
            raise ConfigError(
                f"{where} takes {file.path}, the journal of a run of omniload, which is no data and grows as the run "
                f"goes on; {_REMEDY}"
            )
        if file.remote is not None:
            continue  # a run keeps nothing but its journal on a store
        folder = above if _lies_in_run(name) else os.path.dirname(above)  # noqa: PTH120 -- of many files
        if folder not in folders:
            folders[folder] = _is_run(folder)
        if folders[folder]:
            raise ConfigError(
                f"{where} takes {file.path}, which is no data: {folder} is the folder of a run of omniload; {_REMEDY}"
            )


def _begins_as_ours(file: ShardFile) -> bool:
    (head,) = file.read_ranges([(0, min(file.size_bytes, _FIRST_BYTES))])
    return _OF_RUN.match(head) is not None


def _is_run(folder: str) -> bool:
    for name in (JOURNAL_NAME, RUN_RECORD_NAME):
        with suppress(OSError), Path(folder, name).open("rb") as file:
            if _OF_RUN.match(file.read(_FIRST_BYTES)):
                return True
    return False


def require_apart(
    where: str,
    pattern: str,
    base_dir: Path,
    run_dir: Path,
    *,
    has_journal: bool,
    taken: Callable[[str], bool],
) -> None:
    """Refuse a pattern that takes files of a run's folder, which need not be there yet.

    Args:
        where: Its place in the mix file, and the pattern.
        pattern: A path, folder or glob of this machine.
        base_dir: Folder that relative paths start at.
        run_dir: The run's folder.
        has_journal: Whether the run keeps its journal there.
        taken: Whether a file of this name in a folder that a path names is read.

    Raises:
        ConfigError: It takes one of them; the next start would find data that this one had not.
    """
    try:
        patterns = expanded(pattern) if "{" in pattern else [pattern]
    except ValueError:
        return  # of its braces, which the listing tells
    paths = [run_dir.resolve() / name for name in (JOURNAL_NAME,) * has_journal + _SOON_THERE]
    for each in patterns:
        if soon := _takes(each.removeprefix("file://"), base_dir, paths, taken):
            raise ConfigError(
                f"{where} takes {soon}, which this run writes: its next start would find other data; {_REMEDY}"
            )


def _takes(
    pattern: str, base_dir: Path, paths: Sequence[Path], taken: Callable[[str], bool]
) -> Path | None:
    """Return which of some files a pattern takes, as ``find_files`` does, once they are there."""
    whole = base_dir / pattern
    # A file that is named in full is there, or nothing begins; of those in braces there may be thousands.
    if not glob.has_magic(pattern) and not whole.is_dir():
        return None
    # A bracket in the folder's own name is not a pattern.
    fixed = 0 if pattern.startswith("/") else len(base_dir.parts)
    parts = whole.parts
    while fixed < len(parts) and not glob.has_magic(parts[fixed]):
        fixed += 1
    folder, rest = Path(*parts[:fixed]).resolve(), parts[fixed:]
    for path in paths:
        if not path.is_relative_to(folder):
            continue
        names = path.relative_to(folder).parts
        is_marked = any(name[0] in "_." for name in names)
        if is_marked and not any(part[0] in "_." for part in rest):
            continue
        if _matches(rest, names) if rest else taken(path.name):
            return path
    return None


def _matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a glob takes a path, part by part; ``**`` stands for any number of folders, at its end for any file."""
    if not parts or not names:
        return not parts and not names
    if parts[0] == "**":
        rest = parts[1:] or ["*"]
        return any(
            _matches(rest, names[n:])
            for n in range(len(names))
            if all(name[0] != "." for name in names[:n])
        )
    hidden = names[0][0] == "." and parts[0][0] != "."
    return not hidden and fnmatch.fnmatchcase(names[0], parts[0]) and _matches(parts[1:], names[1:])


def split_of(path: str) -> str | None:
    """Return the split that a file, or the folder that holds it, is called by; ``None`` where neither is."""
    *_, folder, name = ("", *PurePosixPath(path.lower()).parts)
    word = _WORD.match(name)
    return _SPLITS.get(word.group() if word else "") or _SPLITS.get(folder)


def warn_of_splits(where: str, paths: Iterable[str]) -> None:
    """Warn where one pattern takes what is trained on and what was held out from that.

    Every file has to be called by a split: among others ``test.py`` is a name like any.

    Args:
        where: What takes them: its place in the mix file, and the pattern.
        paths: All files that the pattern takes.
    """
    counts = Counter[str]()
    for path in paths:
        if (split := split_of(path)) is None:
            return
        counts[split] += 1
    if len(counts) > 1 and _TRAINED_ON in counts:
        found = ", ".join(f"{split} {counts[split]:,}" for split in sorted(counts))
        _LOG.warning(
            "%s takes files of %d splits, by their names (%s), and all of them are trained on: name those that are "
            "meant, as by **/train*; where all are, give each a pattern of its own in a list",
            *(where, len(counts), found),
        )
