"""The data plane of large-model training: samples of many sources to many ranks, balanced, in an order that resumes."""

import os
from importlib import import_module

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

__version__ = "0.1.0"

# Arrow reads it once, when it is loaded. By default it gives memory back 10 ms after it was freed, so that every
# block is decoded into pages that the kernel has to clear anew: a fifth of the CPU time of large steps.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

# Type checkers read __init__.pyi: named here, the floor would import the front room.
_PLACES = {
    "ClientPlaceTree": ("omniload.plan.place_tree", "ClientPlaceTree"),
    "DGraph": ("omniload.plan.dgraph", "DGraph"),
    "DynamicSampler": ("omniload.front.sampling.sampler", "DynamicSampler"),
    "Group": ("omniload.front.sampling.values", "Group"),
    "GroupBatch": ("omniload.front.sampling.values", "GroupBatch"),
    "Loader": ("omniload.front.loader", "Loader"),
    "METRICS": ("omniload.base.metrics", "REGISTRY"),
    "MixSchedule": ("omniload.mix.schedule", "MixSchedule"),
    "PackedRows": ("omniload.front.batches.rows", "PackedRows"),
    "Placement": ("omniload.plan.placement", "Placement"),
    "PlacementRequest": ("omniload.plan.strategies", "PlacementRequest"),
    "PolicyInput": ("omniload.mix.policy.rules", "PolicyInput"),
    "Prompt": ("omniload.front.sampling.values", "Prompt"),
    "QuadraticCost": ("omniload.plan.cost", "QuadraticCost"),
    "Rollouts": ("omniload.front.sampling.values", "Rollouts"),
    "RoundLimitError": ("omniload.front.sampling.sampler", "RoundLimitError"),
    "ServedPlane": ("omniload.front.served_plane", "ServedPlane"),
    "TrainingBatch": ("omniload.front.batches.training_batch", "TrainingBatch"),
    "join": ("omniload.front.served_rank", "join"),
    "open": ("omniload.front.opening", "open_mix"),
    "placed_by": ("omniload.plan.strategies", "placed_by"),
    "serve": ("omniload.front.served_plane", "serve"),
    **{
        name: ("omniload.base.errors", name)
        for name in (
            "ConfigError",
            "IntegrityError",
            "OmniloadError",
            "StateError",
            "UnavailableError",
        )
    },
}


def __getattr__(name: str) -> object:
    """Load what is offered when it is asked for: ``import omniload`` itself takes a few milliseconds."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inner = _PLACES[name]
    from omniload.base.concurrency.held_signals import SignalsHeld  # noqa: PLC0415 -- with typing and threading

    # Libraries make other errors of a Ctrl-C that comes as they are loaded.
    with SignalsHeld():
        return getattr(import_module(module), inner)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
