"""Prompts in memory, ranks as threads, and the expected result of dynamic sampling, by a loop over all prompts."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from omniload.base.errors import StateError
from omniload.batch.rows import Piece
from omniload.front.sampling.exchange import Exchange
from omniload.front.sampling.sampler import DynamicSampler

__all__ = [
    "LoaderInMemory",
    "Ranks",
    "Rows",
    "as_told",
    "expected_batches",
    "kept_of",
    "some_steps",
    "text_of",
]

NAMES = ("easy", "hard")
WAIT_S = 60


def some_steps(sizes):
    """Return the prompts of steps of these sizes: keys and tokens, from two sources alternately."""
    positions, steps = [0, 0], []
    for size in sizes:
        step = []
        for i in range(size):
            source = (i + len(steps)) % 2
            step.append(((source, positions[source], 0, 0), [source, positions[source], 7]))
            positions[source] += 1
        steps.append(step)
    return steps


@dataclass
class Rows:
    """A rank's prompts of a step."""

    step: int
    prompts: list

    def pieces(self):
        return [
            Piece(
                key=key,
                tokens=np.array(tokens, np.int32),
                columns={"text": np.frombuffer(text_of(key).encode(), np.uint8)},
            )
            for key, tokens in self.prompts
        ]


def text_of(key):
    """Return the text of a prompt."""
    return f"zwölf {key[0]}/{key[1]}"


class LoaderInMemory:
    """One of several ranks, which are dealt the prompts of each step unevenly."""

    source_names = NAMES

    leads, peers = True, ()

    def __init__(self, steps, rank=0, num_ranks=1, run_dir=None):
        self.steps, self.rank, self.num_ranks, self.run_dir = steps, rank, num_ranks, run_dir
        self.step = 0

    def next_batch(self):
        if self.step == len(self.steps):
            return None
        dealt = random.Random(f"{self.step} {self.num_ranks}")
        mine = [p for p in self.steps[self.step] if dealt.randrange(self.num_ranks) == self.rank]
        self.step += 1
        return Rows(self.step - 1, mine)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        if state.get("step", -1) > len(self.steps):
            raise StateError("a state of more steps than there are")
        self.step = state["step"]


class _Meeting(Exchange):
    """One rank's side of an exchange among threads."""

    def __init__(self, rank, size, barrier, parts):
        self.rank, self.size, self._barrier, self._parts = rank, size, barrier, parts

    def all_gather(self, part):
        self._parts[self.rank] = part
        self._barrier.wait(WAIT_S)
        found = list(self._parts)
        self._barrier.wait(WAIT_S)
        return found


def _meetings(size):
    barrier, parts = threading.Barrier(size), [b""] * size
    return [_Meeting(rank, size, barrier, parts) for rank in range(size)]


class Ranks:
    """Samplers of ranks, a thread each; those of one number along dp follow each other where it has ``peers``."""

    def __init__(
        self,
        steps,
        num_ranks,
        *,
        peers=1,
        run_dir=None,
        state=None,
        settings_of_last=None,
        **settings,
    ):
        along_dp = [_meetings(num_ranks) for _ in range(peers)]
        self.samplers = []
        for rank in range(num_ranks):
            for peer, sharing in enumerate(_meetings(peers)):
                loader = LoaderInMemory(steps, rank, num_ranks, run_dir)
                if peers > 1:
                    loader.peers = tuple(range(rank * peers, (rank + 1) * peers))
                    loader.leads = not peer
                is_last = (rank, peer) == (num_ranks - 1, peers - 1)
                self.samplers.append(
                    DynamicSampler(
                        loader,
                        exchange=along_dp[peer][rank],
                        peers=sharing if peers > 1 else None,
                        **(settings | (settings_of_last or {} if is_last else {})),
                    )
                )
        if state is not None:
            for sampler in self.samplers:
                sampler.load_state_dict(state)

    def next_batch(self, rollout=None):
        """Return the batch of each rank, or the error that it raises."""
        rollouts = rollout if isinstance(rollout, list) else [rollout] * len(self.samplers)

        def one(sampler, mine):
            try:
                return sampler.next_batch(mine)
            except Exception as error:  # noqa: BLE001 -- looked at by the test
                return error

        with ThreadPoolExecutor(len(self.samplers)) as threads:
            return list(threads.map(one, self.samplers, rollouts))

    def batches(self, rollout=None):
        """Return all remaining batches, each as the list of the ranks' batches."""
        found = []
        while (batch := self.next_batch(rollout))[0] is not None:
            if isinstance(batch[0], Exception):
                raise batch[0]
            found.append(batch)
        assert batch == [None] * len(self.samplers)
        return found

    def state_dict(self):
        """Return the state, which is the same on every rank."""
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]


def as_told(batch):
    """Return the groups of a batch over all ranks, in an order that does not depend on the ranks."""
    return sorted(
        (group.prompt.source, group.prompt.key, group.prompt.tokens.tolist())
        for part in batch
        for group in part.groups
    )


def kept_of(step, rewards_of):
    """Return the prompts of a step whose answers differ in reward."""
    return {key[:3] for key, _ in step if len(set(rewards_of(key[:3]))) > 1}


def expected_batches(steps, rewards_of, groups, surplus):
    """Fill batches as DAPO describes it, over all prompts in memory.

    After the rollouts of each step, the groups whose rewards are not all equal go into a buffer, until it has a
    batch.

    Returns:
        For each batch, the number of steps drawn for it and, in order, the step of each of its groups; and the steps of
        the groups that remain in the buffer.
    """
    batches, buffer, rounds = [], [], 0
    for number, step in enumerate(steps):
        while len(buffer) >= groups:
            batches.append((rounds, buffer[:groups]))
            buffer, rounds = buffer[groups:], 0
        buffer += [number] * len(kept_of(step, rewards_of))
        rounds += 1
        if len(buffer) >= groups:
            batches.append((rounds, buffer[:groups]))
            buffer, rounds = (buffer[groups:] if surplus == "carry" else []), 0
    while len(buffer) >= groups:
        batches.append((rounds, buffer[:groups]))
        buffer, rounds = buffer[groups:], 0
    return batches, buffer
