"""Files that a path matches by accident: the files of a run, and splits that were held out.

No source may take a file of a run, because a journal grows while it is read, so the next start would find other data.
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
"""Files that every run has in its folder, next to its journal."""
_NAMES = frozenset(
    {
        *(RUN_RECORD_NAME, GROUPS_NAME, EDITS_NAME, REQUEST_NAME, ANSWER_NAME),
        *("status.json", "writers.json", "train.json", "log.jsonl"),
    }
)
_FOLDERS = frozenset({"logs", "losses", "rewards", "times"})
_FIRST_BYTES = 64
_OF_RUN = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"(?:base|lives)":')
"""The beginning of a journal, and of the record of a run."""
_REMEDY = "narrow the pattern, or put run_dir elsewhere"
_TRAINED_ON = "train"
_SPLITS = {
    **dict.fromkeys(("train", "training"), _TRAINED_ON),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
"""Names of splits in lower case, and the name of each in messages."""
_WORD = re.compile(r"[a-z]+")


def may_be_of_run(path: str) -> bool:
    """Return whether a file has the name of a file in a run's folder; its first bytes then decide."""
    above, _, name = path.rpartition("/")
    is_journal = name.startswith(JOURNAL_NAME)
    return is_journal or _lies_in_run(name) or above.rpartition("/")[2] in _FOLDERS


def _lies_in_run(name: str) -> bool:
    # Decisions on groups are moved aside, like the journal.
    return name in _NAMES or name.startswith(f"{GROUPS_NAME}.")


def refuse_run_files(where: str, files: Iterable[ShardFile]) -> None:
    """Raise an error for files that a run, this one or another, keeps in its folder.

    Args:
        where: The place in the mix file, and the pattern.
        files: Files for which ``may_be_of_run`` is true.

    Raises:
        ConfigError: One of the files belongs to a run.
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
            continue  # on a store, a run keeps nothing but its journal
        folder = above if _lies_in_run(name) else os.path.dirname(above)  # noqa: PTH120 -- for many files
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
    """Raise an error for a pattern that matches files of a run's folder, even if they do not exist yet.

    Args:
        where: The place in the mix file, and the pattern.
        pattern: A path, folder or glob of this machine.
        base_dir: Folder that relative paths start from.
        run_dir: The run's folder.
        has_journal: Whether the run keeps its journal there.
        taken: Returns whether a file with a given name is read if a path names its folder.

    Raises:
        ConfigError: The pattern matches such a file, so the next start would find data that this one did not have.
    """
    try:
        patterns = expanded(pattern) if "{" in pattern else [pattern]
    except ValueError:
        return  # the listing reports the fault in the braces
    paths = [run_dir.resolve() / name for name in (JOURNAL_NAME,) * has_journal + _SOON_THERE]
    for each in patterns:
        if soon := _takes(each.removeprefix("file://"), base_dir, paths, taken):
            raise ConfigError(
                f"{where} takes {soon}, which this run writes: its next start would find other data; {_REMEDY}"
            )


def _takes(
    pattern: str, base_dir: Path, paths: Sequence[Path], taken: Callable[[str], bool]
) -> Path | None:
    """Return the first of some files that a pattern would match, as ``find_files`` does, once they exist."""
    whole = base_dir / pattern
    # A file that is named in full must exist before a run begins, and braces may name thousands of such files.
    if not glob.has_magic(pattern) and not whole.is_dir():
        return None
    # A bracket in the name of the base folder is not part of the pattern.
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
    """Return whether a glob matches a path, part by part; ``**`` matches any folders and, at its end, any file."""
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
    """Return the split that the name of a file, or of its folder, stands for; ``None`` if neither does."""
    *_, folder, name = ("", *PurePosixPath(path.lower()).parts)
    word = _WORD.match(name)
    return _SPLITS.get(word.group() if word else "") or _SPLITS.get(folder)


def warn_of_splits(where: str, paths: Iterable[str]) -> None:
    """Warn if one pattern matches both a training split and a held-out split.

    The warning requires that every file has the name of a split, because ``test.py`` among other files is an ordinary
    name.

    Args:
        where: The place in the mix file, and the pattern.
        paths: All files that the pattern matches.
    """
    counts = Counter[str]()
    for path in paths:
        if (split := split_of(path)) is None:
            return
        counts[split] += 1
    if len(counts) > 1 and _TRAINED_ON in counts:
        found = ", ".join(f"{split} {counts[split]:,}" for split in sorted(counts))
        _LOG.warning(
            "%s takes files of %d splits, by their names (%s), and all of them are trained on: select the splits "
            "that you want, as by **/train*; if you want all, list a pattern for each",
            *(where, len(counts), found),
        )
