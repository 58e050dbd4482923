"""Ranks of a process group, reused for many cases: ``with Ranks(4) as ranks: ranks.run(case, dp=2, sp=2, ...)``.

A case is a function of a module that ranks import; its arguments are its ``ProcessGroups`` and keywords. Ranks beyond
the mesh rest. If the shape of the mesh changes, the mesh is made again, over a store on a port that the system
chooses.
"""

import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.support.trainer.fake_gpus import without_gpus
from tests.support.trainer.fork_server import forking
from trainer_integration.moe.parallel.process_groups import BACKENDS, ProcessGroups

ANSWER_S = 150


class Ranks:
    def __init__(self, num_ranks, device="cpu"):
        """Start ranks; for ``cuda``, messages between GPUs go nowhere, and messages between hosts arrive."""
        self._num_ranks, self._device = num_ranks, device
        self._pipes, self._processes = [], []

    def run(self, case, *, dp=1, sp=1, **arguments):
        """Return what ``case(groups, **arguments)`` returns on every rank of the mesh.

        If a rank fails or does not answer, all are started again. A later case must not wait for it, and must not
        take its late answer for an answer to another question.
        """
        try:
            return self._run(case, (dp, sp), arguments)
        except AssertionError:
            self._end()
            self._start()
            raise

    def _run(self, case, shape, arguments):
        pipes = self._pipes[: shape[0] * shape[1]]
        if self._shape != shape:
            if self._shape is not None:
                for pipe in self._pipes[: self._shape[0] * self._shape[1]]:
                    pipe.send(("leave",))
                    self._answer(pipe)
            self._shape = shape
            pipes[0].send(("host",))
            port = self._answer(pipes[0])
            for pipe in pipes:
                pipe.send(("join", port, *shape, self._device))
            for pipe in pipes:
                self._answer(pipe)
        for pipe in pipes:
            pipe.send(("run", case, arguments))
        return [self._answer(pipe) for pipe in pipes]

    def _start(self):
        context = forking()
        for rank in range(self._num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._shape = None

    def _end(self):
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    @staticmethod
    def _answer(pipe):
        assert pipe.poll(ANSWER_S), f"a rank did not answer within {ANSWER_S} s"
        fault, answer = pipe.recv()
        if fault is not None:
            raise AssertionError(fault)
        return answer

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self._end()


def _serve(rank, pipe):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    here = {"rank": rank}
    while True:
        command, *rest = pipe.recv()
        try:
            pipe.send((None, _COMMANDS[command](here, *rest)))
        except BaseException:  # noqa: BLE001 -- told to the test, whatever it is
            pipe.send((traceback.format_exc(), None))


def _host(here):
    here["store"] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return here["store"].port


def _join(here, port, dp, sp, device):
    store = here.pop("store", None) or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(
        without_gpus(BACKENDS[device]),
        store=store,
        rank=here["rank"],
        world_size=dp * sp,
        timeout=timedelta(seconds=90),
    )
    here["groups"] = ProcessGroups.of(dp, sp, device)


def _run(here, case, arguments):
    return case(here["groups"], **arguments)


def _leave(here):
    del here["groups"]
    dist.destroy_process_group()


_COMMANDS = {"host": _host, "join": _join, "run": _run, "leave": _leave}
