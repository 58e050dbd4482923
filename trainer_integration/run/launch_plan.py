"""The plan of a launch: the training file and its mix, read once.

Everything later, including every restart, uses what was read then. Both files may be edited while the job runs.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from omniload.actors.address import PlaneAddress
from omniload.actors.plane import PlaneSpec
from omniload.base.config import line_of
from omniload.base.errors import ConfigError, OmniloadError, StateError
from omniload.base.state import JsonObject
from omniload.base.units import decimal_of
from omniload.front.launch import Launch
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.held_out import held_out
from omniload.mix.run_record import mix_text, read_run_record, write_run_record
from omniload.source.access.index_folders import index_folder
from omniload.source.tokenize import open_tokenizer
from trainer_integration.checkpoint.place import CheckpointPlace, place_of
from trainer_integration.config import TrainConfig, load_train
from trainer_integration.mixtral.config import require_weights
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.parallel.crossover_table import read_crossover
from trainer_integration.run.launch_record import write_launch_record
from trainer_integration.run.model_of import model_of, vision_of, with_cost_of
from trainer_integration.run.rank_spec import EvaluationSpec, RankSpec
from trainer_integration.run.resuming import Resume, choose, require_step, step_name
from trainer_integration.run.run_log import LOG_NAME, EventLine, read_log
from trainer_integration.vision.config import VisionConfig
from trainer_integration.writers.opening import require_writers

__all__ = ["AttemptStart", "LaunchPlan", "next_log_number", "read_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """Where an attempt starts from."""

    attempt: int
    step: int | None
    """Checkpoint to load; ``None`` starts from nothing."""
    state: JsonObject | None
    """The data plane's state at ``step``."""
    beyond: Mapping[int, str]
    """Checkpoints of later steps that will be set aside, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One training file and its mix."""

    config: Path
    """The training file."""
    train: TrainConfig
    mix_file: Path
    mix_text: str
    """Text of the mix file when it was read."""
    mix: MixConfig
    """The mix with its balance: by the model's cost, unless the file gives a cost."""
    model: MoEConfig
    vision: VisionConfig | None = None
    """Encoder of the model, if the mix has images."""
    evaluation: EvaluationSpec | None = None
    """The evaluation mix."""
    profile: tuple[int, int] | None = None
    """First and last step of a trace, as requested for this launch."""

    @property
    def folder(self) -> Path:
        """Folder that the training file's relative paths start at."""
        return self.config.parent

    def require_ranks(self, launch: Launch) -> None:
        """Refuse a launcher that has started other ranks than the file names.

        Raises:
            ConfigError: The message names both numbers. A process whose launcher starts no ranks may start them itself.
        """
        parallel = self.train.parallel
        if launch.starts_ranks and parallel.num_ranks != launch.world_size:
            started = "1 rank was" if launch.world_size == 1 else f"{launch.world_size} ranks were"
            raise ConfigError(
                f"{self.config}: parallel: dp {parallel.dp} times sp {parallel.sp} is {parallel.num_ranks}, but "
                f"{started} started, by {launch.found_in}; start as many as the file says (torchrun "
                "--nproc-per-node), change the file, or run without a launcher on one host"
            )

    @property
    def base_dir(self) -> Path:
        """Folder that the mix's relative paths start at."""
        return self.mix_file.resolve().parent

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.train.run_folder(self.folder)

    @property
    def checkpoints(self) -> CheckpointPlace:
        """Place of the checkpoints."""
        return place_of(self.train.checkpoint_location(self.folder))

    def first_step(self, resume: Resume) -> int:
        """Return the first step to train, if the checkpoint of it is whole.

        Raises:
            StateError: There are checkpoints but no request to resume, the requested checkpoint does not exist, or it
                is beyond the run's end.
        """
        place = self.checkpoints
        steps = place.steps()
        if isinstance(resume, int):
            require_step(place, resume, steps)
        elif not steps:
            return 0
        # Resuming is not the default: an unchanged run_dir in a copied file names another user's finished run.
        elif resume == "never":
            raise StateError(
                f"{place.location} holds {step_name(steps[-1])}; pass --resume latest to continue from it, or give "
                "another run_dir"
            )
        first = resume if isinstance(resume, int) else steps[-1]
        if first > self.train.steps:
            which = "the checkpoint" if isinstance(resume, int) else "the newest checkpoint"
            raise StateError(
                f"steps is {self.train.steps}, but {which} is of step {first}, which is beyond it; raise steps, "
                "resume from an earlier checkpoint, or give another run_dir"
            )
        return first

    def start_of(
        self,
        attempt: int,
        resume: Resume = "latest",
        damaged: Mapping[int, str] = MappingProxyType({}),
    ) -> AttemptStart:
        """Return where an attempt that begins now starts from.

        Args:
            attempt: Number of the attempt.
            resume: Which checkpoint to resume from.
            damaged: Steps that ranks of earlier attempts could not load, and why.

        Raises:
            ConfigError: It starts from nothing, and the model cannot have the weights to begin with.
            IntegrityError: No checkpoint is what was saved, or the requested one is not.
            StateError: The checkpoint was written by another release.
        """
        choice = choose(self.checkpoints, resume, damaged)
        if choice.step is None:
            # Only now, because a checkpoint contains all weights, and the initial weights may be gone by then.
            self._require_weights()
        return AttemptStart(
            attempt=attempt,
            step=choice.step,
            state=choice.state,
            beyond=choice.beyond,
        )

    def _require_weights(self) -> None:
        folder = self.train.weights_folder(self.folder)
        if folder is None:
            return
        place = f"{self.config}:{line_of(self.config, 'weights')}: weights"
        if self.vision is not None:
            raise ConfigError(
                f"{place}: are {self.train.weights}, which have no image encoder, and the mix has images; leave "
                "weights out"
            )
        try:
            require_weights(folder, self.model)
        except OmniloadError as error:
            raise ConfigError(f"{place}: {error}") from error

    def is_finished(self, step: int | None) -> bool:
        """Return whether nothing is left to train after ``step``, by ``steps`` or because the data ended there."""
        if step is None or not (self.run_dir / LOG_NAME).exists():
            return False
        if step >= self.train.steps:
            return True
        ends = [
            line.step
            for line in read_log(self.run_dir)
            if isinstance(line, EventLine) and line.what == "data_end"
        ]
        # With another text, the mix may continue where the data of the old one ended.
        return ends[-1:] == [step] and read_run_record(self.run_dir).last.text == self.mix_text

    def plane_spec(self, state: JsonObject | None) -> PlaneSpec:
        """Return the data plane to open, from nothing or from ``state``."""
        return PlaneSpec(
            mix=self.mix,
            base_dir=self.base_dir,
            tree=self.train.place_tree,
            run_dir=self.run_dir,
            state=state,
            num_steps=self.train.steps,
            cache_dir=index_folder(self.mix_file),
        )

    def rank_spec(
        self,
        rank: int,
        start: AttemptStart,
        plane: PlaneAddress | None,
        store: socket.socket | None = None,
    ) -> RankSpec:
        """Return the specification of a rank.

        Args:
            rank: Number of the rank.
            start: Where its attempt starts from.
            plane: Address of the plane; without it, the rank runs the data plane itself.
            store: Listening socket of the store through which ranks find each other; rank 0 inherits it.
        """
        return RankSpec(
            launcher_pid=os.getpid(),
            train=self.train,
            folder=self.folder,
            model=self.model,
            vision=self.vision,
            mix=self.mix,
            base_dir=self.base_dir,
            cache_dir=index_folder(self.mix_file),
            rank=rank,
            attempt=start.attempt,
            store_port=None if store is None else store.getsockname()[1],
            store_fd=store.fileno() if store is not None and rank == 0 else None,
            resume_step=start.step,
            plane=plane,
            # A plane that is open already has the state, which is long with many sources.
            loader_state=start.state if plane is None else None,
            evaluation=self.evaluation,
            profile=self.profile,
        )

    def note(self, first_step: int) -> None:
        """Write the records of the launch to the run's folder.

        Called only after the data plane has accepted the launch, because a refused launch must not overwrite the record
        of what the run was trained with.
        """
        write_run_record(
            self.run_dir,
            self.mix_file,
            {"dp": self.train.parallel.dp, "cp": self.train.parallel.sp},
            from_step=first_step,
            text=self.mix_text,
            balance=self.mix.balance,
        )
        write_launch_record(self.run_dir, self.config, self.train)


def read_plan(config: Path, profile: tuple[int, int] | None = None) -> LaunchPlan:
    """Read and check a training file and its mixes.

    Args:
        config: The training file.
        profile: First and last step of a trace.

    Raises:
        ConfigError: One of them has a fault, or they do not fit each other.
    """
    train, folder = load_train(config)
    _require_writers(train, config)
    train = _with_crossover(train, folder)
    mix_file = train.mix_file(folder)
    mix, base_dir = load_mix(mix_file)
    _require_no_pairs(mix, mix_file)
    vision = vision_of(train, mix)
    if vision is not None and train.parallel.sp > 1:
        line = line_of(config, "parallel", "sp")
        raise ConfigError(
            f"{config}:{line}: parallel.sp: is {train.parallel.sp}, but {mix_file} has images, whose embeddings "
            "belong to whole rows; set sp to 1, and dp to the number of ranks"
        )
    try:
        model = model_of(train, mix, base_dir)
    except ValueError as error:
        raise ConfigError(f"the training file does not fit its mix: {error}") from error
    if mix.runtime.kind == "local" and train.parallel.num_ranks > 1:
        raise ConfigError(
            f"runtime.kind is local and parallel.dp is {train.parallel.dp}, parallel.sp {train.parallel.sp}: "
            "threads of one process serve one rank; set runtime.kind to auto or ray, or both to 1"
        )
    return LaunchPlan(
        config=config.resolve(),
        train=train,
        mix_file=mix_file,
        mix_text=mix_text(mix_file),
        mix=with_cost_of(model, mix, vision),
        model=model,
        vision=vision,
        evaluation=_evaluation_of(train, folder, model, vision),
        profile=profile,
    )


def _require_no_pairs(mix: MixConfig, mix_file: Path) -> None:
    """Refuse sources of preference pairs, because the included trainer has no loss for them.

    Raises:
        ConfigError: The message has the line of the source's transforms.
    """
    for name, source in mix.sources.items():
        if source.pair_columns:
            line = line_of(mix_file, "sources", name, "transforms")
            raise ConfigError(
                f"{mix_file}:{line}: sources.{name}: holds preference pairs, which omniload train has no loss for; "
                "train in a loop of your own (docs/how-to/data/preferences.md)"
            )


def _require_writers(train: TrainConfig, config: Path) -> None:
    """Refuse a tool whose package is not installed, with its line in the training file."""
    for kind in train.log.kinds:
        try:
            require_writers([kind])
        except ConfigError as error:
            line = line_of(config, "log", kind)
            place = config if line is None else f"{config}:{line}"
            raise ConfigError(f"{place}: log.{kind}: {error}") from error


def _with_crossover(train: TrainConfig, folder: Path) -> TrainConfig:
    """Return the training file with the crossover as a number in place of the file with its measurement."""
    parallel = train.parallel
    if not isinstance(parallel.crossover, str):
        return train
    found = read_crossover(folder / parallel.crossover, sp=parallel.sp)
    # As a number, because ranks on other hosts may not see the file, and it may be measured anew meanwhile.
    parallel = parallel.model_copy(update={"crossover": found.by_time})
    return train.model_copy(update={"parallel": parallel})


def _evaluation_of(
    train: TrainConfig, folder: Path, model: MoEConfig, vision: VisionConfig | None
) -> EvaluationSpec | None:
    """Read the evaluation mix, and check that it ends and fits the model."""
    file, wanted = train.evaluation_mix(folder), train.evaluation
    if file is None or wanted is None:
        return None
    mix, base_dir = load_mix(file)
    _require_no_pairs(mix, file)
    images = vision_of(train, mix)
    if images is not None and images != vision:
        own = "none" if vision is None else f"patch {vision.patch} and merge {vision.merge}"
        raise ConfigError(
            f"{file}: has images of patch {images.patch} and merge {images.merge}, and {train.mix} has {own}; an "
            "encoder is trained on the patches that it is evaluated on"
        )
    if wanted.split is not None:
        try:
            mix = held_out(mix, wanted.split)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
    if mix.mix.stop != "each_once":
        raise ConfigError(
            f"{file}: mix.stop is {mix.mix.stop}, and an evaluation takes every document once; set it to each_once"
        )
    tokenizer = None if mix.tokenizer is None else open_tokenizer(mix.tokenizer, base_dir)
    # A smaller vocabulary is no fault, because each of its ids has an embedding.
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{file}: its tokenizer has {tokenizer.vocab_size} ids, the model {model.vocab_size}; use that of "
            f"{train.mix}"
        )
    # Peers take two slices of each row, an early one and a late one. The plane enforces this for the run's own mix.
    if mix.pack.length % (2 * train.parallel.sp) and train.parallel.sp > 1:
        raise ConfigError(
            f"{file}: pack.length is {mix.pack.length}, not a multiple of 2 * sp = {2 * train.parallel.sp}; change it"
        )
    # Every rank opens it, but only one process can have the port.
    runtime = mix.runtime.model_copy(update={"metrics_port": 0})
    return EvaluationSpec(
        mix=mix.model_copy(update={"runtime": runtime}),
        base_dir=base_dir,
        cache_dir=index_folder(file),
        num_steps=wanted.steps,
    )


def next_log_number(run_dir: Path) -> int:
    """Return a number above those of all logs of ranks in a run's folder, so that none is overwritten."""
    # Taken from the files, because a launch that ended before the first line of the run's log has left logs too.
    stems = [path.stem for path in (run_dir / "logs").glob("rank-*-attempt-*.log")]
    numbers = [decimal_of(stem.rpartition("-")[2]) for stem in stems]
    return max((number + 1 for number in numbers if number is not None), default=0)
