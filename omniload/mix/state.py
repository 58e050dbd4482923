"""The state of a mix before a step: a handful of integers.

It contains nothing about ranks, loaders or timing, so a run can resume it under any of them. In JSON, sources are
identified by name, because the number of a source is valid only within one mix.

Shape suffixes:
    S  sources
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import add
from typing import Self

import numpy as np

from omniload.base.errors import StateError
from omniload.base.state import (
    Json,
    JsonObject,
    require_version,
    sealed,
    shown,
    unsealed,
    whole_number,
)
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.fingerprint import differences
from omniload.mix.other_states import SHOWN_KEYS, refuse_others
from omniload.mix.pieces import (
    POSITION_LIMIT,
    SUB_LIMIT,
    TOKEN_LIMIT,
    PieceTable,
)

__all__ = [
    "COUNT_LIMIT",
    "EDITED_VERSION",
    "SPREAD_VERSION",
    "STATE_VERSION",
    "Cursor",
    "MixState",
    "cursor_of",
]

STATE_VERSION = 2
EDITED_VERSION = 3
"""Version of a state that carries edits; releases without edits must not resume from it."""
SPREAD_VERSION = 4
"""Version of a state whose amounts were changed; it holds what was drawn before the change."""
COUNT_LIMIT = 1 << 63
"""Exclusive limit of steps, revisions and amounts drawn."""
Cursor = tuple[int, int, int]
"""The next token of a source: raw position, number of the sample within that record, token within that sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixState:
    """Everything that the planner needs to plan step ``step`` and all later steps."""

    step: int
    """Next step."""
    cursors_S: tuple[Cursor, ...]
    """Next sample of each source."""
    credits_S: tuple[int, ...]
    """Credit of each source, see ``omniload.mix.deficit``."""
    drawn_S: tuple[int, ...]
    """Amount drawn of each source so far, in the unit of the weights."""
    carried: PieceTable
    """Pieces that are drawn and not yet in a row, oldest first."""
    mix_revision: int = 0
    """Revision of the mix that applies."""
    since_S: tuple[int, ...] = ()
    """Amount drawn of each source at the last change of amounts; the remaining amounts are spread from there on.
    Empty if nothing was drawn before."""
    bad_S: tuple[int, ...] = ()
    """Number of records of each source that could not be decoded, in its current epoch before its cursor. Each
    record is met once in an epoch. Empty if there are none."""

    @classmethod
    def start(cls, num_sources: int) -> Self:
        """Return the state before step 0."""
        zeros = (0,) * num_sources
        return cls(
            step=0,
            cursors_S=((0, 0, 0),) * num_sources,
            credits_S=zeros,
            drawn_S=zeros,
            carried=PieceTable.empty(),
        )

    @property
    def ended_S(self) -> list[bool]:
        """Whether each source that is passed over only once has ended.

        A source that does not repeat ends with its cursor before the first sample of an epoch after the first. A
        cursor reaches this place in no other way, because it always follows the last drawn sample.
        """
        return [position > 0 and sub == token == 0 for position, sub, token in self.cursors_S]

    def after(
        self,
        *,
        cursors_S: Sequence[Cursor],
        served_S: Sequence[int],
        weights_S: Sequence[int],
        carried: PieceTable,
    ) -> Self:
        """Return the state after a step that drew ``served_S`` under ``weights_S``."""
        # The same as in ``draw``, but from sums alone, because a fold of the journal does not know single draws.
        total = sum(served_S)
        return replace(
            self,
            step=self.step + 1,
            cursors_S=tuple(cursors_S),
            # Lists, because a generator takes half as long again for thousands of sources.
            credits_S=tuple(
                [
                    credit + weight * total - WEIGHT_ONE * served
                    for credit, weight, served in zip(
                        self.credits_S, weights_S, served_S, strict=True
                    )
                ]
            ),
            drawn_S=tuple(map(add, self.drawn_S, served_S)),
            carried=carried,
        )

    def widened(self, num_sources: int) -> Self:
        """Return the state with further sources, of which nothing is drawn, up to ``num_sources`` in all."""
        zeros = (0,) * (num_sources - len(self.cursors_S))
        if not zeros:
            return self
        return replace(
            self,
            # At the end, so that an added source does not change the number of another.
            cursors_S=(*self.cursors_S, *((0, 0, 0) for _ in zeros)),
            credits_S=self.credits_S + zeros,
            drawn_S=self.drawn_S + zeros,
            since_S=self.since_S and self.since_S + zeros,
            bad_S=self.bad_S and self.bad_S + zeros,
        )

    def bad_of(self, source: int) -> int:
        """Return ``bad_S`` of a source; 0 if nothing was drawn of it yet."""
        return self.bad_S[source] if source < len(self.bad_S) else 0

    def with_bad(self, counts: Mapping[int, int]) -> Self:
        """Return the state with the given numbers of bad records, by source."""
        if not counts:
            return self
        bad_S = list(self.bad_S or (0,) * len(self.cursors_S))
        for s, count in counts.items():
            bad_S[s] = count
        # Empty if there are none, so that the state equals that of releases without this count.
        return replace(self, bad_S=tuple(bad_S) if any(bad_S) else ())

    def floors(self) -> list[int]:
        """Return the first raw position of each source that is still needed."""
        floors_S = np.array([position for position, _, _ in self.cursors_S], np.int64)
        # ``at`` applies every piece of a source; assignment by index would apply only the last.
        np.minimum.at(floors_S, self.carried.sources_P, self.carried.positions_P)
        floors: list[int] = floors_S.tolist()
        return floors

    def digest(self) -> str:
        """Return a digest of everything that decides the next draws, without ``bad_S``, which older releases lack."""
        digest = hashlib.blake2b(digest_size=16)
        # Fixed width and byte order, because another kind of machine may continue the journal.
        digest.update(np.asarray([self.step, self.mix_revision], "<i8").tobytes())
        each = chain.from_iterable(self.cursors_S)  # numpy takes three times as long for tuples
        digest.update(np.fromiter(each, "<i8", 3 * len(self.cursors_S)).tobytes())
        digest.update(np.asarray(self.drawn_S, "<i8").tobytes())
        digest.update(np.asarray(self.since_S, "<i8").tobytes())
        # Credits may exceed 64 bits while weights change.
        digest.update(repr(self.credits_S).encode())
        digest.update(self.carried.to_bytes())
        return digest.hexdigest()

    def to_json(
        self,
        names: Sequence[str],
        fingerprint: Mapping[str, str],
        edits: Sequence[Json] = (),
    ) -> JsonObject:
        """Return the state as plain JSON, keyed by source name, with a digest of itself.

        Args:
            names: Names of the sources.
            fingerprint: Facts that a resume must find unchanged.
            edits: The edits up to ``mix_revision``, so that a run that continues elsewhere finds them here.
        """
        # Without edits, the state is byte for byte the one of releases that do not know edits.
        edited: JsonObject = {"edits": list(edits)} if edits else {}
        if self.since_S:
            edited["since"] = dict(zip(names, self.since_S, strict=True))
        if self.bad_S:
            found = zip(names, self.bad_S, strict=True)
            edited["bad"] = {name: count for name, count in found if count}
        return sealed(
            {
                "version": _version_of(edited),
                "step": self.step,
                "mix_revision": self.mix_revision,
                "fingerprint": dict(fingerprint),
                "sources": {
                    name: {
                        "cursor": list(self.cursors_S[s]),
                        "credit": self.credits_S[s],
                        "drawn": self.drawn_S[s],
                    }
                    for s, name in enumerate(names)
                },
                "carried": self.carried.to_json(names),
                **edited,
            }
        )

    @classmethod
    def from_json(
        cls, state: Mapping[str, Json], names: Sequence[str], fingerprint: Mapping[str, str]
    ) -> Self:
        """Read the output of ``to_json``.

        ``require_possible`` checks whether the values are possible in this mix.

        Raises:
            StateError: The value is not an object, has another version, is damaged, or belongs to another mix or other
                data; the message names every part that differs.
        """
        # First, so that a state of another loader is reported by the loader's name and not by its missing version.
        refuse_others(state)
        if not isinstance(state, Mapping):
            raise StateError(
                f"the mix state is {state!r:.60}, not an object; give the result of state_dict()"
            )
        if "version" not in state:
            held = ", ".join(map(repr, list(state)[:SHOWN_KEYS])) or "nothing"
            raise StateError(
                f"this is no mix state: it has no version, and holds {held}; pass the result of state_dict()"
            )
        # The version depends on the content, so that older releases can read a state without edits.
        reads = _version_of(state)
        if state["version"] in range(reads + 1, SPREAD_VERSION + 1):
            raise StateError(
                f"the mix state has version {state['version']!r} and lacks what it holds of changes of the mix, "
                "as where torch's DCP was given the loader: it loads only the keys that a new loader has; "
                "save one text, json.dumps(loader.state_dict()), and resume this run from a checkpoint before "
                "its first change: its folder makes the changes again"
            )
        require_version(state, reads, of="mix")
        # The digest is checked before the fingerprint, so that a flipped bit is reported as damage, not as another
        # mix.
        content = unsealed(state, of="the mix state")
        _require_same(content.get("fingerprint"), fingerprint, content.get("step"))
        try:
            entries = _entries(content["sources"], names)
            return cls(
                step=whole_number(content["step"], below=COUNT_LIMIT),
                cursors_S=tuple(entry.cursor for entry in entries),
                credits_S=tuple(entry.credit for entry in entries),
                drawn_S=tuple(entry.drawn for entry in entries),
                carried=PieceTable.from_json(content["carried"], names),
                mix_revision=whole_number(content["mix_revision"], below=COUNT_LIMIT),
                since_S=_since(content.get("since"), names, entries),
                bad_S=_bad(content.get("bad"), names),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the mix state is damaged ({error!r}); resume from an earlier checkpoint"
            ) from error


def _version_of(state: Mapping[str, Json]) -> int:
    if "since" in state:
        return SPREAD_VERSION
    return EDITED_VERSION if "edits" in state else STATE_VERSION


def _since(since: Json, names: Sequence[str], entries: "Sequence[_Entry]") -> tuple[int, ...]:
    """Return the amount drawn of each source at the last change of amounts; at most what is drawn of it."""
    if since is None:
        return ()
    if not isinstance(since, dict) or since.keys() != set(names):
        raise ValueError(f"since is {since!r:.200}, the mix has {', '.join(names):.200}")
    return tuple(
        whole_number(since[name], below=entry.drawn + 1)
        for name, entry in zip(names, entries, strict=True)
    )


def _bad(bad: Json, names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of bad records of each source; empty if there are none."""
    if bad is None:
        return ()
    if not isinstance(bad, dict) or not bad or bad.keys() - set(names):
        raise ValueError(f"bad is {bad!r:.200}, the mix has {', '.join(names):.200}")
    counts = {name: whole_number(count, least=1, below=COUNT_LIMIT) for name, count in bad.items()}
    return tuple(counts.get(name, 0) for name in names)


def _require_same(saved: Json, now: Mapping[str, str], step: Json) -> None:
    if not isinstance(saved, dict):
        raise StateError(
            f"the mix state is damaged (its fingerprint is {shown(saved)}); resume from an earlier checkpoint"
        )
    if said := differences(saved, now):
        raise StateError(
            f"the mix is not the one the checkpoint was written with ({'; '.join(said)}); "
            f"resume with the old file, data and tokenizer, or start a new run{_by_edits(saved, now)}"
            f"{_of_other_rows(saved, now, step)}"
        )


def _by_edits(saved: Mapping[str, Json], now: Mapping[str, str]) -> str:
    """Return, as the end of a message, how a run's folder helps with the differences; most users came for this."""
    ways, changed = [], {k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k)}
    # Only digests show what was declared, because a state does not contain the file.
    if any(
        k in ("mix", "pack") or (k.startswith("sources.") and k.count(".") == 1) for k in changed
    ):
        ways.append("tells the keys by `omniload mix diff RUN FILE`")
    edits = []
    if "mix" in changed:
        edits.append("other weights by `omniload mix set`")
    if any(k.endswith(".records") for k in changed):
        edits.append(
            "more files, as a source of their own, by `omniload mix add`, once path names those that were there alone"
        )
    if edits:
        ways.append("takes " + " and ".join(edits))
    return f"; a run with a folder (run_dir=) {', and '.join(ways)}" if ways else ""


def _of_other_rows(saved: Mapping[str, Json], now: Mapping[str, str], step: Json) -> str:
    """Return how a new run can leave out what this run had drawn, if rows, their number or tokens differ."""
    rows = ("pack", "batch.tokens", "tokenizer", "tokenizer.library")
    if all(saved.get(k) == now.get(k) for k in rows):
        return ""
    return (
        f". The state is of step {shown(step)}: a new run leaves out what was drawn before it by the files that "
        f"`omniload mix drawn RUN --step {shown(step)} -o FOLDER` writes, or, of a run without a folder, `omniload mix "
        "drawn OLD_FILE --state STATE.json -o FOLDER`"
    )


def _entries(sources: Json, names: Sequence[str]) -> "list[_Entry]":
    if not isinstance(sources, dict) or sources.keys() != set(names):
        raise ValueError(f"its sources are {sources!r:.200}, the mix has {', '.join(names):.200}")
    return [_Entry.from_json(sources[name]) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The entry of one source in a state."""

    cursor: Cursor
    credit: int
    drawn: int

    @classmethod
    def from_json(cls, entry: Json) -> Self:
        match entry:
            # No further keys, because a key that this release does not know may decide the next draws.
            case {"cursor": cursor, "credit": credit, "drawn": drawn, **rest} if not rest:
                return cls(
                    cursor=cursor_of(cursor),
                    credit=whole_number(credit, least=-COUNT_LIMIT, below=COUNT_LIMIT),
                    drawn=whole_number(drawn, below=COUNT_LIMIT),
                )
            case _:
                raise ValueError(f"{entry!r:.200} is no cursor, credit and amount drawn")


def cursor_of(values: Json) -> Cursor:
    """Return a cursor from JSON.

    Raises:
        ValueError: The value is not three integers, or one of them is out of its range.
    """
    match values:
        case [position, sub, token]:
            return (
                whole_number(position, below=POSITION_LIMIT),
                whole_number(sub, below=SUB_LIMIT),
                whole_number(token, below=TOKEN_LIMIT),
            )
        case _:
            raise ValueError(f"a cursor is three integers, not {shown(values)}")
