"""Safeguards of the data plane: each is removed in a separate process, until a history breaks a promise.

The code is imported once, unchanged. A forked process imports again the module without its safeguard, and every
module that imports it, directly or indirectly.
"""

import builtins
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Caught", "Safeguard", "broken_undisturbed", "caught", "safeguards"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = ("omniload", "tests")
RUN = ("tests.histories.checking", "tests.histories.worlds")
"""The modules that run a history."""


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
        """The module that contains its text, once.

        Raises:
            LookupError: No module contains it, or several places do.
        """
        found: list[Path] = []
        for module, text in _texts().items():
            found += [module] * text.count(self.before)
        if len(found) != 1:
            raise LookupError(f"{self.holds}: its text stands {len(found)} times")
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Caught:
    """The way in which the loss of a safeguard was noticed."""

    safeguard: Safeguard
    seed: int | None
    """The seed of the broken history; ``None`` if none broke."""
    broken: str
    seconds: float


@cache
def _texts() -> dict[Path, str]:
    """Return the text of every module of the data plane."""
    modules = sorted((ROOT / "omniload").rglob("*.py"))
    return {module: module.read_text(encoding="utf-8") for module in modules}


def safeguards() -> list[Safeguard]:
    """Return all safeguards."""
    entries = tomllib.loads((HERE / "safeguards.toml").read_text(encoding="utf-8"))
    return [Safeguard(**entry) for entry in entries["safeguard"]]


def caught(found: Sequence[Safeguard], seeds: Iterable[int] | None = None) -> Iterator[Caught]:
    """Remove each safeguard and run histories until one breaks: the known seed, or ``seeds`` in order."""
    importers = _importers()
    _texts()  # read here once, not in each process
    for safeguard in found:
        began_s = time.monotonic()
        known = [] if safeguard.seed is None else [safeguard.seed]
        seed, broken = _in_a_fork(safeguard, importers, known if seeds is None else list(seeds))
        seconds = time.monotonic() - began_s
        yield Caught(safeguard=safeguard, seed=seed, broken=broken, seconds=seconds)


def broken_undisturbed(found: Sequence[Safeguard]) -> Iterator[str]:
    """Import each module that has a safeguard again, unchanged, and yield the promises that its histories break."""
    importers, of_module = _importers(), defaultdict(list)
    for safeguard in found:
        of_module[safeguard.module].append(safeguard)
    for group in of_module.values():
        as_it_is = replace(group[0], after=group[0].before)
        seeds = [safeguard.seed for safeguard in group if safeguard.seed is not None]
        _, broken = _in_a_fork(as_it_is, importers, seeds)
        if broken:
            yield broken


def _importers() -> dict[str, set[str]]:
    """Import the modules that run a history, and return the importers of each of our modules."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    # A module that was imported earlier no longer reports its own imports.
    for name in [name for name in _ours() if name != __name__]:
        del sys.modules[name]
    with _noting_imports(found):
        for name in RUN:
            import_module(name)
    for name in _ours():
        found[name.rpartition(".")[0]].add(name)  # a package is imported before its modules
    return found


@contextmanager
def _noting_imports(found: defaultdict[str, set[str]]) -> Iterator[None]:
    plain = builtins.__import__

    def noting(
        name: str,
        names: Mapping[str, Any] | None = None,
        inner: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if names is not None and name.split(".", maxsplit=1)[0] in OURS:
            for each in (name, *(f"{name}.{part}" for part in fromlist or ())):
                found[each].add(names["__name__"])
        return plain(name, names, inner, fromlist or (), level)

    builtins.__import__ = noting
    try:
        yield
    finally:
        builtins.__import__ = plain


def _ours() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in OURS]


def _forget(module: str, importers: Mapping[str, set[str]]) -> None:
    """Force a fresh import of a module, and of everything that would otherwise keep using the old one."""
    waiting, stale = [module], {__name__}
    while waiting:
        if (name := waiting.pop()) not in stale:
            stale.add(name)
            waiting += importers.get(name, ())
    for name in stale & {*_ours()} - {__name__}:
        package, _, inner = name.rpartition(".")
        del sys.modules[name]
        # A package returns its own attribute before it looks for a module.
        vars(sys.modules.get(package, ModuleType(""))).pop(inner, None)


def _in_a_fork(
    safeguard: Safeguard, importers: Mapping[str, set[str]], seeds: Sequence[int]
) -> tuple[int | None, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # it ends soon, and a garbage collection would copy each page that it shares with its parent
        os.close(reading)
        try:
            answer: tuple[int | None, str] = _first_broken(safeguard, importers, seeds)
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


def _first_broken(
    safeguard: Safeguard, importers: Mapping[str, set[str]], seeds: Sequence[int]
) -> tuple[int | None, str]:
    without = _Without(safeguard)
    _forget(without.name, importers)
    sys.meta_path.insert(0, without)
    checking, worlds = (import_module(name) for name in RUN)
    for seed in seeds:
        broken = checking.history_of(worlds.world_of(seed)).broken
        if broken is not None:
            return seed, broken
    return None, ""


class _Without(importlib.abc.MetaPathFinder):
    """Finds one module, without a safeguard."""

    def __init__(self, safeguard: Safeguard) -> None:
        self._safeguard, self._module = safeguard, safeguard.module
        self.name = ".".join(self._module.relative_to(ROOT).with_suffix("").parts)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self.name:
            return None
        loader = _Loader(self._safeguard, fullname, str(self._module))
        return importlib.util.spec_from_file_location(fullname, self._module, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, safeguard: Safeguard, name: str, path: str) -> None:
        super().__init__(name, path)
        self._safeguard = safeguard

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module again, because the compiled file still has the safeguard."""
        source = self.get_data(self.path).decode()
        text = source.replace(self._safeguard.before, self._safeguard.after)
        return compile(text, self.path, "exec")
