"""Causal attention with grouped KV heads, within documents.

Shape suffixes:
    N  tokens        D  width of the model        C  width of a head
    H  query heads   G  KV heads                  P  places in the padded layout
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.documents import DocumentGroups
from trainer_integration.moe.rope import Rotation

__all__ = ["Attention", "attend"]


def attend(qkv_NXC: Tensor, documents: DocumentGroups, num_heads: int) -> Tensor:
    """Attend causally within each document; the cost is the square of each length.

    Sequence parallelism exchanges heads for tokens just before and just after this
    function, which then sees whole documents and some of the heads.

    Args:
        qkv_NXC: ``H`` query heads, then the key heads, then the value heads, ``X = H + 2 G``.
        documents: Layout of the documents.
        num_heads: ``H``.

    Returns:
        Attended values, ``[N, H, C]``.
    """
    padded_PXC = documents.pad(qkv_NXC)
    num_kv_heads = (padded_PXC.shape[1] - num_heads) // 2
    sizes = [count * length for count, length in documents.groups]
    outputs = []
    for (count, length), part in zip(documents.groups, torch.split(padded_PXC, sizes), strict=True):
        heads = part.view(count, length, *part.shape[1:]).transpose(1, 2)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    if not outputs:
        return qkv_NXC[:, :num_heads]
    return documents.unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


class Attention(nn.Module):
    """QKV projection, rotary positions, attention, output projection."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        num_qkv_heads = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = nn.Linear(shape.dim, num_qkv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    @override
    def forward(self, x_ND: Tensor, rotation: Rotation, documents: DocumentGroups) -> Tensor:
        """Mix tokens within documents, ``[N, D]``."""
        num_turned = self.num_heads + self.num_kv_heads
        qkv_NXC = self.qkv(x_ND).view(len(x_ND), -1, self.head_dim)
        qkv_NXC = torch.cat(
            (rotation.apply(qkv_NXC[:, :num_turned]), qkv_NXC[:, num_turned:]), dim=1
        )
        attended_NHC = attend(qkv_NXC, documents, self.num_heads)
        mixed_ND: Tensor = self.output(attended_NHC.reshape(x_ND.shape))
        return mixed_ND
