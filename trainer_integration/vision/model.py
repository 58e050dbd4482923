"""The included model behind a vision encoder.

::

    images dealt to this rank ──encoder──▶ embeddings ──all-to-all──▶ embeddings of this rank's rows
    tokens ──embedding──────────────────────────────────▶ placeholders replaced ──▶ layers, loss

Shape suffixes:
    N  tokens        D  width        E  embeddings
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from omniload.base.errors import StateError
from omniload.batch.microbatch import CpSlice, Microbatch
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.encoder import VisionEncoder
from trainer_integration.vision.flops import encoder_flops
from trainer_integration.vision.inputs import VisionInputs

__all__ = ["VisionLanguageModel"]


class VisionLanguageModel(MoETransformer):
    """A decoder over packed documents with images in them.

    Gradients, added up over data-parallel ranks, are those of one rank, whichever rank encodes an image: the
    exchange of embeddings has a backward, which takes each gradient to where its image was encoded.
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
            dtype: To compute in; ``None`` for that of the parameters.
        """
        super().__init__(config, seed=seed, dtype=dtype)
        self.dp_peers = dp_peers
        self.encoder = VisionEncoder(vision, config.dim, seed=seed + 1)
        self._agreed = False

    @override
    def draw_weights(self, seed: int) -> None:
        super().draw_weights(seed)
        if hasattr(self, "encoder"):  # the model's own come first, while it is made
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
        # Every rank takes part in the exchange, also one that has nothing to encode or to receive.
        made_ED = self.encoder(inputs.pixels(x_ND.dtype), inputs.grids)
        if inputs.meets_peers:
            self._agree(inputs)
            made_ED = self.dp_peers.exchange(
                made_ED, inputs.sends, inputs.receives, "image embeddings"
            )
        return x_ND.index_copy(0, inputs.places_E, made_ED.to(x_ND.dtype))

    def _agree(self, inputs: VisionInputs) -> None:
        """Compare what ranks expect with what is sent, once: with other counts they would wait, or write beyond.

        Raises:
            StateError: Two ranks differ; on all of them.
        """
        if self._agreed:
            return
        self._agreed = True
        peers = self.dp_peers
        ones = [1] * peers.size
        sent_W = torch.tensor(inputs.sends, device=self.device)
        told = peers.exchange(sent_W, ones, ones, "image counts").tolist()
        faults = [
            f"rank {rank} sends {sends} embeddings of images and rank {peers.rank} expects {expected}"
            for rank, (sends, expected) in enumerate(zip(told, inputs.receives, strict=True))
            if sends != expected
        ]
        if int(peers.summed(torch.tensor(len(faults), device=self.device))):
            found = (
                faults[0] if faults else "other ranks differ in the embeddings of images they send"
            )
            raise StateError(
                f"{found}: they have batches of different steps; take every batch once on every rank"
            )
