"""The shell of a source loader: what one reads again that takes over."""

import queue
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from omniload.actors.heartbeats import Activity
from omniload.actors.roles import loader as loader_module
from omniload.actors.roles.loader import LoaderShell
from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.machine.messages import TakeOver
from omniload.source.block import SampleBlock
from tests.support.plane.builders import a_mix, a_table

WITHIN_S = 20.0


class AnOpening:
    """Opens a source whose reads are answered by ``answer``."""

    answer: staticmethod

    def __init__(self, *, mix, number, **_):
        self.name, self.number = mix.names[number], number

    def open(self, *_):
        return self

    def share(self, memory):
        """Hold nothing."""

    def read(self, start, stop, without):
        type(self).answer(self.number, start, stop)
        lengths = [1] * (stop - start)
        tokens = Ragged.of([[7]] * (stop - start))
        return SampleBlock(table=a_table(lengths, start=start), tokens=tokens, skipped=0)


@pytest.fixture
def a_shell(monkeypatch):
    def opened(answer):
        monkeypatch.setattr(AnOpening, "answer", staticmethod(answer), raising=False)
        monkeypatch.setattr(loader_module, "SourceOpening", AnOpening)
        activity = Activity("loader-0")
        return LoaderShell(a_mix(), [0, 1], base_dir=Path(), cache_dir=None, activity=activity)

    return opened


def test_a_loader_that_takes_over_reads_its_sources_beside_each_other(a_shell):
    both = threading.Barrier(2)
    held = [Future(), Future()]

    def answer(source, start, stop):
        both.wait(WITHIN_S)
        held[source].set_result((start, stop))

    shell = a_shell(answer)
    shell.take_over(TakeOver(ranges={0: (3, 5), 1: (0, 9)}))

    assert [each.result(WITHIN_S) for each in held] == [(3, 5), (0, 9)]
    shell.close()


def test_a_source_that_cannot_be_read_again_keeps_no_other_from_it(a_shell, monkeypatch):
    said = Future()
    monkeypatch.setattr(loader_module._LOG, "warning", lambda _, error: said.set_result(str(error)))
    read = queue.SimpleQueue()

    def answer(source, start, stop):
        if source == 0:
            raise IntegrityError("cut short")
        read.put((start, stop))

    shell = a_shell(answer)
    shell.take_over(TakeOver(ranges={0: (0, 8), 1: (0, 2050)}))

    assert said.result(WITHIN_S) == "cut short"
    parts = {read.get(timeout=WITHIN_S) for _ in range(3)}
    assert parts == {(0, 1024), (1024, 2048), (2048, 2050)}
    shell.close()
