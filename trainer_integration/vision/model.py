"""The included model behind a vision encoder.

::

    images dealt to this rank ──encoder──▶ embeddings ──all-to-all──▶ embeddings of this rank's rows
    tokens ──embedding──────────────────────────────────▶ placeholders replaced ──▶ layers, loss

Shape suffixes:
    N  tokens        D  width        E  embeddings
"""

import torch
from torch import Tensor
from typing_extensions import override

from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.encoder import VisionEncoder
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

    @override
    def embedded(self, inputs: ModelInputs) -> Tensor:
        x_ND = super().embedded(inputs)
        if not isinstance(inputs, VisionInputs):
            return x_ND
        # Every rank takes part in the exchange, also one that has nothing to encode or to receive.
        made_ED = self.encoder(inputs.pixels(self.embedding_VD.dtype), inputs.grids)
        if self.dp_peers.size > 1:
            made_ED = self.dp_peers.exchange(
                made_ED, inputs.sends, inputs.receives, "image embeddings"
            )
        return x_ND.index_copy(0, inputs.places_E, made_ED.to(x_ND.dtype))
