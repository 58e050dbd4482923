"""Braces of a pattern, against what a shell writes."""

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
}
"""What bash 5.2 prints for ``echo PATTERN``."""


@pytest.mark.parametrize("pattern", BY_BASH)
def test_braces_stand_for_what_a_shell_makes_of_them(pattern):
    assert " ".join(expanded(pattern)) == BY_BASH[pattern]


@pytest.mark.parametrize("pattern", ["{0..99999999999}", "{0..999}{0..999}", "{a,b}" * 40])
def test_braces_that_stand_for_too_many_names_are_refused_at_once(pattern):
    with pytest.raises(ValueError, match="more than 200,000 names"):
        expanded(pattern)


def test_a_range_that_falls_is_refused():
    with pytest.raises(ValueError, match=r"the range \{9\.\.3\} falls"):
        expanded("a-{9..3}.tar")
