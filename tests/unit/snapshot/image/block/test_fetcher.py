"""The fetcher, by script: what is asked of whom, and in which order."""

import pytest

from snapshot.image.block.fetcher import (
    BlocksFetched,
    BlockWanted,
    FetchBlocks,
    Fetcher,
    FetchSettings,
    GiveUpBlock,
    HandOverBlock,
    Priority,
)
from snapshot.image.layer.index import BlockRef

DEMAND, HOT = Priority


def block(number, blob="blob", size=10):
    return BlockRef(f"{blob}:{number}", blob, number, number * size, size)


def apart(*numbers):
    """Blocks with others between them, so that no request holds two."""
    return tuple(block(number * 2) for number in numbers)


def a_fetcher(**changes):
    settings = {
        "tiers": ("peer", "registry"),
        "slots": 4,
        "reserved_slots": 2,
        "coalesce_bytes": 30,
        "bridge_bytes": 0,
    }
    return Fetcher(settings=FetchSettings(**settings | changes))


def want(fetcher, priority, *blocks):
    return fetcher.handle(BlockWanted(tuple(blocks), priority))


def asked(commands):
    return [
        (c.tier, [ref.number for ref in c.blocks]) for c in commands if isinstance(c, FetchBlocks)
    ]


def requests(commands):
    return [c.request for c in commands if isinstance(c, FetchBlocks)]


def arrive(fetcher, command):
    return fetcher.handle(
        BlocksFetched(command.request, frozenset(ref.digest for ref in command.blocks))
    )


def fail(fetcher, command):
    return fetcher.handle(BlocksFetched(command.request, frozenset()))


def test_a_block_is_asked_of_the_first_tier_and_handed_over():
    fetcher = a_fetcher()

    (command,) = want(fetcher, DEMAND, block(0))

    assert command == FetchBlocks(0, "peer", DEMAND, (block(0),))
    assert arrive(fetcher, command) == (HandOverBlock("blob:0"),)
    assert asked(want(fetcher, DEMAND, block(0))) == [("peer", [0])]  # anew: it is forgotten


def test_what_one_tier_lacks_is_asked_of_the_next_and_then_given_up():
    fetcher = a_fetcher()
    (first,) = want(fetcher, DEMAND, block(0))

    (second,) = fail(fetcher, first)

    assert second.tier == "registry"
    assert fail(fetcher, second) == (GiveUpBlock("blob:0"),)
    assert asked(want(fetcher, DEMAND, block(0))) == [("peer", [0])]  # anew: it is forgotten


def test_a_tier_that_has_a_part_is_asked_no_more_for_the_rest():
    fetcher = a_fetcher()
    (first,) = want(fetcher, HOT, block(0), block(1), block(2))

    commands = fetcher.handle(BlocksFetched(first.request, frozenset({"blob:1"})))

    assert commands[0] == HandOverBlock("blob:1")
    assert sorted(asked(commands)) == [("registry", [0]), ("registry", [2])]


def test_neighbours_are_fetched_in_one_request_up_to_a_size():
    commands = want(a_fetcher(), HOT, *[block(n) for n in range(5)])

    assert asked(commands) == [("peer", [0, 1, 2]), ("peer", [3, 4])]


def test_neighbours_that_were_wanted_later_or_in_another_order_come_along():
    commands = want(a_fetcher(), HOT, block(3), block(9), block(4))

    assert asked(commands) == [("peer", [3, 4]), ("peer", [9])]


def test_neighbours_of_another_blob_do_not_come_along():
    commands = want(a_fetcher(), HOT, block(0), block(1, blob="other"))

    assert asked(commands) == [("peer", [0]), ("peer", [1])]


def test_prefetch_leaves_slots_free_and_a_demand_uses_them_at_once():
    fetcher = a_fetcher()

    assert len(requests(want(fetcher, HOT, *apart(0, 1, 2, 3, 4)))) == 2
    assert asked(want(fetcher, DEMAND, block(99))) == [("peer", [99])]
    assert asked(want(fetcher, DEMAND, block(97))) == [("peer", [97])]


def test_a_demand_that_found_no_slot_is_first_when_one_is_free():
    fetcher = a_fetcher()
    running = [*want(fetcher, HOT, *apart(0, 1, 2, 3)), *want(fetcher, DEMAND, *apart(10, 11))]
    assert want(fetcher, DEMAND, block(99)) == ()

    commands = arrive(fetcher, running[0])

    assert asked(commands) == [("peer", [99])]


def test_prefetch_goes_in_the_order_it_was_wanted():
    fetcher = a_fetcher()
    order = apart(7, 3, 9, 1)
    commands = list(want(fetcher, HOT, *order))

    for command in commands:
        commands += [c for c in arrive(fetcher, command) if isinstance(c, FetchBlocks)]

    assert [c.blocks[0] for c in commands] == list(order)


def test_a_request_for_what_is_on_its_way_asks_nobody_again():
    fetcher = a_fetcher()
    (command,) = want(fetcher, HOT, block(0))

    assert want(fetcher, DEMAND, block(0)) == ()
    assert want(fetcher, HOT, block(0)) == ()
    assert arrive(fetcher, command) == (HandOverBlock("blob:0"),)


def test_a_queued_block_that_a_reader_now_waits_for_overtakes_all_prefetch():
    fetcher = a_fetcher()
    want(fetcher, HOT, *apart(0, 1, 2, 3, 4, 5))

    commands = want(fetcher, DEMAND, *apart(5))

    assert [(c.priority, c.blocks) for c in commands] == [(DEMAND, apart(5))]


def test_a_demand_whose_prefetch_failed_is_repeated_as_a_demand():
    fetcher = a_fetcher()
    (command, *_) = want(fetcher, HOT, *apart(0, 1, 2, 3))
    want(fetcher, DEMAND, *apart(0))

    commands = fail(fetcher, command)

    assert (commands[0].priority, commands[0].tier) == (DEMAND, "registry")


def test_an_answer_that_nobody_waits_for_changes_nothing():
    fetcher = a_fetcher()
    (command,) = want(fetcher, DEMAND, block(0))
    arrive(fetcher, command)

    assert arrive(fetcher, command) == ()
    assert fail(fetcher, command) == ()


def test_two_layers_with_the_same_block_fetch_it_once():
    one, other = BlockRef("same", "a", 0, 0, 10), BlockRef("same", "b", 5, 50, 10)

    assert len(want(a_fetcher(), DEMAND, one, other)) == 1


@pytest.mark.parametrize(
    "changes", [{"slots": 2, "reserved_slots": 2}, {"reserved_slots": 0}, {"tiers": ()}]
)
def test_settings_that_leave_somebody_without_a_slot_are_refused(changes):
    with pytest.raises(ValueError, match="leave at least one slot"):
        a_fetcher(**changes)


@pytest.mark.parametrize(
    ("bridge", "requests_of"),
    [
        (0, [[0], [2], [5]]),
        (9, [[0], [2], [5]]),
        (10, [[0, 2], [5]]),
        (19, [[0, 2], [5]]),
        (20, [[0, 2, 5]]),
    ],
)
def test_a_gap_is_bridged_up_to_its_limit_and_no_further(bridge, requests_of):
    fetcher = a_fetcher(slots=8, coalesce_bytes=100, bridge_bytes=bridge)

    commands = want(fetcher, HOT, *map(block, (0, 2, 5)))

    assert [numbers for _, numbers in asked(commands)] == requests_of


def test_a_gap_counts_in_the_size_of_a_request():
    fetcher = a_fetcher(coalesce_bytes=30, bridge_bytes=25)

    assert asked(want(fetcher, HOT, *map(block, (0, 2, 4)))) == [("peer", [0, 2]), ("peer", [4])]


def test_no_gap_is_bridged_to_another_blob_or_to_what_another_class_wants():
    fetcher = a_fetcher(slots=8, reserved_slots=7, coalesce_bytes=100, bridge_bytes=100)
    want(fetcher, HOT, block(0, blob="first"), block(6))

    commands = want(fetcher, DEMAND, block(0), block(2, blob="other"), block(4))

    assert ("peer", [0, 4]) in asked(commands)
    assert ("peer", [2]) in asked(commands)
    assert all(6 not in numbers for _, numbers in asked(commands))
