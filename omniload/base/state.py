"""The Stateful protocol: plain JSON out, plain JSON in."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from omniload.base.errors import StateError

__all__ = ["Json", "JsonObject", "Stateful", "require_version"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = dict[str, Json]


@runtime_checkable
class Stateful(Protocol):
    """Whatever can be saved and restored, after torchdata's protocol of the same name."""

    def state_dict(self) -> JsonObject:
        """Return the state as plain JSON with a ``version``."""
        ...

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Continue from ``state``; raise ``StateError`` where it does not fit."""
        ...


def require_version(state: Mapping[str, Json], version: int, *, of: str) -> None:
    """Refuse a state that another release wrote in another form.

    Raises:
        StateError: ``state["version"]`` is not ``version``.
    """
    found = state.get("version")
    if found != version:
        raise StateError(
            f"{of} state has version {found!r}, this code reads {version}; "
            "resume with the release that wrote the checkpoint"
        )
