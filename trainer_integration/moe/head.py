"""Cross entropy of a large vocabulary without its logits.

Shape suffixes:
    N  tokens        M  tokens with a label        D  width        V  vocabulary
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

__all__ = ["CHUNK_LOGITS", "summed_cross_entropy"]

CHUNK_LOGITS = 1 << 21
"""Logits held at a time (8 MiB in float32). One CPU thread, 1024 tokens of width 128: 41, 85 and 397 ms
at 4096, 8192 and 32768 ids; half as many 43, 83, 438; four times as many 42, 96, 402."""


def summed_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, labelled_M: Tensor
) -> Tensor:
    """Return the cross entropy of ``x @ weight.T`` summed over all labels, float64.

    Tokens without a label cost nothing. The logits of a few tokens at a time are turned
    into gradients at once, in the forward pass, so that no more than ``CHUNK_LOGITS``
    of them ever exist.

    Args:
        x_ND: Last hidden states.
        weight_VD: Output matrix.
        labels_N: Next tokens.
        labelled_M: Which tokens have a label, in order.
    """
    if len(labelled_M) < len(labels_N):
        x_ND, labels_N = x_ND.index_select(0, labelled_M), labels_N.index_select(0, labelled_M)
    loss: Tensor = _SummedCrossEntropy.apply(x_ND, weight_VD, labels_N)  # type: ignore[no-untyped-call]
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, labels_M: Tensor) -> Tensor:
        with_grad = any(ctx.needs_input_grad)
        grad_x_MD = torch.empty_like(x_MD)
        grad_weight_VD = torch.zeros_like(weight_VD)
        total = torch.zeros((), dtype=torch.float64, device=x_MD.device)
        size = max(1, CHUNK_LOGITS // len(weight_VD))
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        for start in range(0, len(x_MD), size):
            rows = slice(start, start + size)
            x_CD, labels_C1 = x_MD[rows], labels_M[rows].unsqueeze(1)
            logits_CV = (x_CD @ weight_VD.t()).to(wide)
            # Log-softmax by hand, in place: only one array of logits is ever alive.
            logits_CV -= logits_CV.amax(-1, keepdim=True)
            picked_C1 = logits_CV.gather(1, labels_C1)
            logits_CV.exp_()
            sums_C1 = logits_CV.sum(-1, keepdim=True)
            total += (sums_C1.log() - picked_C1).double().sum()
            if with_grad:
                logits_CV /= sums_C1
                logits_CV.scatter_add_(1, labels_C1, torch.full_like(picked_C1, -1.0))
                grad_CV = logits_CV.to(x_MD.dtype)
                torch.mm(grad_CV, weight_VD, out=grad_x_MD[rows])
                grad_weight_VD.addmm_(grad_CV.t(), x_CD)
        ctx.save_for_backward(grad_x_MD, grad_weight_VD)
        return total

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x_MD, grad_weight_VD = ctx.saved_tensors
        scale = grad.to(grad_x_MD.dtype)
        return grad_x_MD * scale, grad_weight_VD * scale, None
