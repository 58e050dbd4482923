"""The keywords that a loader takes beside torch's: who makes the batches, and what becomes of a worker that hangs."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from omniload.base.errors import ConfigError
from trainer_integration.loader.iterators import ManyProcesses, Noting
from trainer_integration.loader.replacing import Replacing
from trainer_integration.loader.shared.iterator import Share, Shared
from trainer_integration.loader.threads import ManyThreads

__all__ = ["Ways"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": ("process", "thread"),
    "on_hang": ("raise", "replace"),
}
_MOST_RANKS = 64
"""Of one machine that bring workers to a group."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a loader's batches are made."""

    workers: str = "process"
    on_hang: str = "raise"
    share: bool | str = False

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> Self:
        """Take out of ``keywords`` what torch does not know.

        Raises:
            ConfigError: A value is none of those there are, or a keyword is torchdata's.
        """
        if "snapshot_every_n_steps" in keywords:
            raise ConfigError(
                f"snapshot_every_n_steps={keywords['snapshot_every_n_steps']!r:.60} is of torchdata's loader; leave it "
                "out: a state of this one is of every batch"
            )
        taken = {name: keywords.pop(name) for name in _CHOICES if name in keywords}
        for name, value in taken.items():
            if value not in _CHOICES[name]:
                raise ConfigError(
                    f"{name}={value!r:.60} is not one of {list(_CHOICES[name])}; choose one"
                )
        share = keywords.pop("share", False)
        if not isinstance(share, bool | str) or share == "":
            raise ConfigError(
                f"share={share!r:.60} is no name, nor True or False; give each loader that shares a name of its own"
            )
        return cls(**taken, share=share)

    def check(self, loader: Any) -> None:
        """Refuse what does not go together.

        Raises:
            ConfigError: Threads or replacing are asked of a dataset or of settings that they are not for.
        """
        if self == Ways():
            return
        given = {"workers": "process", "on_hang": "raise", "share": False}
        asked = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if value != given[name]
        )
        piped = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
        if piped or loader._dataset_kind == _DatasetKind.Iterable:
            raise ConfigError(
                f"{asked} is for map datasets, found the {'pipe' if piped else 'iterable dataset'} "
                f"{type(loader.dataset).__name__}; leave it out"
            )
        if self.share:
            self._check_share(loader, asked)
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

    def joining(self, environment: Mapping[str, str] = os.environ) -> Share | None:
        """Return the loader's part in the group of its machine, where it shares."""
        if not self.share:
            return None
        found = (
            environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or ""
        )
        ranks = int(found) if found.isascii() and found.isdigit() else 1
        return Share(self.share, max(1, min(ranks, _MOST_RANKS)))

    def _check_share(self, loader: Any, asked: str) -> None:
        if (self.workers, self.on_hang) != ("process", "raise"):
            raise ConfigError(
                f"{asked} do not go together: shared workers are processes, replaced where they end; give share= alone"
            )
        if not (loader.num_workers and loader.in_order):
            raise ConfigError(
                f"share={self.share!r} needs workers and order, found num_workers={loader.num_workers} and "
                f"in_order={loader.in_order}; set num_workers= to those that each rank brings"
            )

    @property
    def read_ahead(self) -> bool:
        """Whether several read ahead in one copy of the dataset, so that its state is of no batch."""
        return bool(self.share) or self.workers == "thread"

    @property
    def kind(self) -> Callable[[Any], Noting]:
        """The iterator of such a loader, where there are workers."""
        if self.share:
            return Shared
        if self.workers == "thread":
            return ManyThreads
        return Replacing if self.on_hang == "replace" else ManyProcesses
