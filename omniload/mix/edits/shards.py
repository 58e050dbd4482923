"""Shards that edits leave out: the shard that a name means, and the shards left out at a step."""

import difflib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.base.units import counted
from omniload.mix.edits.edit import Edit, SkipShard
from omniload.mix.edits.sources import require_known

__all__ = ["ShardsFound", "left_out_of", "require_skippable", "shard_meant", "shards_like"]

_SHOWN = 6
"""Number of shards that a message lists."""
_LIKE_MOST = 10_000
"""Number of shards of a loader that are compared with a name that matches none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsFound:
    """The result of a search for a name among the shards of some sources."""

    whole: tuple[SkipShard, ...] = ()
    """Shards whose path equals the name; at most a few."""
    tails: tuple[SkipShard, ...] = ()
    """Shards whose path ends in the name; at most a few."""
    matches: int = 0
    """Number of all shards of the first kind, or of the second kind if there are none of the first."""
    like: tuple[str, ...] = ()
    """Other paths, the most similar first."""
    shards: int = 0
    """Number of shards that were searched."""


def shards_like(change: SkipShard, paths_of: Mapping[str, Sequence[str]]) -> ShardsFound:
    """Return the shards that a name may mean.

    Args:
        change: Names the shard by its path, or by the end of its path from a ``/`` on.
        paths_of: Paths of the shards that hold records of each source, in the order of their numbers.
    """
    wanted = _plain(change.file)
    whole: list[SkipShard] = []
    tails: list[SkipShard] = []
    others: list[str] = []
    for name, paths in paths_of.items():
        if change.source not in (None, name):
            continue
        for number, path in enumerate(paths):
            plain = _plain(_as_text(path))
            if plain == wanted or plain.endswith(f"/{wanted}"):
                found = SkipShard(file=_writable(path), source=name, number=number, of=len(paths))
                (whole if plain == wanted else tails).append(found)
            else:
                others.append(path)
    base = wanted.rpartition("/")[2]
    # Only for a message, so not all of possibly millions are compared.
    looked_at = [] if whole or tails else others[:_LIKE_MOST]
    like = heapq.nlargest(_SHOWN, looked_at, key=lambda path: _likeness(base, path))
    return ShardsFound(
        whole=tuple(whole[:_SHOWN]),
        tails=tuple(tails[:_SHOWN]),
        matches=len(whole) or len(tails),
        like=tuple(_writable(path) for path in like),
        shards=len(whole) + len(tails) + len(others),
    )


def shard_meant(change: SkipShard, names: Sequence[str], found: Iterable[ShardsFound]) -> SkipShard:
    """Return the change with the one shard that its name means.

    Args:
        change: The change as requested.
        names: Sources of the mix.
        found: Search results for all sources.

    Raises:
        ConfigError: There is no such shard or source, or the name matches several shards.
    """
    if change.source is not None:
        require_known([change.source], names)
    every = list(found)
    where = f"source {change.source!r}" if change.source else counted(len(names), "source")
    # Two loaders have a source open while it moves.
    whole = list(dict.fromkeys(shard for each in every for shard in each.whole))
    meant_by = whole or list(dict.fromkeys(shard for each in every for shard in each.tails))
    if not meant_by:
        looked = sum(each.shards for each in every)
        base = _plain(change.file).rpartition("/")[2]
        like = {path for each in every for path in each.like}
        shown = heapq.nlargest(_SHOWN, sorted(like), key=lambda path: _likeness(base, path))
        raise ConfigError(
            f"no shard of {where} is {change.file!r}, or ends in it, of {looked} that hold records; most like it: "
            f"{', '.join(shown)}; say the path as the mix names it, or the end of it from a / on"
        )
    if len(meant_by) > 1:
        count = sum(each.matches for each in every if each.whole or not whole)
        listed = ", ".join(f"{shard.file} of {shard.source}" for shard in meant_by[:_SHOWN])
        same = len({shard.file for shard in meant_by}) == 1
        remedy = "say --source NAME" if same else "say more of its path, or --source NAME"
        more = f", and {count - _SHOWN} more" if count > _SHOWN else ""
        raise ConfigError(f"{change.file!r} is {count} shards: {listed}{more}; {remedy}")
    return meant_by[0]


def left_out_of(edits: Sequence[Edit], step: int) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the shards of each source that are left out at a step."""
    # An undo counts from its own step on. Before that step, the shard was left out.
    gone = {edit.undoes for edit in edits if edit.step <= step}
    found: dict[str, set[int]] = {}
    for edit in edits:
        match edit.change:
            case SkipShard(source=str(source), number=int(number)):
                # Only the step counts, not the revision, because a run at rest may leave a shard out from a past step
                # on.
                if edit.step <= step and edit.revision not in gone:
                    found.setdefault(source, set()).add(number)
    return {source: tuple(sorted(numbers)) for source, numbers in found.items()}


def require_skippable(edits: Sequence[Edit], change: SkipShard) -> None:
    """Refuse a shard that is left out already, or the last one of its source.

    Raises:
        ConfigError: The shard is one of these, or was not searched for.
    """
    if change.number is None or change.source is None or change.of is None:
        raise ConfigError(
            f"shard {change.file!r} was not looked for among the shards of the mix; ask a plane that has them open"
        )
    gone = {edit.undoes for edit in edits}
    out: dict[int, Edit] = {}
    for edit in edits:
        match edit.change:
            case SkipShard(source=change.source, number=int(number)) if edit.revision not in gone:
                out[number] = edit
    if (before := out.get(change.number)) is not None:
        raise ConfigError(
            f"{change.file} of source {change.source!r} is left out already, by edit {before.revision} from step "
            f"{before.step} on; undo that edit first to leave it out from another step on"
        )
    # With no shard left, the weight of the source could not be met.
    if len(out) + 1 >= change.of:
        raise ConfigError(
            f"{change.file} is the last of {counted(change.of, 'shard')} of source {change.source!r} that is not left "
            f"out; say omniload mix retire RUN {change.source} to draw no more from it"
        )


def _plain(path: str) -> str:
    """Return a path without the prefix for reaching its store, such as ``s3://`` or ``./``."""
    path = path.partition("://")[2] if "://" in path else path
    while path.startswith("./"):
        path = path[2:]
    return path.lstrip("/")


def _likeness(base: str, path: str) -> float:
    # An upper bound of the similarity is enough: names of shards differ in a number, and thousands are compared.
    return difflib.SequenceMatcher(None, base, path.rpartition("/")[2]).quick_ratio()


def _writable(path: str) -> str:
    """Return a path in a form that may be stored in the run's folder."""
    return without_secrets(_as_text(path))


def _as_text(path: str) -> str:
    # The stored form is JSON, but a file name need not be valid UTF-8.
    return path.encode(errors="backslashreplace").decode()
