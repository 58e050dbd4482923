"""Two starts compared stage by stage."""

from collections.abc import Mapping
from dataclasses import dataclass

from snapshot.startup.attempts import BETWEEN, Attempt, Stage
from snapshot.startup.events import TIERS

__all__ = ["Difference", "StageDifference", "difference_of"]

_SAME_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """One stage in two starts; ``None`` where a start has no such stage."""

    name: str
    before: Stage | None
    after: Stage | None
    path_before_s: float
    path_after_s: float

    @property
    def path_s(self) -> float:
        """What the stage adds to the critical path: after less before."""
        return self.path_after_s - self.path_before_s

    @property
    def changed_bytes(self) -> Mapping[str, int]:
        """Bytes after less before, by tier, where they differ."""
        before = {} if self.before is None else self.before.bytes
        after = {} if self.after is None else self.after.bytes
        more = {tier: after.get(tier, 0) - before.get(tier, 0) for tier in TIERS}
        return {tier: size for tier, size in more.items() if size}

    @property
    def changed_facts(self) -> Mapping[str, tuple[str, str]]:
        """Facts that differ, before and after, such as the image; empty text where there is none."""
        before, after = _facts(self.before), _facts(self.after)
        return {
            name: (before.get(name, ""), after.get(name, ""))
            for name in sorted({**before, **after})
            if before.get(name, "") != after.get(name, "")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changed from one start to another."""

    before: Attempt
    after: Attempt
    stages: tuple[StageDifference, ...]
    """Stages of either, in the order of ``after``; last what lies between stages."""

    @property
    def seconds(self) -> float:
        """After less before; the sum of what the stages add."""
        return self.after.seconds - self.before.seconds

    @property
    def ratio(self) -> float | None:
        """After over before."""
        return self.after.seconds / self.before.seconds if self.before.seconds else None

    @property
    def explaining(self) -> StageDifference | None:
        """The stage that moved the total farthest the way it went; ``None`` within a millisecond."""
        if abs(self.seconds) < _SAME_S:
            return None
        sign = 1 if self.seconds > 0 else -1
        return max(self.stages, key=lambda each: sign * each.path_s)

    @property
    def explained(self) -> float | None:
        """Part of the difference that this stage makes; above 1 where others went against it."""
        stage = self.explaining
        return None if stage is None else stage.path_s / self.seconds


def difference_of(before: Attempt, after: Attempt) -> Difference:
    """Compare two starts."""
    old = {stage.name: stage for stage in before.stages}
    new = {stage.name: stage for stage in after.stages}
    stages = [
        StageDifference(
            name=name,
            before=old.get(name),
            after=new.get(name),
            path_before_s=old[name].path_s if name in old else 0.0,
            path_after_s=new[name].path_s if name in new else 0.0,
        )
        for name in {**new, **old}
    ]
    between = StageDifference(
        name=BETWEEN,
        before=None,
        after=None,
        path_before_s=before.between_s,
        path_after_s=after.between_s,
    )
    return Difference(before=before, after=after, stages=(*stages, between))


def _facts(stage: Stage | None) -> dict[str, str]:
    """Return what the nodes of a stage say; several texts of one name joined."""
    found: dict[str, dict[str, None]] = {}
    for node in stage.nodes if stage is not None else ():
        for name, text in node.facts.items():
            found.setdefault(name, {})[text] = None
    return {name: ", ".join(sorted(texts)) for name, texts in found.items()}
