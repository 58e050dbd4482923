"""One rank of two under Lightning, which deals the sampler and makes the loader again."""

import sys
from itertools import chain
from pathlib import Path

from tests.frameworks.test_lightning import fit
from tests.support.trainer.loaders import Numbers
from trainer_integration.hosts.lightning import DataLoader

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    two = {"devices": 2, "strategy": "ddp"}

    def make():
        return DataLoader(Numbers(20), 2, shuffle=True)

    unbroken = fit(folder / "whole", make(), 10, **two)
    again = fit(folder / "again", make(), 10, folder / "whole/step=3.ckpt", **two)
    assert again == unbroken[3:], (again, unbroken)
    assert len(set(chain.from_iterable(unbroken[:5]))) == 10
