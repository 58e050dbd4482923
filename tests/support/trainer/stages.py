"""A model of two layers, an embedding and a last one, computed by stages of a pipeline or by one process."""

import torch
from torch.nn.functional import cross_entropy

from tests.support.plane.processes.telling import tell

__all__ = ["embedding", "finish", "fresh", "last_layer", "sums_of"]

_IDS, _WIDTH = 8_192, 4


def fresh():
    """Return the weights of both layers, the same in every process."""
    draw = torch.Generator().manual_seed(0)
    shape = (_IDS, _WIDTH)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for _ in "12"]


def embedding(weight, batch):
    """Return hidden states ``[R, T, width]`` of tokens and their positions."""
    return weight[batch.tokens] * (1 + batch.position_ids[..., None])


def last_layer(weight, hidden, batch):
    """Return the mean loss of a batch; positions also count here, as in the attention of every stage."""
    logits = (hidden / (1 + batch.position_ids[..., None])) @ weight.T
    losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return losses / batch.loss_tokens


def sums_of(gradient):
    """Return the sums of the gradients of each token id with a gradient, by its number."""
    sums = gradient.sum(1)
    return {str(i): float(sums[i]) for i in sums.nonzero().flatten().tolist()}


def finish(*, gradient, **told):
    """Print a rank's results and the sums of its gradient, as JSON."""
    tell(told | {"gradient": sums_of(gradient)})
