"""The state of a sampler: what waits, what was counted, and the state of its loader, as one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject, require_version, sealed, unsealed, whole_number
from omniload.front.sampling.values import Group, group_from, group_json
from omniload.machine.groups.filler import GroupCounts
from omniload.mix.journal.groups import Answers, RoundDecision, answers_json, answers_of

__all__ = ["SamplerState"]

_VERSION = 1
_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Where a sampler stands between two batches: the same on every rank, for any number of them."""

    batch: int
    """The batch that comes next."""
    waiting: tuple[Group, ...]
    counts: Mapping[int, GroupCounts]
    rounds: tuple[RoundDecision, ...]
    """Of a batch that the end of the data left half full."""
    answers: Mapping[int, Answers]
    """Of those rounds, by number of the source."""
    loader: JsonObject

    def as_json(self) -> JsonObject:
        """Return it as plain JSON, with a digest of itself."""
        return sealed(
            {
                "version": _VERSION,
                "batch": self.batch,
                "waiting": [group_json(group) for group in self.waiting],
                "counts": {str(number): asdict(each) for number, each in self.counts.items()},
                "rounds": [each.as_json() for each in self.rounds],
                "answers": answers_json(self.answers),
                "loader": self.loader,
            }
        )

    @classmethod
    def of(cls, state: object) -> "SamplerState":
        """Read a state.

        Raises:
            StateError: It is none, of another version, or damaged.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                f"the state of a sampler is of type {type(state).__name__}; hand over what its state_dict() returned"
            )
        if "loader" not in state:
            raise StateError(
                f"the state has {_shown(list(state))} and no loader: it is none of a sampler; hand over what its "
                "state_dict() returned, which holds that of its loader"
            )
        require_version(state, _VERSION, of="sampler")
        content: dict[str, Any] = unsealed(state, of="the state of a sampler")
        try:
            found = cls(
                batch=whole_number(content["batch"], below=_LIMIT),
                waiting=tuple(group_from(each) for each in content["waiting"]),
                counts={
                    int(number): _counts_of(each) for number, each in content["counts"].items()
                },
                rounds=tuple(map(RoundDecision.of, content["rounds"])),
                answers=answers_of(content["answers"]),
                loader=dict(content["loader"]),
            )
            found.require_whole()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StateError(
                f"the state of a sampler is damaged ({error!r:.160}); resume from an earlier checkpoint"
            ) from error
        return found

    def require_whole(self) -> None:
        """Refuse counts that are not of the groups.

        Raises:
            ValueError: A group waits twice, or is not counted.
        """
        keys = [group.prompt.key for group in self.waiting]
        if len(set(keys)) < len(keys):
            raise ValueError("a group waits twice")
        for number in {key[0] for key in keys} | self.counts.keys():
            counts = self.counts[number]
            waiting = sum(key[0] == number for key in keys)
            if not counts.is_whole() or counts.waiting != waiting:
                raise ValueError(f"{waiting} groups of source {number} wait, counted as {counts}")


def _counts_of(found: Mapping[str, Json]) -> GroupCounts:
    return GroupCounts(
        *(whole_number(found[each.name], below=_LIMIT) for each in fields(GroupCounts))
    )


def _shown(keys: Sequence[object]) -> str:
    return f"the keys {sorted(map(str, keys))[:8]}" if keys else "no key"
