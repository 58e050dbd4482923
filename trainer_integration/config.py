"""The training file: which mix, which model, how long, where to.

Free of torch, so that a command can check a file without waiting for it.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at, load_yaml
from omniload.mix.config import LARGEST_STEP
from omniload.mix.sources import Name
from omniload.plan.place_tree import ClientPlaceTree
from trainer_integration.moe.config import MoEConfig, MoEShape, heads_fault
from trainer_integration.vision.config import VisionShape
from trainer_integration.writers.settings import LogConfig

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SpikeGuardConfig",
    "TrainConfig",
    "load_train",
]

_LARGEST_TOKENS = 1 << 53
"""Most tokens that a schedule counts: what a float64 holds exactly."""


class ParallelConfig(StrictModel):
    """Number of ranks along each axis."""

    dp: int = Field(default=1, ge=1, le=65_536)
    """Data-parallel ranks. Each trains on its own microbatches, and gradients are summed."""
    sp: int = Field(default=1, ge=1, le=1024)
    """Ranks that share the tokens (sequence parallelism) and the experts (expert parallelism) of every layer."""
    fsdp: bool = False
    """Shard parameters, gradients and optimiser state over the data-parallel ranks. Each rank keeps one of ``dp``
    parts, and gathers a layer to compute it."""
    pp: Literal[1] = 1
    """Reserved for pipeline stages."""
    transport: Literal["auto", "a2a", "ag_rs"] = "auto"
    """How tokens reach experts on other ranks: ``a2a`` sends each row to its experts, ``ag_rs`` sends all tokens to all
    ranks. ``auto`` uses ``ag_rs`` if a token has more experts than ``sp``, or than ``crossover`` says."""
    crossover: Annotated[int, Field(ge=0, le=4096)] | str | None = None
    """Largest number of experts per token for which ``a2a`` is faster, or the file in which
    ``omniload train crossover`` saved its measurement."""

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.dp * self.sp

    @property
    def is_sharded(self) -> bool:
        """Whether ranks keep parts of the model: there is nobody to shard it with at one data-parallel rank."""
        return self.fsdp and self.dp > 1


class OptimizerConfig(StrictModel):
    """AdamW with linear warm-up, then a schedule that lowers the learning rate to a fraction of its peak."""

    lr: float = Field(default=1e-3, gt=0, le=1e6, allow_inf_nan=False)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After warm-up: ``cosine`` decays by a cosine, ``linear`` in a straight line, ``constant`` not at all, and ``wsd``
    (warmup-stable-decay) in a straight line over the last ``decay_steps``."""
    decay_steps: int | None = Field(default=None, ge=1, le=LARGEST_STEP)
    """For ``wsd``. Default: a tenth of the run."""
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step divided by the peak."""
    warmup_steps: int = Field(default=10, ge=0, le=LARGEST_STEP)
    """Steps over which the learning rate grows to its peak."""
    total_tokens: int | None = Field(default=None, ge=1, le=_LARGEST_TOKENS)
    """Tokens over which the schedule runs, in place of ``steps``. The schedule then uses ``warmup_tokens`` and
    ``decay_tokens``, and ignores ``warmup_steps`` and ``decay_steps``."""
    warmup_tokens: int = Field(default=0, ge=0, le=_LARGEST_TOKENS)
    """With ``total_tokens``: tokens over which the learning rate grows to its peak."""
    decay_tokens: int | None = Field(default=None, ge=1, le=_LARGEST_TOKENS)
    """For ``wsd``. Default: a tenth of ``total_tokens``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the averages of gradients and of their squares."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6, allow_inf_nan=False)
    """Weight decay of matrices; weights of norms have none."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest gradient norm, over all parameters; ``.inf`` never clips."""

    @model_validator(mode="after")
    def _betas_decay(self) -> Self:
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise fault_at(
                    f"betas[{i}] is {beta}; use a value from 0 up to, not with, 1", *("betas", i)
                )
        return self

    @model_validator(mode="after")
    def _tokens_have_a_total(self) -> Self:
        if self.total_tokens is None:
            for name in ("warmup_tokens", "decay_tokens"):
                if getattr(self, name):
                    raise fault_at(
                        f"{name} is {getattr(self, name)}, and total_tokens is not given; give it, or steps in place "
                        "of tokens",
                        name,
                    )
        elif self.warmup_tokens > self.total_tokens:
            raise fault_at(
                f"warmup_tokens is {self.warmup_tokens}, more than total_tokens {self.total_tokens}; lower it",
                "warmup_tokens",
            )
        return self


class SpikeGuardConfig(StrictModel):
    """What to do with a step whose gradient norm jumps."""

    action: Literal["off", "skip", "stop"] = "off"
    """``skip`` leaves the model unchanged and continues; ``stop`` ends the run. Both report the step and its
    samples."""
    sigma: float = Field(default=6.0, gt=0, le=1e6, allow_inf_nan=False)
    """A norm is a spike if it is more than this many standard deviations above the mean."""
    window: int = Field(default=50, ge=10, le=10_000)
    """Number of earlier norms for mean and deviation. No step is judged before there are this many."""


class EvaluationConfig(StrictModel):
    """Losses on data that the run does not train on."""

    mix: Annotated[str, Field(min_length=1)] | None = None
    """Path of a mix file whose ``stop`` is ``each_once``; each of its sources gets a loss of its own. Default: the mix
    that is trained on, with a ``split``."""
    split: Name | None = None
    """Split that the mix holds out. An evaluation goes through its documents once."""
    every_steps: int = Field(default=100, ge=1, le=LARGEST_STEP)
    """Steps between evaluations."""
    steps: Annotated[int, Field(ge=1, le=LARGEST_STEP)] | None = None
    """Largest number of steps that an evaluation takes from the mix, the same steps each time; all by default."""

    @model_validator(mode="after")
    def _other_data_than_is_trained_on(self) -> Self:
        if self.mix is None and self.split is None:
            raise fault_at(
                "mix and split are not given; name a split that the training mix holds out, or another mix"
            )
        return self


class CheckpointConfig(StrictModel):
    """When and where the run is saved."""

    every_steps: int = Field(default=100, ge=1, le=LARGEST_STEP)
    """Steps between checkpoints."""
    keep: int = Field(default=3, ge=1, le=LARGEST_STEP)
    """Number of newest checkpoints to keep."""
    asynchronous: bool = False
    """Continue training while a copy of model and optimiser is written. A save then stops training only for the copy,
    and the copy takes as much memory as model and optimiser."""
    folder: str | None = None
    """Folder of the checkpoints, or ``omnifs://FOLDER::STORE`` for striped checkpoints without a mount. Default:
    ``checkpoints`` in ``run_dir``."""


class TrainConfig(StrictModel):
    """One training run. Relative paths start at the folder of the file."""

    version: Literal[1]
    """Version of this format."""
    mix: str = Field(min_length=1)
    """Path of the mix file."""
    steps: int = Field(ge=1, le=LARGEST_STEP)
    """Steps of the whole run, restarts included."""
    parallel: ParallelConfig = ParallelConfig()
    """Number of processes, by axis."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which the layers compute. Parameters, their gradients and the optimiser stay in float32."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model: the CPU, or on each host the GPU with the number of the rank there."""
    model: MoEShape = MoEShape()
    """The model, except for its vocabulary."""
    vision: VisionShape = VisionShape()
    """The image encoder, if the mix has images."""
    vocab_size: int | None = Field(default=None, ge=2, le=1 << 24)
    """Number of token ids of the model. Default: that of the mix's tokenizer."""
    weights: Annotated[str, Field(min_length=1)] | None = None
    """Folder of a Mixtral in the format of Hugging Face, whose weights the run starts with. ``model`` and
    ``vocab_size`` then come from its ``config.json``. Default: random weights from ``seed``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser and schedule of the learning rate."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When and where the run is saved."""
    spike_guard: SpikeGuardConfig = SpikeGuardConfig()
    """What to do with a step whose gradient norm jumps."""
    evaluation: EvaluationConfig | None = None
    """Losses on data that the run does not train on. Default: no evaluation."""
    peak_tflops: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    """Peak speed of a rank's device in 10^12 FLOP/s, to compute MFU. Default: that of a known GPU in BF16."""
    run_dir: str = Field(default="run", min_length=1)
    """Folder for logs, metrics and checkpoints."""
    max_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """How often the run restarts from the last checkpoint after a rank dies. Another death ends the run."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Decides the initial weights."""
    log: LogConfig = LogConfig()
    """Tools that receive the figures of every step, with their settings, or a list of their names:
    ``[tensorboard, wandb, mlflow]``."""
    digest: bool = True
    """Record a digest of every step's samples, so that two runs can be compared."""

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        optimizer, steps = self.optimizer, self.steps
        if optimizer.total_tokens is None and optimizer.warmup_steps > steps:
            # Who has not written the key cannot be told to lower it.
            if "warmup_steps" not in optimizer.model_fields_set:
                raise fault_at(
                    f"steps is {steps}, less than the {optimizer.warmup_steps} that the learning rate warms up over "
                    f"where optimizer.warmup_steps is not given; give it, at most {steps}",
                    "steps",
                )
            raise fault_at(
                f"optimizer.warmup_steps is {optimizer.warmup_steps}, more than steps {steps}; lower it",
                *("optimizer", "warmup_steps"),
            )
        return self

    @model_validator(mode="after")
    def _ranks_share_layers(self) -> Self:
        sp, model = self.parallel.sp, self.model
        fault = heads_fault(model.num_heads, model.num_kv_heads, sp)
        if fault is None and model.groups % sp:
            fault = f"expert_groups (by default num_experts) is {model.groups}, not a multiple of sp {sp}"
        if fault is not None:
            raise fault_at(f"{fault}; change the model or parallel.sp", *("parallel", "sp"))
        return self

    @model_validator(mode="after")
    def _experts_shard_evenly(self) -> Self:
        dp = self.parallel.dp
        if not self.parallel.is_sharded or self.parallel.sp == 1:
            return self  # experts are cut along another dimension, where parts may be unequal
        for name, size in (("dim", self.model.dim), ("twice hidden", 2 * self.model.hidden)):
            if size % dp:
                raise fault_at(
                    f"parallel.fsdp with sp {self.parallel.sp} cuts {name} of the experts into dp parts, and {size} is "
                    f"not a multiple of {dp}; change the model or parallel.dp",
                    *("parallel", "fsdp"),
                )
        return self

    def moe(self, tokenizer_vocab_size: int | None = None) -> MoEConfig:
        """Return the model with its vocabulary.

        Args:
            tokenizer_vocab_size: Ids of the tokenizer; None where the mix has none.

        Raises:
            ValueError: Neither the file nor the tokenizer gives a size, or the file's is
                too small for the tokenizer.
        """
        # A larger one may be given, as for a table of a round size.
        size = self.vocab_size or tokenizer_vocab_size
        if size is None:
            raise ValueError("vocab_size is not given and the mix has no tokenizer; give it")
        if tokenizer_vocab_size is not None and size < tokenizer_vocab_size:
            raise ValueError(
                f"vocab_size is {size}, less than the tokenizer's {tokenizer_vocab_size}; raise it"
            )
        return MoEConfig.of(self.model, size)

    @property
    def place_tree(self) -> ClientPlaceTree:
        """The ranks as the data plane knows them: those that share layers take slices of the same rows."""
        return ClientPlaceTree.of(dp=self.parallel.dp, cp=self.parallel.sp)

    def evaluation_mix(self, folder: Path) -> Path | None:
        """Return the evaluation's mix file, if there is an evaluation."""
        if self.evaluation is None:
            return None
        return folder / (self.evaluation.mix or self.mix)

    def mix_file(self, folder: Path) -> Path:
        """Return the mix file, ``folder`` being that of the training file."""
        return folder / self.mix

    def weights_folder(self, folder: Path) -> Path | None:
        """Return the folder of the weights to begin with, if there are any."""
        return None if self.weights is None else folder / self.weights

    def run_folder(self, folder: Path) -> Path:
        """Return the folder of the run."""
        return folder / self.run_dir

    def checkpoint_location(self, folder: Path) -> str:
        """Return the folder of the checkpoints, or the URL of their place on a store."""
        where = self.checkpoint.folder
        if where is None:
            return str(self.run_folder(folder) / "checkpoints")
        # Not joined where it is a URL: as a path it would lose a slash.
        return where if "://" in where else str(folder / where)


def load_train(path: str | Path) -> tuple[TrainConfig, Path]:
    """Read a training file.

    Returns:
        The configuration, and the folder that its relative paths start at.

    Raises:
        ConfigError: The file is missing or faulty; every fault with its line.
    """
    file = Path(path)
    return load_yaml(file, TrainConfig), file.resolve().parent
