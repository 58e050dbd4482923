"""A busy GPU, if there is a GPU."""

import pytest
import torch

__all__ = ["GPU", "kept_busy", "needs_gpu"]

GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_SIDE = 4096


def kept_busy(products: int) -> torch.cuda.Event:
    """Queue ``products`` matrix products, some milliseconds in all; return an event that occurs when they are done."""
    factor = torch.ones(_SIDE, _SIDE, device=GPU)
    for _ in range(products):
        factor = factor @ factor
    done = torch.cuda.Event()
    done.record()
    return done
