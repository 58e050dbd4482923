"""What several modules of tests of the trainer share."""

from importlib import import_module

import pytest


@pytest.fixture(scope="session")
def ranks():
    """Four ranks for the cases of every module: what one of them does first takes it three times as long as again."""
    # Named, not imported: lanes that run none of these tests read this file too, and have no torch.
    with import_module("tests.support.trainer.moe_group").Ranks(4) as ranks:
        yield ranks
