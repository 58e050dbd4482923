"""Checkpoints: whole or absent, checked on read, free of pickle.

::

    step-00000020/                  committed by one rename
      meta.json                     version, model, size and checksum of every other file
      loader.json                   the data plane's state at the same step
      shard-00001-....safetensors   what rank 0 wrote; tensors are spread over the ranks
      shard-00002-....safetensors
    step-00000040.partial/          being written, or left by a crash; never read

Tensors go through torch's distributed checkpoint (DCP) in its safetensors form, whose files contain only JSON and
numbers. Any number of ranks can load what any number saved. No RNG state is saved, because randomness is a function of
seed and position.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typing_extensions import override

from omniload.base.errors import IntegrityError, StateError
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject, require_version
from omniload.base.writing import sync_folder
from trainer_integration.checkpoint.file_digests import (
    FileDigest,
    read_sealed_json,
    write_sealed_json,
    write_synced,
)
from trainer_integration.checkpoint.folder import LOADER, META, VERSION, path_of, steps_in
from trainer_integration.checkpoint.save_errors import (
    NoRoomError,
    is_full,
    no_room,
    own_errors,
    require_room,
)
from trainer_integration.checkpoint.saving import ALONE, Saving
from trainer_integration.checkpoint.tensors import (
    NOTHING,
    Optimizer,
    Restored,
    require_same_model,
    tensors_of,
)
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["Checkpoints"]

_PARTIAL_SUFFIX = ".partial"

_log = get_logger(__name__)


class Checkpoints(Saving[Path]):
    """Checkpoints in a folder that all ranks share."""

    def __init__(
        self,
        folder: Path,
        model_config: Mapping[str, Json],
        *,
        keep: int = 3,
        groups: ProcessGroups = ALONE,
    ) -> None:
        """Use ``folder``, shared by all ranks of ``groups``; ``model_config`` must not change."""
        super().__init__(model_config, keep, groups)
        self.folder = folder
        self._world_size = 1 if groups.world is None else dist.get_world_size(groups.world)

    @override
    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        loader_state: Mapping[str, Json],
        progress: Mapping[str, Json] = NOTHING,
    ) -> Path:
        """Save and commit tensors; see ``save``."""
        final = path_of(self.folder, step)
        partial = final.with_name(final.name + _PARTIAL_SUFFIX)
        if final.exists():
            raise StateError(f"{final} exists already; resume from it, or move it away")
        # Bytes of all ranks: a sharded tensor reports the bytes of the whole tensor.
        need = sum(tensor.nbytes for tensor in tensors.values())
        if self._rank == 0:
            # This comes before room is measured, because leftovers of a crash take some of it.
            self._sweep()
        require_room(str(final), need, self._room, self._group)
        if self._rank == 0:
            # The sweep has removed what was there, so a new folder would belong to another job's save.
            partial.mkdir()
        self._barrier()
        try:
            with own_errors(str(final), "nothing was saved", need=need, room=self._room):
                dcp_save(
                    tensors,
                    storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            digests = self._gathered_digests(partial)
            fault = None
            if self._rank == 0:
                about: JsonObject = {"loader": dict(loader_state), "progress": dict(progress)}
                fault = self._fault_of_commit(partial, final, digests, about)
            self._require_committed(final, fault)
        except NoRoomError:
            if self._rank == 0:  # all ranks leave a save together, so none still writes
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    @override
    def load(
        self, model: nn.Module, optimizer: Optimizer, *, step: int | None = None
    ) -> Restored | None:
        """Every file is read and checked once, by one of the ranks, before any is used; see ``Saving.load``."""
        steps = steps_in(self.folder)
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            raise StateError(
                f"{self.folder} has no checkpoint of step {step}; it has {list(steps)}"
            )
        path = path_of(self.folder, step)
        meta = read_sealed_json(path / META)
        require_version(meta, VERSION, of=f"checkpoint {path}")
        saved = meta.get("model")
        assert isinstance(saved, dict), "the digest of meta.json fits, so its form does"
        require_same_model(path, saved, self._model_config)
        # This comes before the first tensor is read, because loading in place cannot be undone.
        self._verify(path, meta)
        tensors = tensors_of(model, optimizer, self._groups)
        with own_errors(str(path), "resume from an earlier checkpoint"):
            dcp_load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(path)),
                process_group=self._group,
                no_dist=self._group is None,
            )
        progress = meta.get("progress", {})
        assert isinstance(progress, dict), "the digest of meta.json fits, so its form does"
        # These bytes were compared above with the digest in meta.json.
        loader_state = orjson.loads((path / LOADER).read_bytes())
        return Restored(step=step, loader_state=loader_state, progress=progress)

    def _room(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _fault_of_commit(
        self,
        partial: Path,
        final: Path,
        digests: dict[str, FileDigest],
        about: JsonObject,
    ) -> NoRoomError | None:
        """Commit; return the error if the disk is full by now, because all ranks must learn of it."""
        try:
            self._commit(partial, final, digests, about)
        except OSError as error:
            if not is_full(error):
                raise
            need = sum(digest.size_bytes for digest in digests.values())
            return no_room(str(final), need, self._room(), str(error))
        return None

    def _require_committed(self, final: Path, fault: NoRoomError | None) -> None:
        """Wait for the commit by rank 0, and raise its error on all ranks."""
        told = torch.tensor(fault is not None)
        if self._group is not None:
            dist.broadcast(told, group_src=0, group=self._group)
        if fault is not None:
            raise fault
        if bool(told):
            raise NoRoomError(f"{final} does not fit, rank 0 found; make room and resume")

    def _sweep(self) -> None:
        """Remove what a crash left half written or half deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in sorted(self.folder.glob(f"step-*{_PARTIAL_SUFFIX}")):
            _log.warning("removing %s, left by an interrupted save", entry)
            shutil.rmtree(entry)

    def _gathered_digests(self, partial: Path) -> dict[str, FileDigest]:
        """Have every rank read its own file; return all digests on rank 0, which commits, and none on other ranks."""
        own = sorted(partial.glob(f"shard-{self._rank + 1:05d}-*.safetensors"))
        # A rank that was dealt no tensor has written no file.
        digest = FileDigest.of(own[0]) if own else FileDigest(size_bytes=-1, xxh3=0)
        # Two signed halves, because a checksum does not fit a signed 64-bit element.
        row = torch.tensor([digest.size_bytes, digest.xxh3 >> 32, digest.xxh3 & 0xFFFFFFFF])
        rows = [torch.empty_like(row) for _ in range(self._world_size)]
        if self._group is None:
            rows = [row]
        else:
            dist.all_gather(rows, row, group=self._group)
        found: dict[str, FileDigest] = {}
        if self._rank != 0:
            return found  # rank 0 may have committed by now, under another folder name
        # DCP numbers shards by their ranks, from 1.
        for i, (size_bytes, high, low) in enumerate((r.tolist() for r in rows), start=1):
            for file in sorted(partial.glob(f"shard-{i:05d}-*.safetensors")):
                found[file.name] = FileDigest(size_bytes=size_bytes, xxh3=high << 32 | low)
        return found

    def _commit(
        self,
        partial: Path,
        final: Path,
        digests: dict[str, FileDigest],
        about: JsonObject,
    ) -> None:
        write_synced(partial / LOADER, orjson.dumps(about["loader"]))
        digests = {**digests, LOADER: FileDigest.of(partial / LOADER)}
        meta: JsonObject = {
            "version": VERSION,
            "world_size": self._world_size,
            "model": self._model_config,
            "progress": about["progress"],
            "files": {name: digest.to_json() for name, digest in digests.items()},
        }
        write_sealed_json(partial / META, meta)
        # DCP has synced the shards, and the two files were written synced, but their names are not on storage yet.
        sync_folder(partial)
        # The commit: until here a reader sees no checkpoint, from here on a whole one.
        partial.rename(final)
        sync_folder(self.folder)
        # Removed only after the commit, so that there are never fewer checkpoints than must be kept.
        for step in steps_in(self.folder)[: -self._keep]:
            # Renamed first, because deleting takes time, and half a checkpoint must not look whole.
            old = path_of(self.folder, step)
            shutil.rmtree(old.rename(old.with_name(old.name + _PARTIAL_SUFFIX)))

    def _verify(self, path: Path, meta: JsonObject) -> None:
        """Check every file once, spread over the ranks; all ranks raise if one finds a fault."""
        listed = meta.get("files")
        assert isinstance(listed, dict), "the digest of meta.json fits, so its form does"
        # In one order on all ranks, because each takes its share by a file's position.
        names = sorted(listed)
        # DCP reads every shard in the folder, whether it was saved with the others or not.
        present = {file.name for file in path.glob("*.safetensors")}
        if strangers := sorted(present - listed.keys()):
            raise IntegrityError(
                f"{path} holds {strangers}, which were not saved with it; move them away"
            )
        faults = [
            (i, fault)
            for i, name in enumerate(names)
            if i % self._world_size == self._rank
            and (fault := FileDigest.from_json(listed[name]).fault_in(path / name)) is not None
        ]
        # All ranks learn the result. Otherwise one without a fault would wait for the others in the first collective.
        worst = torch.tensor(faults[0][0] if faults else -1)
        if self._group is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        if faults:
            raise IntegrityError(f"{faults[0][1]}; resume from an earlier checkpoint")
        if int(worst) >= 0:
            raise IntegrityError(
                f"{path / names[int(worst)]} is not what was saved, another rank found; resume "
                "from an earlier checkpoint"
            )

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)
