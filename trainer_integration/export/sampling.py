"""Text from a model: token after token, each drawn from what the model says of all before it.

Nothing is kept between tokens, so ``n`` tokens cost ``n`` passes over what is there by then: for looking
at a small model, not for serving.

Shape suffixes:
    T  tokens        V  vocabulary
"""

from collections.abc import Sequence

import numpy as np
import torch

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import IGNORE_LABEL, Microbatch
from omniload.source.tokenize import open_tokenizer
from trainer_integration.export.from_run import TrainedModel
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer

__all__ = ["continued", "continued_text"]

_LEAST = 1e-30
"""Of a temperature above 0, as float32 knows it: what is drawn at less is the same."""


def continued_text(
    trained: TrainedModel, prompt: str, num_tokens: int, *, temperature: float = 1.0, seed: int = 0
) -> str:
    """Return a prompt and what follows it, by the tokenizer of the run's mix; arguments as for ``continued``.

    Raises:
        ConfigError: The mix has no tokenizer, or the prompt no token.
    """
    config = trained.mix.tokenizer
    if config is None:
        raise ConfigError("the run's mix has no tokenizer, so nothing turns text into tokens")
    tokenizer = open_tokenizer(config, trained.base_dir)
    ids = tokenizer.encode([prompt]).values_V.tolist()
    added = continued(trained.model, ids, num_tokens, temperature=temperature, seed=seed)
    return tokenizer.decode(np.array([*ids, *added]))


def continued(
    model: MoETransformer,
    prompt_T: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Return the tokens that follow a prompt.

    Args:
        model: One that no ranks share.
        prompt_T: Token ids, at least one.
        num_tokens: How many to add.
        temperature: 0 takes the likeliest token each time; 1 draws as the model says.
        seed: Decides what is drawn.

    Raises:
        ConfigError: The prompt has no token, or one that the model does not know; or the temperature is no number from
            0 on.
    """
    if not temperature >= 0:
        raise ConfigError(f"temperature is {temperature}; give a number from 0 on")
    tokens = [int(token) for token in prompt_T]
    if not tokens or not all(0 <= token < model.config.vocab_size for token in tokens):
        raise ConfigError(
            f"the prompt is {tokens[:8]}; give at least one token id, all from 0 to {model.config.vocab_size - 1}"
        )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits_V = model.logits(_inputs_of(tokens, model))[-1].float().cpu()
        if temperature == 0:
            tokens.append(int(logits_V.argmax()))
        else:
            # From the greatest down: by a tiny temperature, logits as they are become infinite, and chances no numbers.
            chances_V = ((logits_V - logits_V.max()) / max(temperature, _LEAST)).softmax(-1)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return tokens[len(prompt_T) :]


def _inputs_of(tokens: list[int], model: MoETransformer) -> ModelInputs:
    row = Microbatch(
        tokens_RT=np.array([tokens], np.int32),
        cu_seqlens=np.array([0, len(tokens)], np.int32),
        sources_D=np.zeros(1, np.int16),
        next_D=np.array([IGNORE_LABEL], np.int32),
        keys_K4=np.zeros((0, 4), np.int64),
    )
    return ModelInputs.of(row, device=model.device, varlen=model.takes_varlen)
