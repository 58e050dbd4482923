"""Imports point downward: the contracts of pyproject.toml hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.modules import ROOT


def test_import_contracts_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")

    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
