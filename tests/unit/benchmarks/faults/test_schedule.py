"""Scripts of faults: a seed draws one, what is printed is read back, and a line that is none is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults.schedule import (
    KINDS,
    NO_ROLE,
    OF_ROLES,
    Fault,
    Faults,
    drawn,
    together,
    written,
)

ROLES = ("constructor-0", "loader-0", "loader-1", "planner", "reader-0", "shadow-0", "shadow-1")
kinds = st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True).map(tuple)
roles = st.lists(st.sampled_from(["loader", "planner", "shadow", "reader"]), min_size=1).map(tuple)


@given(seed=st.integers(0, 1000), kinds=kinds, roles=roles)
def test_a_drawn_script_is_read_back_as_it_is_printed(seed, kinds, roles):
    faults = Faults(count=30, roles=roles, kinds=kinds, seed=seed)

    script = drawn(faults, ROLES)

    assert written("\n".join(map(str, script))) == script
    assert drawn(faults, reversed(ROLES)) == script
    assert len(together(script)) == 30  # one after the other
    assert {fault.kind for fault in script} <= set(kinds)
    for fault in script:
        assert fault.role.startswith(roles) if fault.kind in OF_ROLES else fault.role == NO_ROLE


def test_another_seed_draws_another_script():
    faults = [Faults(count=20, roles=("loader",), kinds=("kill", "stop"), seed=n) for n in (1, 2)]

    assert drawn(faults[0], ROLES) != drawn(faults[1], ROLES)


def test_roles_that_are_not_there_are_told():
    with pytest.raises(ValueError, match=r"no role begins with reader or worker; there are \['p"):
        drawn(Faults(count=1, roles=("reader", "worker")), ["planner"])


def test_a_script_may_have_remarks_and_faults_at_once():
    script = written(
        """
        # step role kind seconds
        40  loader-0  kill      # with its shadow
        40  shadow-0  kill
        90  -         store  7.5
        90  planner   stop
        95  -         delay
        """
    )

    assert [[str(fault) for fault in faults] for faults in together(script)] == [
        ["40 loader-0 kill", "40 shadow-0 kill"],
        ["90 - store 7.5", "90 planner stop"],
        ["95 - delay 20"],
    ]
    assert [fault.what for fault in script] == [
        *("kill loader", "kill shadow", "store", "stop planner", "delay")
    ]
    assert script[-1] == Fault(step=95, role=NO_ROLE, kind="delay", seconds=20.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("20 loader-0", r"line 1: '20 loader-0': write a step, a role or -, a kind"),
        ("\nsoon loader-0 kill", "line 2: .*'soon' is no step"),
        ("-1 loader-0 kill", "'-1' is no step"),
        ("² loader-0 kill", "is no step"),
        ("20 loader-0 hit", "'hit' is no kind; write one of kill, "),
        ("20 - kill", "kill strikes a role; name one such as loader-0"),
        ("20 loader-0 store", "store strikes no role; write - and not 'loader-0'"),
        ("20 loader-0 kill 5", "kill is done at once; leave '5' out"),
        ("20 - store long", "'long' is no number of seconds"),
        ("20 - store nan", "nan seconds; write more than 0 and at most 600"),
        ("20 - store 0", "0 seconds; write more than 0"),
        ("20 loader-0 kill\n10 loader-0 kill", "line 2: step 10 comes behind step 20"),
    ],
)
def test_a_line_that_is_none_of_a_script_is_told(text, why):
    with pytest.raises(ValueError, match=why):
        written(text)
