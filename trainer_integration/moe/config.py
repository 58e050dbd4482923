"""Shape of the included model."""

from typing import Self

from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at
from omniload.base.state import JsonObject

__all__ = ["MoEConfig", "MoEShape", "heads_fault"]


_LATER_FIELDS = ("expert_groups", "capacity_factor", "z_weight", "bias_rate")


class MoEShape(StrictModel):
    """Shape of the model, except for its vocabulary, which the tokenizer decides."""

    dim: int = Field(default=128, ge=2, le=65_536)
    """Width of the residual stream."""
    num_layers: int = Field(default=2, ge=1, le=1024)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1, le=65_536)
    """Query heads; ``dim`` is a multiple of this number."""
    num_kv_heads: int = Field(default=2, ge=1, le=65_536)
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""
    hidden: int = Field(default=256, ge=1, le=1 << 20)
    """Width of one expert."""
    num_experts: int = Field(default=8, ge=1, le=4096)
    """Experts in a layer."""
    top_k: int = Field(default=2, ge=1, le=4096)
    """Experts per token. Their weights sum to one; the weight of a single expert is its probability."""
    balance_weight: float = Field(default=0.01, ge=0, le=1e6, allow_inf_nan=False)
    """Weight of the balance loss relative to the token loss; the balance loss is 1 at even load."""
    expert_groups: int | None = Field(default=None, ge=1, le=4096)
    """Number of groups of neighbouring experts, and so the largest number of devices that may share them. Load is
    balanced, and tokens are dropped, per group. Default: every expert is a group."""
    capacity_factor: float | None = Field(default=None, gt=0, le=4096, allow_inf_nan=False)
    """Capacity of a group for the choices of a row, relative to its even share. Choices beyond it are dropped, the
    least probable first. Default: no choice is dropped."""
    z_weight: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Weight, relative to the token loss, of the z-loss: the mean square of the logsumexp of the router's logits."""
    bias_rate: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Step size of the bias that moves choices to idle experts without a loss; 0 for no bias."""
    rope_theta: float = Field(default=10_000.0, gt=1, le=1e12, allow_inf_nan=False)
    """Longest rotary wavelength divided by two pi, in tokens."""
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1)
    """Number added to the mean square in every norm."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the output matrix too."""
    init_std: float = Field(default=0.02, gt=0, lt=1)
    """Standard deviation of the initial weights; projections into the residual stream have a smaller one."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            unit = 2 * self.num_heads
            raise fault_at(
                f"dim is {self.dim} and num_heads {self.num_heads}: dim / num_heads must be an even "
                f"whole number for rotary positions; use dim {unit * max(1, self.dim // unit)}",
                "dim",
            )
        if self.num_heads % self.num_kv_heads:
            raise fault_at(
                f"num_heads is {self.num_heads}, not a multiple of num_kv_heads {self.num_kv_heads}; "
                "lower num_kv_heads to a divisor",
                "num_kv_heads",
            )
        return self

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.num_experts:
            raise fault_at(
                f"top_k is {self.top_k}, more than num_experts {self.num_experts}; lower it",
                "top_k",
            )
        if self.num_experts % self.groups:
            raise fault_at(
                f"expert_groups is {self.groups}, no divisor of num_experts {self.num_experts}; change it",
                "expert_groups",
            )
        return self

    @property
    def groups(self) -> int:
        """Groups of experts."""
        return self.num_experts if self.expert_groups is None else self.expert_groups

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads


class MoEConfig(MoEShape):
    """A model that can be built."""

    vocab_size: int = Field(ge=2, le=1 << 24)
    """Token ids the model knows."""

    @classmethod
    def of(cls, shape: MoEShape, vocab_size: int) -> Self:
        """Give ``shape`` a vocabulary."""
        return cls(vocab_size=vocab_size, **shape.model_dump(include=set(MoEShape.model_fields)))

    def identity(self) -> JsonObject:
        """Return what a checkpoint must have been saved with to fit this model.

        The weight of a single expert was 1 once; its checkpoints are of another function.
        """
        # Added where it tells two functions apart, so that other checkpoints of older releases fit as they are.
        gate: JsonObject = {"gate": "probability"} if self.top_k == 1 else {}
        content = self.model_dump(mode="json")
        # Checkpoints of earlier releases do not name these.
        since = {name: MoEShape.model_fields[name].default for name in _LATER_FIELDS}
        later = {name for name, default in since.items() if content[name] == default}
        return {name: value for name, value in content.items() if name not in later} | gate


def heads_fault(num_heads: int, num_kv_heads: int, peers: int) -> str | None:
    """Say why heads cannot be dealt to ``peers``, or ``None`` where they can."""
    if num_heads % peers:
        return f"num_heads is {num_heads}, not a multiple of sp {peers}"
    if num_kv_heads % peers and peers % num_kv_heads:
        return f"num_kv_heads {num_kv_heads} and sp {peers}: neither is a multiple of the other"
    return None
