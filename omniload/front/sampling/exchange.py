"""How ranks exchange the results of their rollouts: all of them make one call, and all get the same result.

Each rank gives its part, or its reason for having none, and then all ranks continue or all fail. The parts of a round
are the rewards of each rank's prompts; together they form the event for the filler of batches. The first rank keeps the
decision on a batch in the run's folder, and passes it to all ranks in a replay.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.metrics import GROUPS_JUDGED
from omniload.base.units import counted
from omniload.front.meeting import Failure
from omniload.front.openers import torch_part
from omniload.front.sampling.values import Group, group_from
from omniload.machine.groups.filler import DataEnded, Event, Filling, RoundReplayed, RoundReported
from omniload.mix.journal.groups import BatchDecision, GroupJournal, RoundDecision, decision_of
from omniload.mix.journal.rewards import SourceRewards
from omniload.plan.groups.verdicts import ALL_RIGHT, ALL_WRONG, KEPT

__all__ = [
    "END",
    "AloneExchange",
    "Decisions",
    "Exchange",
    "JsonExchange",
    "Kind",
    "event_of",
    "exchange_for",
    "exchange_of_peers",
    "passed_on",
    "report_of",
    "shown_by",
]

Kind = Literal["round", "replayed round", "journal", "groups", "answers"]
"""What is exchanged: rewards of a step, its prompts alone, what was decided before, groups that go to other ranks, and
answers to prompts that several ranks share."""
END: Mapping[str, Any] = {"step": None}
"""Report of a rank whose data has ended."""
_FEWEST_ANSWERS = 2
_VERDICTS = {KEPT: "kept", ALL_RIGHT: "all_right", ALL_WRONG: "all_wrong"}


class Exchange(Protocol):
    """The ranks along dp, over whatever the trainer's ranks speak by."""

    rank: int
    """This rank's number among them, from 0."""
    size: int
    """How many they are."""

    def all_gather(self, part: bytes) -> list[bytes]:
        """Give a part to all ranks, and return every rank's, in their order.

        Raises:
            UnavailableError: A rank does not come in time.
        """
        ...


class AloneExchange(Exchange):
    """Exchange of a single rank, which has no others."""

    rank, size = 0, 1

    @override
    def all_gather(self, part: bytes) -> list[bytes]:
        return [part]


def exchange_for(
    num_ranks: int, exchange: Exchange | None, process_group: object, timeout_s: float
) -> Exchange:
    """Return the exchange of a loader's ranks: the given one, else torch's with a process group, else one rank's.

    Raises:
        ConfigError: There is no exchange for these ranks, or it is of other ranks.
        UnavailableError: The other ranks do not come.
    """
    if exchange is None:
        exchange = _found(num_ranks, process_group, timeout_s)
    if exchange.size != num_ranks:
        raise ConfigError(
            f"the loader is of {counted(num_ranks, 'rank')} along dp, and the exchange among {exchange.size}; give the "
            'group of those that take other samples, process_group=mesh.get_group("dp")'
        )
    return exchange


def _found(num_ranks: int, process_group: object, timeout_s: float) -> Exchange:
    if num_ranks == 1 and process_group is None:
        return AloneExchange()
    # Looked up and not imported: if torch is not loaded, it has no group.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise ConfigError(
            f"the loader is of {counted(num_ranks, 'rank')}, and there is no process group of torch for them to agree "
            "by; call init_process_group first, or give exchange="
        )
    found: Exchange = torch_part("exchange_of")(process_group, timeout_s)
    return found


def exchange_of_peers(
    ranks: Sequence[int], exchange: Exchange | None, timeout_s: float
) -> Exchange:
    """Return the exchange of ranks that share their prompts: the one given, torch's, or of one rank.

    Raises:
        ConfigError: It is of other ranks.
        UnavailableError: The other ranks do not come.
    """
    if exchange is None:
        found: Exchange = (
            torch_part("exchange_among")(ranks, timeout_s) if ranks else AloneExchange()
        )
        return found
    if ranks and exchange.size != len(ranks):
        raise ConfigError(
            f"{counted(len(ranks), 'rank')} along tp, pp and ep share their prompts, and peers= is among "
            f"{exchange.size}; give the exchange of those, {list(ranks)}"
        )
    return exchange


@dataclass(frozen=True, slots=True)
class JsonExchange:
    """Exchanges JSON objects among ranks that sample with the same settings."""

    exchange: Exchange
    settings: Mapping[str, Any]
    """Arguments that all ranks are to have given alike: by others they would come to other batches, each by itself."""
    ranks: Sequence[int] = ()
    """Numbers of the ranks in the job, for messages; by default their places."""

    def gather(
        self, kind: Kind, batch: int, make: Callable[[], Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Make this rank's part, and return all ranks' parts.

        No rank waits for a rank that fails: its error is sent in place of its part.

        Args:
            kind: Kind of the exchange.
            batch: Batch that the exchange belongs to.
            make: Makes the part.

        Raises:
            OmniloadError: Another rank has failed; names its number and message.
            ConfigError: The samplers of the ranks have different arguments.
            StateError: Ranks are not at the same batch, or exchange different things.
            Exception: The error that ``make`` raised.
        """
        failed: Exception | None = None
        try:
            part = orjson.dumps(
                # The kind is sent along because an all-gather combines the parts of ranks wherever each rank is.
                {"kind": kind, "batch": batch, "settings": self.settings, "part": make()},
                option=orjson.OPT_SERIALIZE_NUMPY,
            )
        except Exception as error:  # noqa: BLE001 -- raised below, once the others know
            failed = error
            part = Failure.of(error).model_dump_json().encode()
        parts = self.exchange.all_gather(part)
        if failed is not None:
            raise failed
        return [self._checked(place, part, kind, batch) for place, part in enumerate(parts)]

    def _checked(self, place: int, part: bytes, kind: Kind, batch: int) -> Mapping[str, Any]:
        names = self.ranks or range(self.exchange.size)
        rank, me = names[place], names[self.exchange.rank]
        try:
            found = orjson.loads(part)
            if "failed" in found:
                raise Failure.model_validate(found).error(rank)
            told: Mapping[str, Any] = found["part"]
            theirs = {name: found["settings"][name] for name in self.settings}
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"rank {rank} sent {part[:60]!r}, which is no part of an exchange ({error!r:.80}); install one release "
                "on all ranks"
            ) from error
        if theirs != self.settings:
            others = {name: each for name, each in theirs.items() if each != self.settings[name]}
            mine = {name: self.settings[name] for name in others}
            raise ConfigError(
                f"the sampler of rank {rank} has {others}, and that of rank {me} {mine}; give all "
                "ranks the same, groups= those over all ranks"
            )
        if (found["kind"], found["batch"]) != (kind, batch):
            raise StateError(
                f"rank {rank} gives the {found['kind']} of batch {found['batch']}, and rank {me} the "
                f"{kind} of batch {batch}; ask for every batch on all ranks, all with a rollout or all without, and "
                "load one state on all"
            )
        return told


def report_of(step: int, groups: Sequence[Group]) -> Mapping[str, Any]:
    """Return a rank's report on its groups."""
    return {
        "step": step,
        "keys": [group.prompt.key for group in groups],
        "digests": [group.prompt.digest() for group in groups],
        "rewards": [group.rewards for group in groups if group.rewards is not None],
    }


def event_of(reports: Sequence[Mapping[str, Any]], judged: RoundDecision | None) -> Event:
    """Return the reports of all ranks, in their order, as one event.

    Args:
        reports: Results of ``report_of``, or ``END``.
        judged: Earlier decision on the step; ``None`` if rewards decide it now.

    Raises:
        StateError: Ranks are at other steps.
        ConfigError: Ranks rolled out different numbers of answers.
    """
    steps = [report["step"] for report in reports]
    if set(steps) == {None}:
        return DataEnded()
    if len(set(steps)) > 1:
        raise StateError(
            f"ranks drew the steps {steps!r:.120} for one round (None: the data has ended); let the sampler alone "
            "take batches of its loader, and load one state on all ranks"
        )
    keys = [key for report in reports for key in report["keys"]]
    numbers = [len(report["keys"]) for report in reports]
    shared = {
        "step": steps[0],
        # Also needed without prompts, because an empty list has no second axis.
        "keys_N3": np.array(keys, np.int64).reshape(-1, 3),
        "owners_N": np.repeat(np.arange(len(reports)), numbers),
        "digests": [digest for report in reports for digest in report["digests"]],
    }
    if judged is not None:
        return RoundReplayed(judged=judged, **shared)
    return RoundReported(rewards_NG=_joined(reports), **shared)


def _joined(reports: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    answers = {
        rank: len(report["rewards"][0]) for rank, report in enumerate(reports) if report["rewards"]
    }
    if len(set(answers.values())) > 1:
        raise ConfigError(
            f"rollouts gave other numbers of answers of a prompt, by rank {answers!r:.120}; give as many on all ranks"
        )
    rewards = [rewards_G for report in reports for rewards_G in report["rewards"]]
    # If no rank has a prompt, the array still needs a width.
    most = max(answers.values(), default=_FEWEST_ANSWERS)
    return np.array(rewards, np.float64).reshape(-1, most)


def passed_on(parts: Sequence[Mapping[str, Any]], batch: int) -> list[Group]:
    """Return the groups that ranks sent each other for a batch.

    Args:
        parts: Parts of all ranks: ``groups`` as made by ``group_json``, and ``digest`` of the batch on that rank.
        batch: Number of the batch.

    Raises:
        StateError: Ranks have arrived at different batches.
    """
    digests = [part["digest"] for part in parts]
    # Each rank has computed the batch by itself, and would train on its own version.
    if len(set(digests)) > 1:
        raise StateError(
            f"batch {batch} has other groups on other ranks: its digests are {digests!r:.160}; load one state on all "
            "ranks"
        )
    return [group_from(each) for part in parts for each in part["groups"]]


class Decisions:
    """Decisions on batches, passed to all ranks by the first rank, which reads them and may write them."""

    def __init__(
        self,
        exchange: JsonExchange,
        journal: GroupJournal | None,
        filling: Filling,
        *,
        writes: bool,
    ) -> None:
        self._json_exchange, self._journal, self._filling = exchange, journal, filling
        self._writes = writes
        self._kept: Iterator[BatchDecision] | None = None
        self._expected = 0
        """Batch of the decision that ``_kept`` yields next."""
        self.replayed: BatchDecision | None = None
        """Earlier decision on the batch that is replayed; ``None`` if rewards decide."""

    def find(self, batch: int) -> bool:
        """Look up the decision on a batch; on all ranks.

        Returns:
            Whether there is a decision. If not, no batch was handed out after the last decision.

        Raises:
            ConfigError: The run keeps no decisions, or it was filled with other settings.
            OmniloadError: The journal cannot be read.
        """
        told = self._json_exchange.gather("journal", batch, lambda: self._told(batch))
        line = told[0]["line"]
        if line is None:
            return False
        found = decision_of(line.encode(), "what rank 0 tells")
        mine = (self._filling.groups, self._filling.surplus)
        if (found.groups, found.surplus) != mine:
            raise ConfigError(
                f"batch {batch} of the run has {found.groups} groups with surplus {found.surplus!r}, this sampler "
                f"{mine[0]} with {mine[1]!r}; replay it with the groups and the surplus that it was filled with"
            )
        self.replayed = found
        return True

    def judged(self, round_: int) -> RoundDecision | None:
        """Return the decision on a round of the replayed batch; ``None`` without a replay.

        Raises:
            IntegrityError: The batch took fewer rounds.
        """
        if self.replayed is None:
            return None
        if round_ >= len(self.replayed.rounds):
            raise IntegrityError(
                f"batch {self.replayed.batch} was full after {counted(len(self.replayed.rounds), 'round')}, and is not "
                "now; begin the replay where the run began, or from a state of it"
            )
        return self.replayed.rounds[round_]

    def settle(self, decision: BatchDecision) -> None:
        """Keep a decision, or compare it with the earlier one.

        Raises:
            IntegrityError: The batch has other prompts than before.
            OmniloadError: The decision cannot be kept.
        """
        # A replay only compares, because the journal already has the decision.
        then = self.replayed
        if then is not None:
            if (then.digest, len(then.rounds)) != (decision.digest, len(decision.rounds)):
                raise IntegrityError(
                    f"batch {decision.batch} has digest {decision.digest} after "
                    f"{counted(len(decision.rounds), 'round')}, and had {then.digest} after {len(then.rounds)}; the "
                    "data has changed, or the state is of another run"
                )
        elif self._journal is not None and self._writes:
            # The journal is one line longer now; the read under way ends before that line.
            self._kept = None
            self._journal.append(decision)

    def forget(self) -> None:
        """Forget the position in the journal, because the sampler continues elsewhere."""
        self._kept = None

    def _told(self, batch: int) -> Mapping[str, Any]:
        if self._json_exchange.exchange.rank:
            return {}
        if self._journal is None:
            raise ConfigError(
                "there is no rollout, and the loader keeps no run to go through again; give next_batch a rollout, or "
                "omniload.open the run_dir of a run"
            )
        if self._kept is None or self._expected != batch:
            # The read then continues from there; otherwise each batch would read the whole journal.
            self._kept = self._journal.since(batch)
        found = next(self._kept, None)
        self._expected = batch + 1
        return {"line": None if found is None else found.line().decode()}


def shown_by(decision: BatchDecision, names: Sequence[str]) -> dict[str, SourceRewards]:
    """Return the results of a batch's rounds for each source, by name, and count them for Prometheus."""
    found = {
        names[source]: SourceRewards(answers=told.answers, right=told.right)
        for source, told in decision.answers.items()
    }
    for each in decision.rounds:
        for source, verdict in zip(
            each.keys_N3[:, 0].tolist(), each.verdicts_N.tolist(), strict=True
        ):
            of_source = found.setdefault(names[source], SourceRewards())
            of_source.groups += 1
            of_source.kept += verdict == KEPT
            GROUPS_JUDGED.labels(names[source], _VERDICTS[verdict]).inc()
    return found
