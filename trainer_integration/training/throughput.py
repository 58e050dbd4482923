"""Speed of a step by the model's own arithmetic: FLOP/s, and the share of the devices' peak (MFU).

The products of the model are counted, forward and backward, as in the data plane's costs: attention only within
documents, and half of each square because of the causal mask. Recomputation and padding do not count. The time of each
microbatch is reported too. A trace of some steps shows where the time went; https://ui.perfetto.dev draws it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from omniload.batch.microbatch import Batch, CpSlice, Microbatch
from omniload.batch.rows import documents_of, work_of
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.flops import cost_of

__all__ = ["PassTime", "PassTimes", "StepProfile", "model_flops", "peak_flops_of", "token_pairs"]

_PEAKS_BF16 = {"H200": 989e12, "H100 SXM": 989e12, "H100": 756e12, "A100": 312e12, "B200": 2250e12}
"""Dense BF16 FLOP/s by a part of the device's name, special names before general ones; the makers' figures."""


def token_pairs(batch: Batch) -> float:
    """Return the sum of the squared lengths of the documents in a rank's rows, including rows that peers share."""
    total = 0.0
    for microbatch in batch.microbatches:
        # In float64, because the square of a long document exceeds int32.
        lengths_D = np.diff(documents_of(microbatch).cu_seqlens).astype(np.float64)
        # Padding is a document of its row, but not of the model.
        padding_D = np.diff(microbatch.cu_seqlens)[microbatch.sources_D < 0].astype(np.float64)
        total += float((lengths_D**2).sum() - (padding_D**2).sum())
    return total


def model_flops(config: MoEConfig, tokens: int, pairs: float) -> float:
    """Return the FLOPs of a step: see ``cost_of``.

    Args:
        config: The model.
        tokens: Tokens of the step, over all ranks.
        pairs: ``token_pairs`` of the step, over all ranks.
    """
    linear, quadratic = cost_of(config)
    return linear * tokens + quadratic * pairs


def peak_flops_of(device: torch.device, given_tflops: float | None = None) -> float | None:
    """Return the peak FLOP/s of a rank's device: as given, or of a known GPU in BF16; ``None`` if unknown."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS_BF16.items() if part in name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Time of a microbatch, and the figures that costs use."""

    tokens: int
    """Tokens of its documents, without padding."""
    squares: int
    """Sum of the squared lengths of these documents."""
    seconds: float


@dataclass(slots=True)
class PassTimes:
    """Times passes on their device: on a GPU by its events, which block nothing, otherwise by the clock."""

    device: torch.device
    _passes: list[tuple[Microbatch | CpSlice, Callable[[], float]]] = field(
        default_factory=list, init=False
    )

    @contextmanager
    def of(self, part: Microbatch | CpSlice) -> Iterator[None]:
        """Time the pass of a microbatch."""
        if self.device.type == "cuda":
            began, ended = _event(), _event()
            began.record()
            yield
            ended.record()
            self._passes.append((part, lambda: began.elapsed_time(ended) * 1e-3))
            return
        began_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        self._passes.append((part, lambda: took_s))

    def taken(self) -> tuple[PassTime, ...]:
        """Return the time of each pass; called once a figure of the step is on the host, it does not wait."""
        found = []
        for part, seconds in self._passes:
            tokens, squares = work_of(part)
            found.append(PassTime(tokens=tokens, squares=squares, seconds=seconds()))
        return tuple(found)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StepProfile:
    """Traces the steps of a range into one file."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        """Trace from the first to the last of ``steps``; nothing if it is ``None``."""
        self._steps, self._folder, self._rank = steps, folder, rank
        self._profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[Path | None]:
        """Run a step; if it is the last of the range, the file exists as soon as the ``with`` ends.

        Yields:
            The file that ends with this step; ``None`` for others.
        """
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield None
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        is_last = step == self._steps[1]
        with record_function(f"step {step}"):
            yield self._file if is_last else None
        if is_last:
            self.close()

    def close(self) -> None:
        """Write the trace; do nothing if no step of the range was run, or if the file is written."""
        if self._profile is not None:
            tracer, self._profile = self._profile, None
            tracer.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(self._file))

    @property
    def _file(self) -> Path:
        assert self._steps is not None, "a file is asked for within the range"
        first, last = self._steps
        return self._folder / f"rank-{self._rank}-steps-{first}-{last}.json"
