"""Patches to embeddings: patch embedding, a few layers within each image, a projector.

Shape suffixes:
    P  patches of all images        V  values of a patch        D  width        I  images
    E  embeddings                   H  heads                    C  width of a head
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.model import part_of
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.rope import Rotation
from trainer_integration.vision.config import VisionConfig

__all__ = ["VisionEncoder", "grid_places"]


def grid_places(grids: Sequence[tuple[int, int]], merge: int) -> Tensor:
    """Return the row and column of every patch, ``[P, 2]``, in the order that a mix gives patches in.

    Args:
        grids: Rows and columns of patches of each image, multiples of ``merge``.
        merge: Side of the square of patches that lie together.
    """
    parts = [torch.empty(0, 2, dtype=torch.int64)]
    for rows, columns in grids:
        places = torch.stack(
            torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1
        )
        cut = places.view(rows // merge, merge, columns // merge, merge, 2)
        parts.append(cut.transpose(1, 2).reshape(-1, 2))
    return torch.cat(parts)


class VisionEncoder(nn.Module):
    """Encodes images of any size, each by itself: what one rank computes does not depend on what it was dealt."""

    def __init__(self, config: VisionConfig, out_dim: int, *, seed: int = 0) -> None:
        """Make an encoder with first weights, equal for equal seeds, of embeddings ``out_dim`` wide."""
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.values_per_patch, config.dim)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        self.fc1 = nn.Linear(config.merge**2 * config.dim, config.hidden)
        self.fc2 = nn.Linear(config.hidden, out_dim)
        if self.embed.weight.device.type != "meta":
            self.draw_weights(seed)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Set first weights; a rank that holds a part of a matrix draws all of it, and keeps its own."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape)
                drawn.normal_(0.0, self.config.init_std, generator=generator)
                parameter.copy_(part_of(drawn, parameter))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    @override
    def forward(self, patches_PV: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return the embeddings of images, ``[E, out_dim]``: one for each ``merge * merge`` patches, in order.

        Args:
            patches_PV: Patches of all images, image by image, as floating point.
            grids: Rows and columns of patches of each image.

        Raises:
            ValueError: Patches have another number of values than the encoder takes.
        """
        values = self.config.values_per_patch
        if len(patches_PV) and patches_PV.shape[1] != values:
            raise ValueError(
                f"a patch has {patches_PV.shape[1]} values, and an encoder of patch {self.config.patch} takes "
                f"{values}; give the encoder the patch of the mix"
            )
        patches_PV = patches_PV.reshape(-1, values)
        places_P2 = grid_places(grids, self.config.merge).to(patches_PV.device)
        head_dim = self.config.dim // self.config.num_heads
        wide = torch.promote_types(patches_PV.dtype, torch.float32)
        turns = tuple(
            Rotation.at(places_P2[:, axis], head_dim // 2, self.config.rope_theta, wide)
            for axis in (0, 1)
        )
        sizes = [rows * columns for rows, columns in grids]
        x_PD = _linear(self.embed, patches_PV)
        for block in self.blocks:
            x_PD = block(x_PD, turns, sizes)
        merged = self.norm(x_PD).reshape(-1, self.config.merge**2 * self.config.dim)
        return _linear(self.fc2, functional.gelu(_linear(self.fc1, merged)))


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm1 = RMSNorm(config.dim, config.norm_epsilon)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)
        self.norm2 = RMSNorm(config.dim, config.norm_epsilon)
        self.fc1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.fc2 = nn.Linear(config.hidden, config.dim, bias=False)

    @override
    def forward(self, x_PD: Tensor, turns: tuple[Rotation, ...], sizes: Sequence[int]) -> Tensor:
        heads = (3 * self.num_heads, x_PD.shape[1] // self.num_heads)
        qkv_PHC = _linear(self.qkv, self.norm1(x_PD)).view(len(x_PD), *heads)
        turned, values = torch.split(qkv_PHC, [2 * self.num_heads, self.num_heads], dim=1)
        halves = zip(turns, turned.chunk(2, dim=-1), strict=True)
        turned = torch.cat([turn.apply(half) for turn, half in halves], dim=-1)
        attended = [
            _attended(part) for part in torch.split(torch.cat((turned, values), dim=1), list(sizes))
        ]
        # Without an image every parameter still has a gradient, zero: ranks add them up.
        mixed_PD = torch.cat(attended) if attended else values
        x_PD = x_PD + _linear(self.output, mixed_PD.reshape(x_PD.shape))
        return x_PD + _linear(self.fc2, functional.gelu(_linear(self.fc1, self.norm2(x_PD))))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer in the type of what comes, whatever its parameters are kept in."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return functional.linear(x, layer.weight.to(x.dtype), bias)


def _attended(qkv_PHC: Tensor) -> Tensor:
    """Attend within one image, every patch to every patch."""
    q, k, v = qkv_PHC.transpose(0, 1).unsqueeze(0).chunk(3, dim=1)
    return functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
