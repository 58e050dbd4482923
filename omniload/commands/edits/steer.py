"""``omniload mix steer``: a policy moves the weights of a running run, by the same edits that a user makes."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from omniload.actors.status_file import read_status
from omniload.base.config import load_yaml
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.settings.registry import registered
from omniload.base.state import JsonObject
from omniload.commands.display import emit_json, output, say
from omniload.commands.edits.asking import change_mix
from omniload.commands.edits.at_rest import planned_to
from omniload.commands.edits.pulse import Pulse, said_of_end, while_up
from omniload.commands.edits.untaken import TOLD, untaken_from
from omniload.commands.options import json_option, run_argument
from omniload.mix.edits.edit import MOST_EDITS, SetWeights
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.history import History
from omniload.mix.edits.sources import require_known
from omniload.mix.edits.stages import declared_at
from omniload.mix.journal.bounded import take_from
from omniload.mix.journal.losses import SourceLoss, TurnLosses, losses_by_source
from omniload.mix.journal.rewards import SourceRewards, rewards_by_source, rewards_by_turn
from omniload.mix.policy.rules import GROUP, Turn, decide, seen_at, turns_that_weigh
from omniload.mix.run_record import read_run_record
from omniload.mix.schema.caps import group_fractions_from
from omniload.mix.schema.policies import (
    LossPolicy,
    OdmPolicy,
    PolicyConfig,
    RegisteredPolicy,
    RewardPolicy,
    SteeringConfig,
)

__all__ = ["Steering", "steer"]

_LOOK_S = 1.0
_ANSWER_S = 60.0


@dataclass(slots=True, kw_only=True)
class Steering:
    """Decides for one run, repeatedly."""

    run: Path
    config: SteeringConfig
    losses_from: int = field(init=False, default=0)
    """First step whose losses and rewards no decision has counted."""
    decided_at: int = field(init=False)
    """First step that no rank had at the last decision; the next decision is due ``every`` steps later."""
    _has_decided: bool = field(init=False, default=False)
    _pulse: Pulse = field(init=False)
    _told: TurnLosses | None = field(init=False, default=None)
    """Losses by turns, for a policy that uses losses."""

    def __post_init__(self) -> None:
        """Begin at the run's present step.

        Raises:
            ConfigError: The run draws amounts.
        """
        history = self._history()
        # Refused here and not hours later at the first decision: such a run has no shares for a policy to move.
        if history.latest.mix.amounts is not None:
            raise ConfigError(
                f"{self.run} draws amounts, and a policy moves weights; change amounts by omniload mix set, or start a "
                "run of stages of weights"
            )
        self._pulse = Pulse(self.run)
        step = untaken_from(self.run, planned_to(self.run, history))
        # A run that went back repeats the earlier decisions up to the step it had reached, so none is made twice.
        been_to = max(step, *(take_from(self.run / told, 0, lambda _: None) for told in TOLD))
        with suppress(StateError):  # there is none, and its loop may report nothing
            been_to = max(been_to, read_status(self.run).been_to)
        self.decided_at = max(step, _last_change(history, been_to))

    def look(self, *, now: bool = False) -> JsonObject | None:
        """Make a decision that is due, or wanted ``now``, and have the mix changed if the decision asks for it.

        Returns:
            The decision; ``None`` if none is due, or if nothing was reported to base it on.

        Raises:
            OmniloadError: See ``change_mix`` and ``decide``.
            UnavailableError: A decision is due, and the plane has just died.
        """
        history = self._history()
        if (step := self._step_due(history, now=now)) is None:
            return None
        if not self._has_decided:
            # Reports from before the last change belong to other weights. A change at a later step had no effect yet.
            self.losses_from = _last_change(history, step)
        reported, _ = losses_by_source(self.run, self.losses_from, history.pair_sources, step)
        rewards, _ = rewards_by_source(self.run, self.losses_from, step)
        if isinstance(self.config.policy, LossPolicy) and not any(
            found.labels for found in reported.values()
        ):
            return None
        if isinstance(self.config.policy, RewardPolicy) and not any(
            each.groups for each in rewards.values()
        ):
            return None
        seen = seen_at(history, step, *_means(reported), rewards)
        if isinstance(self.config.policy, OdmPolicy):
            seen = replace(seen, turns=self._turns(self.config.policy, history, step))
            if not seen.turns:
                return None
        shares, decided_for = decide(self.config.policy, seen, *_caps(history, step)), step
        moved = max(abs(shares[name] - share) for name, share in seen.shares.items())
        said: JsonObject = {
            "step": step,
            "losses": dict(seen.losses),
            "useful": {name: e.kept / e.groups for name, e in rewards.items() if e.groups},
            "before": dict(seen.shares),
            "after": dict(seen.shares),
            "revision": None,
        }
        # Also above 0: ``least`` may be 0, and an edit that moves nothing still counts towards MOST_EDITS.
        if moved > 0 and moved >= self.config.least:
            # A decision that is due while a job dies waits for its next start. At rest, it would apply only after all
            # planned steps, and the next start may plan those steps anew.
            change = SetWeights(weights=shares)
            taken = change_mix(self.run, change, None, _ANSWER_S, at_rest=now)
            step = taken.edit.step
            said |= {"step": step, "after": dict(taken.after), "revision": taken.edit.revision}
            said |= {"unsure": taken.unsure} if taken.unsure else {}
        # Set after the change: if the plane does not answer, the decision is made again, from the same losses.
        self.losses_from, self._has_decided = max(self.losses_from, decided_for), True
        # The change may apply from a later step, because ranks continued meanwhile.
        self.decided_at = max(decided_for, step)
        return said

    def _step_due(self, history: History, *, now: bool) -> int | None:
        """Return the first step that no rank has, if a decision is due there or wanted ``now``."""
        # If a job has died or is starting again, the folder describes the previous start, and the next step is unknown.
        if not now and not self._pulse.is_up():
            return None
        planned, due = planned_to(self.run, history), self.decided_at + self.config.every
        # Planned steps are checked first, because the steps of many ranks take longer to read.
        if not now and planned < due:
            return None
        step = untaken_from(self.run, planned, is_up=not now)
        return step if now or step >= due else None

    def _turns(self, policy: OdmPolicy, history: History, step: int) -> list[Turn]:
        """Return the turns before a step that have weight, if the folder has them; the last may be incomplete."""
        every = self.config.every
        begun = max(0, -(-(step - policy.from_step) // every))
        before = max(0, begun - turns_that_weigh(policy.smoothing))
        first = policy.from_step + before * every
        if policy.goes_by == "loss":
            # Kept between decisions, because reading all turns anew takes gigabytes if hundreds of ranks report.
            self._told = self._told or TurnLosses(
                self.run, policy.from_step, every, history.pair_sources
            )
            told = self._told.since(before)
            means = {turn - before: _means(losses)[0] for turn, losses in told.items()}
        else:
            rewards = rewards_by_turn(self.run, first, every)
            means = {turn: _mean_rewards(found) for turn, found in rewards.items()}
        return [
            Turn(
                number=before + turn + 1,
                shares=history.shares_at(first + turn * every),
                values=values,
            )
            for turn, values in means.items()
            # For a run that went back, the folder also has turns of coming steps.
            if values and before + turn < begun
        ]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources of the run, including those that edits added."""
        return tuple(self._history().latest.sources)

    def _history(self) -> History:
        return read_history(self.run, read_run_record(self.run).last.mix())


def _caps(
    history: History, step: int
) -> tuple[dict[str, float], list[tuple[frozenset[str], float]]]:
    """Return the largest shares of sources, and of groups of them: no policy exceeds the limits of the file."""
    most = {
        name: source.max_fraction
        for name, source in history.latest.sources.items()
        if source.max_fraction is not None
    }
    groups = [
        (frozenset(cap.names), cap.max_fraction)
        for cap in group_fractions_from(declared_at(history, step), step)
        if cap.max_fraction is not None
    ]
    return most, groups


def _last_change(history: History, step: int) -> int:
    """Return the step of the last edit that has taken effect at a step; 0 without an edit."""
    return max((edit.step for edit in history.edits if edit.step <= step), default=0)


def _means(reported: dict[str, SourceLoss]) -> tuple[dict[str, float], dict[str, int]]:
    seen = {name: found for name, found in sorted(reported.items()) if found.labels}
    means = {name: found.mean for name, found in seen.items()}
    return (
        {name: mean for name, mean in means.items() if mean is not None},
        {name: found.labels for name, found in seen.items()},
    )


def _mean_rewards(found: dict[str, SourceRewards]) -> dict[str, float]:
    return {name: each.reward / each.labels for name, each in found.items() if each.labels}


@click.command("steer")
@run_argument
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Decide once, now, and exit.")
@json_option
def steer(run: Path, file: Path, once: bool, as_json: bool) -> None:
    """Adjust the weights of RUN while it runs, by the policy of FILE.

    FILE names the policy and the steps between two decisions. Each decision is an edit, as if set by hand: it is kept
    with its step, is the same on every rank, and is repeated by a resume. When this command ends, the weights stay. It
    ends with the run. Ctrl-C ends only the command, not the run.

    \b
    Example:
      omniload mix steer demo/run steer.yaml
      omniload mix steer demo/run steer.yaml --once
    """  # noqa: D301 -- click's own marker
    config = load_yaml(file, SteeringConfig)
    if isinstance(config.policy, RegisteredPolicy):
        # Checked here, so that a missing function is reported now and not at the first decision, hours later.
        registered(GROUP, config.policy.function)
    steering = Steering(run=run, config=config)
    if isinstance(config.policy, LossPolicy):
        # A source whose reference loss has a misspelt name would be without one, and gain share without end.
        require_known(config.policy.reference, steering.sources)
    if once:
        said = steering.look(now=True)
        if said is None:
            raise StateError(_nothing_reported(run, _goes_by(config.policy), steering))
        _tell(said, as_json=as_json)
        return

    late = ""

    def look() -> None:
        nonlocal late
        try:
            said = steering.look()
        except UnavailableError as error:  # a plane that is busy, or being started again
            if str(error) != late:  # once, however long this lasts
                click.echo(f"not decided now: {error}", err=True)
            late = str(error)
            return
        late = ""
        if said is not None:
            _tell(said, as_json=as_json)

    while_up(
        run,
        look,
        every_s=_LOOK_S,
        goes_on="steering",
        instead="steer it then, or decide once for a run that is to go on later, with --once",
        after="its weights stay as they are",
    )


def _goes_by(policy: PolicyConfig) -> str:
    return policy.goes_by if isinstance(policy, OdmPolicy) else policy.type


def _nothing_reported(run: Path, what: str, steering: Steering) -> str:
    said = f"no {what} was reported from step {steering.losses_from} on"
    if not (ended := said_of_end(run)):
        return f"{run}: {said}; call loader.observe in the loop"
    return (
        f"{run}: {ended}, before step {steering.decided_at}, and {said}: there is nothing to decide by; resume it, "
        "with loader.observe in the loop, and steer it then"
    )


def _tell(said: JsonObject, *, as_json: bool) -> None:
    if as_json:
        emit_json(said)
        return
    before, after = said["before"], said["after"]
    assert isinstance(before, dict), "shares by name"
    assert isinstance(after, dict), "shares by name"
    if said["revision"] is None:
        say(output(), f"step {said['step']}: nothing moves")
        return
    moves = ", ".join(
        f"{name} {before[name]:.2%} to {after[name]:.2%}" for name in list(after)[:12]
    )
    say(output(), f"edit {said['revision']} of {MOST_EDITS}, from step {said['step']} on: {moves}")
    if "unsure" in said:
        say(output(), str(said["unsure"]))
