"""The model with its optimiser and checkpoints, over the steps of one attempt: batches in, lines of the log out.

Every rank runs one trainer; the process that started the ranks reads the lines of rank 0.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import IntegrityError
from omniload.batch.digest import batch_digest
from omniload.batch.microbatch import Batch
from omniload.client import Client
from omniload.mix.journal.times import TimeLog
from omniload.plan.place_tree import ClientPlaceTree
from snapshot.startup.events import restarted, stage
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.place import StorePlace, place_of
from trainer_integration.checkpoint.saving import BackgroundSaver, Saving, groups_for_saving
from trainer_integration.checkpoint.tensors import tensors_of
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.run.joining import built_model, whole_batch
from trainer_integration.run.rank_spec import RankSpec
from trainer_integration.run.run_log import EventKind, EventLine, StepLine
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.training.progress import TrainingProgress
from trainer_integration.training.step import StepResult, train_step
from trainer_integration.training.throughput import StepProfile, peak_flops_of
from trainer_integration.vision.config import identity_of

__all__ = ["Trainer", "Write"]

Write = Callable[[StepLine | EventLine], None]
"""Takes a line of the run's log."""


class Trainer:
    """The model with its optimiser and checkpoints, over the steps of one attempt."""

    def __init__(
        self,
        spec: RankSpec,
        groups: ProcessGroups,
        write: Write,
        asked_to_end: threading.Event,
    ) -> None:
        """Build the model and load the checkpoint that the specification names; all ranks together."""
        train = spec.train
        self._spec, self._train, self._groups = spec, train, groups
        self._take = write
        self._asked_to_end = asked_to_end
        self.all_end = False
        """Whether the ranks have agreed to end before the last step."""
        self._all_saved = False
        self._startup = restarted(spec.attempt)
        with stage("model_build", self._startup):
            # A checkpoint contains all weights, including initial ones.
            weights = train.weights_folder(spec.folder) if spec.resume_step is None else None
            self._model = built_model(train, spec.model, groups, spec.vision, weights)
            self._optimizer = FlatAdamW(self._model, train.optimizer, train.steps)
        self._progress = TrainingProgress(train.spike_guard)
        self._peak = peak_flops_of(self._model.device, train.peak_tflops)
        in_background = train.checkpoint.asynchronous
        self._checkpoints = _checkpoints(
            spec, groups_for_saving(groups) if in_background else groups
        )
        self._saver = BackgroundSaver(self._checkpoints) if in_background else None
        self._stall_s = 0.0
        self._profile = StepProfile(
            spec.profile, train.run_folder(spec.folder) / "profile", spec.rank
        )
        self._times = TimeLog(train.run_folder(spec.folder), spec.rank)
        self._saved_step = spec.resume_step or 0
        if spec.resume_step is not None:
            self._load(spec.resume_step)

    def run(self, client: Client) -> None:
        """Train to the last step, the end of the data or the step in which a rank is asked to end; save that step."""
        while client.next_step < self._train.steps:
            with self._profile.step(client.next_step) as traced:
                batch = self._step(client)
            if batch is None:
                self.tell("data_end", f"after step {client.next_step - 1}", client.next_step)
                break
            if traced is not None:
                self.tell("profile", str(traced), batch.step)
            if (batch.step + 1) % self._train.checkpoint.every_steps == 0:
                self._save(client)
            if self.all_end:
                break
        # If the data ended within the range, the trace up to that point is written.
        self._profile.close()
        # A step that was already saved is not saved twice.
        if client.next_step > self._saved_step:
            self._save(client)
        self._tell_saved()

    def _step(self, client: Client) -> Batch | None:
        """Train on the next batch; ``None`` if the data has ended."""
        began_s = time.perf_counter()
        with stage("data_plane", self._startup):
            batch = client.next_batch()
        if batch is None:
            return None
        with stage("first_step", self._startup):
            result = train_step(self._model, self._optimizer, batch, self._groups, self._progress)
        self._startup = {}  # a start-up ends with its first step
        for each in result.passes:
            self._times.add(batch.step, each.tokens, each.squares, each.seconds)
        line = self._line(batch, result, client.last_wait_s, began_s)
        if result.spike is not None:
            self.tell("spike", f"{result.spike.said_of(batch.step)}; skipped", batch.step)
        self._write(line.model_copy(update={"evaluation": self._evaluated(batch.step)}))
        if self._all_saved:
            self._tell_saved()
        return batch

    def _evaluated(self, step: int) -> dict[str, float] | None:
        """Return the losses on the evaluation mix, if they are due after a step."""
        spec, wanted = self._spec.evaluation, self._train.evaluation
        if spec is None or wanted is None or (step + 1) % wanted.every_steps:
            return None
        from trainer_integration.training.evaluation import evaluate  # noqa: PLC0415 -- loads a plane's readers

        plane = PlaneSpec(
            mix=spec.mix,
            base_dir=spec.base_dir,
            tree=ClientPlaceTree.of(),
            cache_dir=spec.cache_dir,
            num_steps=spec.num_steps,
        )
        return evaluate(self._model, plane, self._groups).loss

    def _load(self, step: int) -> None:
        with stage("checkpoint_load", self._startup) as tally:
            try:
                restored = self._checkpoints.load(self._model, self._optimizer, step=step)
            except IntegrityError as error:
                # Whichever rank exits first, its line is read before its exit.
                self._write(self._event("damaged", str(error), step), of_any_rank=True)
                raise
            assert restored is not None, "a checkpoint that is named is there, or an error"
            self._progress = TrainingProgress.of(self._train.spike_guard, restored.progress)
            if self._spec.rank == 0:  # the ranks read a checkpoint together
                tier = "disk" if isinstance(self._checkpoints, Checkpoints) else "store"
                held = tensors_of(self._model, self._optimizer, self._groups)
                tally.add(tier, sum(tensor.nbytes for tensor in held.values()))

    def _save(self, client: Client) -> None:
        """Save, or begin to save if checkpoints are written in parallel with training."""
        step, began_s = client.next_step, time.perf_counter()
        state, progress = client.state_dict(), self._progress.to_json()
        # Also for a save that has only begun, because the end of the run waits for it and starts no second one.
        self._saved_step = step
        if self._saver is None:
            self._checkpoints.save(step, self._model, self._optimizer, state, progress)
            self._tell_checkpoint(step, time.perf_counter() - began_s)
            return
        self._tell_saved()
        tensors = self._checkpoints.tensors_at(step, self._model, self._optimizer)
        self._saver.start(step, tensors, state, progress)
        self._stall_s = time.perf_counter() - began_s

    def _tell_saved(self) -> None:
        """Wait for a save that is written in parallel with training, and report it."""
        self._all_saved = False
        saved = None if self._saver is None else self._saver.finish()
        if saved is not None:
            self._tell_checkpoint(saved.step, saved.took_s, self._stall_s)

    def _tell_checkpoint(self, step: int, took_s: float, stall_s: float | None = None) -> None:
        line = self._event("checkpoint", f"step-{step:08d}", step)
        self._write(line.model_copy(update={"took_s": took_s, "stall_s": stall_s}))

    def tell(self, what: EventKind, detail: str, step: int | None = None) -> None:
        """Report an event to the launcher; one rank speaks for all."""
        self._write(self._event(what, detail, step))

    def _event(self, what: EventKind, detail: str, step: int | None = None) -> EventLine:
        attempt = self._spec.attempt
        return EventLine(attempt=attempt, seconds=0, what=what, detail=detail, step=step)

    def _write(self, line: StepLine | EventLine, *, of_any_rank: bool = False) -> None:
        if of_any_rank or self._spec.rank == 0:
            self._take(line)

    def _line(self, batch: Batch, result: StepResult, wait_s: float, began_s: float) -> StepLine:
        figures, digest = self._over_ranks(
            torch.tensor(
                [wait_s, result.seconds_compute, self._asked_to_end.is_set(), self._is_saved],
                dtype=torch.float64,
            ),
            self._digest(batch) if self._train.digest else 0,
        )
        # The ranks must end at the same step, so a request to one rank is for all.
        self.all_end = bool(figures[:, 2].any())
        # A save that failed on all ranks must be raised in the same step on all.
        self._all_saved = bool(figures[:, 3].all())
        # After the messages, because a step is over when it is over on all ranks.
        seconds = time.perf_counter() - began_s
        return StepLine(
            attempt=self._spec.attempt,
            step=batch.step,
            **dict(result.figures),
            seconds=seconds,
            wait_s=tuple(figures[:, 0].tolist()),
            compute_s=tuple(figures[:, 1].tolist()),
            imbalance=batch.imbalance,
            bound=batch.bound,
            model_flops=result.flops,
            mfu=None
            if self._peak is None
            else result.flops / (seconds * self._peak * len(figures)),
            tokens_by_source=dict(batch.tokens_by_source),
            digest=f"{digest:016x}" if self._train.digest else None,
        )

    @property
    def _is_saved(self) -> bool:
        return self._saver is not None and self._saver.is_ready

    def _digest(self, batch: Batch) -> int:
        """Return this rank's share of the step's digest; for shared rows, only the first peer counts."""
        if self._groups.sp.size == 1:
            return batch_digest(batch)
        whole = whole_batch(batch, self._groups.sp)
        return batch_digest(whole) if self._groups.sp.rank == 0 else 0

    def _over_ranks(self, figures_4: torch.Tensor, digest: int) -> tuple[torch.Tensor, int]:
        """Return the figures of all ranks ``[ranks, 4]`` and the digest of the whole step."""
        world = self._groups.world
        if world is None:
            return figures_4[None], digest
        size = dist.get_world_size(world)
        # Zeros except for this rank's row, so that their sum is all rows, by one call that every backend has.
        figures = torch.zeros(size, 4, dtype=torch.float64)
        figures[self._spec.rank] = figures_4
        dist.all_reduce(figures, group=world)
        # A sum modulo 2**64 is what 64-bit integers compute by themselves, signed or not.
        share = torch.tensor([digest - (1 << 64) if digest >> 63 else digest], dtype=torch.int64)
        dist.all_reduce(share, group=world)
        return figures, int(share.item()) % (1 << 64)


def _checkpoints(spec: RankSpec, groups: ProcessGroups) -> Saving[Any]:
    """Open the checkpoints of the run, in a folder or on a store."""
    place = place_of(spec.train.checkpoint_location(spec.folder))
    model, keep = identity_of(spec.model, spec.vision), spec.train.checkpoint.keep
    if isinstance(place, StorePlace):
        from trainer_integration.checkpoint.striped.writer import (  # noqa: PLC0415 -- needs a file system
            StripedCheckpoints,
        )

        return StripedCheckpoints(place, model, keep=keep, groups=groups)
    return Checkpoints(place.folder, model, keep=keep, groups=groups)
