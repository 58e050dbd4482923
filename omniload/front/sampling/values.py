"""Prompts and groups of answers as a loop takes them, and as JSON between ranks and in a state.

Shape suffixes:
    T  tokens of a prompt        G  answers of a group        V  values of its scores
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import Json, JsonObject, require_version, sealed, unsealed, whole_number
from omniload.front.batches.rows import PackedRows
from omniload.machine.groups.filler import GiveUp, GroupCounts, PromptKey
from omniload.mix.columns import TEXT
from omniload.mix.journal.groups import Answers, RoundDecision, answers_json, answers_of
from omniload.plan.groups.verdicts import checked_rewards

__all__ = [
    "Group",
    "GroupBatch",
    "Prompt",
    "PromptLoader",
    "Rollout",
    "Rollouts",
    "SamplerState",
    "group_from",
    "group_json",
    "groups_of",
    "prompts_of",
    "too_few",
]

_LIMIT = 1 << 62
_VERSION = 1
_SHOWN = 8
"""Most sources named in a message."""


def _no_scores() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


# Compared by identity, because the comparison of arrays in a dataclass's ``__eq__`` has no single truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A document for which answers are generated."""

    source: str
    """Name of the prompt's source."""
    key: PromptKey
    """Number of the source, position in its order, and sub; unique within a run."""
    tokens: NDArray[np.int32]
    """Tokens of the prompt, ``[T]``, without padding."""
    scores: NDArray[np.float32] = field(default_factory=_no_scores)
    """Column ``scores`` of the prompt, ``[V]``, if ``batch.columns`` of the mix names it: an expected answer, or the
    index of a table row with the answer."""
    text: str = ""
    """Column ``text`` of the prompt, if ``batch.columns`` of the mix names it."""

    def digest(self) -> str:
        """Return a digest of its tokens."""
        # In a fixed byte order, whatever the host's, because digests of ranks are compared.
        data = np.ascontiguousarray(self.tokens, "<i4").tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """A prompt and its answers."""

    prompt: Prompt
    rewards: NDArray[np.float64] | None
    """Reward of each answer, ``[G]``; ``None`` in a replay."""
    answers: tuple[NDArray[np.int64], ...] | None = None
    """Tokens of each answer, if the rollout returned them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Result of a rollout that returns answers in addition to rewards."""

    rewards: Any
    """Reward of each answer of each prompt ``[N, G]``: a list, an array, or a tensor on any device."""
    answers: Sequence[Sequence[Any]] | None = None
    """Token ids of the answers: for each prompt, for each answer, a sequence of integers. They come with the groups of
    the batch, also from other ranks and earlier rounds, and a state holds those of waiting groups."""


Rollout = Callable[[list[Prompt]], Any]
"""From prompts to ``Rollouts``, or to rewards ``[N, G]`` alone."""


class PromptLoader(Protocol):
    """What is asked of a ``Loader``."""

    source_names: tuple[str, ...]
    run_dir: Path | None
    num_ranks: int
    peers: tuple[int, ...]
    leads: bool

    def next_batch(self) -> Any:  # noqa: ANN401 -- a TrainingBatch, or what has its step and pieces
        """Return the prompts of the next step, ``None`` when the data has ended."""
        ...

    def state_dict(self) -> JsonObject:
        """Return the state after the batches handed out."""
        ...

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Continue where a state was taken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """This rank's groups of a batch."""

    number: int
    """Number of the batch, from 0."""
    groups: tuple[Group, ...]
    """Groups that this rank trains on. The numbers of two ranks differ by at most one."""
    total: int
    """Groups of the batch over all ranks."""
    rounds: int
    """Steps of prompts that were drawn for the batch."""
    digest: str
    """Digest of the prompts of the whole batch, in order: the same on every rank, in a resume and in a replay."""

    def __len__(self) -> int:
        return len(self.groups)

    @override
    def __repr__(self) -> str:
        return f"GroupBatch(number={self.number}, groups={len(self)} of {self.total}, rounds={self.rounds})"


def prompts_of(rows: PackedRows, names: Sequence[str]) -> list[Prompt]:
    """Return the documents of a batch as prompts.

    Raises:
        ConfigError: A document was cut, or cp peers share the rows.
    """
    found = []
    for piece in rows.pieces():
        source, position, sub, first = piece.key
        if first:
            raise ConfigError(
                f"a prompt of {names[source]} was cut: a piece begins at its token {first}; open the mix with "
                "pack: {method: none, overlong: drop}, and rows as long as a prompt may be"
            )
        found.append(
            Prompt(
                source=names[source],
                key=(source, position, sub),
                tokens=piece.tokens,
                scores=piece.columns.get("scores", _no_scores()),
                text=bytes(piece.columns.get(TEXT, b"")).decode(),
            )
        )
    return found


def groups_of(prompts: Sequence[Prompt], given: object) -> list[Group]:
    """Return the prompts with their rollout's results.

    Raises:
        ConfigError: Rewards or answers do not fit these prompts.
    """
    rollouts = given if isinstance(given, Rollouts) else Rollouts(rewards=given)
    rewards_NG = checked_rewards(rollouts.rewards, len(prompts))
    answers_NG = _checked_answers(rollouts.answers, rewards_NG.shape)
    return [
        Group(prompt=prompt, rewards=rewards_G, answers=answers)
        for prompt, rewards_G, answers in zip(prompts, rewards_NG, answers_NG, strict=True)
    ]


def _checked_answers(
    given: Sequence[Sequence[Any]] | None, shape: tuple[int, ...]
) -> list[tuple[NDArray[np.int64], ...] | None]:
    num_prompts, num_answers = shape
    if given is None:
        return [None] * num_prompts
    counts = [len(each) for each in given]
    if counts != [num_answers] * num_prompts:
        raise ConfigError(
            f"answers are {counts!r:.80} of {len(counts)} prompts, and rewards {list(shape)}; give the token ids of "
            "each answer, for each prompt, as many as rewards"
        )
    return [tuple(_token_ids(answer) for answer in each) for each in given]


def _token_ids(answer: Any) -> NDArray[np.int64]:  # noqa: ANN401
    held = answer.detach().cpu() if hasattr(answer, "detach") else answer
    try:
        found = np.asarray(held)
    except ValueError as error:
        raise ConfigError(f"an answer is no sequence of token ids ({error!s:.80})") from error
    # An empty list becomes an array of floats: without a token it has no type.
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"an answer has shape {list(found.shape)} of {found.dtype}; give token ids, [T] of integers, without "
            "padding"
        )
    return found.astype(np.int64)


def group_json(group: Group) -> JsonObject:
    """Return a group as JSON."""
    prompt, rewards, answers = group.prompt, group.rewards, group.answers
    return {
        "source": prompt.source,
        "key": list(prompt.key),
        "tokens": prompt.tokens.tolist(),
        "scores": prompt.scores.tolist(),
        "text": prompt.text,
        "rewards": None if rewards is None else rewards.tolist(),
        "answers": None if answers is None else [answer.tolist() for answer in answers],
    }


def group_from(found: Any) -> Group:  # noqa: ANN401 -- JSON of another process
    """Return the group that ``group_json`` has written.

    Raises:
        ValueError: The object is no group.
        KeyError: A part is missing.
        TypeError: A part has the wrong type.
    """
    source, key, rewards, answers = (found[n] for n in ("source", "key", "rewards", "answers"))
    if not isinstance(source, str) or len(key) != 3:
        raise ValueError(f"a group of source {source!r:.40} with key {key!r:.60}")
    number, position, sub = (whole_number(part, below=_LIMIT) for part in key)
    held = None
    if rewards is not None:
        held = np.asarray(rewards, np.float64)
        # A single answer differs from no other, and yields no advantage.
        if held.ndim != 1 or len(held) < 2 or not np.isfinite(held).all():
            raise ValueError(f"rewards {rewards!r:.80} of a group")
    if answers is not None and (held is None or len(answers) != len(held)):
        raise ValueError(f"{len(answers)} answers of a group without as many rewards")
    return Group(
        prompt=Prompt(
            source=source,
            key=(number, position, sub),
            tokens=_integers(found["tokens"], np.int32),
            scores=np.asarray(found["scores"], np.float32).reshape(-1),
            # A state of an earlier release has none.
            text=str(found.get("text", "")),
        ),
        rewards=held,
        answers=None if answers is None else tuple(_integers(each, np.int64) for each in answers),
    )


def _integers(found: Any, dtype: type[np.integer[Any]]) -> NDArray[Any]:  # noqa: ANN401
    held = np.asarray(found if isinstance(found, list) else [found])
    if held.ndim != 1 or (held.size and held.dtype.kind != "i"):
        raise ValueError(f"{held.dtype} of shape {list(held.shape)} where token ids were due")
    limit = np.iinfo(dtype)
    if held.size and not limit.min <= held.min() <= held.max() <= limit.max:
        raise ValueError(f"token ids from {held.min()} to {held.max()}")
    return held.astype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Position of a sampler between two batches: the same on every rank, for any number of ranks."""

    batch: int
    """The next batch."""
    waiting: tuple[Group, ...]
    counts: Mapping[int, GroupCounts]
    rounds: tuple[RoundDecision, ...]
    """Rounds of a batch that the end of the data left half full."""
    answers: Mapping[int, Answers]
    """Answers of those rounds, by number of the source."""
    loader: JsonObject

    def as_json(self) -> JsonObject:
        """Return the state as plain JSON, with a digest of itself."""
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
            StateError: The object is no sampler's state, is of another version, or is damaged.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                f"the state of a sampler is of type {type(state).__name__}; pass the result of its state_dict()"
            )
        if "loader" not in state:
            raise StateError(
                f"the state has {_shown(list(state))} and no loader, so it is not the state of a sampler; pass the "
                "result of its state_dict(), which holds that of its loader"
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
        """Refuse counts that do not match the groups.

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


def too_few(found: GiveUp, batch: int, groups: int, names: Sequence[str]) -> str:
    """Return the message about rounds that gave too few of the ``groups`` of a batch."""
    sources = "; ".join(
        f"{names[number]}: of {counts.drawn} all right {counts.all_right}, all wrong {counts.all_wrong}"
        for number, counts in sorted(found.counts.items())[:_SHOWN]
    )
    return (
        f"{found.rounds} steps of prompts, which is max_rounds, gave {found.drawn} groups, and of the "
        f"{groups} of batch {batch} there are {found.kept} (so far {sources}); choose "
        "prompts that are answered rightly now and then, draw more of them in a step (batch.tokens of the mix), "
        "ask for fewer groups, or raise max_rounds"
    )
