"""Answers that many who ask at once share: who may take which, and what becomes of errors."""

from concurrent.futures import Future

import pytest

from fusefs.bridge.api.waiting import result_of, run_blocking
from fusefs.vfs.fresh_single_flight import FreshSingleFlight


class Store:
    """Answers questions when the test says so."""

    def __init__(self):
        self.questions = []

    async def question(self):
        self.questions.append(Future())
        return await result_of(self.questions[-1])


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def asked(store):
    sharing = FreshSingleFlight()
    return lambda about="f": sharing.call(about, store.question)


def begun(*askers):
    for asker in askers:
        assert not asker.send(None).done()
    return askers


def test_who_asks_alone_is_answered_by_one_question(store, asked):
    (asker,) = begun(asked())
    store.questions[0].set_result("now")

    assert run_blocking(asker) == "now"
    assert len(store.questions) == 1


def test_who_asks_later_asks_anew(store, asked):
    for answer in ("first", "second"):
        (asker,) = begun(asked())
        store.questions[-1].set_result(answer)
        assert run_blocking(asker) == answer

    assert len(store.questions) == 2


def test_all_who_ask_during_a_question_share_the_next_one(store, asked):
    first, *others = begun(asked(), asked(), asked(), asked())
    assert len(store.questions) == 1
    store.questions[0].set_result("old")
    assert run_blocking(first) == "old"

    begun(others[0])
    store.questions[1].set_result("new")

    assert [run_blocking(other) for other in others] == ["new"] * 3
    assert len(store.questions) == 2


def test_who_asks_during_the_second_question_waits_for_a_third(store, asked):
    first, second = begun(asked(), asked())
    store.questions[0].set_result(1)
    run_blocking(first)
    begun(second)
    (third,) = begun(asked())
    store.questions[1].set_result(2)
    run_blocking(second)
    begun(third)
    store.questions[2].set_result(3)

    assert run_blocking(third) == 3


def test_questions_about_other_things_do_not_wait(store, asked):
    begun(asked("f"), asked("g"))

    assert len(store.questions) == 2


def test_an_error_reaches_all_who_share_it_and_nobody_else(store, asked):
    first, *others = begun(asked(), asked(), asked())
    store.questions[0].set_exception(TimeoutError("first"))
    with pytest.raises(TimeoutError, match="first"):
        run_blocking(first)
    begun(others[0])
    store.questions[1].set_exception(TimeoutError("second"))

    for other in others:
        with pytest.raises(TimeoutError, match="second"):
            run_blocking(other)
    (later,) = begun(asked())
    store.questions[2].set_result("here")
    assert run_blocking(later) == "here"


def test_who_is_stopped_while_it_asks_loses_nobody(store, asked):
    first, *others = begun(asked(), asked(), asked())
    first.close()

    begun(others[0])
    store.questions[1].set_result("new")
    assert [run_blocking(other) for other in others] == ["new"] * 2


def test_who_is_stopped_while_it_waits_for_its_turn_loses_nobody(store, asked):
    first, second, *others = begun(asked(), asked(), asked(), asked())
    second.close()
    begun(*others)  # the question that was under way still is
    assert len(store.questions) == 1
    store.questions[0].set_result("old")
    run_blocking(first)
    begun(others[0])
    store.questions[1].set_result("new")

    assert [run_blocking(other) for other in others] == ["new"] * 2


def test_who_is_stopped_while_it_shares_is_not_missed(store, asked):
    first, second, third = begun(asked(), asked(), asked())
    third.close()
    store.questions[0].set_result("old")
    run_blocking(first)
    begun(second)
    store.questions[1].set_result("new")

    assert run_blocking(second) == "new"


def test_a_change_waits_for_the_question_under_way_and_is_shared_by_nobody(store):
    sharing = FreshSingleFlight()
    (first,) = begun(sharing.call("f", store.question))
    changes = begun(*(sharing.exclusive("f", store.question) for _ in range(2)))
    later = begun(*(sharing.call("f", store.question) for _ in range(2)))
    begun(sharing.exclusive("g", store.question))
    assert len(store.questions) == 2, "the first, and that about another thing"

    for waiting, answer in ((first, "old"), (changes[0], 1), (changes[1], 2)):
        begun(waiting) if waiting is not first else None
        store.questions[-1 if waiting is not first else 0].set_result(answer)
        assert run_blocking(waiting) == answer
    begun(later[0])
    store.questions[-1].set_result("new")

    assert [run_blocking(one) for one in later] == ["new", "new"]
    assert len(store.questions) == 5


def test_a_change_that_fails_or_is_stopped_is_in_nobodys_way(store):
    sharing = FreshSingleFlight()
    failing, stopped = begun(*(sharing.exclusive("f", store.question) for _ in range(2)))
    (asker,) = begun(sharing.call("f", store.question))
    stopped.close()
    store.questions[0].set_exception(TimeoutError("no"))
    with pytest.raises(TimeoutError, match="no"):
        run_blocking(failing)
    begun(asker)
    store.questions[-1].set_result("here")

    assert run_blocking(asker) == "here"


def test_nothing_is_kept_of_what_was_answered(store):
    sharing = FreshSingleFlight()
    for outcome in ("answer", "error", "stop"):
        (asker,) = begun(sharing.call(outcome, store.question))
        if outcome == "answer":
            store.questions[-1].set_result(1)
            run_blocking(asker)
        elif outcome == "error":
            store.questions[-1].set_exception(OSError("no"))
            with pytest.raises(OSError, match="no"):
                run_blocking(asker)
        else:
            asker.close()

    assert sharing._rounds == {}
