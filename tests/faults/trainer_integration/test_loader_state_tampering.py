"""Tampering with a saved state of a DataLoader: whatever is changed, no other batches come of it."""

import copy
import itertools
import json
import math

import pytest
import torch
from torch.utils.data import IterableDataset

from omniload.base.errors import StateError
from trainer_integration import DataLoader

VALUES = (None, True, 0, 1, -1, 2, 1 << 31, 1 << 63, 10**30, 1.5, math.nan, "", "x", [], [0], {})
NEAR = (lambda old: old + 1, lambda old: old - 1, lambda old: -old, lambda old: old + (1 << 20))


class Counted(IterableDataset):
    """Has a state of its own, which no loader can judge."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at, "seen": {1: 2}}

    def load_state_dict(self, state):
        self.at = state["at"]


LOADERS = {
    "in order": lambda: DataLoader(range(60), batch_size=3),
    "shuffled": lambda: DataLoader(range(60), batch_size=3, shuffle=True),
    "an iterable": lambda: DataLoader(Counted(), batch_size=3),
}


def whole_tree(node, at=()):
    """Yield every place below the root of a state."""
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        yield (*at, key), value
        if isinstance(value, dict | list):
            yield from whole_tree(value, (*at, key))


def changed(state):
    """Yield copies of a state, each with one thing changed, and what that is."""
    for (*above, last), old in whole_tree(state):
        values = list(VALUES)
        if type(old) is int:
            values += [near(old) for near in NEAR]
        if isinstance(old, str) and old:
            values += [old[:-1], "A" + old[1:]]
        if isinstance(old, list):
            values.append(old * 2)
        for value in [*values, KeyError]:
            other = copy.deepcopy(state)
            node = other
            for key in above:
                node = node[key]
            if value is KeyError:
                del node[last]
            elif type(value) is type(old) and value == old:
                continue
            else:
                node[last] = value
            yield other, f"{(*above, last)}: {old!r:.30} -> {value!r:.30}"


def left_of(loader):
    return [batch.tolist() for batch in itertools.islice(loader, 8)]


@pytest.mark.parametrize("through", [copy.deepcopy, lambda state: json.loads(json.dumps(state))])
@pytest.mark.parametrize("kind", LOADERS)
def test_what_was_not_tampered_with_resumes(kind, through):
    torch.manual_seed(3)
    loader = LOADERS[kind]()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = through(loader.state_dict())

    resumed = LOADERS[kind]()
    resumed.load_state_dict(state)

    assert left_of(resumed) == [batch.tolist() for batch in itertools.islice(batches, 8)]


@pytest.mark.parametrize("kind", LOADERS)
def test_whatever_is_changed_is_refused_as_it_is_loaded(kind):
    torch.manual_seed(3)
    loader = LOADERS[kind]()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    tried = 0

    for other, change in changed(state):
        tried += 1
        try:
            LOADERS[kind]().load_state_dict(other)
        except StateError:
            continue
        pytest.fail(f"accepted with {change}")

    assert tried > 300
