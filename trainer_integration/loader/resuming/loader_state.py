"""The state of a loader as plain JSON: versioned, with digests of its parts, and ranges that are checked.

The order of an epoch is large and does not change, so it has a digest of its own, made once. The rest has a digest
under ``blake2b``. The states that datasets and samplers return need not be JSON; if they are, they have a digest too.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import orjson

from omniload.base.errors import StateError
from omniload.base.state import (
    JsonObject,
    require_version,
    sealed,
    shown,
    unsealed,
    whole_number,
)
from omniload.mix.other_states import OF_DATASET, writer_of
from trainer_integration.loader.resuming.order import Place
from trainer_integration.loader.samples import Start, are_alike

__all__ = ["LoaderState", "Stage", "sealed_order", "without_marks"]

T = TypeVar("T")
Stage = Literal["fresh", "running", "finished"]
_SHOWN_KEYS = 8
_VERSION = 2
_UNSEALED_VERSION = 1
"""Version with a digest of the order only."""
_SEAL = "blake2b"
# Keys that frameworks add to a state, such as a count of epochs, are theirs, and no digest covers them.
_OURS = (
    *("version", "kind", "stage", "seed", "shape", "generators", "batches", "late", "digest"),
    *("workers", "next_worker", "given"),
)
_AS_JSON = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
# Values that JSON would return as another type have no digest: they are kept as they are and never compared.
_AS_GIVEN = (
    orjson.OPT_SORT_KEYS
    | orjson.OPT_NON_STR_KEYS
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)
_MOST = 1 << 62
_REMEDY = "resume from an earlier checkpoint"


def sealed_order(place: Place) -> JsonObject:
    """Return the part that stays the same through an epoch, with a digest of itself."""
    return sealed({"epochs": place.epochs, "begun": place.begun, "drawn": place.drawn})


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Content of ``DataLoader.state_dict``."""

    kind: Literal["map", "iterable"]
    stage: Stage
    shape: JsonObject
    """Values that must be the same for the state to mean the same batches."""
    seed: int | None = None
    """Base seed of the epoch's workers; ``None`` lets the next iterator draw it."""
    place: Place = field(default_factory=Place)
    workers: int = 0
    """Worker processes; a dataset that has a state in each resumes with as many."""
    next_worker: int = 0
    starts: list[Start] = field(default_factory=list)
    """Where each worker continues, if the dataset is iterable or has a state."""

    def as_dict(self, order: JsonObject) -> dict[str, Any]:
        """Return the state; ``order`` is ``sealed_order`` of its place."""
        made: dict[str, Any] = {
            "version": _VERSION,
            "kind": self.kind,
            "stage": self.stage,
            "seed": self.seed,
            "shape": dict(self.shape),
            "order": order,
            "generators": self.place.now,
        }
        if self.place.kept is not None:
            made["sampler"] = self.place.kept
        if self.kind == "map":
            made["batches"], made["late"] = self.place.batches, list(self.place.late)
            made["digest"] = self.place.digest
        if self.kind == "iterable" or self.starts:
            made["workers"], made["next_worker"] = self.workers, self.next_worker
            made["starts"] = [vars(start).copy() for start in self.starts]
        # Separate from our own digest, because a dataset's own state need not be JSON, and then has no digest.
        made["given"] = _given_digest(made)
        return made | {_SEAL: _digest(made)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "LoaderState":
        """Return the state that ``as_dict`` wrote; keys of other origin are ignored.

        Raises:
            StateError: It is no state, of another version, damaged, or out of range.
        """
        other = writer_of(state, own=OF_DATASET)
        if other is not None and not other.startswith("torchdata"):  # most of them can be read
            raise StateError(
                f"this is a state of {other}, whose places are not those of a dataset of torch's; resume with that "
                "loader, or begin a new epoch with the saved model"
            )
        if "version" not in state:
            held = ", ".join(map(repr, list(state)[:_SHOWN_KEYS]))
            raise StateError(
                f"this is no state of a loader: it has no version, and holds {held}; pass the result of state_dict()"
            )
        # A state with a digest is not of the version that had none, whatever it says.
        if state["version"] != _UNSEALED_VERSION or _SEAL in state:
            require_version(state, _VERSION, of="loader")
        try:
            if state["version"] != _UNSEALED_VERSION:
                _require_whole(state)
            return cls._read(state)
        except KeyError as error:
            raise StateError(f"the loader's state has no {error}; {_REMEDY}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"the loader's state is damaged: {error}; {_REMEDY}") from error

    @classmethod
    def _read(cls, state: Mapping[str, Any]) -> "LoaderState":
        order = unsealed(_typed(state, "order", dict), of="the order in the loader's state")
        kind = _choice(state, "kind", ("map", "iterable"))
        stage = _choice(state, "stage", ("fresh", "running", "finished"))
        seed = state["seed"]
        epochs: list[Any] = _typed(order, "epochs", list)
        batches = whole_number(state.get("batches", 0), below=_MOST)
        place = Place(
            batches=batches,
            late=tuple(whole_number(each, below=batches) for each in state.get("late", ())),
            digest=whole_number(state.get("digest", 0), below=1 << 32),
            kept=state.get("sampler"),
            epochs=[whole_number(each, below=_MOST) for each in epochs],
            begun=_generators(order["begun"]),
            drawn=_generators(order["drawn"]),
            now=_generators(state["generators"]),
        )
        if stage == "running" and place.drawn is None and place.now is None:
            raise ValueError("it names no generators")
        return cls(
            kind=cast("Any", kind),
            stage=cast("Any", stage),
            shape=_typed(state, "shape", dict),
            seed=None if seed is None else whole_number(seed, below=1 << 64, least=-(1 << 63)),
            place=place,
            workers=whole_number(state.get("workers", 0), below=1 << 16),
            next_worker=whole_number(state.get("next_worker", 0), below=1 << 16),
            starts=[_start(each, kind) for each in state.get("starts", ())],
        )

    def starts_of(self, lanes: int) -> list[Start]:
        """Return where each of ``lanes`` workers continues."""
        if len(self.starts) == lanes:
            return list(self.starts)
        # For a map dataset, whose copies ``check`` has found alike.
        states = [start.state for start in self.starts[:1]] if self.kind == "map" else []
        return [Start(state=states[0] if states else None)] * lanes

    def check(self, kind: str, shape: JsonObject, workers: int, *, takes_state: bool) -> None:
        """Refuse a loader whose batches are not those of the state.

        Args:
            kind: Kind of the dataset.
            shape: Result of ``shape_of`` for the loader.
            workers: ``num_workers`` of the loader.
            takes_state: Whether the loader's dataset accepts a state.

        Raises:
            StateError: The dataset's kind or length, the batch size, the samplers or the number of ranks differ; or the
                number of workers differs, although each has a place or a state of the dataset.
        """
        if self.kind != kind:
            raise StateError(
                f"the state is of a dataset of kind {self.kind!r}, this one is {kind!r}; "
                "resume with the dataset that saved"
            )
        placed = any(start.state is not None for start in self.starts)
        if kind == "iterable" and (placed or self.stage == "running") and self.workers != workers:
            raise StateError(
                f"the state is of {self.workers} workers, each with its own place in the iterable dataset; "
                f"this loader has {workers}: use num_workers={self.workers}"
            )
        if kind == "map" and placed:
            self._check_copies(workers, takes_state)
        if self.stage != "running":
            return
        # A value that the state does not name comes from a later release, and is not compared.
        for name, saved in self.shape.items():
            if name in shape and shape[name] != saved:
                raise StateError(
                    f"{name} was {saved!r} in the run that saved and is {shape[name]!r} here; the place in the epoch "
                    "would be of other samples: resume with the same, or finish the epoch first"
                )
        if kind == "iterable" and len(self.starts) != max(1, workers):
            raise StateError(
                f"the loader's state holds the places of {len(self.starts)} workers, not of "
                f"{max(1, workers)}; {_REMEDY}"
            )

    def _check_copies(self, workers: int, takes_state: bool) -> None:
        """Refuse a loader that cannot restore the state of each worker's map dataset."""
        if not takes_state:
            raise StateError(
                "the state holds one of the map dataset's own, which this loader cannot give back: its dataset has no "
                "load_state_dict, or workers='thread' or share= is set; resume with the loader of the run that saved"
            )
        first, *others = [start.state for start in self.starts]
        alike = bool(others) and all(are_alike(first, other) for other in others)
        if len(self.starts) != max(1, workers) and not alike:
            raise StateError(
                f"the state is of {self.workers} workers, each with a state of its own of the map dataset; this loader "
                f"has {workers}: use num_workers={self.workers}"
            )


def _digest(state: Mapping[str, Any]) -> str:
    """Return a digest of our part of a state; of the order, only its own digest is included."""
    starts = [
        {key: value for key, value in start.items() if key != "state"}
        for start in state.get("starts", ())
    ]
    ours = {key: state[key] for key in _OURS if key in state}
    ours |= {"order": state["order"][_SEAL], "starts": starts}
    # Keys are sorted, because JSON that was saved and read may return them in another order.
    return hashlib.blake2b(orjson.dumps(ours, option=_AS_JSON), digest_size=16).hexdigest()


def _given_digest(state: Mapping[str, Any]) -> str | None:
    """Return a digest of the states of datasets and samplers; ``None`` if they are no plain JSON."""
    given = [state.get("sampler"), [start["state"] for start in state.get("starts", ())]]
    try:
        data = orjson.dumps(given, option=_AS_GIVEN)
    except TypeError:
        return None
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _require_whole(state: Mapping[str, Any]) -> None:
    """Refuse a state whose digests do not match; KeyError, TypeError and the like say what is missing or no JSON.

    Raises:
        StateError: The message names the part.
    """
    if state[_SEAL] != _digest(state):
        part = "it"
    elif state["given"] is not None and state["given"] != _given_digest(state):
        part = "what the dataset or the sampler gave for its own state"
    else:
        return
    raise StateError(
        f"the loader's state is damaged: {part} has another digest than the state carries; {_REMEDY}"
    )


def _typed(state: Mapping[str, Any], key: str, kind: Callable[..., T]) -> T:
    value = state[key]
    if type(value) is not kind:
        raise ValueError(f"{key} is {value!r:.60}")
    return cast("T", value)


def _choice(state: Mapping[str, Any], key: str, among: tuple[str, ...]) -> str:
    if state[key] not in among:
        raise ValueError(f"{key} is {state[key]!r:.60}, not one of {list(among)}")
    return cast("str", state[key])


def _generators(taken: Any) -> JsonObject | None:
    if taken is not None and not (isinstance(taken, dict) and "generators" in taken):
        raise ValueError(f"generators are {taken!r:.60}")
    return cast("JsonObject | None", taken)


_PARTS = {"map": {"dataset"}, "iterable": {"dataset", "iterator"}}
"""Parts of a worker that have a state, by the kind of its dataset."""


def _start(fields: Mapping[str, Any], kind: str) -> Start:
    state = fields["state"]
    if state is not None and not (
        isinstance(state, dict) and state and state.keys() <= _PARTS[kind]
    ):
        raise ValueError(f"the state of a worker is {shown(state)}, none of {sorted(_PARTS[kind])}")
    return Start(
        batches=whole_number(fields["batches"], below=_MOST),
        state=state,
        over=fields["over"] is True,
        begun=_generators(fields["begun"]),
        drawn=_generators(fields["drawn"]),
    )


def without_marks(state: Any) -> Any:
    """Return a mix's state, which is sealed, without frameworks' keys such as ``_iterator_finished``."""
    if not isinstance(state, Mapping) or not state:
        return state
    return {key: value for key, value in state.items() if not str(key).startswith("_")}
