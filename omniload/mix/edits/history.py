"""The mix that applies at a step: a mix file with its edits applied."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omniload.base.errors import ConfigError
from omniload.base.state import Json
from omniload.mix.config import MixConfig
from omniload.mix.edits.amounts import spread_anew
from omniload.mix.edits.edit import Change, Edit, SkipShard, SkipSteps, never_held
from omniload.mix.edits.next_edit import next_edit
from omniload.mix.edits.shards import left_out_of
from omniload.mix.edits.sources import edited_mix
from omniload.mix.edits.stages import declared_at
from omniload.mix.schedule import boundaries, weights_at
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.caps import beyond_fractions
from omniload.mix.schema.stages import GoneThrough
from omniload.mix.state import MixState

__all__ = ["History"]


@dataclass(frozen=True, slots=True)
class History:
    """A mix and its edits.

    The number of a source is its index among the sorted names of the file. Added sources follow in the order of their
    edits, so an edit never changes the number of another source.
    """

    base: MixConfig
    """The mix of its file."""
    edits: tuple[Edit, ...] = ()
    """Edits in the order of their revisions, from 1."""
    _mixes: dict[int, MixConfig] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _left_out: dict[int, dict[str, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Shards left out at the step of the last query."""
    _amounts: dict[str, tuple[Amount, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _skips_shards: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def latest(self) -> MixConfig:
        """The mix with every edit; it names all sources."""
        return self.of_revision(len(self.edits))

    @property
    def pair_sources(self) -> frozenset[str]:
        """Names of the sources whose documents are preference pairs."""
        return frozenset(
            name for name, source in self.latest.sources.items() if source.pair_columns
        )

    @property
    def edited_to(self) -> int:
        """The last step at which an edit takes effect; 0 without edits."""
        return max((edit.step for edit in self.edits), default=0)

    def revision_at(self, step: int) -> int:
        """Return the revision that a step is drawn under: the last of the edits that begin at the step or before.

        Edits at later steps do not count, even if they are known already. Therefore a run passes through the same
        states whether it learns of them early or late.
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
        """Return for how many steps from ``step`` on no edit takes effect; at least 1."""
        return min((e.step - step for e in self.edits if e.step > step), default=float("inf"))

    @property
    def skips_shards(self) -> bool:
        """Whether an edit skips a shard, at any step and whether undone or not."""
        if not self._skips_shards:
            found = any(isinstance(edit.change, SkipShard) for edit in self.edits)
            self._skips_shards.append(found)
        return self._skips_shards[0]

    @property
    def leaves_out(self) -> bool:
        """Whether an edit leaves out shards or steps, at any step and whether undone or not."""
        return self.skips_shards or any(edit.behind is not None for edit in self.edits)

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
            # One entry is enough, because every source of a step asks for that step, and then for no earlier one.
            self._left_out.clear()
            found = self._left_out[step] = left_out_of(self.edits, step)
        return found

    def entered(self, state: MixState) -> tuple[MixConfig, MixState]:
        """Return the mix of the step after ``state``, and the state as that step begins."""
        revision = self.revision_at(state.step)
        return self.of_revision(revision), self.entering(state, revision)

    def entering(self, state: MixState, revision: int) -> MixState:
        """Return ``state`` as its step begins under a revision: with added sources, and after skipped steps."""
        if revision == state.mix_revision:
            return state
        entered = replace(
            state.widened(len(self.of_revision(revision).sources)), mix_revision=revision
        )
        skips, known = self.skips(revision), state.mix_revision
        here = [s for s in skips if s.revision > known and s.step == state.step]
        if here:
            # The state after the skip includes the earlier edits, so only later edits spread amounts.
            entered, known = self._behind(here[-1], entered), here[-1].revision
        return spread_anew(entered, self, self.edits[known:revision])

    def skipped_steps(self, revision: int) -> int:
        """Return how many steps the edits up to a revision skip; what those steps drew counts as drawn."""
        changes = [edit.change for edit in self.skips(revision)]
        return sum(c.stop - c.first for c in changes if isinstance(c, SkipSteps))

    def replanned_from(self, revision: int) -> float:
        """Return the first step that is planned again although a run of that revision had planned it."""
        gone = never_held(self.edits)  # a skip undone later was planned anew up to there
        later = (
            edit.step
            for edit in self.edits
            if isinstance(edit.change, SkipSteps | SkipShard)
            and edit.revision > revision
            and edit.revision not in gone
        )
        return min(later, default=float("inf"))

    def skips(self, revision: int) -> list[Edit]:
        """Return the edits up to a revision that skip steps and are not undone by that revision."""
        edits = self.edits[:revision]
        gone = {edit.undoes for edit in edits}
        return [edit for edit in edits if edit.behind is not None and edit.revision not in gone]

    def _behind(self, skip: Edit, entered: MixState) -> MixState:
        """Return the state after skipped steps, as the first of these steps begins."""
        assert skip.behind is not None, "it skips steps"
        revision = skip.behind.get("mix_revision")
        # Sources are numbered as in the run and not in the order of the keys, because storing the JSON may sort the
        # keys.
        is_known = isinstance(revision, int) and 0 <= revision < skip.revision
        names = self.of_revision(int(revision or 0)).names if is_known else ()
        # Without a fingerprint, as it was saved, because the run's own fingerprint is compared at every resume.
        behind = MixState.from_json(skip.behind, names, {}).widened(len(entered.cursors_S))
        return replace(behind, step=entered.step, mix_revision=entered.mix_revision)

    def shares_at(self, step: int) -> dict[str, float]:
        """Return the share of each source at a step; they sum to 1."""
        mix = self.at(step)
        return dict(zip(mix.names, weights_at(mix.mix.stages, mix.names, step), strict=True))

    def greatest_shares(self, start: int, stop: int) -> dict[str, float]:
        """Return the greatest share of each source at any step from ``start`` to ``stop``, as far as known."""
        # Between these steps shares only rise or only fall, so they are greatest at one of these steps.
        changes = {edit.step for edit in self.edits} | set(boundaries(self.at(stop)))
        # Also the step before a change, because an edit cuts a ramp off.
        between = {k for change in changes for k in (change - 1, change)}
        greatest: dict[str, float] = {}
        for step in (start, *sorted(k for k in between if start < k < stop), stop):
            for name, share in self.shares_at(step).items():
                greatest[name] = max(share, greatest.get(name, 0.0))
        return greatest

    def fingerprint_at(self, revision: int, fingerprint: Mapping[str, str]) -> dict[str, str]:
        """Return the fingerprint of the file's mix, with what edits up to ``revision`` found about their sources."""
        parts = dict(fingerprint)
        for edit in self.edits[:revision]:
            parts |= edit.found
        return parts

    def edits_as_json(self, revision: int) -> list[Json]:
        """Return the edits for a state of ``revision``, as plain JSON."""
        return [edit.model_dump(mode="json") for edit in self.edits[:revision]]

    def state_fields_at(self, revision: int, fingerprint: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of ``MixState.to_json`` for a state of ``revision``."""
        return {
            "names": self.of_revision(revision).names,
            "fingerprint": self.fingerprint_at(revision, fingerprint),
            "edits": self.edits_as_json(revision),
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
        """Return the history with one more edit; arguments and errors are those of ``next_edit``."""
        edit = next_edit(
            self, change, step, found, behind, at_rest=at_rest, gone_through=gone_through
        )
        after = History(self.base, (*self.edits, edit))
        after._mixes.update(self._mixes)  # otherwise each edit would apply all earlier edits again
        # Checked last, because the limits of shares concern the mix with the edit.
        for fault in beyond_fractions(after.latest.sources, declared_at(self, step), edit.stages):
            raise ConfigError(fault.message())
        return after

    def tried(self, change: Change, step: int | None) -> "History":
        """Return the history with one more edit without knowing the progress of the run; the run accepts it elsewhere.

        Raises:
            ConfigError: As for ``edited``, except that stages may wait for epochs of a source that is no longer drawn.
        """
        at = self.edited_to if step is None else step
        return self.edited(change, at, gone_through=lambda _name, _epochs: True)
