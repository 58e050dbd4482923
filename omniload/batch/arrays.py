"""The seam to tensor libraries: makes tensors of numpy arrays; torch has an adapter of its own."""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError

__all__ = ["Arrays", "NumpyArrays", "SideStream"]


class SideStream(Protocol):
    """Copies tensors to a device concurrently with the trainer's computation there."""

    def copied(self, tensor: Any) -> Any:  # noqa: ANN401 -- the tensor type of whichever library
        """Begin to copy a tensor of the host; return the copy, which nothing may use before ``arrive``."""
        ...

    def mark(self) -> object:
        """Return a mark behind the copies begun so far."""
        ...

    def arrive(self, copies: Sequence[Any], mark: object) -> None:
        """Have the user's stream wait for ``mark``; ``copies`` keep their memory until it is done with them."""
        ...


class Arrays(Protocol):
    """Makes what the trainer computes with out of numpy arrays."""

    def of(self, array: NDArray[Any]) -> Any:  # noqa: ANN401 -- the tensor type of whichever library
        """Return ``array`` as a tensor that may be written to."""
        ...

    def check(self, device: object) -> None:
        """Refuse a device that ``to`` cannot put tensors on.

        Raises:
            ConfigError: There is no such device here.
        """
        ...

    def to(self, tensor: Any, device: object) -> Any:  # noqa: ANN401
        """Return a tensor on a device."""
        ...

    def side_stream(self, device: object) -> SideStream | None:  # noqa: ARG002 -- of those that have any
        """Return a stream that copies concurrently with the trainer's work; ``None`` if the library has none."""
        return None


class NumpyArrays(Arrays):
    """Numpy itself, for JAX and for loops without torch."""

    @override
    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    @override
    def check(self, device: object) -> None:
        raise ConfigError(
            f"numpy arrays have no device {device!r}; install torch, or copy them by your own library"
        )

    @override
    def to(self, tensor: NDArray[Any], device: object) -> NDArray[Any]:
        self.check(device)
        return tensor
