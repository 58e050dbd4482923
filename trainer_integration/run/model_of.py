"""The model that a training file and its mix describe together: vocabulary and cost."""

from pathlib import Path

from omniload.mix.config import MixConfig
from omniload.source.tokenize import open_tokenizer
from trainer_integration.config import TrainConfig
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.flops import cost_of

__all__ = ["model_of", "with_cost_of"]

_ATTENTION_SLOWDOWN = 1.3
"""A FLOP of attention takes as long as this many of a matrix product, on a CPU; see ``cost_of``."""


def model_of(train: TrainConfig, mix: MixConfig, base_dir: Path) -> MoEConfig:
    """Return the model with the vocabulary of the mix's tokenizer.

    Raises:
        ConfigError: The tokenizer cannot be opened.
        ValueError: There is no tokenizer and no ``vocab_size``, or it is too small.
    """
    tokenizer = None if mix.tokenizer is None else open_tokenizer(mix.tokenizer, base_dir)
    return train.moe(None if tokenizer is None else tokenizer.vocab_size)


def with_cost_of(model: MoEConfig, mix: MixConfig) -> MixConfig:
    """Return the mix balanced by the cost of ``model``, unless its file gives costs itself."""
    if mix.balance.model_fields_set & {"linear", "quadratic", "cost"}:
        return mix
    linear, quadratic = cost_of(model, attention_slowdown=_ATTENTION_SLOWDOWN)
    balance = mix.balance.model_copy(update={"linear": linear, "quadratic": quadratic})
    return mix.model_copy(update={"balance": balance})
