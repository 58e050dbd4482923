"""The choice of the nearest trace and the users known to an image agree with models too simple to be wrong."""

from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from snapshot.image.block.prefetch import Outstanding
from snapshot.image.start.run import ids_of
from snapshot.image.trace.trace import command_key, nearest

words = st.lists(st.sampled_from(["a", "b", "c"]), max_size=4)


def shared(one, other):
    return max(n for n in range(5) if one[:n] == other[:n] and n <= min(len(one), len(other)))


@given(st.lists(words, max_size=6), words)
def test_no_command_is_nearer_than_the_nearest(commands, wanted):
    place = nearest(commands, wanted)

    most = max((shared(command, wanted) for command in commands), default=0)
    if place is None:
        assert most == 0
    else:
        assert shared(commands[place], wanted) == most > 0


@given(st.lists(words, max_size=6), words)
def test_the_command_itself_is_always_the_nearest(commands, wanted):
    if wanted:
        assert [*commands, wanted][nearest([*commands, wanted], wanted)] == wanted


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_commands_have_one_key_each(one, other):
    assert (command_key(one) == command_key(other)) == (one == other)


@given(st.text(max_size=20), st.text(max_size=60), st.text(max_size=60))
def test_whatever_an_image_claims_there_are_numbers_or_an_error(user, passwd, group):
    try:
        ids = ids_of(user, passwd, group)
    except ConfigError:
        ids = ()
    assert all(isinstance(number, int) and number >= 0 for number in ids)
    assert ids or user


@given(st.sets(st.integers(0, 9)), st.lists(st.tuples(st.integers(0, 9), st.booleans())))
def test_outstanding_blocks_are_those_that_have_not_settled(expected, events):
    outstanding = Outstanding(map(str, expected))
    left, failed = set(expected), set()

    for number, came in events:
        outstanding.settled(str(number), came)
        if number in left and not came:
            failed.add(number)
        left.discard(number)

    outstanding.close()
    seen = []
    assert outstanding.wait(seen.append) == (not left)
    assert seen == [len(left)]
    assert outstanding.failed == len(failed)
