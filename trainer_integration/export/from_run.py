"""The model of a run, from one of its checkpoints, on one process."""

from dataclasses import dataclass
from pathlib import Path

from omniload.base.errors import StateError
from omniload.mix.config import MixConfig
from omniload.mix.run_record import read_run_record
from omniload.source.tokenize import open_tokenizer
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.place import StorePlace, place_of
from trainer_integration.checkpoint.striped_checkpoints import StripedCheckpoints
from trainer_integration.mixtral.folder import write_mixtral, write_tokenizer
from trainer_integration.moe.model import MoETransformer
from trainer_integration.run.launch_record import read_launch_record
from trainer_integration.run.model_of import model_of, vision_of
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.vision.config import identity_of
from trainer_integration.vision.model import VisionLanguageModel

__all__ = ["TrainedModel", "export_run", "model_of_run"]


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
    optimizer = FlatAdamW(model, train.optimizer, train.steps)
    place = place_of(location)
    identity = identity_of(config, vision)
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
    config, end = found.mix.tokenizer, None
    if config is not None:
        end = open_tokenizer(config, found.base_dir).end_of_document_id
    write_mixtral(found.model, folder, longest=found.mix.pack.length, end_of_document=end)
    if config is not None:
        write_tokenizer(config, found.base_dir, folder)
    return found
