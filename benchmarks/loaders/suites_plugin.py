"""A pytest plugin that puts our loader in the place of torch's or torchdata's in a suite of tests."""

import contextlib
import os
from typing import Any

import torch.utils.data

from trainer_integration import DataLoader

__all__ = ["VARIABLE"]

VARIABLE = "OMNILOAD_LOADER_UNDER_TEST"
"""``ours``, or anything else for the suite's own loader."""


class _Stateful(DataLoader[Any]):
    """Our loader with the keyword that torchdata adds; our state is correct after every batch."""

    def __init__(self, dataset: object, *args: object, **keywords: object) -> None:
        keywords.pop("snapshot_every_n_steps", None)
        super().__init__(dataset, *args, **keywords)


if os.environ.get(VARIABLE) == "ours":
    with contextlib.suppress(ImportError):
        import torchdata.stateful_dataloader as stateful

        stateful.StatefulDataLoader = _Stateful
    torch.utils.data.DataLoader = DataLoader  # type: ignore[misc]
