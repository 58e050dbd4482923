"""What holds at a step: a mix file and its edits, folded. And what a change would make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.base.state import Json
from omniload.mix.config import MixConfig, Stage, WeightsConfig
from omniload.mix.edits.amounts import (
    amounts_under,
    require_amounts_before,
    require_counted_alike,
    spread_anew,
)
from omniload.mix.edits.edit import (
    MOST_EDITS,
    AddSource,
    BeginStage,
    Change,
    Edit,
    RetireSource,
    SetAmounts,
    SetWeights,
    SkipShard,
    SkipSteps,
    Undo,
    never_held,
    require_no_secrets,
    why_skipped_for_good,
)
from omniload.mix.edits.shards import left_out_of, require_skippable
from omniload.mix.edits.sources import edited_mix, require_fits, require_known, weighted
from omniload.mix.edits.stages import dated, declared_at
from omniload.mix.schedule import boundaries, stages_from, weights_at
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.caps import beyond_fractions
from omniload.mix.schema.stages import GoneThrough
from omniload.mix.state import MixState

__all__ = ["History"]


@dataclass(frozen=True, slots=True)
class History:
    """A mix and its edits.

    The number of a source is its place among the sorted names of the file; sources that were
    added follow in the order of their edits. So an edit never moves a number.
    """

    base: MixConfig
    """The mix as its file says."""
    edits: tuple[Edit, ...] = ()
    """In the order of their revisions, from 1."""
    _mixes: dict[int, MixConfig] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _left_out: dict[int, dict[str, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Shards that are left out at the step that was asked for last."""
    _amounts: dict[str, tuple[Amount, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _skips_shards: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def latest(self) -> MixConfig:
        """The mix with every edit: it names all sources."""
        return self.of_revision(len(self.edits))

    @property
    def edited_to(self) -> int:
        """The last step at which an edit begins to hold; 0 without edits."""
        return max((edit.step for edit in self.edits), default=0)

    def revision_at(self, step: int) -> int:
        """Return the revision that a step is drawn under: the last of the edits that hold at it or held before.

        Edits of later steps do not count, known as they may be: a run that hears of them earlier
        or later goes through the same states.
        """
        return max((edit.revision for edit in self.edits if edit.step <= step), default=0)

    def of_revision(self, revision: int) -> MixConfig:
        """Return the mix of the first ``revision`` edits."""
        known = revision
        while known and known not in self._mixes:
            known -= 1
        mix = self._mixes[known] if known else self.base
        for edit in self.edits[known:revision]:
            mix = self._mixes[edit.revision] = edited_mix(mix, edit)
        return mix

    def at(self, step: int) -> MixConfig:
        """Return the mix that a step is drawn from."""
        return self.of_revision(self.revision_at(step))

    def steps_alike(self, step: int) -> float:
        """Return for how many steps from ``step`` on no edit begins to hold; at least 1."""
        return min((e.step - step for e in self.edits if e.step > step), default=float("inf"))

    @property
    def skips_shards(self) -> bool:
        """Whether an edit skips a shard, at whatever step, undone or not."""
        if not self._skips_shards:
            found = any(isinstance(edit.change, SkipShard) for edit in self.edits)
            self._skips_shards.append(found)
        return self._skips_shards[0]

    def amounts_of(self, name: str) -> tuple[Amount, ...]:
        """Return every amount that a source has at any step."""
        if name not in self._amounts:
            held = [self.base.mix.amounts, *(edit.amounts for edit in self.edits)]
            self._amounts[name] = tuple(each[name] for each in held if each and name in each)
        return self._amounts[name]

    def left_out_at(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return the numbers of the shards of each source that are left out at a step."""
        found = self._left_out.get(step)
        if found is None:
            # One step's are enough: it is asked for by every source of that step, and then no more.
            self._left_out.clear()
            found = self._left_out[step] = left_out_of(self.edits, step)
        return found

    def entered(self, state: MixState) -> tuple[MixConfig, MixState]:
        """Return the mix of the step that ``state`` stands before, and the state as that step begins."""
        revision = self.revision_at(state.step)
        return self.of_revision(revision), self.entering(state, revision)

    def entering(self, state: MixState, revision: int) -> MixState:
        """Return ``state`` as its step begins under a revision: with added sources, and behind what is skipped."""
        if revision == state.mix_revision:
            return state
        entered = replace(
            state.widened(len(self.of_revision(revision).sources)), mix_revision=revision
        )
        skips, known = self._skips(revision), state.mix_revision
        here = [s for s in skips if s.revision > known and s.step == state.step]
        if here:
            # Of edits up to the skip the state behind it has all: amounts are spread by later ones alone.
            entered, known = self._behind(here[-1], entered), here[-1].revision
        return spread_anew(entered, self, self.edits[known:revision])

    def skipped_steps(self, revision: int) -> int:
        """Return how many steps the edits up to a revision leave out: what they drew counts as drawn."""
        changes = [edit.change for edit in self._skips(revision)]
        return sum(c.stop - c.first for c in changes if isinstance(c, SkipSteps))

    def reopened_by(self, revision: int) -> float:
        """Return the first step that is planned again, though a run of that revision planned it."""
        gone = never_held(self.edits)  # one that was undone later is planned anew up to there
        later = (
            edit.step
            for edit in self.edits
            if isinstance(edit.change, SkipSteps | SkipShard)
            and edit.revision > revision
            and edit.revision not in gone
        )
        return min(later, default=float("inf"))

    def _skips(self, revision: int) -> list[Edit]:
        """Return the edits up to a revision that skip steps and are not undone by it."""
        edits = self.edits[:revision]
        gone = {edit.undoes for edit in edits}
        return [edit for edit in edits if edit.behind is not None and edit.revision not in gone]

    def _behind(self, skip: Edit, entered: MixState) -> MixState:
        """Return the state behind skipped steps, as the first of them begins."""
        assert skip.behind is not None, "it skips steps"
        revision = skip.behind.get("mix_revision")
        # By the run's numbers, not in the order of the keys: whoever keeps a state as JSON may have sorted them.
        is_known = isinstance(revision, int) and 0 <= revision < skip.revision
        names = self.of_revision(int(revision or 0)).names if is_known else ()
        # Without a fingerprint, as it was kept: the run's own is compared wherever it goes on.
        behind = MixState.from_json(skip.behind, names, {}).widened(len(entered.cursors_S))
        return replace(behind, step=entered.step, mix_revision=entered.mix_revision)

    def shares_at(self, step: int) -> dict[str, float]:
        """Return the share of each source at a step; they sum to 1."""
        mix = self.at(step)
        return dict(zip(mix.names, weights_at(mix.mix.stages, mix.names, step), strict=True))

    def greatest_shares(self, start: int, stop: int) -> dict[str, float]:
        """Return the greatest share of each source at any step from ``start`` to ``stop``, as far as is known."""
        # Between these steps shares rise or fall, and nothing else, so that they are greatest at one of them.
        changes = {edit.step for edit in self.edits} | set(boundaries(self.at(stop)))
        # The last of before a change, too: an edit cuts a ramp off.
        between = {k for change in changes for k in (change - 1, change)}
        greatest: dict[str, float] = {}
        for step in (start, *sorted(k for k in between if start < k < stop), stop):
            for name, share in self.shares_at(step).items():
                greatest[name] = max(share, greatest.get(name, 0.0))
        return greatest

    def found_by(self, revision: int, fingerprint: Mapping[str, str]) -> dict[str, str]:
        """Return the fingerprint of the file's mix with what edits up to ``revision`` found of their sources."""
        parts = dict(fingerprint)
        for edit in self.edits[:revision]:
            parts |= edit.found
        return parts

    def carried_by(self, revision: int) -> list[Json]:
        """Return the edits that a state of ``revision`` carries."""
        return [edit.model_dump(mode="json") for edit in self.edits[:revision]]

    def kept_with(self, revision: int, fingerprint: Mapping[str, str]) -> dict[str, Any]:
        """Return what a state of ``revision`` is written with: arguments of ``MixState.to_json``."""
        return {
            "names": self.of_revision(revision).names,
            "fingerprint": self.found_by(revision, fingerprint),
            "edits": self.carried_by(revision),
        }

    def edited(
        self,
        change: Change,
        step: int,
        found: Mapping[str, str] | None = None,
        behind: MixState | None = None,
        *,
        at_rest: bool = False,
        gone_through: GoneThrough | None = None,
    ) -> "History":
        """Return the history with one more edit.

        Args:
            change: What is asked for.
            step: First step that it is to hold at.
            found: Parts of the fingerprint of a source that is added.
            behind: State behind steps that are skipped.
            at_rest: Whether no plane of the run is up: then skipped steps may be drawn after all.
            gone_through: Tells which epochs of sources are over, so that a stage waits for them no more; none by
                default.

        Raises:
            ConfigError: It names a source that is not there, or leaves a stage without weights, or there is
                nothing to undo, or a source comes with a secret.
        """
        require_no_secrets(change)
        require_counted_alike(self.base, change)
        most = MOST_EDITS - sum(stage.waits for stage in self.base.mix.stages)
        if len(self.edits) >= most:
            raise ConfigError(
                f"the run has {len(self.edits)} edits, {most} at most; end it, put what holds now into its mix "
                "file and start a new run"
            )
        undoes = self.undone_by(change, step, at_rest=at_rest)
        self._require_behind_skips(change, step, undoes)
        require_amounts_before(self, change, step, undoes)
        if isinstance(change, AddSource):
            require_fits(self.base, self.latest, change.name, change.source)
        amounts = amounts_under(self, change, undoes)
        stages = self._stages_of(change, step, undoes) if amounts is None else []
        if stages:
            self._require_stages(stages, step, gone_through)
        edit = Edit(
            revision=len(self.edits) + 1,
            step=step,
            change=change,
            stages=tuple(stages),
            amounts=amounts,
            undoes=undoes,
            found=dict(found or {}),
            behind=self._kept_behind(change, behind),
        )
        after = History(self.base, (*self.edits, edit))
        after._mixes.update(self._mixes)  # else each edit would fold all that came before it
        for fault in beyond_fractions(after.latest.sources, declared_at(self, step), stages):
            raise ConfigError(fault.message())
        return after

    def tried(self, change: Change, step: int | None) -> "History":
        """Return the history with one more edit where nobody knows how far the run is; it is taken up elsewhere.

        Raises:
            ConfigError: As for ``edited``, but that stages may wait for epochs of a source that is drawn no more.
        """
        at = self.edited_to if step is None else step
        return self.edited(change, at, gone_through=lambda _name, _epochs: True)

    def _stages_of(self, change: Change, step: int, undoes: int | None) -> list[Stage]:
        """Return the stages from ``step`` on that a change makes; none where weights stay."""
        match change:
            case BeginStage():
                raise ConfigError("a stage begins by itself, once its epochs are over")
            case SkipShard():
                require_skippable(self.edits, change)
            case Undo() if undoes is not None and self.edits[undoes - 1].stages:
                before = self.of_revision(undoes - 1).mix.stages
                return stages_from(dated(self, before, step, undoes), step)
            case SetWeights() | SetAmounts() | AddSource() | RetireSource():
                return self._stages_under(change, step)
        # What began by epochs behind this step is found anew: other records are drawn up to there.
        anew = dated(self, self.latest.mix.stages, step, undoes)
        return [] if anew == self.latest.mix.stages else stages_from(anew, step)

    def _kept_behind(self, change: Change, behind: MixState | None) -> dict[str, Any] | None:
        if not isinstance(change, SkipSteps):
            return None
        if behind is None:
            raise ConfigError(
                f"steps {change.first}:{change.stop} cannot be skipped while the run goes on: they are trained on; "
                "end the run, skip them, and go on from a checkpoint before them"
            )
        return behind.to_json(self.of_revision(behind.mix_revision).names, {})

    def _require_behind_skips(self, change: Change, step: int, undoes: int | None) -> None:
        """Refuse to change what comes before skipped steps: what was behind them would be another place.

        Raises:
            ConfigError: Naming the edit.
        """
        skips = [s for s in self._skips(len(self.edits)) if s.revision != undoes]
        if skips and step < skips[-1].step:
            later = (
                "skip steps behind it"
                if isinstance(change, SkipSteps)
                else f"say --at {skips[-1].step} or later"
            )
            raise ConfigError(
                f"step {step} lies before step {skips[-1].step}, where edit {skips[-1].revision} skips steps: with "
                f"another mix before it, it would not be those; {later}, or undo that edit first"
            )

    def undone_by(self, change: Change, step: int, *, at_rest: bool) -> int | None:
        """Return the revision of the edit that a change undoes from a step on; ``None`` where it is no undo.

        Raises:
            ConfigError: There is none, or it skips steps that the run has gone on behind.
        """
        if not isinstance(change, Undo):
            return None
        gone = {edit.undoes for edit in self.edits}
        # An undo is not undone: said once more, it undoes the edit before. Nor is a stage that began by itself.
        left = [edit for edit in self.edits if edit.was_asked and edit.revision not in gone]
        if not left:
            raise ConfigError(
                f"there is nothing to undo: of {len(self.edits)} edits of the run none is left"
            )
        if left[-1].behind and not (at_rest and step == left[-1].step):
            raise ConfigError(why_skipped_for_good(left[-1]))
        return left[-1].revision

    def _stages_under(
        self, change: SetWeights | SetAmounts | AddSource | RetireSource, step: int
    ) -> list[Stage]:
        """Return the stages from ``step`` on under a change of weights."""
        held = dated(self, self.latest.mix.stages, step)
        stages = stages_from(held, step)
        match change:
            case SetWeights(weights=weights):
                require_known(weights, self.latest.names)
                # A ramp under way ends here; stages that begin later hold as they are declared.
                later = [stage for stage in held if stage.from_step > step]
                return [weighted(stages[0], {**stages[0].weights, **weights}, step), *later]
            case AddSource(name=name, weight=float(weight)):
                part = weight / sum(stages[0].weights.values())
                return [
                    weighted(s, {**s.weights, name: part * sum(s.weights.values())}, step)
                    for s in stages
                ]
            case RetireSource(name=name):
                require_known([name], self.latest.names)
                if not any(stage.weights.get(name, 0.0) for stage in stages):
                    raise ConfigError(
                        f"source {name!r} has no weight from step {step} on; it is retired already"
                    )
                return [
                    weighted(s, {n: w for n, w in s.weights.items() if n != name}, step)
                    for s in stages
                ]
            case _:
                raise AssertionError(f"{change.kind} gives no weights")

    def _require_stages(
        self, stages: Sequence[Stage], step: int, gone_through: GoneThrough | None
    ) -> None:
        """Hold the weights from ``step`` on to the rules of a mix file."""
        # Counted from the step: by the rules of a file its first stage begins at 0. Those that wait are behind all.
        moved = [
            s.model_dump(exclude={"from_step"} if s.waits else {"from_epochs"})
            | ({} if s.waits else {"from_step": s.from_step - step})
            for s in stages
        ]
        content = self.base.mix.model_dump() | {"stages": moved}
        known = {} if gone_through is None else {"gone_through": gone_through}
        try:
            WeightsConfig.model_validate(content, context=known)
        except ValidationError as error:
            raise ConfigError(
                f"the weights from step {step} on are refused (stages are counted from there): "
                + "; ".join(str(fault["msg"]) for fault in error.errors())
            ) from error
