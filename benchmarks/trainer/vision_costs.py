"""Costs of encoder and backbone of the included vision model on this processor, and of a step of ranks.

Shape suffixes:
    S  measured calls        N  images or documents of a call        R  ranks        M  microbatches
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.trainer.vision_corpus import LENGTH, MODEL, VISION, Work
from tests.support.trainer.moe_builders import a_microbatch, documents_of
from trainer_integration.config import OptimizerConfig
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.vision.model import VisionEncoder, VisionLanguageModel

__all__ = ["DOCUMENTS", "IMAGES", "Cost", "Costs", "measured_costs", "seconds_of_step"]

IMAGES = (
    (16,),
    (64,),
    (256,),
    (1024,),
    (2304,),
    (4096,),
    (16,) * 32,
    (64,) * 16,
    (256,) * 8,
    (1024,) * 2,
)
"""Patches of the images of each measured call: squares of even numbers."""
DOCUMENTS = (
    (64,),
    (256,),
    (512,),
    (1024,),
    (2048,),
    (64,) * 32,
    (256,) * 8,
    (512,) * 2,
    (1024,) * 2,
)
"""Tokens of the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a part of the model, fitted to some calls."""

    call_s: float
    """Fixed cost of a call."""
    item_s: float
    """Cost of an image or document."""
    linear_s: float
    """Cost of a patch or token."""
    quadratic_s: float
    """Cost of a pair of patches of an image, or of tokens of a document."""
    measured_s: tuple[float, ...]
    """Time of each measured call."""

    def __call__(self, sizes_N: Sequence[int] | NDArray[np.int64]) -> float:
        """Return the seconds of a call with images or documents of these sizes; 0 for a call without any."""
        if not len(sizes_N):
            return 0.0
        factors_4 = np.array([self.call_s, self.item_s, self.linear_s, self.quadratic_s])
        return float(_features(sizes_N) @ factors_4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs, in processor seconds of one thread."""

    encoder_forward: Cost
    encoder_backward: Cost
    backbone: Cost
    """Forward and backward: between the two exchanges of a microbatch."""
    update_s: float
    """Cost of the optimiser, once a step on every rank."""


def measured_costs(repetitions: int) -> Costs:
    """Measure encoder and backbone by themselves; return medians of ``repetitions`` repetitions."""
    encoder, backbone = VisionEncoder(VISION, MODEL.dim), MoETransformer(MODEL)
    passes = [_medians(lambda s=sizes: _of_encoder(encoder, s), repetitions) for sizes in IMAGES]
    both = [
        _medians(lambda s=sizes: (_of_backbone(backbone, s),), repetitions) for sizes in DOCUMENTS
    ]
    return Costs(
        encoder_forward=_fitted(IMAGES, [forward_s for forward_s, _ in passes]),
        encoder_backward=_fitted(IMAGES, [backward_s for _, backward_s in passes]),
        backbone=_fitted(DOCUMENTS, [seconds for (seconds,) in both]),
        update_s=_of_update(repetitions),
    )


def seconds_of_step(
    works_RM: Sequence[Sequence[Work]], costs: Costs, *, dealt: bool, sharded: bool = False
) -> float:
    """Return the time of a step if ranks wait for each other as in the included trainer.

    Args:
        works_RM: Work of each rank and microbatch.
        costs: Costs of the parts. Sending is free.
        dealt: Other ranks than those of the rows encode the images: all wait for embeddings in every microbatch,
            and in backward for their gradients. Otherwise ranks meet once, where gradients are summed.
        sharded: Ranks meet in every microbatch even if images are not dealt, because each has a part of the model.
    """
    parts_RM3 = np.array(
        [
            [
                (
                    costs.encoder_forward(work.patches_I),
                    costs.backbone(work.lengths_D),
                    costs.encoder_backward(work.patches_I),
                )
                for work in works
            ]
            for works in works_RM
        ]
    )
    at_R = np.zeros(len(works_RM))
    for parts_R3 in parts_RM3.swapaxes(0, 1):
        for part, seconds_R in enumerate(parts_R3.T):
            at_R = at_R + seconds_R
            if dealt and part < 2:  # embeddings travel, and their gradients
                at_R[:] = at_R.max()
        if sharded:
            at_R[:] = at_R.max()
    return float(at_R.max()) + costs.update_s


def _features(sizes_N: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    sizes_N = np.asarray(sizes_N, np.float64)
    return np.array([1.0, len(sizes_N), sizes_N.sum(), (sizes_N**2).sum()])


def _fitted(calls: Sequence[Sequence[int]], measured_s: Sequence[float]) -> Cost:
    """Fit by least squares of relative errors, with no coefficient below 0."""
    seconds_S = np.array(measured_s)
    scaled_S4 = np.stack([_features(sizes) for sizes in calls]) / seconds_S[:, None]
    kept, found_4 = np.ones(4, bool), np.zeros(4)
    while kept.any():
        found_4[:] = 0.0
        found_4[kept] = np.linalg.lstsq(scaled_S4[:, kept], np.ones_like(seconds_S), rcond=None)[0]
        if found_4.min() >= 0:
            break
        kept &= found_4 > found_4.min()
    call_s, item_s, linear_s, quadratic_s = found_4.tolist()
    return Cost(
        call_s=call_s,
        item_s=item_s,
        linear_s=linear_s,
        quadratic_s=quadratic_s,
        measured_s=tuple(measured_s),
    )


def _medians(call: Callable[[], tuple[float, ...]], repetitions: int) -> list[float]:
    call()  # the first call pays for costs that later ones do not have
    return [median(each) for each in zip(*(call() for _ in range(repetitions)), strict=True)]


def _of_encoder(encoder: VisionEncoder, sizes: Sequence[int]) -> tuple[float, float]:
    encoder.zero_grad()
    pixels_PV = torch.rand(sum(sizes), VISION.values_per_patch)
    grids = [(isqrt(patches), isqrt(patches)) for patches in sizes]
    began_s = time.process_time()
    made_ED = encoder(pixels_PV, grids)
    forward_s = time.process_time() - began_s
    gradient_ED = torch.ones_like(made_ED)
    began_s = time.process_time()
    made_ED.backward(gradient_ED)
    return forward_s, time.process_time() - began_s


def _of_backbone(model: MoETransformer, sizes: Sequence[int]) -> float:
    rows = a_microbatch([documents_of(sizes, vocab_size=MODEL.vocab_size)], LENGTH)
    inputs = ModelInputs.of(rows)
    model.zero_grad()

    def both() -> None:
        model(inputs).token_loss.backward()

    return _timed(both)


def _of_update(repetitions: int) -> float:
    model = VisionLanguageModel(MODEL, VISION)
    optimizer = FlatAdamW(model, OptimizerConfig(), 1 << 20)
    times = []
    for step in range(repetitions + 1):
        optimizer.clear()
        times.append(_timed(lambda at=step: optimizer.update(at, optimizer.norm_of(at), 1)))
    return median(times[1:])


def _timed(call: Callable[[], object]) -> float:
    began_s = time.process_time()
    call()
    return time.process_time() - began_s
