"""The tests of tests/frameworks, in the environment that holds the frameworks."""

import os
from pathlib import Path

import pytest

from tests.support.programs import finished

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-frameworks/bin/python"
FOLDER = ROOT / "tests/frameworks"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("marks", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_our_loaders_pass_inside_frameworks(marks):
    """One process for all: loading the frameworks takes as long as most of the tests."""
    if not PYTHON.exists():
        pytest.skip("FRAMEWORKS NOT TESTED: no .venv-frameworks; run make setup")
    line = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, FOLDER]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Frameworks are large: what one process has compiled, the next one finds.
    env.pop("PYTHONDONTWRITEBYTECODE", None)

    done = finished(
        line, limit_s=840, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
