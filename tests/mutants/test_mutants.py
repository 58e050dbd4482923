"""Every mutant still applies to the code, and the tests that are to catch it are there."""

import ast
from collections import Counter

import pytest

from tests.house.modules import ROOT, tree_of
from tests.mutants.mutants import modules_naming, modules_with, mutants

ALL = mutants()


def test_mutants_are_spread_over_all_packages_and_told_apart():
    counts = Counter(mutant.package for mutant in ALL)

    assert sum(counts.values()) >= 60
    assert {package for package, count in counts.items() if count >= 8} == {
        "fusefs",
        "omniload",
        "snapshot",
        "trainer_integration",
    }
    assert len({(m.package, m.holds) for m in ALL}) == len(ALL)


def around(module, at, size):
    """Return the outermost statements of a module of which a place in its text is a part, as text.

    To parse all of the module for each mutant took the most of the time.
    """
    text = module.read_text(encoding="utf-8")
    first, last = (1 + text.count("\n", 0, place) for place in (at, at + size - 1))
    nodes = tree_of(module.relative_to(ROOT)).body
    heads = [(node, *getattr(node, "decorator_list", ())) for node in nodes]
    begins = [1, *(min(each.lineno for each in head) for head in heads)]
    begin = max(each for each in begins if each <= first)
    end = min((each for each in begins if each > last), default=text.count("\n") + 2)
    return "\n".join(text.split("\n")[begin - 1 : end - 1])


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: f"{m.package}: {m.holds}")
def test_a_mutant_applies_once_and_is_code(mutant):
    found = modules_with(mutant)
    assert len(found) == 1, f"its text stands in {found}; write it anew as the code is now"

    text = found[0].read_text(encoding="utf-8")
    sound = around(found[0], text.index(mutant.before), len(mutant.before))
    assert sound.count(mutant.before) == 1

    changed = ast.parse(sound.replace(mutant.before, mutant.after))
    assert ast.dump(changed) != ast.dump(ast.parse(sound))


def test_every_test_that_is_to_catch_one_is_there():
    _, missing = modules_naming({test for mutant in ALL for test in mutant.tests})

    assert missing == []
