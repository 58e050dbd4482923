"""accelerate's own ``prepare``, ``save_state`` and ``load_state`` over our loaders."""

import time
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader as TorchLoader

from omniload.base.errors import StateError, UnavailableError
from omniload.client import Client
from tests.frameworks.forks import run_ranks
from tests.support.trainer.loaders import Numbers, Stream, StreamWithState, plain
from trainer_integration import DataLoader
from trainer_integration.hosts import accelerate as hosts_accelerate
from trainer_integration.hosts.accelerate import Accelerator, prepare_mix

CONFIGURATIONS = {
    "default": {},
    "seedable": {"use_seedable_sampler": True},
    "dispatched": {"dispatch_batches": True},
    "split": {"split_batches": True},
    "stateful": {"use_stateful_dataloader": True},
}
LOADERS = {
    "map": lambda kind: kind(Numbers(11), 2, shuffle=True),
    "workers": lambda kind: kind(Numbers(11), 2, shuffle=True, num_workers=2),
    "stream": lambda kind: kind(Stream(11), 2),
    "stream with state": lambda kind: kind(StreamWithState(11), 2),
}


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Forget what accelerate keeps for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(kind, make, configuration, loader_kind):
    """Prepare a loader by an accelerator of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = DataLoaderConfiguration(**CONFIGURATIONS[configuration])
    torch.manual_seed(5)  # accelerate's own sampler takes the seed of the process
    host = kind(cpu=True, dataloader_config=settings)
    loader = host.prepare(make(loader_kind))
    torch.manual_seed(5)  # torchdata draws a number when it is made
    return host, loader


CASES = [
    (configuration, name)
    for configuration in CONFIGURATIONS
    for name in LOADERS
    if configuration == "default" or name != "workers"
]


@pytest.mark.parametrize(("configuration", "name"), CASES)
@pytest.mark.parametrize("position", [1, 4, 6])
def test_a_run_that_is_saved_and_loaded_gives_the_batches_of_the_unbroken_one(
    configuration, name, position, tmp_path
):
    make = LOADERS[name]
    # torchdata draws its shuffling otherwise than torch; ours is torch's under every configuration.
    oracle = "default" if configuration == "stateful" else configuration
    _, theirs = prepared(accelerate.Accelerator, make, oracle, TorchLoader)
    unbroken = [plain(theirs) for _ in range(3)]

    host, loader = prepared(Accelerator, make, configuration, DataLoader)
    assert plain(loader) == unbroken[0]
    batches = iter(loader)
    assert plain([next(batches) for _ in range(position)]) == unbroken[1][:position]
    host.save_state(tmp_path)
    again, resumed = prepared(Accelerator, make, configuration, DataLoader)
    again.load_state(tmp_path)

    # The state of an epoch's last batch is of the epoch that follows.
    if position < len(unbroken[1]):
        assert plain(resumed) == unbroken[1][position:]
    assert plain(resumed) == unbroken[2]


class Failing(Numbers):
    """Raises for sample 6, once."""

    failed = False

    def __getitem__(self, index):
        if index == 6 and not self.failed:
            self.failed = True
            raise UnavailableError("the store is away")
        return super().__getitem__(index)


@pytest.mark.parametrize("configuration", ["default", "dispatched"])
def test_the_state_behind_a_fetch_that_raised_is_of_the_batches_that_the_loop_has(
    configuration, tmp_path
):
    host, loader = prepared(
        Accelerator, lambda kind: kind(Failing(11), 2), configuration, DataLoader
    )
    got = []
    with pytest.raises(UnavailableError):
        got.extend(plain([batch]) for batch in loader)
    host.save_state(tmp_path)
    again, resumed = prepared(
        Accelerator, lambda kind: kind(Numbers(11), 2), configuration, DataLoader
    )
    again.load_state(tmp_path)

    assert got == [[[0, 1]], [[2, 3]]]
    assert plain(resumed)[:3] == [[4, 5], [6, 7], [8, 9]]


def test_a_resumed_run_is_resumed_within_the_same_epoch(tmp_path):
    host, loader = prepared(Accelerator, LOADERS["workers"], "default", DataLoader)
    unbroken = plain(loader)
    for number in range(3):
        host, loader = prepared(Accelerator, LOADERS["workers"], "default", DataLoader)
        if number:
            host.load_state(tmp_path / str(number - 1))
        batches = iter(loader)
        assert plain([next(batches), next(batches)]) == unbroken[2 * number : 2 * number + 2]
        host.save_state(tmp_path / str(number))


def test_two_ranks_are_dealt_to_as_by_accelerate_and_resume(mix, tmp_path):
    """The cases and what they assert stand in the script that each rank runs."""
    run_ranks("accelerate_rank.py", 2, str(mix), str(tmp_path))


def test_a_state_is_asked_for_with_each_batch_and_costs_microseconds():
    _, loader = prepared(Accelerator, LOADERS["map"], "default", DataLoader)
    iter_batches = iter(loader)
    next(iter_batches)
    base = loader.base_dataloader
    base.state_dict()
    # Of this thread's own work: whatever else the machine does says nothing of the code.
    began_s = time.thread_time()
    for _ in range(1000):
        base.state_dict()

    assert (time.thread_time() - began_s) / 1000 < 200e-6


def test_the_loader_that_accelerate_remade_has_no_state_of_its_own():
    host = accelerate.Accelerator(cpu=True)
    loader = DataLoader(Numbers(6), 2)
    assert plain(host.prepare(loader)) == [[0, 1], [2, 3], [4, 5]]

    with pytest.raises(StateError, match=r"trainer_integration\.hosts\.accelerate"):
        loader.state_dict()


def test_a_state_loaded_before_prepare_is_not_lost_silently():
    loader = DataLoader(Numbers(6), 2)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())

    with pytest.raises(StateError, match="prepare first"):
        Accelerator(cpu=True).prepare(loader)


def test_a_mix_keeps_its_place_and_ends_an_accumulation(mix, tmp_path):
    def opened(folder=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        host = Accelerator(cpu=True, gradient_accumulation_steps=4)
        loader = host.prepare(DataLoader(mix, labels="unshifted", steps=6))
        if folder is not None:
            host.load_state(folder)
        return host, loader

    _, loader = opened()
    unbroken = [batch.tokens.tolist() for batch in loader]
    loader.base_dataloader.close()
    host, loader = opened()
    model, ends = torch.nn.Linear(1, 1), []
    for number, batch in enumerate(loader):
        with host.accumulate(model):
            ends.append(host.sync_gradients)
        assert batch.tokens.tolist() == unbroken[number]
        if number == 2:
            host.save_state(tmp_path)
    loader.base_dataloader.close()
    _, resumed = opened(tmp_path)

    assert [batch.tokens.tolist() for batch in resumed] == unbroken[3:]
    assert ends == [False, False, False, True, False, True]
    resumed.base_dataloader.close()


@pytest.fixture
def away(monkeypatch):
    """Have a loader of a mix wait in vain for the steps that are in the set, once each."""
    steps, wait = set(), Client.wait_for_batch

    def failing(client, timeout=None):
        if client.next_step in steps:
            steps.remove(client.next_step)
            raise UnavailableError("no batch within 1 s")
        return wait(client, timeout)

    monkeypatch.setattr(Client, "wait_for_batch", failing)
    return steps


def test_a_mix_gives_the_batch_that_was_fetched_before_one_that_raised(mix, away, tmp_path):
    def opened():
        AcceleratorState._reset_state(reset_partial_state=True)
        host = Accelerator(cpu=True)
        return host, host.prepare(DataLoader(mix, steps=6))

    away.update({0, 3})
    host, loader = opened()
    with pytest.raises(UnavailableError):
        next(iter(loader))
    got, batches = [], iter(loader)
    with pytest.raises(UnavailableError):
        got.extend(batch.step for batch in batches)
    assert got == [0, 1]
    host.save_state(tmp_path / "behind the error")
    assert next(batches).step == 2  # asked again
    host.save_state(tmp_path / "behind a retry")
    assert [batch.step for batch in loader] == [3, 4, 5]  # by another loop
    loader.base_dataloader.close()

    for folder, first in (("behind the error", 2), ("behind a retry", 3)):
        host, loader = opened()
        next(iter(loader))  # what was fetched here is not of the place that is loaded
        host.load_state(tmp_path / folder)
        assert [batch.step for batch in loader] == list(range(first, 6))
        loader.base_dataloader.close()


def test_a_loop_over_a_mix_goes_on_where_the_one_before_was_left(mix):
    loader = Accelerator(cpu=True).prepare(DataLoader(mix, steps=5))
    first = [batch.step for batch, _ in zip(loader, range(2), strict=False)]

    # zip has taken one more than it gave.
    assert (first, [batch.step for batch in loader]) == ([0, 1], [3, 4])
    assert list(loader) == []
    loader.base_dataloader.close()


def test_a_loop_over_the_loader_itself_goes_on_where_one_over_the_prepared_loader_was_left(mix):
    with DataLoader(mix, steps=5) as loader:
        prepared = Accelerator(cpu=True).prepare(loader)
        seen = [next(iter(prepared)).step, next(iter(prepared)).step]
        assert loader.state_dict() == prepared.state_dict()
        seen += [next(iter(loader)).step, *(batch.step for batch in prepared)]

    assert seen == [0, 1, 2, 3, 4]


def test_threads_that_share_a_loop_over_a_mix_get_each_batch_once(mix):
    with DataLoader(mix, steps=40) as loader, ThreadPoolExecutor(4) as threads:
        batches = iter(Accelerator(cpu=True).prepare(loader))
        shares = [threads.submit(lambda: [batch.step for batch in batches]) for _ in range(4)]
        steps = [step for share in shares for step in share.result(timeout=60)]

    assert sorted(steps) == list(range(40))


def test_a_batch_that_cannot_be_brought_to_the_device_is_the_next_one_still(mix, monkeypatch):
    with DataLoader(mix, steps=3) as loader:
        batches = iter(Accelerator(cpu=True).prepare(loader))
        first = next(batches)
        with monkeypatch.context() as full:
            full.setattr(hosts_accelerate, "send_to_device", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(batches)
        steps = [batch.step for batch in batches]

    assert (first.step, steps) == (0, [1, 2])


def test_a_batch_that_was_fetched_ahead_is_of_the_loader_and_of_no_place_that_is_loaded(mix):
    with DataLoader(mix, steps=5) as loader:
        first = next(iter(prepare_mix(loader, "cpu")))
        again = prepare_mix(loader, "cpu")  # as a Trainer that trains once more
        steps = [batch.step for batch in again]
        loader.load_state_dict({})  # changes nothing
        assert (first.step, steps, list(again)) == (0, [1, 2, 3, 4], [])

    with DataLoader(mix, steps=5) as loader:
        prepared = prepare_mix(loader, "cpu")
        next(iter(prepared))
        state = prepared.state_dict()
        assert prepare_mix(loader, "cpu").state_dict()["step"] == state["step"] == 1
        next(iter(prepared))
        loader.load_state_dict(state)
        assert [batch.step for batch in prepared] == [1, 2, 3, 4]


def test_each_evaluation_goes_through_a_split_and_a_checkpoint_keeps_no_place_in_it(mix, tmp_path):
    held = mix.with_name("held.yaml")
    held.write_text(mix.read_text() + "splits: {eval: 0.3}\n")

    def evaluated(host_of, folder=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        host, seen = host_of(cpu=True), []
        made = [DataLoader(held, steps=4), DataLoader(held, split="eval", steps=3)]
        training, held_out = host.prepare(*made)
        if folder is not None:
            host.load_state(folder)
        for batch in training:
            seen.append((batch.step, [batch.step for batch in held_out]))
            if batch.step == 1:
                host.save_state(tmp_path / host_of.__module__)
        for loader in made:
            loader.close()
        return seen

    for host_of in (Accelerator, accelerate.Accelerator):
        whole = evaluated(host_of)
        assert whole == [(step, [0, 1, 2]) for step in range(4)]
        assert evaluated(host_of, tmp_path / host_of.__module__) == whole[2:]


def test_accelerates_own_prepare_leaves_a_mix_as_it_is_and_saves_its_state(mix, tmp_path):
    host = accelerate.Accelerator(cpu=True)
    with DataLoader(mix, steps=4) as loader:
        assert host.prepare(loader) is loader
        batches = iter(loader)
        first = next(batches).tokens.tolist()
        host.save_state(tmp_path)
        rest = [batch.tokens.tolist() for batch in batches]
        host.load_state(tmp_path)

        assert [batch.tokens.tolist() for batch in loader] == rest
        assert first not in rest
