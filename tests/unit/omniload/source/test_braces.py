"""Braces of a pattern, compared with a shell."""

import pytest

from omniload.source.braces import expanded

BY_BASH = {
    "plain.tar": "plain.tar",
    "a-{0..3}.tar": "a-0.tar a-1.tar a-2.tar a-3.tar",
    "a-{08..11}.tar": "a-08.tar a-09.tar a-10.tar a-11.tar",
    "a-{000..2}.tar": "a-000.tar a-001.tar a-002.tar",
    "a-{9..010}": "a-009 a-010",
    "{train,test}/x-{0..1}.tar": "train/x-0.tar train/x-1.tar test/x-0.tar test/x-1.tar",
    "{a{1,2},b}.tar": "a1.tar a2.tar b.tar",
    "a{}b{x}c.tar": "a{}b{x}c.tar",
    "a{b.tar": "a{b.tar",
    "a}b.tar": "a}b.tar",
    "x{a,,b}": "xa x xb",
    "{{0..1}": "{0 {1",
    "{a,b{c}": "{a,b{c}",
    "{a{1,2}}": "{a1} {a2}",
    "{{a,b},{c,d}}-{1..2}": "a-1 a-2 b-1 b-2 c-1 c-2 d-1 d-2",
    "a}{b,c}{d": "a}b{d a}c{d",
}
"""Output of bash 5.2 for ``echo PATTERN``."""


@pytest.mark.parametrize("pattern", BY_BASH)
def test_braces_stand_for_what_a_shell_makes_of_them(pattern):
    assert " ".join(expanded(pattern)) == BY_BASH[pattern]


HOSTILE = {
    "{0..99999999999}": "more than 200,000 names",
    "{0..999}{0..999}": "more than 200,000 names",
    "{a,b}" * 100_000: "more than 200,000 names",
    "{a," * 50_000 + "}" * 50_000: "braces lie deeper than 32",
    "{0..199999}" + "x" * 400_000: "names of more than 64 MiB together",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("pattern", "said"), HOSTILE.items(), ids=lambda text: text[:24])
def test_a_hostile_pattern_costs_no_more_than_its_length(pattern, said):
    with pytest.raises(ValueError, match=said):
        expanded(pattern)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pattern", ["{" * 500_000, "{" * 250_000 + "}" * 250_000])
def test_braces_without_a_choice_are_letters_however_many(pattern):
    assert expanded(pattern) == [pattern]


def test_a_range_that_falls_is_refused():
    with pytest.raises(ValueError, match=r"the range \{9\.\.3\} falls"):
        expanded("a-{9..3}.tar")
