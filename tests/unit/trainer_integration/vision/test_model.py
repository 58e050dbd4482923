"""The vision encoder: images apart from each other, places of patches, embeddings at placeholders."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from omniload.mix.schema.transforms import ImagesTransform
from omniload.source.transforms.image_patches import patches_of
from tests.support.drawn import ramp
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.flops import encoder_flops
from trainer_integration.vision.model import VisionEncoder, grid_places

CONFIG = VisionConfig(patch=4, merge=2, dim=16, num_heads=2, hidden=24, init_std=0.2)


def test_places_follow_the_order_that_a_mix_gives_patches_in():
    pixels = np.zeros((16, 24, 3), np.uint8)
    for row in range(4):
        for column in range(6):
            pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = (row, column, 0)
    patches = patches_of(pixels, 4, 2).reshape(24, 16, 3)

    places = grid_places([(4, 6)], 2)

    assert np.array_equal(patches[:, 0, :2], places.numpy())


def test_an_image_is_encoded_the_same_whatever_lies_beside_it():
    encoder = VisionEncoder(CONFIG, 8).double()
    images = [patches_of(ramp(*size), 4, 2) for size in ((8, 16), (16, 8), (24, 24))]
    grids = [(2, 4), (4, 2), (6, 6)]

    def encoded(which):
        flat = np.concatenate([images[i] for i in which]).astype(np.float64) / 255
        return encoder(torch.from_numpy(flat), [grids[i] for i in which])

    together = torch.split(encoded([2, 0, 1]), [9, 2, 2])

    for part, i in zip(together, [2, 0, 1], strict=True):
        torch.testing.assert_close(part, encoded([i]), rtol=0, atol=1e-12)


def test_equal_seeds_give_equal_weights_whatever_was_drawn_before():
    first = VisionEncoder(CONFIG, 8, seed=3).state_dict()
    torch.rand(7)
    again = VisionEncoder(CONFIG, 8, seed=3).state_dict()

    assert all(torch.equal(first[name], again[name]) for name in first)


def test_an_encoder_sees_where_a_patch_lies():
    encoder = VisionEncoder(CONFIG, 8).double()
    flat = torch.from_numpy(patches_of(ramp(8, 16), 4, 2).astype(np.float64) / 255)

    assert not torch.allclose(encoder(flat, [(2, 4)]), encoder(flat, [(4, 2)]))


def test_nothing_to_encode_gives_no_embedding_and_a_gradient_of_zero():
    encoder = VisionEncoder(CONFIG, 8)

    made = encoder(torch.empty(0, 0), [])
    made.sum().backward()

    assert made.shape == (0, 8)
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert not any(gradient.any() for gradient in gradients.values())


def test_patches_of_another_size_are_refused():
    with pytest.raises(ValueError, match="has 588 values, and an encoder of patch 4 takes 48"):
        VisionEncoder(CONFIG, 8)(torch.zeros(4, 588), [(2, 2)])


def test_heads_that_cannot_turn_by_row_and_column_are_refused():
    with pytest.raises(ValidationError, match="must be a multiple of 4 for rows and columns"):
        VisionConfig(dim=24, num_heads=4)


def test_a_patch_has_as_many_values_as_the_mix_gives():
    transform = ImagesTransform(type="images", patch=14, placeholder=1)

    assert VisionConfig(patch=14).values_per_patch == transform.values_per_patch


def test_flops_of_an_encoder_are_those_that_torch_counts():
    grids = [(2, 4), (6, 6), (4, 2)]
    encoder = VisionEncoder(CONFIG, 8)

    # Its other kernels are not counted on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        encoder(torch.zeros(52, 48), grids)

    assert 3 * counter.get_total_flops() == encoder_flops(CONFIG, 8, grids)


def test_an_encoder_computes_in_the_type_of_its_pixels_and_keeps_parameters_wide():
    encoder = VisionEncoder(CONFIG, 8)
    pixels = torch.rand(8, 48)

    narrow = encoder(pixels.bfloat16(), [(2, 4)])
    narrow.float().sum().backward()

    assert narrow.dtype == torch.bfloat16
    assert {p.grad.dtype for p in encoder.parameters()} == {torch.float32}
    torch.testing.assert_close(narrow.float(), encoder(pixels, [(2, 4)]), rtol=0.05, atol=0.02)
