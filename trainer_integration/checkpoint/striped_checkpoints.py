"""The checkpoints of a run on a striped namespace, without a mount: ``Checkpoints`` for a store's URL.

::

    step-00000020/
      shard-00001-of-00002.safetensors   what rank 0 wrote, striped; tensors are spread over the ranks
      shard-00002-of-00002.safetensors
      index.json                         commits: where every tensor lies, the model's configuration
                                         and the data plane's state at the same step
"""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject
from trainer_integration.checkpoint.place import StorePlace
from trainer_integration.checkpoint.save_errors import NoRoomError
from trainer_integration.checkpoint.saving import ALONE, Saving
from trainer_integration.checkpoint.striped.place import location_of, read_index
from trainer_integration.checkpoint.striped.storage import load_striped, save_striped
from trainer_integration.checkpoint.tensors import (
    NOTHING,
    Optimizer,
    Restored,
    require_same_model,
    tensors_of,
)
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["StripedCheckpoints"]

_LOG = get_logger(__name__)


class StripedCheckpoints(Saving[str]):
    """Checkpoints on a striped namespace."""

    def __init__(
        self,
        place: StorePlace,
        model_config: Mapping[str, Json],
        *,
        keep: int = 3,
        groups: ProcessGroups = ALONE,
    ) -> None:
        """Use ``place``, which all ranks of ``groups`` open; ``model_config`` must not change."""
        super().__init__(model_config, keep, groups)
        self._place = place

    @override
    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        loader_state: Mapping[str, Json],
        progress: Mapping[str, Json] = NOTHING,
    ) -> str:
        """Save and commit tensors; see ``save``."""
        if self._rank == 0:
            # Nobody writes meanwhile: ``save_striped`` begins with a word of rank 0 for which the others wait.
            self._sweep()
        about: JsonObject = {
            "step": step,
            "model": self._model_config,
            "loader": dict(loader_state),
            "progress": dict(progress),
        }
        path = self._place.path_of(step)
        try:
            save_striped(tensors, self._place.files, path, self._group, about=about)
        except NoRoomError:
            if self._rank == 0:  # all ranks leave a save together, so none still writes
                self._sweep()
            raise
        if self._rank == 0:
            for old in self._place.steps()[: -self._keep]:
                self._place.remove(old)
        if self._group is not None:
            dist.barrier(group=self._group)
        return path

    def _sweep(self) -> None:
        for left in self._place.unfinished():
            _LOG.warning("removing step %d, left by an interrupted save", left)
            self._place.remove(left)

    @override
    def load(
        self, model: nn.Module, optimizer: Optimizer, *, step: int | None = None
    ) -> Restored | None:
        """Every byte is checked as it is read; see ``Saving.load``."""
        step = max(self._place.steps(), default=None) if step is None else step
        if step is None:
            return None
        path = self._place.path_of(step)
        about = read_index(self._place.files, path).about
        location = location_of(self._place.files, path)
        require_same_model(location, about.get("model", {}), self._model_config)
        loader_state = self._place.loader_state_of(step)
        tensors = tensors_of(model, optimizer, self._groups)
        load_striped(tensors, self._place.files, path, self._group)
        return Restored(step=step, loader_state=loader_state, progress=about.get("progress", {}))
