"""Shape of the vision encoder."""

from typing import Self

from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at
from omniload.base.state import JsonObject
from trainer_integration.moe.config import MoEConfig

__all__ = ["VisionConfig", "VisionShape", "identity_of"]


class VisionShape(StrictModel):
    """The image encoder: a transformer over the patches of each image, and a projector into the model.

    The mix decides the size of patches. Without images in the mix, there is no encoder.
    """

    dim: int = Field(default=64, ge=4, le=65_536)
    """Width."""
    num_layers: int = Field(default=2, ge=1, le=1024)
    """Blocks."""
    num_heads: int = Field(default=4, ge=1, le=65_536)
    """Heads. Each is rotated by row and by column, so ``dim / num_heads`` is a multiple of 4."""
    hidden: int = Field(default=128, ge=1, le=1 << 20)
    """Width of the feed-forward part and of the projector."""
    rope_theta: float = Field(default=100.0, gt=1, le=1e12, allow_inf_nan=False)
    """Longest rotary wavelength divided by two pi, in patches."""
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1)
    """Number added to the mean square in every norm."""
    init_std: float = Field(default=0.02, gt=0, lt=1)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_turn_twice(self) -> Self:
        if self.dim % (4 * self.num_heads):
            unit = 4 * self.num_heads
            raise fault_at(
                f"dim is {self.dim} and num_heads {self.num_heads}: dim / num_heads must be a multiple of 4 for rows "
                f"and columns; use dim {unit * max(1, self.dim // unit)}",
                "dim",
            )
        return self


class VisionConfig(VisionShape):
    """An encoder that can be built."""

    patch: int = Field(default=14, ge=1, le=256)
    """Side of a patch in pixels: that of the mix."""
    merge: int = Field(default=1, ge=1, le=16)
    """Side, in patches, of the square that becomes one embedding: that of the mix."""

    @classmethod
    def of(cls, shape: VisionShape, patch: int, merge: int) -> Self:
        """Give ``shape`` the patches of a mix."""
        return cls(
            patch=patch, merge=merge, **shape.model_dump(include=set(VisionShape.model_fields))
        )

    @property
    def values_per_patch(self) -> int:
        """Values of a patch: three colours a pixel."""
        return 3 * self.patch**2


def identity_of(model: MoEConfig, vision: VisionConfig | None) -> JsonObject:
    """Return what a checkpoint must have been saved with to fit a model and its encoder, if it has one."""
    own = model.identity()
    # No key where there is no encoder: checkpoints of text, old ones among them, have none.
    return own if vision is None else own | {"vision": vision.model_dump(mode="json")}
