"""The model that a training file and its mix describe together: vocabulary, encoder of images, cost."""

from pathlib import Path

from omniload.mix.config import MixConfig
from omniload.source.tokenize import open_tokenizer
from trainer_integration.config import TrainConfig
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.flops import cost_of
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.flops import encoder_cost_of

__all__ = ["model_of", "vision_of", "with_cost_of"]

_ATTENTION_SLOWDOWN = 1.3
"""Time of a FLOP of attention relative to one of a matrix product, on a CPU; see ``cost_of``."""


def model_of(train: TrainConfig, mix: MixConfig, base_dir: Path) -> MoEConfig:
    """Return the model with the vocabulary of the mix's tokenizer.

    Raises:
        ConfigError: The tokenizer cannot be opened.
        ValueError: There is no tokenizer and no ``vocab_size``, or it is too small.
    """
    tokenizer = None if mix.tokenizer is None else open_tokenizer(mix.tokenizer, base_dir)
    return train.moe(None if tokenizer is None else tokenizer.vocab_size)


def vision_of(train: TrainConfig, mix: MixConfig) -> VisionConfig | None:
    """Return the encoder of the mix's images; ``None`` if it has none."""
    transforms = [source.images_transform for source in mix.sources.values()]
    first = next((transform for transform in transforms if transform is not None), None)
    return None if first is None else VisionConfig.of(train.vision, first.patch, first.merge)


def with_cost_of(model: MoEConfig, mix: MixConfig, vision: VisionConfig | None = None) -> MixConfig:
    """Return the mix balanced by the cost of ``model`` and of its encoder, unless its file gives costs itself."""
    # Both costs or neither, because a cost in the file and one of ours have different scales.
    given, costs = mix.balance.model_fields_set, {}
    if not given & {"linear", "quadratic", "cost"}:
        costs["linear"], costs["quadratic"] = cost_of(model, attention_slowdown=_ATTENTION_SLOWDOWN)
    if vision is not None and not given & {"encoder_linear", "encoder_quadratic"}:
        costs["encoder_linear"], costs["encoder_quadratic"] = encoder_cost_of(
            vision, model.dim, attention_slowdown=_ATTENTION_SLOWDOWN
        )
    if not costs:
        return mix
    return mix.model_copy(update={"balance": mix.balance.model_copy(update=costs)})
