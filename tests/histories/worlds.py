"""The world of a history: the plane that a seed describes, and the faults that happen to it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import AddSource, Change, RetireSource, SetWeights, Undo
from omniload.mix.sources import ParquetSource
from tests.support.plane.builders import PACKS, a_mix, with_packs

__all__ = ["World", "world_of"]

SOURCES = tuple("abcdefgh")
STEPS = 6
_SCENARIOS = 61
"""Mixes and data that worlds share: the expected steps are computed once for each."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that a history depends on. The same world gives the same history."""

    seed: int
    """The seed that decides the order of messages, the faults, and the roles that they hit."""
    scenario: int = 0
    """Number of the mix and of the data."""
    steps: int = STEPS
    dp: int = 4
    num_loaders: int = 1
    num_constructors: int = 1
    shadows: int = 0
    repeat_share: float = 0.0
    lost_share: float = 0.0
    slow_share: float = 0.0
    store_faults: float = 0.0
    cuts: int = 0
    kills: int = 0
    constructor_kills: int = 0
    planner_kills: int = 0
    believed_dead: bool = False
    moves: int = 0
    impatient: bool = False
    changes: int = 0
    resizes: int = 0
    places: int = 0
    constructor_moves: int = 0
    scaler: int = 0
    """Most loaders, which a scaler adds and merges; 0 without a scaler."""
    pace: int = 0
    """Most messages for which the slowest rank computes between two steps."""
    lends: bool = False
    """Whether ranks are lent the step after their present one."""
    small_bases: bool = False
    """Whether the journal has a base every few steps."""

    def smaller(self) -> Iterator["World"]:
        """Yield worlds with fewer faults, the smallest first for each kind."""
        least = World(seed=self.seed, scenario=self.scenario)
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(least, field.name)
            if field.name in ("seed", "scenario", "dp", "steps") or now == then:
                continue
            yield replace(self, **{field.name: then})
            if isinstance(now, int) and not isinstance(now, bool) and now - 1 > then:
                yield replace(self, **{field.name: now - 1})
        for dp in (1, 2):
            if dp < self.dp:
                yield replace(self, dp=dp)
        for steps in (1, 2, 3, 4):
            if steps < self.steps:
                yield replace(self, steps=steps)

    def to_words(self) -> str:
        """Return the differences from a world without faults, as the command line takes them."""
        least = asdict(World(seed=self.seed))
        found = {name: value for name, value in asdict(self).items() if value != least[name]}
        return ",".join(
            [f"seed={self.seed}", *(f"{name}={value}" for name, value in found.items())]
        )

    @classmethod
    def from_words(cls, words: str) -> "World":
        """Read what ``to_words`` returns.

        Raises:
            ValueError: A part of a world is unknown, or its value is no number.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        given: dict[str, Any] = {}
        for word in words.split(","):
            name, _, value = word.partition("=")
            if name not in kinds:
                raise ValueError(f"a world has no {name!r}; it has {', '.join(kinds)}")
            if kinds[name] is bool:
                given[name] = {"True": True, "False": False}[value]
            else:
                given[name] = float(value) if kinds[name] is float else int(value)
        return cls(**given)

    @property
    def mix(self) -> MixConfig:
        """The mix of the world."""
        return _mix_of(self.scenario, bool(self.resizes))

    @property
    def epochs(self) -> list[list[list[int]]]:
        """Lengths of the samples of each record of each source; sources that are added come last."""
        return _epochs_of(self.scenario)[: len(SOURCES) + len(self._added())]

    def asked(self) -> list[tuple[Change, int | None]]:
        """Return the requested changes."""
        return _changes_of(self.scenario)[: self.changes]

    def ranks_later(self) -> list[tuple[int, bool]]:
        """Return the later ranks."""
        return _resizes_of(self.scenario)[: self.resizes]

    def _added(self) -> list[Change]:
        return [change for change, _ in self.asked() if isinstance(change, AddSource)]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make a plane."""
        own = ("scenario", "steps", "changes", "resizes", "small_bases")
        plain = {name: value for name, value in asdict(self).items() if name not in own}
        return plain | {
            "mix": self.mix,
            "epochs": self.epochs,
            "num_steps": self.steps,
            "changes": self.asked(),
            "resizes": self.ranks_later(),
        }


def world_of(seed: int) -> World:
    """Return the world of a seed: 4 ranks, 8 sources, and some of the possible faults."""
    chance = random.Random(f"world {seed}")

    def some(*values: Any) -> Any:
        return chance.choice(values)

    # Few worlds lend, and in all of these the mix changes.
    lends = seed % 16 in (10, 15)
    changes = some(0, 0, 1, 3) or 2 * lends
    # One world in four is scaled. Nothing else moves sources there. The seeds of the other histories are already
    # known to prove particular cases, so they stay unscaled.
    is_scaled = seed % 8 in (5, 7)
    return World(
        seed=seed,
        scenario=seed % _SCENARIOS,
        num_loaders=some(1, 2, 3),
        num_constructors=some(1, 2, 4),
        shadows=some(0, 1, 1, 2),
        repeat_share=some(0.0, 0.1, 0.4),
        lost_share=some(0.0, 0.0, 0.2),
        slow_share=some(0.0, 0.05, 0.15),
        store_faults=some(0.0, 0.0, 0.3),
        cuts=some(0, 1, 3),
        kills=some(0, 1, 3),
        constructor_kills=some(0, 0, 1, 2),
        planner_kills=some(0, 1, 2, 3),
        believed_dead=some(False, True),
        moves=some(0, 0, 2, 6) * (not is_scaled),
        impatient=some(False, True),
        changes=changes,
        resizes=0 if changes else some(0, 0, 1, 2),
        small_bases=some(False, False, True),
        # Last, so that it changes no other value of a world, and no value at all in every second one.
        places=some(0, 0, 1, 2),
        # Few worlds move constructors, because moves change other events, and the seeds of the other histories are
        # known to prove particular cases.
        constructor_moves=some(1, 2, 3) if seed % 4 == 3 else 0,
        scaler=some(2, 3, 4) if is_scaled else 0,
        pace=some(0, 20, 60) if is_scaled else some(20, 60) if lends else 0,
        lends=lends,
    )


@lru_cache
def _mix_of(scenario: int, elastic: bool) -> MixConfig:
    chance = random.Random(f"mix {scenario}")
    weights = {name: chance.randint(1, 5) for name in SOURCES}
    later = {name: chance.randint(0, 5) for name in SOURCES[1:]} | {SOURCES[0]: 1}
    ramp = chance.choice([0, 2])
    mix = a_mix(
        sources=SOURCES,
        rows=8,
        length=16,
        micro_rows=chance.choice([1, 2]),
        pack={
            "method": chance.choice(["best_fit", "best_fit", "concat_and_split", "none"]),
            "overlong": chance.choice(["split", "truncate", "drop"]),
            "lookahead_rows": chance.choice([0, 2]),
        },
        mix={
            "stages": [
                {"from_step": 0, "weights": weights},
                {"from_step": 2, "weights": later, "ramp_steps": ramp},
            ],
            "level": chance.choice(["token", "sample"]),
        },
        runtime={"prefetch_steps": chance.choice([1, 2, 4, 8]), "elastic": elastic},
        balance={"method": chance.choice(["greedy_swap", "none"])},
    )
    # Last, and in few mixes, because the seeds of the other histories are known to prove particular cases.
    if scenario % 11 == 9 or scenario % 13 == 8:
        return with_packs(mix, [chance.choice([None, *PACKS]) for _ in SOURCES])
    return mix


@lru_cache
def _epochs_of(scenario: int) -> list[list[list[int]]]:
    chance = random.Random(f"data {scenario}")

    def record() -> list[int]:
        return [chance.randint(1, 30) for _ in range(chance.choice([0, 1, 1, 1, 2]))]

    return [
        [[9], *(record() for _ in range(chance.randint(0, 14)))] for _ in range(len(SOURCES) + 2)
    ]


@lru_cache
def _changes_of(scenario: int) -> Sequence[tuple[Change, int | None]]:
    chance = random.Random(f"changes {scenario}")
    added = iter(("a-new", "zz-new"))
    found: list[tuple[Change, int | None]] = []
    for _ in range(3):
        name = chance.choice(SOURCES)
        match chance.choice(["set", "set", "add", "retire", "undo"]):
            case "set":
                change: Change = SetWeights(weights={name: float(chance.randint(0, 5))})
            case "add" if (new := next(added, None)) is not None:
                source = ParquetSource(type="parquet", path=f"{new}/*.parquet", tokens="tokens")
                change = AddSource(name=new, source=source, weight=float(chance.randint(1, 5)))
            case "retire":
                change = RetireSource(name=name)
            case _:
                change = Undo()
        found.append((change, chance.choice([None, None, chance.randint(0, STEPS - 1)])))
    return found


@lru_cache
def _resizes_of(scenario: int) -> Sequence[tuple[int, bool]]:
    chance = random.Random(f"ranks {scenario}")
    return [(chance.choice([1, 2, 3, 4, 8]), chance.random() < 0.5) for _ in range(2)]
