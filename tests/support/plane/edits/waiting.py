"""Mixes with a stage that waits for epochs, and their result once that stage has begun."""

from dataclasses import replace

from omniload.mix.edits.stages import with_begun
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

__all__ = ["EPOCHS", "a_file", "at_an_end"]

EPOCHS = {"from_epochs": {"web": 2}, "ramp_steps": 3, "weights": {"web": 1, "code": 3}}


def a_file(weights, *more, sources=None, **changes):
    stages = [{"from_step": 0, "weights": weights}, *more]
    return a_mix(version=2, sources=sources or tuple(weights), mix={"stages": stages}, **changes)


def at_an_end(history, step):
    """Return the history once web was gone through twice, and the state and the records of such a run."""
    state = MixState.start(2)
    state = replace(state, step=step, cursors_S=[(0, 0, 0), (20, 0, 0)])
    return with_begun(history, state, [10, 10])
