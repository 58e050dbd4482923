"""Copying ahead: which fields, in which order, for how long; and that the batches and the state are the same."""

import contextlib
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omniload.base.errors import UnavailableError
from omniload.batch.microbatch import Batch
from omniload.client import Client
from omniload.front.delivery import BatchForm
from omniload.front.loader import Loader
from tests.support.locks import HeardLock
from tests.unit.omniload.front.test_rows import FIRST, LENGTH, SECOND, a_microbatch
from trainer_integration.loader.torch_arrays import TorchArrays, TorchSideStream

NOT_YET = -77


class LateStream:
    """Copies that have no content until they have arrived, and a record of the calls in order."""

    def __init__(self):
        self.calls, self.left = [], []

    def copied(self, tensor):
        self.left.append((torch.full_like(tensor, NOT_YET), tensor))
        self.calls.append("copy")
        return self.left[-1][0]

    def mark(self):
        self.calls.append("mark")
        return len(self.left)

    def arrive(self, copies, mark):
        assert mark == len(self.left)
        newest = [made for made, _ in self.left[mark - len(copies) :]]
        assert list(map(id, copies)) == list(map(id, newest))
        for made, tensor in self.left:
            made.copy_(tensor)
        self.calls.append(f"arrive {len(copies)}")


class Arrays(TorchArrays):
    def __init__(self, stream):
        self.stream = stream

    def side_stream(self, _device):
        return self.stream


class Handle:
    """Five steps; those in ``ready`` are there without waiting."""

    def __init__(self, state=None, ready=range(5), fails_at=None):
        self.first_step = 0 if state is None else state["step"]
        self.ready, self.fails_at, self.calls = ready, fails_at, []

    def is_ready(self, step):
        return step in self.ready

    def lent(self, step, timeout_s=None):
        """Nothing is: whatever is there is given."""

    def take(self, step, timeout_s=None):
        self.calls.append(("take", step, timeout_s))
        if step == self.fails_at:
            raise UnavailableError(f"step {step}")
        if step == 5:
            return None
        documents = [
            [[step * 10 + token for token in document] for document in row] for row in FIRST
        ]
        return Batch(
            step=step,
            microbatches=tuple(a_microbatch(part, length=LENGTH) for part in (documents, SECOND)),
            loss_tokens=9,
            imbalance=1.0,
            bound=1.0,
        )

    def taken(self, step):
        self.calls.append(("taken", step))

    def state_at(self, step):
        return {"step": step}

    def close(self):
        pass


def a_loader(stream, form=BatchForm, **handles):
    made = []

    def open_client(_stack, state):
        made.append(Handle(state, **handles))
        return Client(made[-1])

    return Loader(open_client, form(arrays=Arrays(stream), device="cpu")), made


def train(loader, fields=("tokens", "labels")):
    """Act as a loop; return the tensors that it saw, and the state after each batch."""
    seen = []
    for batch in loader:
        tensors = [getattr(rows, name).clone() for rows in batch.microbatches for name in fields]
        seen.append((batch.step, torch.cat([t.flatten() for t in tensors]), loader.state_dict()))
    return seen


def test_batches_and_states_are_those_of_a_loop_that_copies_nothing_ahead():
    (expected, found) = (train(a_loader(stream)[0]) for stream in (None, LateStream()))

    assert [step for step, _, _ in found] == [0, 1, 2, 3, 4]
    for (step, tensors, state), (_, wanted, wanted_state) in zip(found, expected, strict=True):
        assert torch.equal(tensors, wanted)
        assert state == wanted_state == {"step": step + 1}


def test_the_fields_of_the_batch_before_are_copied_ahead_and_arrive_before_they_are_handed_over():
    stream = LateStream()

    train(a_loader(stream)[0])

    # Two fields of two microbatches; nothing was requested before the first batch.
    assert stream.calls == [
        *("mark", "arrive 0"),
        *([*["copy"] * 4, "mark", "arrive 4"] * 3),
    ]


def test_a_loop_that_asks_for_another_field_has_it_all_the_same():
    loader, _ = a_loader(LateStream())
    for _ in range(3):
        loader.next_batch().microbatches[0].tokens  # noqa: B018 -- made when it is asked for

    batch = loader.next_batch()

    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 0]
    assert batch.microbatches[0].tokens[0, 0] == 31
    assert NOT_YET not in batch.cu_seqlens


def test_a_step_that_is_not_there_yet_is_waited_for_when_it_is_asked_for_and_not_before():
    loader, made = a_loader(LateStream(), ready=(2,))

    train(loader)

    (handle,) = made
    assert [call for call in handle.calls if call[0] == "take"] == [
        ("take", 0, None),
        ("take", 1, None),
        ("take", 2, pytest.approx(0, abs=0.1)),
        ("take", 3, None),
        ("take", 4, None),
        ("take", 5, None),
    ]


def test_a_batch_is_said_to_be_taken_when_it_is_handed_over():
    loader, made = a_loader(LateStream())

    loader.next_batch()

    assert [call[:2] for call in made[0].calls] == [("take", 0), ("taken", 0), ("take", 1)]


def test_a_failure_ahead_is_raised_by_the_batch_that_it_is_of():
    loader, _ = a_loader(LateStream(), fails_at=1)

    assert loader.next_batch().step == 0
    with pytest.raises(UnavailableError, match="step 1"):
        loader.next_batch()


def test_a_batch_that_the_device_has_no_room_for_ahead_of_its_turn_takes_none_along(caplog):
    class Full(LateStream):
        def copied(self, tensor):
            if len(self.left) == 6:  # half of step 3
                self.left.clear()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().copied(tensor)

    found, expected = train(a_loader(Full())[0]), train(a_loader(None)[0])

    assert [(step, state) for step, _, state in found] == [(n, {"step": n + 1}) for n in range(5)]
    for (_, tensors, _), (_, wanted, _) in zip(found, expected, strict=True):
        assert torch.equal(tensors, wanted)
    assert caplog.text.count("step 3 is not copied ahead of its turn") == 1


def test_a_device_without_room_for_two_batches_is_told_of_once(caplog):
    class Full(LateStream):
        def copied(self, tensor):
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert [step for step, _, _ in train(a_loader(Full())[0])] == list(range(5))
    assert [each.levelname for each in caplog.records].count("WARNING") == 1


def test_a_loaded_state_forgets_what_is_under_way():
    loader, _ = a_loader(LateStream())
    train_three = [int(loader.next_batch().microbatches[0].tokens[0, 0]) for _ in range(3)]

    loader.load_state_dict({"step": 1})

    assert train_three == [1, 11, 21]
    assert [(step, int(seen[0])) for step, seen, _ in train(loader)] == [
        (1, 11),
        (2, 21),
        (3, 31),
        (4, 41),
    ]


def test_a_batch_that_the_loop_has_dropped_is_kept_no_longer_than_to_the_next():
    loader, _ = a_loader(LateStream())
    kept = [weakref.ref(loader.next_batch()) for _ in range(3)]

    assert [ref() is None for ref in kept] == [True, True, False]


class Streams:
    """A fake of ``torch.cuda`` that logs its calls."""

    def __init__(self):
        self.log, self.now = [], "user"

    def Stream(self, device):  # noqa: N802 -- torch's name
        self.log.append(f"stream of {device}")
        return self

    @contextlib.contextmanager
    def stream(self, _stream):
        before, self.now = self.now, "side"
        yield
        self.now = before

    def record_event(self):
        self.log.append("side: event")
        return "event"

    def current_stream(self, device):
        assert self.now == "user"
        self.log.append(f"user's stream of {device}")
        return self

    def wait_event(self, event):
        self.log.append(f"user waits for {event}")


class Tensor:
    def __init__(self, log):
        self.log = log

    def pin_memory(self):
        self.log.log.append(f"{self.log.now}: pin")
        return self

    def to(self, place, *, non_blocking):
        self.log.log.append(f"{self.log.now}: copy to {place}, non_blocking={non_blocking}")
        return self

    def record_stream(self, stream):
        assert stream is self.log
        self.log.log.append("memory is the user's")


def test_a_gpus_copy_starts_in_pinned_memory_on_a_stream_of_its_own_and_is_waited_for_there():
    streams = Streams()
    side = TorchSideStream(torch.device("cuda", 1), streams)

    copy = side.copied(Tensor(streams))
    side.arrive([copy], side.mark())

    assert streams.log == [
        "stream of cuda:1",
        "side: pin",
        "side: copy to cuda:1, non_blocking=True",
        "side: event",
        "user's stream of cuda:1",
        "user waits for event",
        "memory is the user's",
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_copied_ahead_to_where_nothing_goes_on_beside_the_loop(device):
    assert TorchArrays().side_stream(device) is None


def test_a_client_that_peeks_hands_out_the_same_batch():
    client = Client(Handle())

    peeked = client.peek()

    assert client.peek() is peeked
    assert client.state_dict() == {"step": 0}
    assert client.next_batch() is peeked
    assert client.state_dict() == {"step": 1}
    assert np.array_equal(client.next_batch().microbatches[0].tokens_RT[0, :3], [11, 12, 13])


def test_a_client_that_peeks_at_what_is_lent_hands_out_what_it_is_given_then():
    handle = Handle()
    lent = handle.take(0)
    handle.lent = lambda step, _timeout_s: lent
    client = Client(handle)
    handle.calls.clear()

    assert [client.peek() is lent, client.peek() is lent] == [True, True]
    assert handle.calls == []
    batch = client.next_batch()

    assert (batch is lent, batch.step) == (False, 0)


def test_threads_that_share_the_loop_of_a_client_have_each_batch_once():
    class Waiting(Handle):
        def take(self, step, timeout_s=None):
            if step in {0, 4} and step not in asked:  # the first batch, and the last
                asked[step] = threading.Thread(target=lambda: got.append(next(loop, None)))
                asked[step].start()
                asked[step].join(0.05)  # another asks alone only once this one has its batch
            return super().take(step, timeout_s)

    asked, got = {}, []
    client = Client(Waiting())
    loop = iter(client)
    while (batch := next(loop, None)) is not None:
        got.append(batch)
    for thread in asked.values():
        thread.join(60)

    assert sorted(batch.step for batch in got if batch is not None) == [0, 1, 2, 3, 4]
    assert client.state_dict() == {"step": 5}


def test_a_client_that_one_thread_peeks_at_gives_another_each_batch_once(monkeypatch):
    class Peeked(Handle):
        def take(self, step, timeout_s=None):
            if step == 0 and threading.current_thread() is not other:
                other.start()
                asks.wait(60)  # until it is admitted, or it has had its batch
            return super().take(step, timeout_s)

    asks, steps = threading.Event(), []
    fake = SimpleNamespace(RLock=lambda: HeardLock(asks))
    monkeypatch.setattr("omniload.client.threading", fake)
    client = Client(Peeked())
    other = threading.Thread(target=lambda: (steps.append(client.next_batch().step), asks.set()))
    client.peek()
    other.join(60)

    assert steps == [0]
    assert client.next_batch().step == 1


def test_a_client_that_another_thread_asks_is_not_waited_for_by_one_that_peeks():
    class Asked(Handle):
        def take(self, step, timeout_s=None):
            peeks.start()
            peeks.join(60)
            return super().take(step, timeout_s)

    seen = []
    client = Client(Asked())
    peeks = threading.Thread(target=lambda: seen.append(client.peek()))

    assert (client.next_batch().step, seen) == (0, [None])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_batch_that_could_not_be_made_is_the_next_one_still(error):
    failing = [None, error("no memory is left"), None]

    class Form(BatchForm):
        def of(self, batch):
            if failing and (fault := failing.pop(0)) is not None:
                raise fault
            return super().of(batch)

    loader, _ = a_loader(None, Form)
    loader.next_batch()

    with pytest.raises(error):
        loader.next_batch()

    assert loader.state_dict() == {"step": 1}
    assert [step for step, _, _ in train(loader)] == [1, 2, 3, 4]
