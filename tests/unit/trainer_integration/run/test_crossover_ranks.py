"""Tests of measuring the crossover of the transports: ranks that the system does not start."""

import errno
import multiprocessing.context
import os

import pytest

from omniload.base.errors import OmniloadError
from trainer_integration.moe.config import MoEShape
from trainer_integration.run.crossover_ranks import measured_crossover


def test_a_rank_that_the_system_refuses_is_told_as_what_the_system_said(monkeypatch):
    def refuse(process: multiprocessing.context.SpawnProcess) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", refuse)
    shape = MoEShape(dim=8, hidden=8, num_experts=2)

    with pytest.raises(OmniloadError, match=r"rank 0 of 2 .*Resource temporarily unavailable"):
        measured_crossover(shape, sp=2, tokens=4, top_ks=[1])
