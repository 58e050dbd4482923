from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.base.metrics import REGISTRY as METRICS
from omniload.front.batches.rows import PackedRows
from omniload.front.batches.training_batch import TrainingBatch
from omniload.front.loader import Loader
from omniload.front.opening import open_mix as open  # noqa: A004 -- read as omniload.open
from omniload.front.sampling.sampler import DynamicSampler, RoundLimitError
from omniload.front.sampling.values import Group, GroupBatch, Prompt, Rollouts
from omniload.front.served_plane import ServedPlane, serve
from omniload.front.served_rank import join
from omniload.mix.policy.rules import PolicyInput
from omniload.mix.schedule import MixSchedule
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import Placement
from omniload.plan.strategies import PlacementRequest, placed_by

__all__ = [
    "METRICS",
    "ClientPlaceTree",
    "ConfigError",
    "DGraph",
    "DynamicSampler",
    "Group",
    "GroupBatch",
    "IntegrityError",
    "Loader",
    "MixSchedule",
    "OmniloadError",
    "PackedRows",
    "Placement",
    "PlacementRequest",
    "PolicyInput",
    "Prompt",
    "QuadraticCost",
    "Rollouts",
    "RoundLimitError",
    "ServedPlane",
    "StateError",
    "TrainingBatch",
    "UnavailableError",
    "join",
    "open",
    "placed_by",
    "serve",
]

__version__: str
