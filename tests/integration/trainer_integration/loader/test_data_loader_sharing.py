"""share=True: ranks of one machine over one group of workers, with real processes and real kills."""

import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from omniload.base.errors import ConfigError, StateError
from tests.support.trainer.loaders import Numbers, plain, torch_files
from trainer_integration import DataLoader, SharedDataset
from trainer_integration.loader.shared.frames import Frame, Kind, packed
from trainer_integration.loader.shared.group import address_of
from trainer_integration.loader.shared.iterator import Client
from trainer_integration.loader.shared.room import Holds, group_room
from trainer_integration.loader.shared.server import VERSION

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Logged(Numbers):
    """Sample ``i`` is 1,000 times ``i``; each making of one is a line of a file."""

    def __init__(self, length, path):
        super().__init__(length)
        self.path = str(path)

    def __getitem__(self, index):
        with Path(self.path).open("a") as file:
            file.write(f"{index}\n")
        return torch.full((1000,), index)


@pytest.fixture
def launch(monkeypatch):
    """Two loaders of this process under one launcher's variables are two ranks to their group."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(random.randrange(1, 1 << 16)) + f"{os.getpid()}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def firsts(batches):
    return [batch[:, 0].tolist() for batch in batches]


def made(path):
    return sorted(int(line) for line in Path(path).read_text().split())


def test_workers_are_shared_where_a_launcher_ignores_the_ends_of_its_children():
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system keeps no exit codes then
    try:
        shared = DataLoader(Numbers(8), 4, num_workers=1, share=True)
        assert plain(shared) == plain(TorchLoader(Numbers(8), 4))
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_ranks_that_draw_the_same_samples_have_each_made_once(tmp_path, launch):
    path = tmp_path / "made"
    ranks = [
        DataLoader(Logged(64, path), 4, shuffle=True, num_workers=1, share="same",
                   generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]  # fmt: skip
    oracle = torch.utils.data.DataLoader(
        Numbers(64), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )

    for _ in range(2):
        pairs = [firsts(pair) for pair in zip(*ranks, strict=True)]
        assert [pair[0] for pair in pairs] == [pair[1] for pair in pairs] == plain(oracle)

    assert made(path) == sorted([*range(64)] * 2)
    for rank in ranks:
        rank.close()


def test_ranks_that_draw_different_samples_get_their_own(tmp_path, launch):
    path = tmp_path / "made"

    def rank(number, dataset, **keywords):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=number, shuffle=True)
        return keywords.pop("kind", DataLoader)(dataset, 4, sampler=sampler, **keywords)

    ranks = [rank(n, Logged(500, path), num_workers=2, share="apart") for n in range(2)]
    theirs = [rank(n, Numbers(500), kind=torch.utils.data.DataLoader) for n in range(2)]

    assert [firsts(each) for each in ranks] == [plain(each) for each in theirs]
    assert made(path) == [*range(500)]
    for each in ranks:
        each.close()


def test_a_batch_that_is_held_is_not_written_over_by_what_another_rank_drops(launch, tmp_path):
    keeping, dropping = (
        DataLoader(Logged(400, tmp_path / "made"), 4, num_workers=1, share="held") for _ in range(2)
    )

    held = [mine for mine, _ in zip(keeping, dropping, strict=True)]
    keeping.close()
    dropping.close()

    assert firsts(held) == [[*range(n, n + 4)] for n in range(0, 400, 4)]


def test_a_place_saved_with_sharing_is_one_without(tmp_path, launch):
    def loader(**keywords):
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(40), 4, shuffle=True, generator=generator, **keywords)

    expected = plain(loader())
    with loader(num_workers=1, share="saved") as sharing:
        batches = iter(sharing)
        assert plain([next(batches) for _ in range(3)]) == expected[:3]
        state = sharing.state_dict()
        sharing.load_state_dict(state)
        assert plain(batches) == expected[3:]
    alone = loader()
    alone.load_state_dict(state)
    assert plain(alone) == expected[3:]
    with loader(num_workers=2, share="again") as again:
        again.load_state_dict(state)
        assert plain(again) == expected[3:]


def test_ranks_that_are_killed_as_they_come_end_no_group(launch):
    with DataLoader(Numbers(40), 4, num_workers=1, share="gone") as sharing:
        batches = iter(sharing)
        first, server = plain([next(batches)]), sharing.server_pid
        os.kill(server, signal.SIGSTOP)
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as rank:
                rank.connect(address_of("gone"))
        os.kill(server, signal.SIGCONT)

        assert first + plain(batches) == plain(DataLoader(Numbers(40), 4))
        assert sharing.server_pid == server


def served(room, holds, then):
    """Return a connection to a server that lets a rank in, and what of its life is left: ``then`` of its line."""
    ours, theirs = socket.socketpair()

    def serve():
        with theirs:
            theirs.recv(1 << 16)
            if then is None:
                # As of a process that has gone: the next word to it fails.
                theirs.shutdown(socket.SHUT_RD)
            socket.send_fds(theirs, [b"\0"], [room.handle, holds.handle])
            told = {"version": VERSION, "key": room.key, "regions": 1, "pid": 0}
            theirs.sendall(packed(Frame(Kind.WELCOME, 0, json.dumps(told).encode())))
            if then is not None:
                theirs.recv(1 << 16)
                theirs.sendall(then)

    threading.Thread(target=serve, daemon=True).start()
    return ours


def test_a_server_that_ends_while_a_rank_asks_it_again_is_followed_by_another():
    room, holds = group_room(1), Holds(1)
    made = packed(Frame(Kind.BATCH, 0, pickle.dumps("made")))
    lives = iter([b"", None, made])
    client = Client(lambda: served(room, holds, next(lives)), {})

    assert client.wait(client.ask(b"key"), 60, lambda: "a batch") == "made"
    client.close()


def test_kept_workers_that_are_shared_make_every_epoch(launch):
    torch.manual_seed(1)
    theirs = TorchLoader(Numbers(12), 4, shuffle=True, num_workers=1, persistent_workers=True)
    expected = [plain(theirs), plain(theirs)]
    torch.manual_seed(1)
    with DataLoader(
        Numbers(12), 4, shuffle=True, num_workers=1, share="kept", persistent_workers=True
    ) as sharing:
        assert [plain(sharing), plain(sharing)] == expected
        left = iter(sharing)
        next(left)
        sharing.close()
        with pytest.raises(RuntimeError, match="the loader was closed: iterate it again"):
            next(left)


class Failing(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("sample 5 is not there")
        return index


def test_an_error_carries_the_workers_traceback_and_the_next_epoch_is_whole(launch):
    with DataLoader(Failing(12), 2, num_workers=2, share="failing") as loader:
        for _ in range(2):
            batches, got = iter(loader), []
            with pytest.raises(KeyError, match=r"in __getitem__(.|\n)*sample 5 is not there"):
                got.extend(batches)
            assert plain(batches) == [[6, 7], [8, 9], [10, 11]]


class Killing(Numbers):
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_batch_that_kills_its_worker_is_named_and_the_others_come(launch):
    with DataLoader(Killing(12), 2, num_workers=1, share="killing") as loader:
        batches = iter(loader)
        assert plain([next(batches), next(batches)]) == [[0, 1], [2, 3]]
        with pytest.raises(RuntimeError, match=r"exit code -9, at the batch of indices \[4, 5\]"):
            next(batches)


def test_a_sample_that_takes_too_long_is_named(launch):
    with (
        DataLoader(Hanging(4), 2, num_workers=1, share="hang", timeout=1) as loader,
        pytest.raises(RuntimeError, match=r"timed out.*not given the batch of indices \[0, 1\]"),
    ):
        next(iter(loader))


class Hanging(Numbers):
    def __getitem__(self, index):
        signal.pause()


def test_ranks_go_on_where_the_server_is_killed(launch, tmp_path, caplog):
    ranks = [
        DataLoader(Logged(120, tmp_path / "made"), 4, num_workers=1, share="served")
        for _ in range(2)
    ]
    got = []
    for number, pair in enumerate(zip(*ranks, strict=True)):
        got.append(firsts(pair))
        if number == 9:
            server = psutil.Process(ranks[0].server_pid)
            workers = server.children()
            server.kill()
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert len(workers) == 2
            assert not alive

    assert (
        [pair[0] for pair in got]
        == [pair[1] for pair in got]
        == firsts(Numbers(0) or [torch.arange(n, n + 4)[:, None] for n in range(0, 120, 4)])
    )
    assert caplog.text.count("goes on with another") == 2
    for rank in ranks:
        rank.close()


def test_the_last_rank_that_leaves_ends_the_server_and_its_workers(launch):
    ranks = [DataLoader(Numbers(40), 4, num_workers=1, share="last") for _ in range(2)]
    for _ in zip(*ranks, strict=True):
        pass
    server = psutil.Process(ranks[0].server_pid)
    processes = [server, *server.children()]
    ranks[0].close()
    assert plain(ranks[1])[0] == [0, 1, 2, 3]
    ranks[1].close()

    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_a_loader_of_other_samples_is_not_let_in(launch):
    with DataLoader(Numbers(40), 4, num_workers=1, share="one") as first:
        next(iter(first))
        other = DataLoader(Numbers(41), 4, num_workers=1, share="one")
        with pytest.raises(StateError, match="samples 41 and not 40"):
            next(iter(other))


def _listed(length, python=sys.executable):
    # The server spawns its workers with this one.
    multiprocessing.set_executable(python)
    return Listed(length)


class Listed(Numbers):
    def __init__(self, length):
        super().__init__(length)
        self.rows = [{"id": n, "pid": os.getpid()} for n in range(length)]

    def __getitem__(self, index):
        return self.rows[index]["id"], self.rows[index]["pid"], type(self.rows).__name__


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_shared_dataset_is_made_in_the_server_alone_and_packed(launch, method, spawns_warm):
    dataset = SharedDataset(partial(_listed, 10_000, spawns_warm), 10_000)
    with DataLoader(
        dataset, 2_500, num_workers=1, share=f"listed {method}", multiprocessing_context=method
    ) as loader:
        batches = list(loader)
        server = loader.server_pid

    makers = torch.cat([batch[1] for batch in batches]).unique().tolist()
    assert torch.cat([batch[0] for batch in batches]).tolist() == [*range(10_000)]
    assert makers == [server]
    assert {name for batch in batches for name in batch[2]} == {"PackedList"}


def test_a_dataset_that_cannot_be_made_is_told_to_the_rank(launch):
    dataset = SharedDataset(partial(_listed, 3), 4)
    loader = DataLoader(dataset, 1, num_workers=1, share="short")
    with pytest.raises(StateError, match=r"Listed of 3 samples, .* promised 4"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"num_workers": 0}, "needs workers and order"),
        ({"num_workers": 1, "in_order": False}, "needs workers and order"),
        ({"num_workers": 1, "workers": "thread"}, "do not go together"),
        ({"num_workers": 1, "share": 3}, "is no name, nor True or False"),
    ],
)
def test_what_does_not_go_with_sharing_is_refused(keywords, said):
    with pytest.raises(ConfigError, match=said):
        DataLoader(Numbers(4), 2, **{"share": True, **keywords})


_RANK = """
import os, sys, torch
from torch.utils.data import DistributedSampler
from trainer_integration import DataLoader
from tests.support.trainer.loaders import Numbers
rank = int(sys.argv[1])
dataset = Numbers(100_000)
sampler = DistributedSampler(dataset, 2, rank, shuffle=False)
loader = DataLoader(dataset, 2, sampler=sampler, num_workers=1, share=True)
for number, batch in enumerate(loader):
    if number == 3:
        print(loader.server_pid, os.getpid(), flush=True)
        if sys.stdin.readline() != "go\\n":
            break
    if number == 40:
        print(batch.tolist(), flush=True)
        if sys.stdin.readline() != "go\\n":
            break
"""


def test_a_killed_rank_stops_no_other_and_nothing_is_left(warm_python):
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"9{os.getpid()}", "LOCAL_WORLD_SIZE": "2",
        "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen([warm_python.path, "-c", _RANK, str(n)], stdin=-1, stdout=-1, text=True,
                         env=environment)
        for n in range(2)
    ]  # fmt: skip
    try:
        told = [[int(word) for word in rank.stdout.readline().split()] for rank in ranks]
        servers, trainers = zip(*told, strict=True)
        assert servers[0] == servers[1]
        processes = [psutil.Process(servers[0]), *psutil.Process(servers[0]).children()]
        assert len(processes) == 3
        named = {
            mapped.path for one in processes for mapped in one.memory_maps()
            if mapped.path.startswith("/dev/shm/")
        }  # fmt: skip
        # The one that started the server, by its descriptor or not: either may die.
        ranks[0].kill()
        ranks[1].stdin.write("go\n")
        ranks[1].stdin.flush()
        assert ranks[1].stdout.readline() == "[161, 163]\n"
        ranks[1].kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()
    assert not [path for path in named if Path(path).exists()]
    assert torch_files([*trainers, *(process.pid for process in processes)]) == []
