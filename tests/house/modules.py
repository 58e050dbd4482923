"""The modules of the packages: their files, their syntax trees, and the imported modules."""

import ast
import gc
import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "PACKAGES",
    "ROOT",
    "base_files",
    "faults",
    "framework_files",
    "imported",
    "name_of",
    "source_files",
    "statements_of",
    "tree_of",
]

ROOT = Path(__file__).parents[2]
PACKAGES = ("omniload", "fusefs", "snapshot", "trainer_integration")
TRACKERS = ("mlflow", "tensorboard", "wandb")


def source_files() -> list[Path]:
    """Return every module of the packages, relative to the repository."""
    return sorted(
        path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    )


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module, cached and kept from the garbage collector: it has very many nodes."""
    gc.disable()
    try:
        return ast.parse((ROOT / path).read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()


def statements_of(path: Path) -> Iterator[ast.AST]:
    """Yield every statement of a module at any depth: a tenth of the nodes of ``ast.walk``."""
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, inner, ())


def name_of(path: Path) -> str:
    """Return the dotted name of a module."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def framework_files() -> list[Path]:
    """Return the modules that need a framework or a tracker; tests/frameworks imports them."""
    hosts = Path("trainer_integration/hosts")
    trackers = {Path("trainer_integration/writers") / f"{name}.py" for name in TRACKERS}
    return [path for path in source_files() if path.is_relative_to(hosts) or path in trackers]


def base_files() -> list[Path]:
    """Return every other module."""
    return sorted(set(source_files()) - set(framework_files()))


def imported(path: Path) -> ModuleType:
    return importlib.import_module(name_of(path))


def faults(paths: Iterable[Path], rule: Callable[[Path], Any]) -> dict[str, Any]:
    """Return the faults that a rule finds, by file: one test covers hundreds of files."""
    return {str(path): found for path in paths if (found := rule(path))}
