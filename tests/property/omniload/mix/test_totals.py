"""A total, amounts and weights in one mix: the result of each source, checked against exact quotients by level.

The oracle divides nothing itself. It checks that every level sums to its whole, that each weight has its exact part
rounded down or up, and that the parts rounded up have the largest remainders.
"""

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plane.builders import a_mix

NAMES = tuple("abcdefgh")

weights = st.one_of(
    st.integers(1, 9),
    st.decimals("0.1", "99", places=2).map(float),
)


@st.composite
def levels(draw, names, whole, kind, depth=0):
    """Entries of one level that divide a whole: ``{name: entry}``; some are groups, some have amounts."""
    names, entries, left = list(names), {}, whole
    while names:
        count = draw(st.integers(1, len(names))) if depth < 2 else 1
        taken, names = names[:count], names[count:]
        stated = 0
        # The last entry has a weight, so a rest is always left for it.
        if names and left > 20 * len(NAMES) and draw(st.booleans()):
            stated = draw(st.integers(10 * len(taken), left // 2))
            left -= stated
        own = {kind: stated} if stated else {"weight": draw(weights)}
        if len(taken) == 1:
            entries[taken[0]] = own
            continue
        # The result of a weight is not known here: it is at least this amount, see below.
        inner = draw(levels(taken, stated or 10_000, kind, depth + 1))
        entries[f"group {taken[0]}"] = {**own, "of": inner}
    return entries


def sums(entries, found, at=()):
    """Return the amount of each entry, with its sources, as ``{(name, ...): amount}``."""
    of = {}
    for name, entry in entries.items():
        if isinstance(entry, dict) and "of" in entry:
            inner = sums(entry["of"], found, (*at, name))
            of |= inner
            of[(*at, name)] = sum(n for path, n in inner.items() if len(path) == len(at) + 2)
        else:
            of[(*at, name)] = found[name]
    return of


def require_divided(entries, whole, kind, of, at=()):
    here = {name: of[(*at, name)] for name in entries}
    assert sum(here.values()) == whole
    stated = {n: e[kind] for n, e in entries.items() if kind in e}
    assert {n: here[n] for n in stated} == stated
    shared = {n: Fraction(str(e["weight"])) for n, e in entries.items() if "weight" in e}
    quotas = {
        n: w * (whole - sum(stated.values())) / sum(shared.values()) for n, w in shared.items()
    }
    up = [q - floor(q) for n, q in quotas.items() if here[n] == floor(q) + 1]
    down = [q - floor(q) for n, q in quotas.items() if here[n] == floor(q)]
    assert len(up) + len(down) == len(quotas)
    assert max(down, default=0) <= min(up, default=1)
    for name, entry in entries.items():
        if "of" in entry:
            require_divided(entry["of"], here[name], kind, of, (*at, name))


@given(st.integers(2, 8), st.sampled_from(["samples", "tokens"]), st.data())
def test_amounts_are_taken_first_and_weights_share_the_rest_to_the_last_token(num, kind, data):
    # A weight is at least a part in 8,000 of its level, so two levels below it is 10,000.
    whole = data.draw(st.integers(10**12, 10**14))
    entries = data.draw(levels(NAMES[:num], whole, kind))

    mix = a_mix(version=2, sources=NAMES[:num], mix={"total": {kind: whole}, "amounts": entries})

    found = {name: getattr(amount, kind) for name, amount in mix.mix.amounts.items()}
    require_divided(entries, whole, kind, sums(entries, found))
    written = {name: {kind: amount} for name, amount in found.items()}
    # Everything that is true of amounts is true of this mix, because it is the same mix.
    assert mix == a_mix(version=2, sources=NAMES[:num], mix={"amounts": written})


@given(
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 10**12), min_size=2),
    st.just(0) | st.integers(1, 10**12),
)
def test_a_total_that_amounts_do_not_come_to_is_refused_unless_a_weight_takes_the_rest(
    amounts, total
):
    stated, missing = sum(amounts.values()), total
    whole = stated + missing
    mix = {
        "total": {"tokens": whole},
        "amounts": {name: {"tokens": n} for name, n in amounts.items()},
    }

    if missing:
        said = (
            f"{whole:,} tokens, and the amounts in it come to {stated:,}; .* the other {missing:,}"
        )
        with pytest.raises(ValueError, match=said):
            a_mix(version=2, sources=tuple(amounts), mix=mix)
        return
    found = a_mix(version=2, sources=tuple(amounts), mix=mix)
    assert sum(amount.tokens for amount in found.mix.amounts.values()) == whole
