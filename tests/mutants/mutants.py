"""Mutants: small defects put into the code, each of which some test must catch."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Mutant", "modules_naming", "modules_with", "mutants"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_DEFINED = re.compile(r"^\s*def (\w+)\(", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect: a text of the code, and what stands in its place."""

    package: str
    holds: str
    """What no longer holds with it, as a sentence."""
    before: str
    """Stands once in the package: the module is found by it, wherever that is moved."""
    after: str
    tests: tuple[str, ...]
    """Functions of which one must fail."""


def mutants():
    """Return all of them, by package and in the order of its file."""
    return [
        Mutant(package=file.stem, **{**entry, "tests": tuple(entry["tests"])})
        for file in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]
    ]


@cache
def texts_of(folder):
    """Return the text of every module below a folder, as it is when first asked for: a mutant is taken out again."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def modules_with(mutant, root=ROOT):
    """Return the modules in which its text stands, once for each time."""
    found = []
    for module, text in texts_of(root / mutant.package).items():
        found += [module] * text.count(mutant.before)
    return found


def modules_naming(names, root=ROOT):
    """Return the test modules that define one of these functions, and the names that none defines."""
    modules, missing = set(), set(names)
    for module in sorted((root / "tests").rglob("test_*.py")):
        here = set(names) & {*_DEFINED.findall(module.read_text(encoding="utf-8"))}
        if here:
            modules.add(module)
            missing -= here
    return sorted(modules), sorted(missing)
