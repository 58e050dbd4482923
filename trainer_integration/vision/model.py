"""The included model behind a vision encoder.

::

    images dealt to this rank ──encoder──▶ embeddings ──all-to-all──▶ embeddings of this rank's rows
    tokens ──embedding──────────────────────────────────▶ placeholders replaced ──▶ layers, loss

Shape suffixes:
    N  tokens that are not padding        D  width        E  embeddings that this rank receives
    P  patches of all images that this rank encodes       V  values of a patch
    I  images                             H  heads        C  width of a head
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from omniload import PackedRows
from omniload.batch.images import EncodingArrays, share_of
from omniload.batch.microbatch import CpSlice, Microbatch
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.documents import on_device
from trainer_integration.moe.inputs import ModelInputs, on_host
from trainer_integration.moe.model import MoETransformer, part_of
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.moe.rope import Rotation
from trainer_integration.moe.varlen import attend_varlen, takes_varlen
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.flops import encoder_flops

__all__ = ["VisionEncoder", "VisionInputs", "VisionLanguageModel", "grid_places"]

_MEAN = 127.5
"""Mean that scales pixels to numbers from -1 to 1."""


def grid_places(grids: Sequence[tuple[int, int]], merge: int) -> Tensor:
    """Return the row and column of every patch, ``[P, 2]``, in the order in which a mix gives patches.

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
    """Encodes images of any size, each by itself, so the result does not depend on the images dealt to a rank."""

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
        """Set first weights; a rank that keeps a part of a matrix draws all of it, and keeps its own part."""
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
        # Patches come square by square, not line by line, so that the patches of an embedding are adjacent.
        device = patches_PV.device
        places_P2 = on_device(grid_places(grids, self.config.merge).numpy(), device)
        head_dim = self.config.dim // self.config.num_heads
        # Angles at least in float32: bf16 has no integers between 256 and 258, so distant patches would get equal
        # angles.
        wide = torch.promote_types(patches_PV.dtype, torch.float32)
        turns = tuple(
            Rotation.at(places_P2[:, axis], head_dim // 2, self.config.rope_theta, wide)
            for axis in (0, 1)
        )
        sizes = [rows * columns for rows, columns in grids]
        varlen = bool(sizes) and takes_varlen(device, patches_PV.dtype, head_dim)
        ends = np.cumsum([0, *sizes])
        images = _Images(
            sizes=sizes, bounds_I=on_device(ends, device, np.int32) if varlen else None
        )
        # A matrix product instead of a convolution, because the data plane has already cut images into patches.
        x_PD = _linear(self.embed, patches_PV)
        for block in self.blocks:
            x_PD = block(x_PD, turns, images)
        merged = self.norm(x_PD).reshape(-1, self.config.merge**2 * self.config.dim)
        return _linear(self.fc2, functional.gelu(_linear(self.fc1, merged)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Images:
    """Concatenated images."""

    sizes: Sequence[int]
    """Number of patches of each image."""
    bounds_I: Tensor | None
    """Bounds of the images if one kernel attends within all of them, int32, ``[I + 1]``."""


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
    def forward(self, x_PD: Tensor, turns: tuple[Rotation, ...], images: _Images) -> Tensor:
        heads = (3 * self.num_heads, x_PD.shape[1] // self.num_heads)
        qkv_PHC = _linear(self.qkv, self.norm1(x_PD)).view(len(x_PD), *heads)
        # Queries and keys are rotated by their position; values are not.
        turned, values = torch.split(qkv_PHC, [2 * self.num_heads, self.num_heads], dim=1)
        # Half of each head by the row, half by the column.
        halves = zip(turns, turned.chunk(2, dim=-1), strict=True)
        turned = torch.cat([turn.apply(half) for turn, half in halves], dim=-1)
        attended_PHC = _attended(torch.cat((turned, values), dim=1), images)
        x_PD = x_PD + _linear(self.output, attended_PHC.reshape(x_PD.shape))
        return x_PD + _linear(self.fc2, functional.gelu(_linear(self.fc1, self.norm2(x_PD))))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer in the type of its input, whatever type its parameters have."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return functional.linear(x, layer.weight.to(x.dtype), bias)


def _attended(qkv_PHC: Tensor, images: _Images) -> Tensor:
    """Attend within each image, every patch to every patch."""
    if images.bounds_I is not None:
        q, k, v = qkv_PHC.chunk(3, dim=1)
        return attend_varlen(q, k, v, images.bounds_I, max(images.sizes), causal=False)
    # One image at a time, because with padding, a wide and a tall image would both cost the square of their union.
    attended = [_attended_alone(part) for part in torch.split(qkv_PHC, list(images.sizes))]
    # Without an image, every parameter still needs a zero gradient, because ranks add them up.
    return torch.cat(attended) if attended else qkv_PHC.chunk(3, dim=1)[2]


def _attended_alone(qkv_PHC: Tensor) -> Tensor:
    q, k, v = qkv_PHC.transpose(0, 1).unsqueeze(0).chunk(3, dim=1)
    return functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs(ModelInputs):
    """Tokens of rows, patches to encode for any rank, and the places of the embeddings that arrive."""

    patches_PV: Tensor
    """Patches, uint8."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of each image."""
    sends: tuple[int, ...]
    """Embeddings that go to each data-parallel peer; only to this rank if images stay with their rows."""
    receives: tuple[int, ...]
    """Embeddings that come from each peer."""
    places_E: Tensor
    """Token that each embedding replaces, int64."""

    @classmethod
    def of_microbatch(
        cls,
        microbatch: Microbatch,
        dp_peers: Peers = ALONE,
        device: str | torch.device = "cpu",
        *,
        varlen: bool = False,
    ) -> "VisionInputs":
        """Drop the padding of ``microbatch``, and compute where embeddings belong without it.

        Args:
            microbatch: Whole rows; if no strategy dealt their images, this rank encodes them.
            dp_peers: The data-parallel ranks.
            device: Device of the model.
            varlen: Whether its attention is a varlen kernel's.

        Raises:
            ValueError: Images were dealt to other ranks than there are, or in another order, or the number of arriving
                embeddings and of their places differ.
        """
        text = ModelInputs.of(microbatch, device=device, varlen=varlen)
        share = microbatch.encoding or share_of(microbatch, 0, 1)
        peers = ALONE if microbatch.encoding is None else dp_peers
        sends, receives = share.sends_W.tolist(), share.receives_W.tolist()
        _require_fit(sends, receives, len(share.places_E), peers, share.order_M)
        num = int((share.grids_I2[:, 0].astype(np.int64) * share.grids_I2[:, 1]).sum())
        depth = len(share.images_I.values_V) // max(1, num)
        # Places are counted with padding, but the tokens are without.
        before = np.cumsum(microbatch.source_ids_RT.reshape(-1) >= 0) - 1
        return cls(
            **{field.name: getattr(text, field.name) for field in fields(ModelInputs)},
            patches_PV=on_device(share.images_I.values_V, device, np.uint8).view(num, depth),
            grids=tuple((rows, columns) for rows, columns in share.grids_I2.tolist()),
            sends=tuple(sends),
            receives=tuple(receives),
            places_E=on_device(before[share.places_E], device),
        )

    @classmethod
    def of_rows(
        cls, rows: PackedRows, dp_peers: Peers = ALONE, device: str | torch.device = "cpu"
    ) -> "VisionInputs":
        """Return the same for rows that the user's own loop received, one of ``batch.microbatches``.

        Raises:
            ConfigError: The rows are shared among cp peers.
            ValueError: See ``of_microbatch``, or labels are unshifted.
        """
        text = ModelInputs.of_packed(rows, device)
        images = rows.encoding if rows.deals_images else rows.images
        places_E = on_host(images.places)
        order = None
        if isinstance(images, EncodingArrays):
            sends, receives, order = images.sends, images.receives, images.order
        else:
            firsts_I, sizes_I = places_E.T
            places_E = np.repeat(firsts_I - np.cumsum(sizes_I) + sizes_I, sizes_I)
            places_E += np.arange(len(places_E))
            sends = receives = [len(places_E)]
        _require_fit(
            sends, receives, len(places_E), dp_peers if rows.deals_images else ALONE, order
        )
        before = np.cumsum(on_host(rows.padding_mask).reshape(-1)) - 1
        return cls(
            **{field.name: getattr(text, field.name) for field in fields(ModelInputs)},
            patches_PV=on_device(on_host(images.patches), device, np.uint8),
            grids=tuple((rows, columns) for rows, columns in on_host(images.grids).tolist()),
            sends=tuple(sends),
            receives=tuple(receives),
            places_E=on_device(before[places_E], device),
        )

    @property
    @override
    def meets_peers(self) -> bool:
        return len(self.sends) > 1

    def pixels(self, dtype: torch.dtype) -> Tensor:
        """Return the patches as numbers from -1 to 1, ``[P, V]``."""
        return self.patches_PV.to(dtype) / _MEAN - 1


def _require_fit(
    sends_W: Sequence[int], receives_W: Sequence[int], places: int, peers: Peers, order: object
) -> None:
    """Refuse images that were dealt to other ranks, before ranks wait for embeddings that are never sent."""
    for name, counts_W in (("sends to", sends_W), ("receives from", receives_W)):
        if len(counts_W) != peers.size:
            raise ValueError(
                f"a microbatch {name} {len(counts_W)} ranks, and {peers.size} data-parallel ranks share the images; "
                "open the data plane with as many dp ranks as the model has peers"
            )
    if order is not None:
        raise ValueError(
            "a microbatch sends embeddings in another order than they are made in, as of a mesh that numbers its ranks "
            "in another order than their places along dp; number it as init_device_mesh does"
        )
    if sum(receives_W) != places:
        raise ValueError(
            f"a microbatch receives {sum(receives_W)} embeddings and has places for {places}; the plan and the rows "
            "are of different steps"
        )


class VisionLanguageModel(MoETransformer):
    """A decoder over packed documents with images in them.

    Summed over data-parallel ranks, the gradients equal those of one rank, whichever rank encodes an image. The
    exchange of embeddings has a backward, which returns each gradient to the rank that encoded the image.
    """

    def __init__(
        self,
        config: MoEConfig,
        vision: VisionConfig,
        *,
        seed: int = 0,
        dp_peers: Peers = ALONE,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a model with first weights.

        Args:
            config: Shape of the model.
            vision: Shape of the encoder.
            seed: Decides the weights.
            dp_peers: The data-parallel ranks, among which images are dealt.
            dtype: Type to compute in; ``None`` for that of the parameters.
        """
        super().__init__(config, seed=seed, dtype=dtype)
        self.dp_peers = dp_peers
        # With a seed of its own; otherwise its matrices would begin with the numbers of the model's.
        self.encoder = VisionEncoder(vision, config.dim, seed=seed + 1)
        self._agreed = False

    @override
    def draw_weights(self, seed: int) -> None:
        super().draw_weights(seed)
        if hasattr(self, "encoder"):  # false for the model's own weights, which are drawn first
            self.encoder.draw_weights(seed + 1)

    @property
    @override
    def units(self) -> tuple[nn.Module, ...]:
        return (self.encoder, *super().units)

    @override
    def inputs_of(self, microbatch: Microbatch | CpSlice, *, dealt: bool = True) -> ModelInputs:
        if isinstance(microbatch, CpSlice):
            raise TypeError(
                "a microbatch brings a slice of its rows, and images belong to whole ones; open the data plane with dp "
                "alone"
            )
        peers = self.dp_peers if dealt else ALONE
        return VisionInputs.of_microbatch(microbatch, peers, self.device, varlen=self.takes_varlen)

    @override
    def flops_beside(self, inputs: ModelInputs) -> float:
        if not isinstance(inputs, VisionInputs):
            return 0.0
        return encoder_flops(self.encoder.config, self.config.dim, inputs.grids)

    @override
    def embedded(self, inputs: ModelInputs) -> Tensor:
        x_ND = super().embedded(inputs)
        if not isinstance(inputs, VisionInputs):
            return x_ND
        merge = self.encoder.config.merge
        makes = sum(rows * columns for rows, columns in inputs.grids) // merge**2
        if makes != sum(inputs.sends):
            raise ValueError(
                f"the plan sends {sum(inputs.sends)} embeddings, and an encoder of merge {merge} makes {makes} of "
                "these images; give it the merge of the mix"
            )
        # Every rank takes part in the exchange, even with nothing to encode or to receive.
        made_ED = self.encoder(inputs.pixels(x_ND.dtype), inputs.grids)
        if inputs.meets_peers:
            if not self._agreed:
                # Checked only once, because a mismatch shows in the first batch, and each exchange costs a round trip.
                self._agreed = True
                self.dp_peers.require_agreed(inputs.sends, inputs.receives, self.device)
            made_ED = self.dp_peers.exchange(
                made_ED, inputs.sends, inputs.receives, "image embeddings"
            )
        return x_ND.index_copy(0, inputs.places_E, made_ED.to(x_ND.dtype))
