"""The modules of the house: their files, their syntax trees, and themselves imported."""

import ast
import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["PACKAGES", "ROOT", "imported", "name_of", "source_files", "tree_of"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("omniload", "fusefs", "snapshot", "trainer_integration")
EXTRAS = {
    "mlflow",
    "tensorboard",
    "wandb",
    "pyfuse3",
    "trio",
    "ray",
    "torch",
    "jinja2",
    "indexed_gzip",
    "urllib3",
}
EXTRAS |= {"grpc", "google"}
EXTRAS |= {"accelerate", "lightning", "transformers"}  # tests/frameworks has them
"""What an installation may lack."""


def source_files() -> list[Path]:
    """Return every module of the packages, relative to the repository."""
    return sorted(
        path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    )


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """Return the dotted name of a module."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> ModuleType:
    """Import a module; skip the test where an extra that it needs is not installed."""
    try:
        return importlib.import_module(name_of(path))
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            pytest.skip(f"{error.name} is not installed")
        raise
