"""A rank says what it cannot join with, before it waits for its peers."""

from types import SimpleNamespace

import pytest
import torch

from omniload.base.errors import ConfigError
from trainer_integration.run.joining import joined


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_a_fault_of_the_settings():
    train = SimpleNamespace(parallel=SimpleNamespace(num_ranks=2), device="cuda")
    spec = SimpleNamespace(train=train, launcher_pid=1, rank=1)

    with pytest.raises(ConfigError, match=r"'cuda:1' is not here: torch .* sees 0"), joined(spec):
        pass
