"""Dynamic sampling: draws prompts, has them rolled out, and hands out an exact number of useful groups.

::

    loader ──step──▶ prompts ──rollout──▶ rewards ──all-gather──▶ filler ──▶ draw again, or a batch
                        ▲                                            │
                        └──────────────── again ◀────────────────────┘──▶ groups.jsonl, then each rank's groups
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from typing import Any, assert_never

from omniload.base.concurrency.turns import EachBatch, ask_in_turn
from omniload.base.errors import ConfigError, StateError
from omniload.base.state import Json, JsonObject
from omniload.front.arguments import require_finite, require_whole, timeout_from
from omniload.front.sampling.exchange import (
    END,
    Decisions,
    Exchange,
    JsonExchange,
    Kind,
    event_of,
    exchange_for,
    exchange_of_peers,
    passed_on,
    report_of,
    shown_by,
)
from omniload.front.sampling.values import (
    Group,
    GroupBatch,
    Prompt,
    PromptLoader,
    Rollout,
    SamplerState,
    group_from,
    group_json,
    groups_of,
    prompts_of,
    too_few,
)
from omniload.machine.groups.filler import (
    BatchBegun,
    Command,
    DrawPrompts,
    Event,
    Filler,
    Filling,
    GiveUp,
    GroupCounts,
    HandOut,
    NoMore,
    PromptKey,
    Waiting,
)
from omniload.mix.journal.groups import BatchDecision, GroupJournal, Surplus
from omniload.mix.journal.rewards import RewardLog
from omniload.plan.groups.dealing import EVERYBODY

__all__ = ["DynamicSampler", "RoundLimitError"]


class RoundLimitError(ConfigError):
    """This many steps of prompts gave too few groups whose answers differ. Another call draws as many more."""


class DynamicSampler:
    """Batches of groups whose answers differ in reward, over a loader of prompts.

    A group is a prompt and its answers. Groups with equal rewards are left out, and further steps of prompts are drawn
    until a batch is full. A batch has exactly ``groups`` over all ranks, each rank has its share, and every rank draws
    the same number of steps. State and decisions are for whole batches.

    Source:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025), section 3.2.
    """

    def __init__(  # noqa: PLR0913 -- keywords of a call that users make
        self,
        loader: PromptLoader,
        *,
        groups: int,
        max_rounds: int = 10,
        surplus: Surplus = "carry",
        right_above: float = 0.0,
        tolerance: float = 0.0,
        process_group: object = None,
        exchange: Exchange | None = None,
        peers: Exchange | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Sample from a loader. Every rank of the loader makes a sampler with the same arguments.

        Args:
            loader: A loader of prompts, one document each: ``omniload.open(..., pack_method="none")``. Only the sampler
                takes its batches.
            groups: Number of groups of a batch, over all ranks.
            max_rounds: Largest number of steps of prompts to draw for a batch.
            surplus: What to do with groups beyond a batch: ``carry`` makes them the first of the next batch, with their
                answers; ``drop`` leaves them out.
            right_above: An answer is right if its reward is above this; it separates all right from all wrong.
            tolerance: Rewards of a group that differ by no more than this are equal.
            process_group: torch's group of the ranks along dp; the job's by default.
            exchange: How ranks exchange values, if not through torch.
            peers: The same for ranks along tp, pp and ep, which share prompts; the first one's answers count.
            timeout: Seconds that ranks wait for the rollout of another.

        Raises:
            ConfigError: An argument is refused, or ranks cannot reach each other.
        """
        if surplus not in ("carry", "drop"):
            raise ConfigError(f"surplus is {surplus!r}; choose among ['carry', 'drop']")
        timeout = timeout_from(timeout)
        self._loader = loader
        self._filling = Filling(
            groups=require_whole("groups", groups, least=1),
            max_rounds=require_whole("max_rounds", max_rounds, least=1),
            surplus=surplus,
            right_above=require_finite("right_above", right_above),
            tolerance=require_finite("tolerance", tolerance, least=0.0),
            num_ranks=loader.num_ranks,
        )
        self._json_exchange = JsonExchange(
            exchange_for(loader.num_ranks, exchange, process_group, timeout), asdict(self._filling)
        )
        peers = exchange_of_peers(loader.peers, peers, timeout)
        self._peers = JsonExchange(peers, asdict(self._filling), sorted(loader.peers))
        self._filler = Filler(filling=self._filling)
        journal = None if loader.run_dir is None else GroupJournal(loader.run_dir)
        # Ranks along tp, pp and ep get the same results; one of them writes.
        self._writes = loader.leads and self._ranks.rank == 0
        self._rewards = RewardLog(loader.run_dir, 0) if loader.run_dir and self._writes else None
        self._decisions = Decisions(
            self._json_exchange, journal, self._filling, writes=self._writes
        )
        self._turn = threading.RLock()
        self._begin(())

    _held: dict[PromptKey, Group]
    """Groups of this rank: those that it rolled out, and those that wait for the next batch."""
    _due: Command | None
    """The next command; none between two batches. After a failed call, the sampler resumes there."""
    # Kept after a failed call, because the loader has advanced and would not give the prompts again.
    _drawn: tuple[Any] | None
    """Drawn rows of prompts whose answers not all ranks know yet, in a tuple; ``(None,)`` if the data has ended."""
    _made: GroupBatch | None
    """A batch that the caller does not have yet; an interrupt may have kept it from the caller."""

    def _begin(self, held: Sequence[Group], made: GroupBatch | None = None) -> None:
        held_groups = {group.prompt.key: group for group in held}
        # One statement, so that an interrupt such as Ctrl-C comes before all of it or after it.
        self._held, self._due, self._drawn, self._made = held_groups, None, None, made

    def _go_on(self, event: Event) -> None:
        """Apply an event to the filler, completely, or not at all if it is refused or interrupted."""
        filler = deepcopy(self._filler)
        due = filler.handle(event)
        # Also one statement. While a rank may have failed, the same prompts are rolled out again.
        self._filler, self._due, self._drawn = filler, due, None

    @property
    def _ranks(self) -> Exchange:
        return self._json_exchange.exchange

    @property
    def next_batch_number(self) -> int:
        """Number of the next batch, from 0."""
        filled = self._due.decision if isinstance(self._due, HandOut) else self._filler
        return filled.batch if self._made is None else self._made.number

    @property
    def counts(self) -> dict[str, GroupCounts]:
        """Groups of each source so far, over all ranks: drawn, and their outcomes."""
        names = self._loader.source_names
        return {
            names[number]: replace(each) for number, each in sorted(self._filler.counts.items())
        }

    def next_batch(self, rollout: Rollout | None = None) -> GroupBatch | None:
        """Return this rank's groups of the next batch, ``None`` when the data has ended before it was full.

        All ranks call this and return together: an error on one rank is raised on all. You may repeat the call after an
        error; it continues with the same prompts.

        Args:
            rollout: Turns this rank's prompts of a step into the rewards of their answers; not called without prompts.
                Without a rollout, the batch is replayed from the run's folder: the same prompts, without rewards, and
                ``None`` after the last batch there.

        Raises:
            RoundLimitError: ``max_rounds`` steps have given too few groups.
            ConfigError: Rewards have another shape, or are not finite numbers; or prompts are cut.
            StateError: Ranks disagree, or differ from the journal.
            OmniloadError: The loader or another rank has failed.
        """
        return ask_in_turn(self._turn, None, partial(self._next_batch, rollout))

    def _next_batch(
        self, rollout: Rollout | None, _: float | None, take_back: list[Callable[[], None]]
    ) -> GroupBatch | None:
        if self._made is None:
            self._fill(rollout)
        made = self._made

        def back() -> None:
            self._made = made

        take_back.append(back)
        self._made = None
        return made

    def _fill(self, rollout: Rollout | None) -> None:
        """Make the next batch, if there is one."""
        if self._due is None:
            self._decisions.replayed = None
            # All ranks look it up, or none does: it is an exchange, and the first rank reads for all.
            if rollout is None and not self._decisions.find(self._filler.batch):
                return
            self._require_fit()
            self._go_on(BatchBegun())
        while self._due is not None:
            match self._due:
                case DrawPrompts():
                    self._go_on(self._rolled_out(rollout))
                    self._forget_left_out()
                case HandOut():
                    self._hand_out(self._due)
                case GiveUp():
                    # If the same call is made again, it continues to draw from here.
                    given_up, self._due = self._due, DrawPrompts()
                    at = self._filler.batch, self._filling.groups
                    raise RoundLimitError(too_few(given_up, *at, self._loader.source_names))
                case NoMore():
                    self._pass_on(self._due.carried, "", lambda: None)
                    self._begin([self._held[group.key] for group in self._due.carried])
                case _:
                    assert_never(self._due)

    def batches(self, rollout: Rollout | None = None) -> Iterator[GroupBatch]:
        """Return the batches until the data ends; see ``next_batch``. After an error, ``next`` repeats the call."""
        return EachBatch(lambda: self.next_batch(rollout))

    def state_dict(self) -> JsonObject:
        """Return the state after the batches handed out, including the loader's state; the same on every rank.

        Raises:
            StateError: A batch is being filled.
        """
        if self._due is not None or self._made is not None:
            raise StateError(
                f"batch {self.next_batch_number} is being filled; take the state between batches, or keep the last one"
            )
        filler = self._filler
        return SamplerState(
            batch=filler.batch,
            waiting=tuple(self._held[group.key] for group in filler.waiting),
            counts=filler.counts,
            rounds=tuple(filler.rounds),
            answers=filler.answers,
            loader=self._loader.state_dict(),
        ).as_json()

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Continue where ``state`` was taken, on any number of ranks; the loader's part is loaded into the loader.

        Raises:
            StateError: It is not the state of a sampler, or is damaged.
        """
        found = SamplerState.of(state)
        # The loader comes first: if it refuses the state, the sampler stays where it is.
        self._loader.load_state_dict(found.loader)
        waiting = [
            # Every rank has these groups from the state, so none must be sent to the rank that trains on it.
            Waiting(group.prompt.key, EVERYBODY, group.prompt.digest())
            for group in found.waiting
        ]
        self._filler = Filler(
            filling=self._filling,
            batch=found.batch,
            waiting=waiting,
            counts=dict(found.counts),
            rounds=list(found.rounds),
            answers=dict(found.answers),
        )
        self._decisions.forget()
        self._begin(found.waiting)

    def _rolled_out(self, rollout: Rollout | None) -> Event:
        """Draw a step, have its prompts rolled out, and return the reports of all ranks."""
        judged = self._decisions.judged(len(self._filler.rounds))
        if judged is None and rollout is None:
            raise StateError(
                f"batch {self._filler.batch} is being filled by a rollout; give it again"
            )

        def report() -> Mapping[str, Any]:
            # Drawn once: if the rollout fails and the call is repeated, it continues with these prompts.
            if self._drawn is None:
                self._drawn = (self._loader.next_batch(),)
            (rows,) = self._drawn
            if rows is None:
                return END
            prompts = prompts_of(rows, self._loader.source_names)
            if judged is not None or rollout is None:
                groups = [Group(prompt=prompt, rewards=None) for prompt in prompts]
            else:
                groups = self._answered(prompts, rollout) if prompts else []
            self._held |= {group.prompt.key: group for group in groups}
            return report_of(rows.step, groups)

        kind: Kind = "round" if judged is None else "replayed round"
        return event_of(self._json_exchange.gather(kind, self._filler.batch, report), judged)

    def _answered(self, prompts: list[Prompt], rollout: Rollout) -> list[Group]:
        """Return groups with the answers of the first of the ranks that share these prompts.

        All of them call the rollout, as they may have to do it together; own answers would lead to different batches.
        """
        groups: list[Group] = []

        def part() -> Mapping[str, Any]:
            given = rollout(prompts)
            if not self._peers.exchange.rank:
                groups[:] = groups_of(prompts, given)
            sent = () if self._peers.exchange.size == 1 else groups
            return {"groups": list(map(group_json, sent))}

        first, *_ = self._peers.gather("answers", self._filler.batch, part)
        return groups or [group_from(each) for each in first["groups"]]

    def _forget_left_out(self) -> None:
        """Drop the groups that are left out, because answers are long."""
        if isinstance(self._due, DrawPrompts):
            waiting = {group.key for group in self._filler.waiting}
            self._held = {key: group for key, group in self._held.items() if key in waiting}

    def _require_fit(self) -> None:
        """Refuse changed ranks, and groups that a replay left without rewards."""
        if self._loader.num_ranks != self._ranks.size:
            raise ConfigError(
                f"the loader is of {self._loader.num_ranks} ranks now, and the sampler of {self._ranks.size}; make "
                "another on all ranks, and load the state of this one"
            )
        lacking = sum(self._held[group.key].rewards is None for group in self._filler.waiting)
        if lacking and self._decisions.replayed is None:
            raise StateError(
                f"{lacking} groups that wait come from a replay, which has no rewards; load a state of the run, or "
                "sample with surplus='drop', to go on with rollouts"
            )

    def _hand_out(self, due: HandOut) -> None:
        """Keep the decision, send groups to the ranks that train on them, and make a batch of this rank's groups."""
        me, decision = self._ranks.rank, due.decision
        # Groups move between ranks because ranks train on even shares, but roll out uneven numbers of useful groups.
        going = [
            group for group, rank in zip(due.groups, due.ranks, strict=True) if group.owner != rank
        ]
        # One exchange serves both purposes: after it, the decision is durable, and no group is trained on earlier.
        # Waiting groups are sent to every rank, because each rank's state contains them and any number of ranks may
        # continue from it.
        sent = *going, *due.carried
        self._pass_on(sent, decision.digest, lambda: self._decisions.settle(decision))
        if self._decisions.replayed is None and self._writes:
            self._note(decision)
        mine = [
            self._held[group.key]
            for group, rank in zip(due.groups, due.ranks, strict=True)
            if rank == me
        ]
        made = GroupBatch(
            number=decision.batch,
            groups=tuple(mine),
            total=len(due.groups),
            rounds=len(decision.rounds),
            digest=decision.digest,
        )
        self._begin([self._held[group.key] for group in due.carried], made)

    def _note(self, decision: BatchDecision) -> None:
        """Note the results of a batch's rounds, for policies and figures."""
        found = shown_by(decision, self._loader.source_names)
        if self._rewards is not None and decision.rounds:
            self._rewards.add(decision.rounds[-1].step, found)

    def _pass_on(self, groups: Sequence[Waiting], digest: str, settle: Callable[[], None]) -> None:
        """Exchange the groups of ranks, once each rank has made its decision durable."""
        me, batch = self._ranks.rank, self.next_batch_number

        def part() -> Mapping[str, Any]:
            settle()
            sent = [group_json(self._held[group.key]) for group in groups if group.owner == me]
            return {"groups": sent, "digest": digest}

        sent = passed_on(self._json_exchange.gather("groups", batch, part), batch)
        self._held |= {group.prompt.key: group for group in sent}
