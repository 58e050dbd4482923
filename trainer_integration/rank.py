"""One rank's process: takes batches, trains, saves. Started by the launcher.

Standard input brings a ``RankSpec``; rank 0 writes a ``StepLine`` or an ``EventLine`` to
standard output for every step and checkpoint. Everything else goes to standard error.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from omniload.actors.local import LocalPlane
from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger, set_up_logging
from omniload.build.digest import batch_digest
from omniload.build.microbatch import Batch
from omniload.client import Client
from omniload.mix.config import MixConfig, load_mix
from omniload.plan.place_tree import ClientPlaceTree
from trainer_integration.checkpoint import Checkpoints
from trainer_integration.config import TrainConfig, load_train
from trainer_integration.model_of import model_of
from trainer_integration.moe.model import MoETransformer
from trainer_integration.optimizer import FlatAdamW
from trainer_integration.rank_spec import PlaneRef, RankSpec
from trainer_integration.run_log import EventLine, StepLine
from trainer_integration.training import StepResult, train_step, use_one_thread

__all__ = ["main"]

_LOG = get_logger(__name__)
_COLLECTIVE_TIMEOUT = timedelta(minutes=5)
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the rank that standard input describes; return its exit code."""
    spec = RankSpec.model_validate_json(sys.stdin.read())
    _die_with_the_launcher()
    set_up_logging(role=f"rank {spec.rank}")
    use_one_thread()
    try:
        train, folder = load_train(spec.config)
        mix, base_dir = load_mix(train.mix_file(folder))
        with _group(spec, train) as group, _client(spec, train, mix, base_dir) as client:
            _Trainer(spec, train, folder, mix, base_dir, group).run(client)
    except OmniloadError as error:
        _LOG.error("%s", error)
        return error.exit_code
    return 0


class _Trainer:
    """The model and what keeps it, over the steps of one attempt."""

    def __init__(
        self,
        spec: RankSpec,
        train: TrainConfig,
        folder: Path,
        mix: MixConfig,
        base_dir: Path,
        group: dist.ProcessGroup | None,
    ) -> None:
        model_config = model_of(train, mix, base_dir)
        self._spec, self._train, self._group = spec, train, group
        self._model = MoETransformer(model_config, seed=train.seed)
        self._optimizer = FlatAdamW(self._model, train.optimizer, train.steps)
        self._checkpoints = Checkpoints(
            train.checkpoint_folder(folder),
            model_config.model_dump(mode="json"),
            keep=train.checkpoint.keep,
            group=group,
        )
        if spec.resume_step is not None:
            self._checkpoints.load(self._model, self._optimizer.adamw, step=spec.resume_step)

    def run(self, client: Client) -> None:
        """Train to the last step, or to the end of the data."""
        while client.next_step < self._train.steps:
            began_s = time.perf_counter()
            batch = client.next_batch()
            if batch is None:
                _LOG.info("the data ends before step %d", client.next_step)
                break
            result = train_step(self._model, self._optimizer, batch, self._group)
            line = self._line(batch, result, client.last_wait_s, began_s)
            if self._spec.rank == 0:
                _tell(line)
            done = batch.step + 1
            if done % self._train.checkpoint.every_steps == 0 or done == self._train.steps:
                self._save(client, done)

    def _save(self, client: Client, step: int) -> None:
        path = self._checkpoints.save(step, self._model, self._optimizer.adamw, client.state_dict())
        if self._spec.rank == 0:
            _tell(
                EventLine(
                    attempt=self._spec.attempt,
                    seconds=0,
                    what="checkpoint",
                    detail=path.name,
                    step=step,
                )
            )

    def _line(self, batch: Batch, result: StepResult, wait_s: float, began_s: float) -> StepLine:
        times, digest = self._over_ranks(
            torch.tensor([wait_s, result.seconds_compute], dtype=torch.float64),
            batch_digest(batch) if self._train.digest else 0,
        )
        return StepLine(
            attempt=self._spec.attempt,
            step=batch.step,
            loss=result.loss,
            balance_loss=result.balance_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            seconds=time.perf_counter() - began_s,
            wait_s=tuple(times[:, 0].tolist()),
            compute_s=tuple(times[:, 1].tolist()),
            imbalance=batch.imbalance,
            bound=batch.bound,
            tokens_by_source=dict(batch.tokens_by_source),
            digest=f"{digest:016x}" if self._train.digest else None,
        )

    def _over_ranks(self, times_2: torch.Tensor, digest: int) -> tuple[torch.Tensor, int]:
        """Return the times of all ranks ``[ranks, 2]`` and the digest of the whole step."""
        if self._group is None:
            return times_2[None], digest
        size = dist.get_world_size(self._group)
        times = torch.zeros(size, 2, dtype=torch.float64)
        times[self._spec.rank] = times_2
        dist.all_reduce(times, group=self._group)
        # A sum modulo 2**64 is what 64-bit integers do by themselves, signed or not.
        share = torch.tensor([digest - (1 << 64) if digest >> 63 else digest], dtype=torch.int64)
        dist.all_reduce(share, group=self._group)
        return times, int(share.item()) % (1 << 64)


@contextmanager
def _group(spec: RankSpec, train: TrainConfig) -> Iterator[dist.ProcessGroup | None]:
    """Join the ranks of this attempt; a rank alone needs no group."""
    if train.parallel.num_ranks == 1:
        yield None
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.rendezvous}",
        rank=spec.rank,
        world_size=train.parallel.num_ranks,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def _client(spec: RankSpec, train: TrainConfig, mix: MixConfig, base_dir: Path) -> Iterator[Client]:
    """Reach the job's data plane, or run it here."""
    if spec.plane is not None:
        with Client(_handle(spec.plane, spec.rank)) as client:
            yield client
        return
    plane_spec = PlaneSpec(
        mix=mix,
        base_dir=base_dir,
        tree=ClientPlaceTree.of(dp=train.parallel.dp),
        run_dir=train.run_folder(spec.config.resolve().parent),
        state=spec.loader_state,
        num_steps=train.steps,
    )
    with LocalPlane(plane_spec) as plane, Client(plane.handle(spec.rank)) as client:
        yield client


def _handle(plane: PlaneRef, rank: int) -> RankHandle:
    from omniload.actors.ray_cluster import ClusterAddress  # noqa: PLC0415 -- an extra, absent for local users
    from omniload.actors.ray_handle import PlaneAddress, handle_in  # noqa: PLC0415 -- as above

    cluster = ClusterAddress(address=plane.address, namespace=plane.namespace)
    return handle_in(PlaneAddress(cluster=cluster, dp_ranks_of=plane.dp_ranks_of), rank)


def _tell(line: StepLine | EventLine) -> None:
    sys.stdout.write(line.model_dump_json() + "\n")
    sys.stdout.flush()


def _die_with_the_launcher() -> None:
    """Have the kernel end this process when the launcher's ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
