"""Processes that train and save in the background until they are killed, and loads of the remaining checkpoints."""

import random
import signal
from pathlib import Path

import torch

from tests.support.trainer.fork_server import forking
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.folder import steps_in
from trainer_integration.checkpoint.saving import BackgroundSaver
from trainer_integration.training.step import train_step

__all__ = ["killed_saves"]

LIMIT_S = 60
STEPS_BEFORE_A_KILL = 3
LONGEST_DELAY_S = 0.03
"""A save of the small model takes about 20 ms."""


def weight_at(step):
    """Return the value of every weight at a step, so that a mixture of two steps shows."""
    return float(step)


def _train(folder, told):
    torch.set_num_threads(1)
    model = a_model()
    optimizer = an_optimizer(model)
    checkpoints = Checkpoints(folder, a_config().model_dump(), keep=2)
    saver = BackgroundSaver(checkpoints)
    restored = checkpoints.load(model, optimizer)
    step = 0 if restored is None else restored.step
    train_step(model, optimizer, a_batch(0, [a_microbatch(rows_of(0))]))
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(weight_at(step))
        saver.finish()
        tensors = checkpoints.tensors_at(step, model, optimizer)
        saver.start(step, tensors, {"version": 1, "next": step}, {})
        told.send(step)


def killed_saves(folder: Path, count: int, *, seed: int = 0) -> list[int]:
    """Kill a process ``count`` times in mid-save, and load the newest checkpoint each time.

    Returns:
        Loaded steps, rising.

    Raises:
        AssertionError: None could be loaded, its step was wrong, or it was earlier than the previous one.
    """
    rng, loaded = random.Random(seed), []
    context = forking()
    for _ in range(count):
        told, telling = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(folder, telling), daemon=True)
        process.start()
        telling.close()
        for _ in range(STEPS_BEFORE_A_KILL):
            assert told.poll(LIMIT_S), "a process that saves did not begin to"
            begun = told.recv()
        told.poll(rng.uniform(0, LONGEST_DELAY_S))
        process.kill()
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL, "it ended by itself"
        model = a_model(seed=5)
        found = Checkpoints(folder, a_config().model_dump()).load(model, an_optimizer(model))
        assert found.step == steps_in(folder)[-1] >= begun - 1, "a committed step is lost"
        assert found.loader_state["next"] == found.step
        assert all(bool((p == weight_at(found.step)).all()) for p in model.parameters())
        assert not loaded or found.step > loaded[-1]
        loaded.append(found.step)
    return loaded
