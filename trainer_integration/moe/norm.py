"""Root-mean-square norm.

Shape suffixes:
    N  tokens        D  width
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Scales every token to unit mean square, then by a learned weight.

    Source:
        Zhang and Sennrich, arXiv 1910.07467.
    """

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight_D = nn.Parameter(torch.ones(dim))
        self.epsilon = epsilon

    @override
    def forward(self, x_ND: Tensor) -> Tensor:
        """Return ``x / rms(x) * weight``; the mean square is computed at least in float32."""
        # torch's own function is one kernel on a GPU, while six kernels would take longer to start than to compute.
        weight_D = self.weight_D.to(x_ND.dtype)
        return functional.rms_norm(x_ND, weight_D.shape, weight_D, self.epsilon)
