"""Processes of one mount whose requests and answers overlap by chance: every open is one version whole, or ESTALE."""

from collections import Counter

import pytest

from tests.support.fusefs.scheduled_kernel import ScheduledKernel

SIZES = {"of several sizes": (100, 1500, 3000), "of one size": (1500,)}
_ROUNDS = 12


def overlapping(seed, sizes):
    """Have readers, lookers and writers overlap; return what the readers found, and what was wrong."""
    kernel = ScheduledKernel(seed, sizes)
    chance = kernel.chance
    try:
        for number in range(_ROUNDS):
            for _ in range(chance.randint(1, 3)):
                kernel.start(kernel.reader())
            if chance.random() < 0.6:
                kernel.start(kernel.looker())
            if chance.random() < 0.4:
                kernel.start(kernel.renamer(number))
            kernel.run(chance.randrange(5, 60))
            if chance.random() < 0.3:
                kernel.finish()
                kernel.replace()
        kernel.finish()
        return kernel.found, kernel.wrong
    finally:
        kernel.close()


@pytest.mark.parametrize("kind", SIZES)
def test_an_open_shows_one_version_whole_whatever_overlaps(kind):
    found = Counter()
    for seed in range(60):
        outcomes, wrong = overlapping(seed, SIZES[kind])
        assert not wrong, f"seed {seed}"
        found += outcomes

    assert found["whole"] > 800
