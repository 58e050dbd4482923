"""Attention by one kernel of a GPU over documents, or images, that lie end to end.

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
"""Width of a head at most, and what it must be a multiple of."""


def takes_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Tell whether the kernel computes there: on a GPU, in half precision, heads of its widths."""
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
        k_NGC: Keys; query heads share them in groups where there are fewer.
        v_NGC: Values.
        bounds_D: Bounds of the documents, int32, ``[D + 1]``.
        longest: Tokens of the longest document.
        causal: Whether a token sees only those up to itself.
    """
    kernel, knows_groups = _kernel()
    # Torch before 2.13 takes fewer key heads without being told.
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
    """Return torch's function, and whether it is to be told of fewer key heads than query heads."""
    # Imported here: it brings torch's compiler, a sixth of the start of a rank that has no GPU.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    return varlen_attn, "enable_gqa" in signature(varlen_attn).parameters
