"""Shared answers under any order of requests, answers, failures and interruptions."""

from collections import deque
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from fusefs.bridge.api.waiting import result_of
from fusefs.vfs.session import FreshSingleFlight

steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "answer", "fail", "stop", "turn"]),
        st.integers(0, 1),
        st.integers(0, 7),
    ),
    max_size=60,
)


class Loop:
    """Askers, a store that answers on command, and a clock that ticks with every step."""

    def __init__(self):
        self.now = 0
        self.sharing = FreshSingleFlight()
        self.asking = {}
        """Waiting askers: the time and subject of their questions."""
        self.ready = deque()
        self.questions = {0: [], 1: []}
        """Questions: the start, the end, and the future of the answer of each."""
        self.answers = []
        """Answers: the asker's time, the subject, and the question that was answered."""

    async def question(self, about):
        under_way = [q for q in self.questions[about] if q[1] is None]
        assert not under_way, "one at a time"
        mine = [self.now, None, Future()]
        self.questions[about].append(mine)
        try:
            return await result_of(mine[2])
        finally:
            mine[1] = self.now

    def ask(self, about):
        asker = self.sharing.call(about, lambda: self.question(about))
        self.asking[asker] = (self.now, about)
        self.run(asker)

    def run(self, asker):
        try:
            future = asker.send(None)
        except StopIteration as stop:
            self.answers.append((*self.asking.pop(asker), stop.value))
        except OSError as error:
            self.answers.append((*self.asking.pop(asker), error.args[0]))
        else:
            future.add_done_callback(lambda _: self.ready.append(asker))

    def turn(self):
        """Let an asker continue whose wait is over."""
        while self.ready:
            asker = self.ready.popleft()
            if asker in self.asking:
                self.run(asker)
                return

    def end_question(self, about, *, fails):
        for question in self.questions[about]:
            if not question[2].done():
                if fails:
                    question[2].set_exception(OSError(question))
                else:
                    question[2].set_result(question)

    def stop(self, pick):
        if self.asking:
            asker = list(self.asking)[pick % len(self.asking)]
            del self.asking[asker]
            asker.close()

    def finish(self):
        while self.asking:
            self.now += 1
            for about in (0, 1):
                self.end_question(about, fails=False)
            assert self.ready, "somebody waits for nobody"
            self.turn()


def run(taken):
    loop = Loop()
    for what, about, pick in taken:
        loop.now += 1
        if what == "ask":
            loop.ask(about)
        elif what == "stop":
            loop.stop(pick)
        elif what == "turn":
            loop.turn()
        else:
            loop.end_question(about, fails=what == "fail")
    loop.finish()
    return loop


@given(steps)
def test_everybody_is_answered_and_by_a_question_that_began_no_earlier_than_it_asked(taken):
    loop = run(taken)

    asked = sum(what == "ask" for what, _, _ in taken)
    stopped = sum(what == "stop" for what, _, _ in taken)
    assert asked - stopped <= len(loop.answers) <= asked
    for when, about, question in loop.answers:
        assert question in loop.questions[about]
        assert question[0] >= when
    assert loop.sharing._rounds == {}


@given(steps.map(lambda taken: [step for step in taken if step[0] != "stop"]))
def test_nobody_waits_for_more_than_the_question_under_way_and_the_next(taken):
    loop = run(taken)

    for when, about, answer in loop.answers:
        waited = [q for q in loop.questions[about] if q[1] >= when and q[0] <= answer[0]]
        assert len(waited) <= 2, (when, waited)


@given(st.integers(1, 30), st.booleans())
def test_however_many_ask_at_once_two_questions_do(askers, fails):
    taken = [("ask", 0, 0)] * askers
    taken += [("fail" if fails else "answer", 0, 0)]

    assert len(run(taken).questions[0]) == min(askers, 2)
