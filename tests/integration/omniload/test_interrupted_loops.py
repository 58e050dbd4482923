"""A loop that Ctrl-C interrupts at every possible place between request and batch, and that continues."""

import contextlib
import json
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import omniload
from omniload import client
from omniload.actors.local import plane
from omniload.actors.plane import RankHandle
from omniload.actors.roles import constructor
from omniload.base.concurrency import turns
from omniload.base.errors import IntegrityError
from omniload.front import loader, peers
from omniload.front.peers import FetchingHandle, FollowingHandle
from omniload.front.sampling import exchange, sampler, values
from omniload.machine.groups import filler
from omniload.mix.journal import groups
from tests.support.plane.sampling import LoaderInMemory, some_steps
from tests.unit.omniload.front.test_peers import ALL, Fetched, Wire
from trainer_integration.hosts import megatron, torchtitan
from trainer_integration.hosts.megatron import MegatronIterator
from trainer_integration.hosts.torchtitan import TitanLoader
from trainer_integration.loader import mixes
from trainer_integration.loader.data_loader import DataLoader

PLACES = {"call", "c_return"}
"""Events at which Python looks for signals: the start of a function, and the return of a C call."""
INSIDE = {
    *(contextlib.__file__, client.__file__, turns.__file__, loader.__file__),
    *(mixes.__file__, peers.__file__),
}


@pytest.fixture
def mix(tmp_path):
    texts = [json.dumps({"text": f"document {i} " * (i % 7 + 1)}) for i in range(400)]
    Path(tmp_path, "web.jsonl").write_text("\n".join(texts))
    file = Path(tmp_path, "mix.yaml")
    file.write_text("""
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {web: {type: jsonl, path: web.jsonl}}
mix: {stages: [{weights: {web: 1}}]}
pack: {length: 128}
batch: {tokens: 512, micro_tokens: 256}
""")
    return file


def interrupt():
    raise KeyboardInterrupt


def interrupted(ask, place, inside=INSIDE, by=interrupt):
    """Ask, and interrupt at the given place in the sequence; return the answer, and whether the interrupt came."""
    left = place

    def at_places(frame, event, _):
        nonlocal left
        if event in PLACES and frame.f_code.co_filename in inside:
            left -= 1
            if not left:
                by()

    sys.setprofile(at_places)
    try:
        return ask(), False
    except KeyboardInterrupt:
        return None, True
    finally:
        sys.setprofile(None)


def test_a_batch_that_an_interrupt_kept_from_the_loop_is_the_next_one_still(mix):
    with omniload.open(mix, arrays="numpy") as batches:
        first = batches.next_batch().step
        steps, places = [first], 0
        came = True
        while came:
            places += 1
            batch, came = interrupted(batches.next_batch, places)
            if came:
                assert batches.next_step == batches.state_dict()["step"] == len(steps), places
                batch = batches.next_batch(timeout=60)
            steps.append(batch.step)
            assert batches.state_dict()["step"] == len(steps)

    assert places > 10
    assert steps == list(range(len(steps)))


@pytest.fixture
def ctrl_c():
    """Send a real Ctrl-C, as from a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_within_the_locks_of_a_wait_is_an_interrupt_and_leaves_none_held(mix, ctrl_c):
    inside = {threading.__file__, plane.__file__, constructor.__file__}
    places, came, steps = 0, True, []
    while came:
        places += 1
        # A new plane each time, whose first batch is waited for.
        with omniload.open(mix, arrays="numpy", steps=2) as batches:
            batch, came = interrupted(batches.next_batch, places, inside, ctrl_c)
            steps = [] if came else [batch.step]
            steps += [batch.step for batch in batches]
        assert steps == [0, 1], places

    assert places > 10


def test_an_interrupt_leaves_other_threads_their_turn(mix):
    with omniload.open(mix, arrays="numpy") as batches, ThreadPoolExecutor(1) as other:
        places, came, steps = 0, True, []
        while came:
            places += 1
            batch, came = interrupted(batches.next_batch, places)
            steps += [] if came else [batch.step]
            steps.append(other.submit(batches.next_batch, timeout=60).result().step)

    assert steps == list(range(len(steps)))


class OnceOnly(RankHandle):
    """A rank's handle that gives each step a single time, and is ready with the next one."""

    first_step = 0

    def __init__(self, steps=9):
        self.steps = iter(range(steps))

    def take(self, step, timeout_s=None):
        found = SimpleNamespace(step=next(self.steps))
        assert found.step == step
        return found

    def is_ready(self, step):
        return True

    def taken(self, step):
        pass

    state_at = resize = close = taken


def test_what_was_looked_at_behind_a_batch_that_is_taken_back_comes_behind_it():
    rank = client.Client(OnceOnly())
    first = rank.next_batch()
    ahead = rank.peek()

    rank.take_back(first)
    rank.take_back(first)  # a second call has no effect

    assert [rank.next_batch() for _ in range(2)] == [first, ahead]
    assert rank.next_batch().step == 2


def test_a_client_that_is_interrupted_anywhere_gives_each_step_once():
    rank = client.Client(OnceOnly(steps=99))
    steps, places, came = [], 0, True
    while came:
        places += 1
        batch, came = interrupted(rank.next_batch, places)
        assert rank.next_step == len(steps) + (not came), places
        steps.append((rank.next_batch() if came else batch).step)

    assert places > 10
    assert steps == list(range(len(steps)))


def test_an_error_of_the_mix_ends_a_loop_with_its_message_and_few_lines_above_it(mix):
    shard = mix.parent / "web.jsonl"
    lines = shard.read_text().splitlines()
    shard.write_text("\n".join([*lines[:200], "{broken", *lines[200:]]))

    with omniload.open(mix, arrays="numpy") as batches, pytest.raises(IntegrityError) as raised:
        list(batches)

    told = traceback.format_exception(raised.value)
    assert "web.jsonl:201: is not JSON" in told[-1]
    assert len(told) < 8


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_torch_loop_over_a_mix_that_is_interrupted_anywhere_gives_each_batch_once(
    mix, looks_ahead
):
    with DataLoader(mix, arrays="numpy", collate_fn=lambda batch: batch.step) as batches:

        def looked(step):
            assert not looks_ahead or not batches.mix.loader.is_at_end()
            return step

        loop = batches.mix.loop(looked)
        steps, places, came = [], 0, True
        while came:
            places += 1
            step, came = interrupted(lambda: next(loop), places)
            if came:
                assert batches.state_dict().get("step", 0) == len(steps), places
                step = next(iter(batches))
            steps.append(step)

    assert places > 20
    assert steps == list(range(len(steps)))


HOSTS = {
    "megatron": (megatron, MegatronIterator, "microbatch"),
    "torchtitan": (
        torchtitan,
        lambda made: iter(TitanLoader(made, dp_rank=0, dp_world_size=1)),
        "_trainers",
    ),
}


@pytest.mark.parametrize("host", HOSTS)
def test_the_loop_of_a_host_that_is_interrupted_anywhere_gives_each_batch_once(host, mix):
    module, loop, _ = HOSTS[host]
    with DataLoader(mix, collate_fn=lambda batch: batch.step) as batches:
        ask = partial(
            next, loop(batches)
        )  # in the C code inside it; after its return, the host's code runs
        inside, steps, places, came = {*INSIDE, module.__file__}, [], 0, True
        while came:
            places += 1
            step, came = interrupted(ask, places, inside)
            if came:
                assert batches.state_dict().get("step", 0) == len(steps), places
                step = ask()
            steps.append(step)

    assert places > 20
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("host", HOSTS)
def test_a_batch_that_a_host_cannot_make_its_own_of_is_the_next_one_still(host, mix, monkeypatch):
    module, loop, making = HOSTS[host]
    with DataLoader(mix) as batches:
        asked = loop(batches)
        with monkeypatch.context() as patched:
            patched.setattr(module, making, Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                next(asked)
        assert not batches.state_dict().get("step")

        next(asked)

        assert batches.state_dict()["step"] == 1


class Once(Fetched):
    """A handle that gives each step a single time, from 3 on."""

    def __init__(self):
        super().__init__()
        self.due = 3

    def take(self, step, timeout_s=None):
        assert step == self.due
        self.due += 1
        return replace(super().take(3), step=step)


@pytest.mark.parametrize("interrupts_first", [True, False])
def test_peers_that_are_interrupted_anywhere_give_each_step_once(interrupts_first):
    wire = Wire()
    ranks = [client.Client(FetchingHandle([Once()], wire, ALL))]
    ranks.append(client.Client(FollowingHandle(wire, 1.0, 2.0)))
    first, second = ranks if interrupts_first else ranks[::-1]
    steps, places, came = [], 0, True
    while came:
        places += 1
        if not interrupts_first:
            second.next_batch()
        batch, came = interrupted(first.next_batch, places)
        assert first.state_dict() == {"step": first.next_step}, places
        steps.append((first.next_batch() if came else batch).step)
        if interrupts_first:
            second.next_batch()
        assert first.state_dict() == second.state_dict() == {"step": steps[-1] + 1}

    assert places > 10
    assert steps == list(range(3, 3 + len(steps)))


STEPS = some_steps([4] * 60)
OF_SAMPLERS = {
    *(contextlib.__file__, turns.__file__, filler.__file__, groups.__file__),
    *(sampler.__file__, exchange.__file__, values.__file__),
}


def some_right(prompts):
    """Return two rewards of each prompt: one right for every third of a source, all or none right for the others."""
    return [[[1, 1], [0, 0], [1, 0]][prompt.key[1] % 3] for prompt in prompts]


def a_sampler(run_dir):
    return omniload.DynamicSampler(LoaderInMemory(STEPS, run_dir=run_dir), groups=3, max_rounds=20)


def test_a_sampler_that_is_interrupted_anywhere_gives_the_batches_of_an_unbroken_run(tmp_path):
    unbroken = [batch.digest for batch in a_sampler(tmp_path / "unbroken").batches(some_right)]
    places, broken = 1, a_sampler(tmp_path / "0")
    while True:
        for number, digest in enumerate(unbroken[:2]):
            ask = partial(broken.next_batch, some_right)
            batch, came = interrupted(ask, places, OF_SAMPLERS)
            if came:
                assert broken.next_batch_number == number, places
                batch = broken.next_batch(some_right)
            assert (batch.number, batch.digest) == (number, digest), places
            assert broken.state_dict()["batch"] == number + 1
        replayed = a_sampler(tmp_path / f"{places - 1}")
        assert [batch.digest for batch in replayed.batches()] == unbroken[:2], places
        if not came:
            break
        broken, places = a_sampler(tmp_path / f"{places}"), places + 1

    assert places > 50


def test_threads_that_share_a_sampler_get_each_of_its_batches_once(tmp_path):
    unbroken = [batch.digest for batch in a_sampler(tmp_path / "unbroken").batches(some_right)]
    shared = a_sampler(tmp_path / "shared").batches(some_right)
    with ThreadPoolExecutor(4) as threads:
        parts = [threads.submit(lambda: [(b.number, b.digest) for b in shared]) for _ in range(4)]
        found = sorted(each for part in parts for each in part.result(timeout=60))

    assert found == list(enumerate(unbroken))
