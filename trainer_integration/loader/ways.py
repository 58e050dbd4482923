"""The keywords that a loader takes beside torch's: who makes the batches, and what becomes of a worker that hangs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from omniload.base.errors import ConfigError
from trainer_integration.loader.iterators import ManyProcesses, Noting
from trainer_integration.loader.replacing import Replacing
from trainer_integration.loader.threads import ManyThreads

__all__ = ["Ways"]

_CHOICES = {"workers": ("process", "thread"), "on_hang": ("raise", "replace")}


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a loader's batches are made."""

    workers: str = "process"
    on_hang: str = "raise"

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> Self:
        """Take out of ``keywords`` what torch does not know.

        Raises:
            ConfigError: A value is none of those there are.
        """
        taken = {name: keywords.pop(name) for name in _CHOICES if name in keywords}
        for name, value in taken.items():
            if value not in _CHOICES[name]:
                raise ConfigError(
                    f"{name}={value!r:.60} is not one of {list(_CHOICES[name])}; choose one"
                )
        return cls(**taken)

    def check(self, loader: Any) -> None:
        """Refuse what does not go together.

        Raises:
            ConfigError: Threads or replacing are asked of a dataset or of settings that they are not for.
        """
        if self == Ways():
            return
        asked = f"workers={self.workers!r}" if self.workers != "process" else "on_hang='replace'"
        piped = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
        if piped or loader._dataset_kind == _DatasetKind.Iterable:
            raise ConfigError(
                f"{asked} is for map datasets, found the {'pipe' if piped else 'iterable dataset'} "
                f"{type(loader.dataset).__name__}; leave it out"
            )
        if self.on_hang != "replace":
            return
        if self.workers == "thread":
            raise ConfigError(
                "on_hang='replace' cannot kill a thread; use workers='process', or leave on_hang out"
            )
        if not (loader.num_workers and loader.timeout > 0 and loader.in_order):
            raise ConfigError(
                f"on_hang='replace' needs workers, a limit and order, found num_workers={loader.num_workers}, "
                f"timeout={loader.timeout} and in_order={loader.in_order}; set timeout= to what a batch may take"
            )

    @property
    def kind(self) -> Callable[[Any], Noting]:
        """The iterator of such a loader, where there are workers."""
        if self.workers == "thread":
            return ManyThreads
        return Replacing if self.on_hang == "replace" else ManyProcesses
