"""What a serving process does beside answering: a hand-over within its loop, and an end by signals."""

import os
import signal

import pytest

from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.process import serving
from omniload.base.errors import StateError


class Watching:
    """A loop that a hand-over is asked of as soon as it runs."""

    def __init__(self):
        self.calls = {}
        self.takes = []
        self.finishes = True

    def watch(self, descriptor, call):
        assert descriptor not in self.calls
        self.calls[descriptor] = call

    def unwatch(self, descriptor):
        del self.calls[descriptor]

    def take_requests(self, *, on):
        self.takes.append(on)

    def finish_tasks(self, _):
        return self.finishes


class Kept(FileSystem):
    """Files whose state is a word."""

    async def handed_over(self):
        return {"word": "kept"}


class Door:
    def __init__(self, _):
        self.closed = False

    def fileno(self):
        return 7

    def next(self):
        return None

    def close(self):
        self.closed = True


@pytest.fixture
def device():
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


@pytest.fixture
def asked(monkeypatch, device):
    """Return a function that asks for a mount in the manner of a peer, and what came about."""

    def ask(handed_over, loop):
        monkeypatch.setattr(serving, "listen", lambda _: "a listener")
        monkeypatch.setattr(serving, "Door", Door)
        monkeypatch.setattr(serving, "handed_over", handed_over)
        mount = serving.ServedMount("/mnt", device, Kept(), loop)
        found = serving.HandOver(
            mount,
            lambda: {"own": 1},
            lambda: loop.takes.append("end"),
            lambda: loop.takes.append("let go"),
        )
        loop.calls[7]()
        return found

    return ask


@pytest.mark.parametrize("is_handed", [True, False])
def test_who_asks_while_the_mount_is_handed_over_waits_for_the_outcome(asked, is_handed):
    """Finishing requests runs the loop, which must not begin a second hand-over within the first."""
    loop, watched = Watching(), []

    def handed_over(*given):
        watched.append(dict(loop.calls))
        if is_handed:
            given[-1]()
        return is_handed

    assert asked(handed_over, loop).handed is is_handed
    assert watched == [{}]
    assert loop.takes == ([False, "let go", "end"] if is_handed else [False, True])
    assert list(loop.calls) == ([] if is_handed else [7])


@pytest.mark.parametrize("waits", [True, False])
def test_the_next_process_does_not_wait_in_its_reads_and_this_one_goes_on_as_it_did(
    asked, device, waits
):
    os.set_blocking(device, waits)
    seen = []

    def refused(_peer, _door, descriptor, state, _let_go):
        seen.append((state(), os.get_blocking(descriptor)))
        return False

    asked(refused, Watching())

    told = {"mount": None, "filesystem": {"word": "kept"}, "own": 1}
    assert seen == [(told, False)]
    assert os.get_blocking(device) is waits


def test_a_mount_whose_requests_do_not_end_is_not_handed_over(asked):
    loop = Watching()
    loop.finishes = False

    def handed_over(_peer, _door, _device, state, _let_go):
        with pytest.raises(StateError, match="requests still wait for the store after"):
            state()
        return False

    assert not asked(handed_over, loop).handed


def test_a_signal_asks_for_the_end_and_handlers_are_put_back():
    before, asked_to_end = signal.getsignal(signal.SIGHUP), []

    with serving.ended_by_signals(lambda: asked_to_end.append(True), "/mnt"):
        signal.raise_signal(signal.SIGHUP)

    assert asked_to_end == [True]
    assert signal.getsignal(signal.SIGHUP) is before
