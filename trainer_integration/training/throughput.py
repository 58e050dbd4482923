"""How fast a step was by the model's own arithmetic: FLOP/s, and the share of what the devices could do (MFU).

Counted are the products of the model, forward and backward, as the data plane's costs count them:
attention within documents alone, half of each square for the causal mask. Recomputation and padding
count for nothing.
"""

import numpy as np
import torch

from omniload.batch.microbatch import Batch
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.flops import cost_of

__all__ = ["model_flops", "peak_flops_of", "token_pairs"]

_PEAKS_BF16 = {"H200": 989e12, "H100 SXM": 989e12, "H100": 756e12, "A100": 312e12, "B200": 2250e12}
"""Dense BF16 products a second by a part of the device's name, special before general; their makers' figures."""


def token_pairs(batch: Batch) -> float:
    """Return the sum of the squared lengths of the documents in a rank's rows; of rows that peers share, too."""
    total = 0.0
    for microbatch in batch.microbatches:
        lengths_D = np.diff(microbatch.cu_seqlens).astype(np.float64)
        lengths_D[microbatch.sources_D < 0] = 0
        total += float((lengths_D**2).sum())
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
    """Return the most FLOP/s of a rank's device: as given, or of a known GPU in BF16; ``None`` if nobody knows."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS_BF16.items() if part in name), None)
