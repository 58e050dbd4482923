"""Cost of an image for the encoder: arithmetic on its shape."""

from collections.abc import Sequence

import numpy as np

from trainer_integration.vision.config import VisionConfig

__all__ = ["encoder_cost_of", "encoder_flops"]

_FORWARD_AND_BACKWARD = 3
"""Backward makes two products for each product of forward."""


def encoder_cost_of(
    config: VisionConfig, out_dim: int, *, attention_slowdown: float = 1.0
) -> tuple[float, float]:
    """Return FLOPs of a patch and of a pair of patches of one image, forward and backward.

    An image of ``P`` patches costs ``linear * P + quadratic * P ** 2``, because every patch attends to every other: the
    ``encoder_linear`` and ``encoder_quadratic`` of a mix file.

    Args:
        config: The encoder.
        out_dim: Width of an embedding.
        attention_slowdown: Time of a FLOP of attention over that of a matrix product.
    """
    dim, hidden = config.dim, config.hidden
    # Queries, keys, values and output; then the two matrices of the feed-forward part.
    layer = 4 * dim * dim + 2 * dim * hidden
    projector = dim * hidden + hidden * out_dim / config.merge**2
    passed = config.values_per_patch * dim + config.num_layers * layer + projector
    linear = _FORWARD_AND_BACKWARD * 2 * passed
    # Not halved as for the model, because no mask hides a patch from another.
    quadratic = _FORWARD_AND_BACKWARD * 4 * dim * config.num_layers
    return float(linear), float(quadratic * attention_slowdown)


def encoder_flops(config: VisionConfig, out_dim: int, grids: Sequence[tuple[int, int]]) -> float:
    """Return the FLOPs of encoding images of these grids, rows and columns of patches, forward and backward."""
    linear, quadratic = encoder_cost_of(config, out_dim)
    patches_I = np.array(grids, np.float64).reshape(-1, 2).prod(-1)
    return float(linear * patches_I.sum() + quadratic * (patches_I**2).sum())
