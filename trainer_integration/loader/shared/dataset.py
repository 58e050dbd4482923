"""A dataset that is made where it is read first: with ``share=True``, once per machine."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset
from typing_extensions import override

from omniload.base.errors import ConfigError

__all__ = ["SharedDataset"]


class SharedDataset(Dataset[Any]):
    """A map dataset that ``make`` returns, made in the first process that reads a sample."""

    def __init__(self, make: Callable[[], Any], length: int) -> None:
        """Promise a dataset.

        Args:
            make: Makes the dataset. A start method other than fork pickles it.
            length: Samples of it, which samplers ask for where the dataset is not.
        """
        self.make, self.length = make, length
        self._made: Any = None

    def __len__(self) -> int:
        return self.length

    @property
    def made(self) -> Any:
        """The dataset itself, which is made now if it was not.

        Raises:
            ConfigError: It has another length.
        """
        if self._made is None:
            made = self.make()
            if len(made) != self.length:
                raise ConfigError(
                    f"make() returned a {type(made).__name__} of {len(made)} samples, the SharedDataset was promised "
                    f"{self.length}; give length={len(made)}"
                )
            self._made = made
        return self._made

    @override
    def __getitem__(self, index: Any) -> Any:
        return self.made[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return samples, all at once where the dataset can."""
        bulk = getattr(self.made, "__getitems__", None)
        return bulk(indices) if callable(bulk) else [self.made[index] for index in indices]

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leave the dataset where it is: another process makes its own."""
        return {**vars(self), "_made": None}
