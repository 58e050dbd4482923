"""The model of a run, from one of its checkpoints, on one process: written for others, or asked for text.

Text is drawn token after token, and nothing is kept between them, so ``n`` tokens cost ``n`` passes over what is
there by then: for looking at a small model, not for serving.

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
    """What a run came to at one step."""

    model: MoETransformer
    step: int
    mix: MixConfig
    base_dir: Path
    """Folder that the mix's relative paths start at."""


def model_of_run(run_dir: Path, location: str, step: int | None = None) -> TrainedModel:
    """Load a checkpoint of a run, whatever mesh saved it.

    Args:
        run_dir: Folder of the run.
        location: Of its checkpoints: a folder, or a store's URL.
        step: Which; ``None`` takes the newest.

    Raises:
        IntegrityError: The checkpoint is not what was saved.
        StateError: There is none, or it is of another model.
    """
    train, life = read_launch_record(run_dir).train, read_run_record(run_dir).last
    mix = life.mix()
    config = model_of(train, mix, life.base_dir)
    vision = vision_of(train, mix)
    model = MoETransformer(config) if vision is None else VisionLanguageModel(config, vision)
    # A checkpoint is loaded whole: its averages need a place too, though nothing is trained.
    optimizer = FlatAdamW(model, train.optimizer, train.steps)
    place = place_of(location)
    identity = identity_of(config, vision)
    # Without ranks: whatever mesh saved it, each loads the parts that it has a place for, here all.
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
    """Write the model of a run, and the tokenizer of its mix, as Hugging Face keeps them; arguments as above.

    Raises:
        ConfigError: Mixtral cannot compute what the model does.
        IntegrityError: The checkpoint is not what was saved.
        StateError: There is none, or ``folder`` holds files already.
    """
    found = model_of_run(run_dir, location, step)
    config, begin, end = found.mix.tokenizer, None, None
    if config is not None:
        # By its number: generation compares ids, and a config that names none would have it stop at token 2.
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
    # Of the host, to which logits are brought: a seed draws the same text wherever the model is.
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
