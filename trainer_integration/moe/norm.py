"""Root-mean-square norm.

Shape suffixes:
    N  tokens        D  width
"""

import torch
from torch import Tensor, nn
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
        """Return ``x / rms(x) * weight``; the mean square is taken in float32, or wider."""
        # In bf16 a mean of many squares would lose the small ones.
        wide_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
        scale_N1 = torch.rsqrt(wide_ND.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide_ND * scale_N1).to(x_ND.dtype) * self.weight_D.to(x_ND.dtype)
