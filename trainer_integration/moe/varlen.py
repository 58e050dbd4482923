"""Attention by one GPU kernel over concatenated documents or images.

Shape suffixes:
    N  tokens or patches        H  query heads        G  key heads, and as many value heads        C  width of a head
    D  documents or images
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

__all__ = ["attend_varlen", "takes_varlen"]


_WIDEST, _STEP = 256, 8
"""Largest width of a head, and its required divisor."""


def takes_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the kernel can be used: on a GPU, in half precision, for heads of its widths."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim <= _WIDEST and head_dim % _STEP == 0


def attend_varlen(
    q_NHC: Tensor,
    k_NGC: Tensor,
    v_NGC: Tensor,
    bounds_D: Tensor,
    longest: int,
    *,
    causal: bool,
) -> Tensor:
    """Attend within each document, ``[N, H, C]``; a GPU is not waited for.

    Args:
        q_NHC: Queries.
        k_NGC: Keys; if they have fewer heads, groups of query heads share them.
        v_NGC: Values.
        bounds_D: Bounds of the documents, int32, ``[D + 1]``.
        longest: Tokens of the longest document.
        causal: Whether a token attends only to tokens up to itself.
    """
    kernel, knows_groups = _kernel()
    # torch before 2.13 accepts fewer key heads without an argument.
    grouped = {"enable_gqa": q_NHC.shape[1] != k_NGC.shape[1]} if knows_groups else {}
    attended = kernel(
        q_NHC.contiguous(),
        k_NGC.contiguous(),
        v_NGC.contiguous(),
        bounds_D,
        bounds_D,
        longest,
        longest,
        window_size=(-1, 0 if causal else -1),
        **grouped,
    )
    assert isinstance(attended, Tensor), "no auxiliary output was asked for"
    return attended


@cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """Return torch's function, and whether it needs an argument for fewer key heads than query heads."""
    # Imported here because it loads torch's compiler, a sixth of the start of a rank that has no GPU.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    return varlen_attn, "enable_gqa" in signature(varlen_attn).parameters
