"""Safeguards of the data plane: each is taken away in a process of its own, until a history breaks a promise.

Nothing of ours is imported here: the processes that are forked off import the code without a safeguard.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Caught", "Safeguard", "caught", "safeguards"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARIES = ("numpy", "orjson", "pyarrow.compute", "pydantic", "xxhash")
"""Loaded once, before processes are forked off."""


@dataclass(frozen=True, kw_only=True)
class Safeguard:
    """A text of the code without which a promise breaks."""

    holds: str
    before: str
    after: str
    seed: int | None = None
    """A history that breaks without it."""

    @property
    def module(self) -> Path:
        """The module in which its text stands, once.

        Raises:
            LookupError: It stands in none, or in several places.
        """
        found: list[Path] = []
        for module in sorted((ROOT / "omniload").rglob("*.py")):
            found += [module] * module.read_text(encoding="utf-8").count(self.before)
        if len(found) != 1:
            raise LookupError(f"{self.holds}: its text stands {len(found)} times")
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Caught:
    """How a safeguard was missed."""

    safeguard: Safeguard
    seed: int | None
    """The history that broke; ``None`` where none did."""
    broken: str
    seconds: float


def safeguards() -> list[Safeguard]:
    """Return all of them."""
    entries = tomllib.loads((HERE / "safeguards.toml").read_text(encoding="utf-8"))
    return [Safeguard(**entry) for entry in entries["safeguard"]]


def caught(found: Sequence[Safeguard], seeds: Iterable[int] | None = None) -> Iterator[Caught]:
    """Take each away, and run histories until one breaks: its known one, or those of ``seeds`` in order."""
    for name in LIBRARIES:
        import_module(name)
    for safeguard in found:
        began_s = time.monotonic()
        known = [] if safeguard.seed is None else [safeguard.seed]
        seed, broken = _in_a_fork(safeguard, known if seeds is None else list(seeds))
        seconds = time.monotonic() - began_s
        yield Caught(safeguard=safeguard, seed=seed, broken=broken, seconds=seconds)


def _in_a_fork(safeguard: Safeguard, seeds: Sequence[int]) -> tuple[int | None, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer: tuple[int | None, str] = _first_broken(safeguard, seeds)
        except BaseException as error:  # noqa: BLE001 -- told by the process that waits
            answer = (None, f"{type(error).__name__}: {error}")
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told: tuple[int | None, str] = pickle.load(pipe)
    os.waitpid(child, 0)
    return told


def _first_broken(safeguard: Safeguard, seeds: Sequence[int]) -> tuple[int | None, str]:
    for name in [name for name in sys.modules if name.split(".")[0] in ("omniload", "tests")]:
        if name != __name__:
            del sys.modules[name]
    sys.meta_path.insert(0, _Without(safeguard))
    checking: Any = import_module("tests.histories.checking")
    worlds: Any = import_module("tests.histories.worlds")
    for seed in seeds:
        broken = checking.history_of(worlds.world_of(seed)).broken
        if broken is not None:
            return seed, broken
    return None, ""


class _Without(importlib.abc.MetaPathFinder):
    """Finds one module, without a safeguard."""

    def __init__(self, safeguard: Safeguard) -> None:
        self._safeguard, self._module = safeguard, safeguard.module
        self._name = ".".join(self._module.relative_to(ROOT).with_suffix("").parts)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        loader = _Loader(self._safeguard, fullname, str(self._module))
        return importlib.util.spec_from_file_location(fullname, self._module, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, safeguard: Safeguard, name: str, path: str) -> None:
        super().__init__(name, path)
        self._safeguard = safeguard

    def get_code(self, fullname: str) -> CodeType:
        """Compile anew: what was compiled before has the safeguard."""
        source = self.get_data(self.path).decode()
        text = source.replace(self._safeguard.before, self._safeguard.after)
        return compile(text, self.path, "exec")
