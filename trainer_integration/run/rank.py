"""One rank's process: takes batches, trains, saves. Started by the launcher.

Standard input brings a ``RankSpec``; rank 0 writes a ``StepLine`` or an ``EventLine`` to
standard output for every step and checkpoint. Everything else, a library's ``print``
included, goes to standard error.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

import torch
import torch.distributed as dist

from omniload.actors.address import PlaneAddress
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.linux.exec_with_parent import end_with_parent
from omniload.base.log import get_logger, set_up_logging
from omniload.batch.digest import batch_digest
from omniload.batch.microbatch import Batch
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from snapshot.startup.events import restarted, stage
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.place import StorePlace, place_of
from trainer_integration.checkpoint.striped_checkpoints import StripedCheckpoints
from trainer_integration.checkpoint.tensors import tensors_of
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.run.joining import built_model, joined, whole_batch
from trainer_integration.run.optimizer import FlatAdamW
from trainer_integration.run.rank_process import ASK_TO_END
from trainer_integration.run.rank_spec import RankSpec
from trainer_integration.run.run_log import EventKind, EventLine, StepLine
from trainer_integration.run.training import StepResult, train_step, use_one_thread

__all__ = ["main"]

_LOG = get_logger(__name__)


def main() -> int:
    """Run the rank that standard input describes; return its exit code."""
    lines = _own_stdout()
    asked_to_end = threading.Event()
    signal.signal(ASK_TO_END, lambda *_: asked_to_end.set())
    spec = RankSpec.model_validate_json(sys.stdin.read())
    if not end_with_parent(signal.SIGKILL, spec.launcher_pid):
        os.kill(os.getpid(), signal.SIGKILL)
    set_up_logging(role=f"rank {spec.rank}")
    use_one_thread()
    try:
        with joined(spec) as groups, _client(spec) as client:
            trainer = _Trainer(spec, groups, lines, asked_to_end)
            if spec.plane is None:
                trainer.tell("plane", "threads of the rank")
            trainer.run(client)
    except OmniloadError as error:
        _LOG.error("%s", error)
        return error.exit_code
    return 0


def _own_stdout() -> TextIO:
    """Return standard output for the launcher's lines alone; what others print goes to standard error."""
    sys.stdout.flush()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return lines


class _Trainer:
    """The model and what keeps it, over the steps of one attempt."""

    def __init__(
        self,
        spec: RankSpec,
        groups: ProcessGroups,
        lines: TextIO,
        asked_to_end: threading.Event,
    ) -> None:
        train = spec.train
        self._spec, self._train, self._groups, self._lines = spec, train, groups, lines
        self._asked_to_end = asked_to_end
        self._all_end = False
        self._startup = restarted(spec.attempt)
        with stage("model_build", self._startup):
            self._model = built_model(train, spec.model, groups)
            self._optimizer = FlatAdamW(self._model, train.optimizer, train.steps)
        self._checkpoints = _checkpoints(spec, groups)
        self._saved_step = spec.resume_step or 0
        if spec.resume_step is not None:
            self._load(spec.resume_step)

    def run(self, client: Client) -> None:
        """Train to the last step, the end of the data or the step in which a rank is asked to end; save that."""
        while client.next_step < self._train.steps:
            began_s = time.perf_counter()
            with stage("data_plane", self._startup):
                batch = client.next_batch()
            if batch is None:
                self.tell("data_end", f"after step {client.next_step - 1}", client.next_step)
                break
            with stage("first_step", self._startup):
                result = train_step(self._model, self._optimizer, batch, self._groups)
            self._startup = {}  # a start-up ends with its first step
            self._write(self._line(batch, result, client.last_wait_s, began_s))
            if (batch.step + 1) % self._train.checkpoint.every_steps == 0:
                self._save(client)
            if self._all_end:
                break
        if client.next_step > self._saved_step:
            self._save(client)

    def _load(self, step: int) -> None:
        adamw = self._optimizer.adamw
        with stage("checkpoint_load", self._startup) as tally:
            try:
                self._checkpoints.load(self._model, adamw, step=step)
            except IntegrityError as error:
                # Whichever rank exits first, its line is read before its exit.
                self._write(self._event("damaged", str(error), step), of_any_rank=True)
                raise
            if self._spec.rank == 0:  # the ranks read a checkpoint together
                tier = "store" if isinstance(self._checkpoints, StripedCheckpoints) else "disk"
                tally.add(
                    tier,
                    sum(t.nbytes for t in tensors_of(self._model, adamw, self._groups).values()),
                )

    def _save(self, client: Client) -> None:
        step, began_s = client.next_step, time.perf_counter()
        self._checkpoints.save(step, self._model, self._optimizer.adamw, client.state_dict())
        self._saved_step = step
        took_s = time.perf_counter() - began_s
        self.tell("checkpoint", f"step-{step:08d}", step, took_s)

    def tell(
        self, what: EventKind, detail: str, step: int | None = None, took_s: float | None = None
    ) -> None:
        """Tell the launcher of an event; one rank speaks for all."""
        self._write(self._event(what, detail, step, took_s))

    def _event(
        self, what: EventKind, detail: str, step: int | None = None, took_s: float | None = None
    ) -> EventLine:
        attempt = self._spec.attempt
        return EventLine(
            attempt=attempt, seconds=0, what=what, detail=detail, step=step, took_s=took_s
        )

    def _write(self, line: StepLine | EventLine, *, of_any_rank: bool = False) -> None:
        if of_any_rank or self._spec.rank == 0:
            self._lines.write(line.model_dump_json() + "\n")
            self._lines.flush()

    def _line(self, batch: Batch, result: StepResult, wait_s: float, began_s: float) -> StepLine:
        figures, digest = self._over_ranks(
            torch.tensor(
                [wait_s, result.seconds_compute, self._asked_to_end.is_set()], dtype=torch.float64
            ),
            self._digest(batch) if self._train.digest else 0,
        )
        # The ranks must end at one step: what one was asked is for all.
        self._all_end = bool(figures[:, 2].any())
        return StepLine(
            attempt=self._spec.attempt,
            step=batch.step,
            loss=result.loss,
            balance_loss=result.balance_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            seconds=time.perf_counter() - began_s,
            wait_s=tuple(figures[:, 0].tolist()),
            compute_s=tuple(figures[:, 1].tolist()),
            imbalance=batch.imbalance,
            bound=batch.bound,
            expert_imbalance=result.expert_imbalance,
            z_loss=result.z_loss,
            expert_slots=result.expert_slots,
            router_entropy=result.router_entropy,
            drop_rate=result.drop_rate,
            tokens_by_source=dict(batch.tokens_by_source),
            digest=f"{digest:016x}" if self._train.digest else None,
        )

    def _digest(self, batch: Batch) -> int:
        """Return this rank's share of the step's digest: of rows that it shares, the first peer's."""
        if self._groups.sp.size == 1:
            return batch_digest(batch)
        whole = whole_batch(batch, self._groups.sp)
        return batch_digest(whole) if self._groups.sp.rank == 0 else 0

    def _over_ranks(self, figures_3: torch.Tensor, digest: int) -> tuple[torch.Tensor, int]:
        """Return the figures of all ranks ``[ranks, 3]`` and the digest of the whole step."""
        world = self._groups.world
        if world is None:
            return figures_3[None], digest
        size = dist.get_world_size(world)
        figures = torch.zeros(size, 3, dtype=torch.float64)
        figures[self._spec.rank] = figures_3
        dist.all_reduce(figures, group=world)
        # A sum modulo 2**64 is what 64-bit integers do by themselves, signed or not.
        share = torch.tensor([digest - (1 << 64) if digest >> 63 else digest], dtype=torch.int64)
        dist.all_reduce(share, group=world)
        return figures, int(share.item()) % (1 << 64)


def _checkpoints(spec: RankSpec, groups: ProcessGroups) -> Checkpoints | StripedCheckpoints:
    """Reach the checkpoints of the run, in a folder or on a store."""
    place = place_of(spec.train.checkpoint_location(spec.folder))
    model, keep = spec.model.identity(), spec.train.checkpoint.keep
    if isinstance(place, StorePlace):
        return StripedCheckpoints(place, model, keep=keep, groups=groups)
    return Checkpoints(place.folder, model, keep=keep, groups=groups)


@contextmanager
def _client(spec: RankSpec) -> Iterator[Client]:
    """Reach the job's data plane, or run it here."""
    with ExitStack() as stack:
        with stage("data_plane", restarted(spec.attempt)):
            client = _opened(spec, stack)
        yield client


def _opened(spec: RankSpec, stack: ExitStack) -> Client:
    if spec.plane is not None:
        return stack.enter_context(Client(_handle(spec.plane, spec.train.place_tree, spec.rank)))
    plane_spec = PlaneSpec(
        mix=spec.mix,
        base_dir=spec.base_dir,
        tree=spec.train.place_tree,
        run_dir=spec.train.run_folder(spec.folder),
        state=spec.loader_state,
        num_steps=spec.train.steps,
        restarts=spec.attempt,
        cache_dir=spec.cache_dir,
    )
    plane = stack.enter_context(LocalPlane(plane_spec))
    return stack.enter_context(Client(plane.handle(spec.rank)))


def _handle(plane: PlaneAddress, tree: ClientPlaceTree, rank: int) -> RankHandle:
    from omniload.actors.ray.joining import handle_in  # noqa: PLC0415 -- an extra, absent for local users

    return handle_in(plane, tree.coordinates_of(rank)["dp"], tree.slice_of(rank)[0])


if __name__ == "__main__":
    sys.exit(main())
