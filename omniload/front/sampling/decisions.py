"""Decisions on batches as the first rank keeps them in the run's folder, and tells them to all in a replay."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.metrics import GROUPS_JUDGED
from omniload.front.sampling.exchange import Together
from omniload.machine.groups.filler import Filling
from omniload.mix.journal.groups import BatchDecision, GroupJournal, RoundDecision, decision_of
from omniload.mix.journal.rewards import SourceRewards
from omniload.plan.groups.verdicts import ALL_RIGHT, ALL_WRONG, KEPT

__all__ = ["Decisions", "shown_by"]

_VERDICTS = {KEPT: "kept", ALL_RIGHT: "all_right", ALL_WRONG: "all_wrong"}


class Decisions:
    """What was decided on batches, told to all ranks alike by the first one, which reads it and may write it."""

    def __init__(
        self, together: Together, journal: GroupJournal | None, filling: Filling, *, writes: bool
    ) -> None:
        self._together, self._journal, self._filling = together, journal, filling
        self._writes = writes
        self._kept: Iterator[BatchDecision] | None = None
        self._expected = 0
        """Batch of the decision that ``_kept`` yields next."""
        self.replayed: BatchDecision | None = None
        """What was decided before on the batch that is gone through again; ``None`` where rewards decide."""

    def find(self, batch: int) -> bool:
        """Look up what was decided on a batch; on all ranks.

        Returns:
            Whether there is a decision: no batch was handed out after the last of them.

        Raises:
            ConfigError: The run keeps nothing, or was filled by other settings.
            OmniloadError: What is kept cannot be read.
        """
        told = self._together.gather("journal", batch, lambda: self._told(batch))
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
        """Return what was said of a round of the batch that is gone through again; ``None`` where there is none.

        Raises:
            IntegrityError: The batch took fewer rounds.
        """
        if self.replayed is None:
            return None
        if round_ >= len(self.replayed.rounds):
            raise IntegrityError(
                f"batch {self.replayed.batch} was full after {len(self.replayed.rounds)} rounds, and is not now; begin "
                "the replay where the run began, or from a state of it"
            )
        return self.replayed.rounds[round_]

    def settle(self, decision: BatchDecision) -> None:
        """Keep a decision, or compare it with the one of then.

        Raises:
            IntegrityError: The batch has other prompts than it had.
            OmniloadError: It cannot be kept.
        """
        then = self.replayed
        if then is not None:
            if (then.digest, len(then.rounds)) != (decision.digest, len(decision.rounds)):
                raise IntegrityError(
                    f"batch {decision.batch} has digest {decision.digest} after {len(decision.rounds)} rounds, and had "
                    f"{then.digest} after {len(then.rounds)}; the data has changed, or the state is of another run"
                )
        elif self._journal is not None and self._writes:
            # The journal is longer by this line: what is being read of it ends before.
            self._kept = None
            self._journal.append(decision)

    def forget(self) -> None:
        """Look up what comes next anew: the sampler goes on elsewhere."""
        self._kept = None

    def _told(self, batch: int) -> Mapping[str, Any]:
        if self._together.exchange.rank:
            return {}
        if self._journal is None:
            raise ConfigError(
                "there is no rollout, and the loader keeps no run to go through again; give next_batch a rollout, or "
                "omniload.open the run_dir of a run"
            )
        if self._kept is None or self._expected != batch:
            self._kept = self._journal.since(batch)
        found = next(self._kept, None)
        self._expected = batch + 1
        return {"line": None if found is None else found.line().decode()}


def shown_by(decision: BatchDecision, names: Sequence[str]) -> dict[str, SourceRewards]:
    """Return what the rounds of a batch showed of each source, by name, and count it for Prometheus."""
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
