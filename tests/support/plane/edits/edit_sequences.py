"""Random sequences of edits over several lives of a run, and the tokens that must have been trained on.

The model has no planner. It goes through the records of every source by position and counts each token. A token
before the present cursor of its source is in one step, waits for a row, or was in a step that was skipped. Records of
a shard are absent from the step at which the shard is left out.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.edits.amounts import require_drawable
from omniload.mix.edits.edit import (
    AddSource,
    Change,
    Edit,
    RetireSource,
    SetAmounts,
    SetWeights,
    SkipShard,
    SkipSteps,
    Undo,
)
from omniload.mix.edits.edits_file import edits_in
from omniload.mix.edits.found import require_reached
from omniload.mix.edits.history import History
from omniload.mix.possible import require_possible
from omniload.mix.schema.amounts import Amount
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix
from tests.support.plane.reference import SHARDS, shard_of
from tests.support.plane.simulation import Simulation

__all__ = ["EditedRun", "run_sequence"]

NAMES = ("books", "code", "web")
ADDED = ("a-new", "d-new", "zz-new")
LENGTH = 16
MANY = 1 << 30

Tokens = Counter[tuple[int, int, int, int]]
"""Tokens by source, position, sub and place."""


@dataclass(slots=True)
class EditedRun:
    """A run in several lives: each life resumes from a state that an earlier life saved, in another world."""

    random: random.Random
    mix: MixConfig
    epochs: Sequence[Sequence[Sequence[int]]]
    history: History = field(init=False)
    steps: dict[int, Tokens] = field(default_factory=dict)
    """Tokens of every step, as it was trained last."""
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    """State before every step."""
    skipped: dict[int, Tokens] = field(default_factory=dict)
    """Tokens of skipped steps, by the revision of the edit."""
    passed: dict[int, Tokens] = field(default_factory=dict)
    """Tokens that were due before the state after them."""
    end: int = 0
    """First step that was not trained on."""
    lives: int = 0
    killed: int = 0
    """Roles that were killed."""
    refused: int = 0

    def __post_init__(self) -> None:
        self.history = History(self.mix)

    def live(self, at: int, num_steps: int, changes: Sequence[tuple[Change, int | None]]) -> None:
        """Resume from the state before step ``at``, run up to a step, and change the mix meanwhile."""
        chance = self.random
        simulation = Simulation(
            mix=self.mix,
            epochs=self.epochs,
            num_steps=num_steps,
            dp=chance.choice([1, 2, 4]),
            num_loaders=chance.randint(1, 3),
            num_constructors=chance.randint(1, 2),
            seed=chance.randrange(1 << 30),
            repeat_share=chance.choice([0.0, 0.2]),
            kills=chance.choice([0, 1, 2]),
            planner_kills=chance.choice([0, 1, 2]),
            constructor_kills=chance.choice([0, 1]),
            state=self._taken_in(at),
            edits=self.history.edits,
            changes=changes,
        )
        simulation.run()
        self.history = simulation.history
        self.lives += 1
        self.killed += simulation.killed + simulation.planners_killed
        self.killed += simulation.constructors_killed
        self.refused += simulation.refused
        for kept in (self.steps, self.saved):
            for step in [s for s in kept if s >= at]:
                del kept[step]
        for (step, _), batch in simulation.batches.items():
            self.steps[step] = self.steps.get(step, Counter()) + Counter(_tokens_in(batch))
        states = simulation.states.items()
        self.saved |= {step: json.loads(json.dumps(state)) for step, state in states}
        self.end, last = simulation.ended_at()
        self.saved[self.end] = json.loads(json.dumps(last))

    def _taken_in(self, at: int) -> MixState | None:
        """Return a saved state as a plane takes it."""
        if at == 0:
            return None
        saved = self.saved[at]
        revision = len(edits_in(saved))
        edited = self.history.of_revision(revision)
        state = MixState.from_json(saved, edited.names, saved["fingerprint"])
        require_reached(self.history, state, revision)
        records_S = [len(epoch) for epoch in self.epochs]
        skipped_steps = self.history.skipped_steps(revision)
        require_possible(state, edited, records_S, skipped_steps=skipped_steps)
        return state

    def edit_at_rest(self, change: Change, step: int) -> bool:
        """Change the mix while no plane runs; return whether the change was accepted."""
        behind = None
        if isinstance(change, SkipSteps):
            behind = self._state_before(change.stop)
            passed = self.due(change.stop, self.saved[change.stop])
        try:
            after = self.history.edited(change, step, behind=behind, at_rest=True)
            if after.edits[-1].amounts is not None:
                _, state = self.history.entered(self._state_before(step))
                records_S = [len(epoch) for epoch in self.epochs[: len(after.latest.names)]]
                require_drawable(self.history, after, state, records_S)
        except ConfigError:
            self.refused += 1
            return False
        self.history = after
        if isinstance(change, SkipSteps):
            left_out = (self.steps[step] for step in range(change.first, change.stop))
            self.skipped[len(after.edits)] = sum(left_out, Counter())
            self.passed[len(after.edits)] = passed
        return True

    def _state_before(self, step: int) -> MixState:
        saved = self.saved[step]
        names = self.history.of_revision(len(edits_in(saved))).names
        return MixState.from_json(saved, names, saved["fingerprint"])

    def found(self) -> Tokens:
        """Count every token that was trained on, waits for a row, or was skipped with its step."""
        undone = {edit.undoes for edit in self.history.edits}
        skipped = [tokens for edit, tokens in self.skipped.items() if edit not in undone]
        found = sum([*skipped, *self.steps.values()], Counter())
        names = self.history.latest.names
        for name, position, sub, start, stop, _ in self._standing()["carried"]:
            source = names.index(name)
            found.update((source, position, sub, place) for place in range(start, stop))
        return found

    def _skips(self, upto: int) -> list[Edit]:
        undone = {edit.undoes for edit in self.history.edits}
        edits = [edit for edit in self.history.edits if edit.behind is not None]
        return [edit for edit in edits if edit.step <= upto and edit.revision not in undone]

    def _standing(self) -> dict[str, Any]:
        """Return the present state of the run, after the steps that it was to skip next."""
        here = [edit.behind for edit in self._skips(self.end) if edit.step == self.end]
        return here[-1] if here else self.saved[self.end]

    def due(self, upto: int, standing: dict[str, Any]) -> Tokens:
        """Go through the records of every source up to its cursor before a step.

        After skipped steps, the count starts with the tokens that were due before them.
        """
        skips = self._skips(upto)
        due = Counter(self.passed[skips[-1].revision]) if skips else Counter()
        behind = skips[-1].behind["sources"] if skips else {}
        for source, name in enumerate(self.history.latest.names):
            if name in standing["sources"]:
                start = _cursor_in(behind, name)
                left_out = list(self._left_out(name, upto, skips[-1].step if skips else -1, start))
                stop = _cursor_in(standing["sources"], name)
                due.update(self._between(source, start, stop, left_out))
        return due

    def _between(
        self,
        source: int,
        first: tuple[int, int, int],
        last: tuple[int, int, int],
        left_out: Sequence[tuple[int, range]] = (),
    ) -> Iterator[tuple[int, int, int, int]]:
        epoch = self.epochs[source]
        for position in range(first[0], last[0] + 1):
            shard = shard_of(epoch, position)
            if any(shard == number and position in where for number, where in left_out):
                continue
            for sub, length in enumerate(epoch[position % len(epoch)]):
                here = (position, sub)
                begin = 0 if here > first[:2] else first[2] if here == first[:2] else length
                end = length if here < last[:2] else last[2] if here == last[:2] else 0
                yield from ((source, position, sub, place) for place in range(begin, end))

    def _left_out(
        self, name: str, upto: int, skipped_at: int, behind: tuple[int, int, int]
    ) -> Iterator[tuple[int, range]]:
        """Yield the shards of a source that edits leave out, with the first and the last position of each."""
        undone = {edit.undoes: edit.step for edit in self.history.edits}

        def free_from(step: int) -> int:
            """Return the first position from which nothing has been drawn when a step begins."""
            if step <= skipped_at:
                return behind[0] + (behind[1:] != (0, 0))
            position, *within = _cursor_in(self.saved[step]["sources"], name)
            return position + (within != [0, 0])

        for edit in self.history.edits:
            change = edit.change
            if isinstance(change, SkipShard) and change.source == name and edit.step <= upto:
                until = undone.get(edit.revision, MANY)
                stop = free_from(until) if until <= upto else MANY
                yield change.number, range(free_from(edit.step), stop)

    def wanted(self) -> dict[str, Amount]:
        """Return the amounts that were requested last, without undone ones; edits after the last step do not count."""
        wanted = dict(self.mix.mix.amounts)
        before: list[dict[str, Amount]] = []
        for edit in self.history.edits:
            if isinstance(edit.change, Undo):
                earlier = before.pop()
                wanted = earlier if edit.step <= self.end else wanted
                continue
            before.append(wanted)
            if edit.step <= self.end:
                wanted = _changed(wanted, edit)
        return wanted

    def require_exact(self) -> None:
        """Compare the trained tokens with the model."""
        found, due = self.found(), self.due(self.end, self._standing())
        lost, more = due - found, found - due
        assert not lost, f"{len(lost)} tokens are lost, {sorted(lost)[:4]}"
        assert not more, f"{len(more)} tokens are repeated or not due, {sorted(more)[:4]}"

    def require_amounts(self) -> None:
        """Compare a run that drew its amounts to the end with the requested amounts."""
        found, wanted = self.found(), self.wanted()
        for source, name in enumerate(self.history.latest.names):
            if (amount := wanted.get(name)) is None:
                continue
            tokens = [key for key in found if key[0] == source]
            if amount.epochs:
                stop = int(Fraction(repr(amount.epochs)) * len(self.epochs[source]))
                assert _cursor_in(self._standing()["sources"], name) == (stop, 0, 0), (name, amount)
                assert all(position < stop for _, position, *_ in tokens), (name, amount)
            elif amount.samples:
                samples = {key[:3] for key in tokens}
                whole = sum(self.epochs[s][p % len(self.epochs[s])][sub] for s, p, sub in samples)
                assert (len(samples), len(tokens)) == (amount.samples, whole), (name, amount)
            else:
                assert amount.tokens <= len(tokens) < amount.tokens + LENGTH, (name, amount)


def _cursor_in(sources: dict[str, Any], name: str) -> tuple[int, int, int]:
    position, sub, token = sources[name]["cursor"] if name in sources else (0, 0, 0)
    return position, sub, token


def _changed(wanted: dict[str, Amount], edit: Edit) -> dict[str, Amount]:
    match edit.change:
        case SetAmounts(amounts=amounts):
            return wanted | amounts
        case AddSource(name=name, amount=Amount() as amount):
            return wanted | {name: amount}
        case RetireSource(name=name):
            return {n: amount for n, amount in wanted.items() if n != name}
        case _:
            return wanted


def _tokens_in(batch: Any) -> Iterator[tuple[int, int, int, int]]:
    for rows in batch.microbatches:
        sources = rows.source_ids_RT.reshape(-1)
        keys = iter(rows.keys_K4.tolist())
        for begin, end in pairwise(rows.cu_seqlens.tolist()):
            if sources[begin] >= 0:
                source, position, sub, first = next(keys)
                yield from ((source, position, sub, first + n) for n in range(end - begin))


def run_sequence(seed: int) -> EditedRun:
    """Make a run of two to four lives, with edits in each and at rest between them, and compare it with the model."""
    chance = random.Random(seed)
    names = NAMES[: chance.randint(2, 3)]
    epochs = [_records(chance) for _ in range(len(names) + len(ADDED))]
    draws_amounts = chance.random() < 0.5
    run = EditedRun(chance, _mix(chance, names, epochs, draws_amounts), epochs)
    added, at = iter(ADDED), 0
    lives = chance.randint(2, 4)
    for life in range(lives):
        is_last = life == lives - 1
        num_steps = MANY if is_last and draws_amounts else 5 + 4 * life
        changes = [
            (
                change,
                chance.choice(
                    [None, None, chance.randrange(num_steps if num_steps < MANY else 20)]
                ),
            )
            for change in _changes(run, added, chance.randint(0, 4))
        ]
        run.live(at, num_steps, changes)
        if not is_last:
            at = _rest(run, added)
    run.require_exact()
    if draws_amounts:
        run.require_amounts()
    return run


def _records(chance: random.Random) -> list[list[int]]:
    """Return records whose first one gives a sample, so that shard 0 is never empty."""
    rows = [
        [chance.randint(1, 50) for _ in range(chance.randint(0, 3))]
        for _ in range(chance.randint(0, 10))
    ]
    return [[9], *rows]


def _mix(
    chance: random.Random,
    names: Sequence[str],
    epochs: Sequence[Sequence[object]],
    draws_amounts: bool,
) -> MixConfig:
    drawn: dict[str, object] = {
        "stages": [
            {"from_step": 0, "weights": {name: chance.randint(1, 5) for name in names}},
            {
                "from_step": chance.randint(2, 9),
                "weights": {name: chance.randint(1, 5) for name in names},
                "ramp_steps": chance.choice([0, 3]),
            },
        ],
        "level": chance.choice(["token", "sample"]),
    }
    if draws_amounts:
        wanted = zip(names, epochs, strict=False)
        drawn = {
            "amounts": {name: _amount(chance, len(rows)).model_dump() for name, rows in wanted}
        }
    return a_mix(
        version=2,
        sources=names,
        rows=8,
        length=LENGTH,
        pack={"method": chance.choice(["best_fit", "concat_and_split", "none"])},
        mix=drawn,
        runtime={"prefetch_steps": chance.choice([1, 4, 16])},
    )


def _amount(chance: random.Random, records: int) -> Amount:
    match chance.choice(["epochs", "samples", "tokens"]):
        case "epochs":
            return Amount(epochs=chance.choice([1, 1.5, 2, 3]) if records > 1 else 2)
        case "samples":
            return Amount(samples=chance.randint(1, 60))
        case _:
            return Amount(tokens=chance.randint(1, 700))


def _changes(run: EditedRun, added: Iterator[str], count: int) -> Iterator[Change]:
    """Yield changes as users request them, some of them impossible."""
    chance = run.random
    for _ in range(count):
        names = run.history.latest.names
        name, number = chance.choice(names), chance.randrange(1, SHARDS)
        match chance.choice(["set", "set", "add", "retire", "undo", "shard"]):
            case "set":
                yield _set(run, name)
            case "add" if (new := next(added, None)) is not None:
                source = ParquetSource(type="parquet", path=f"{new}/*.parquet", tokens="tokens")
                if run.mix.mix.amounts is None:
                    yield AddSource(name=new, source=source, weight=chance.randint(1, 5))
                else:
                    yield AddSource(name=new, source=source, amount=_amount(chance, 2))
            case "retire":
                yield RetireSource(name=name)
            case "shard":
                file = f"{name}/{number}.parquet"
                yield SkipShard(file=file, source=name, number=number, of=SHARDS)
            case _:
                yield Undo()


def _set(run: EditedRun, name: str) -> Change:
    chance = run.random
    if run.mix.mix.amounts is None:
        return SetWeights(weights={name: chance.randint(0, 5)})
    held = (run.history.latest.mix.amounts or {}).get(name)
    if held is None or chance.random() < 0.4:
        return SetAmounts(amounts={name: _amount(chance, 2)})
    # More of the same amount: a source that has ended continues.
    more = {"epochs": 1, "samples": chance.randint(1, 30), "tokens": chance.randint(1, 300)}
    grown = Amount(**{held.kind: getattr(held, held.kind) + more[held.kind]})
    return SetAmounts(amounts={name: grown})


def _rest(run: EditedRun, added: Iterator[str]) -> int:
    """Change the mix of a run at rest; return the step from which the run resumes."""
    chance = run.random
    latest = [run.end]
    for change in _changes(run, iter(()), chance.randint(0, 2)):
        step = run.end
        if isinstance(change, SkipShard):  # also of steps that were already trained on
            step = chance.randint(max(0, run.end - 4), run.end)
        if run.edit_at_rest(change, step) and isinstance(change, SkipShard):
            latest.append(step)
    if chance.random() < 0.5 and run.end >= 2 and min(latest) == run.end:
        first = chance.randint(max(0, run.end - 5), run.end - 1)
        change = SkipSteps(first=first, stop=chance.randint(first + 1, run.end))
        if run.edit_at_rest(change, first):
            latest.append(first)
    if chance.random() < 0.3:
        return min(latest)
    return chance.choice([step for step in [0, *run.saved] if step <= min(latest)])
