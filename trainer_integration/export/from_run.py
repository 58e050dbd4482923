"""The model of a run, from one of its checkpoints, in one process: exported for other tools, or used to continue text.

Text is drawn token by token, without a cache, so ``n`` tokens cost ``n`` passes over all text so far. This is for
looking at a small model, not for serving.

Shape suffixes:
    T  tokens        V  vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from omniload.base.errors import ConfigError, StateError
from omniload.batch.microbatch import IGNORE_LABEL, Microbatch
from omniload.mix.config import MixConfig
from omniload.mix.run_record import read_run_record
from omniload.source.tokenize import open_tokenizer
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.place import StorePlace, place_of
from trainer_integration.checkpoint.striped.writer import StripedCheckpoints
from trainer_integration.mixtral.folder import write_mixtral, write_tokenizer
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.run.launch_record import read_launch_record
from trainer_integration.run.model_of import model_of, vision_of
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.vision.config import identity_of
from trainer_integration.vision.model import VisionLanguageModel

__all__ = ["TrainedModel", "continued", "continued_text", "export_run", "model_of_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Model of a run at one step."""

    model: MoETransformer
    step: int
    mix: MixConfig
    base_dir: Path
    """Folder that the mix's relative paths start at."""


def model_of_run(run_dir: Path, location: str, step: int | None = None) -> TrainedModel:
    """Load a checkpoint of a run, whatever mesh saved it.

    Args:
        run_dir: Folder of the run.
        location: Location of its checkpoints: a folder, or a store's URL.
        step: Step of the checkpoint; ``None`` takes the newest.

    Raises:
        IntegrityError: The checkpoint is not what was saved.
        StateError: There is none, or it is of another model.
    """
    train, life = read_launch_record(run_dir).train, read_run_record(run_dir).last
    mix = life.mix()
    config = model_of(train, mix, life.base_dir)
    vision = vision_of(train, mix)
    model = MoETransformer(config) if vision is None else VisionLanguageModel(config, vision)
    # A checkpoint is loaded whole, so its averages need memory too, although nothing is trained.
    optimizer = FlatAdamW(model, train.optimizer, train.steps)
    place = place_of(location)
    identity = identity_of(config, vision)
    # Without ranks: any process can load the parts that it has memory for, and this one has memory for all.
    checkpoints = (
        StripedCheckpoints(place, identity)
        if isinstance(place, StorePlace)
        else Checkpoints(place.folder, identity)
    )
    restored = checkpoints.load(model, optimizer, step=step)
    if restored is None:
        raise StateError(f"{place.location} holds no checkpoint; train first")
    return TrainedModel(model=model, step=restored.step, mix=mix, base_dir=life.base_dir)


def export_run(run_dir: Path, location: str, folder: Path, step: int | None = None) -> TrainedModel:
    """Write the model of a run, and the tokenizer of its mix, in Hugging Face's format; arguments as above.

    Raises:
        ConfigError: Mixtral cannot compute the model's function.
        IntegrityError: The checkpoint is not what was saved.
        StateError: There is none, or ``folder`` contains files already.
    """
    found = model_of_run(run_dir, location, step)
    config, begin, end = found.mix.tokenizer, None, None
    if config is not None:
        # As an id, because generation compares ids, and without one in its config it would stop at token 2.
        tokenizer = open_tokenizer(config, found.base_dir)
        begin, end = tokenizer.begin_of_document_id, tokenizer.end_of_document_id
    write_mixtral(
        found.model,
        folder,
        longest=found.mix.pack.length,
        begin_of_document=begin,
        end_of_document=end,
    )
    if config is not None:
        write_tokenizer(config, found.base_dir, folder)
    return found


_LEAST = 1e-30
"""Least temperature above 0 in float32; a smaller one would draw the same."""


def continued_text(
    trained: TrainedModel, prompt: str, num_tokens: int, *, temperature: float = 1.0, seed: int = 0
) -> str:
    """Return a prompt and its continuation, by the tokenizer of the run's mix; arguments as for ``continued``.

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
        model: A model that is not divided among ranks.
        prompt_T: Token ids, at least one.
        num_tokens: Number of tokens to add.
        temperature: 0 takes the likeliest token each time; 1 draws with the model's probabilities.
        seed: Seed of the draws.

    Raises:
        ConfigError: The prompt has no token, or one that the model does not know; or the temperature is no number of at
            least 0.
    """
    if not temperature >= 0:
        raise ConfigError(f"temperature is {temperature}; give a number from 0 on")
    tokens = [int(token) for token in prompt_T]
    if not tokens or not all(0 <= token < model.config.vocab_size for token in tokens):
        raise ConfigError(
            f"the prompt is {tokens[:8]}; give at least one token id, all from 0 to {model.config.vocab_size - 1}"
        )
    # A generator of the CPU, to which logits are copied, so that a seed draws the same text on any device.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits_V = model.logits(_inputs_of(tokens, model))[-1].float().cpu()
        if temperature == 0:
            tokens.append(int(logits_V.argmax()))
        else:
            # Relative to the greatest: with a tiny temperature, logits would become infinite, and probabilities NaN.
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
