"""Why images of LLaVA-OneVision and Pixtral are not made: a place of a batch is one run, as long as its grid says."""

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    PixtralVisionConfig,
    PixtralVisionModel,
)
from transformers.image_processing_utils import select_best_resolution

from tests.support.chats import CHATML, write_model

TILE, TOKENS = 384, 729
"""Pixels and tokens of a side of a tile of LLaVA-OneVision: 27 x 27 patches of SigLIP."""
SIDES = range(40, 1_200, 29)


@pytest.fixture(scope="module")
def onevision(tmp_path_factory):
    model = tmp_path_factory.mktemp("onevision")
    write_model(model, CHATML, special=("<image>", "<video>"))

    class Alone(LlavaOnevisionProcessor):
        """Without videos, which ask for torchvision."""

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

        def tokens_of(self, height, width):
            """Return how many placeholders it writes for an image."""
            return self._get_number_of_features(height, width, TILE, TILE)

    return Alone(
        LlavaOnevisionImageProcessorPil(),
        AutoTokenizer.from_pretrained(model),
        num_image_tokens=TOKENS,
    )


def test_tokens_of_llava_onevision_go_by_the_size_of_an_image_and_not_by_its_tiles(onevision):
    pinpoints = onevision.image_processor.image_grid_pinpoints
    found = {}
    for height in SIDES:
        for width in SIDES:
            best = select_best_resolution([height, width], pinpoints)
            count = onevision.tokens_of(height, width)
            found.setdefault(tuple(best), set()).add(count)
            rows = best[0] // TILE, best[1] // TILE
            # Never those of tiles and a thumbnail: a newline ends each row, and what was padded is left out.
            assert count != (rows[0] * rows[1] + 1) * TOKENS

    # A batch says the grid of an image alone: nearly every grid of tiles has several numbers of embeddings.
    several = [best for best, counts in found.items() if len(counts) > 1]
    assert len(several) > len(found) * 0.9
    assert max(map(len, found.values())) > 10


def test_a_row_of_pixtral_is_no_image_of_its_own():
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = PixtralVisionModel(
        PixtralVisionConfig(intermediate_size=64, patch_size=16, **small)
    ).eval()
    pixels = torch.rand(1, 3, 32, 48)

    with torch.no_grad():
        whole = model(pixels, image_sizes=torch.tensor([[32, 48]])).last_hidden_state[0]
        rows = [
            model(row, image_sizes=torch.tensor([[16, 48]])).last_hidden_state[0]
            for row in pixels.split(16, dim=2)
        ]

    # Each patch sees those of the other rows: encoded apart, as tiles are, they give other embeddings.
    apart = (torch.cat(rows) - whole).abs().amax(1)
    assert whole.shape == torch.cat(rows).shape
    assert (apart > 1e-3).all()
