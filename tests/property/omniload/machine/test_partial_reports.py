"""Steps are the same whatever part of a range a loader reports at once, and whatever its samples weigh."""

from hypothesis import given
from hypothesis import strategies as st

from omniload.machine.messages import PublishPlans, ReadAhead, SamplesReported, Started, StepTaken
from tests.support.plane.builders import a_mix, a_planner, a_table

STEPS = 12


def a_mix_of(method, counted):
    return a_mix(
        weights={"web": 2.0, "code": 1.0},
        pack={"method": method},
        mix={"level": counted} if counted else {},
        loader={"memory": 1 << 20},
        version=2,
    )


def steps_of(mix, lengths_S, most, weights_S):
    """Return the samples of each step if reads return at most ``most`` records, in rotation."""
    planner = a_planner(mix, epoch=[len(lengths) for lengths in lengths_S])
    commands, plans, asked = list(planner.handle(Started())), {}, 0
    for step in range(STEPS):
        while commands:
            command = commands.pop(0)
            if isinstance(command, PublishPlans):
                plans |= {plan.step: plan.membership_digest() for plan in command.plans}
            if isinstance(command, ReadAhead):
                source, start = command.source, command.start
                stop = min(command.stop, start + most[asked % len(most)])
                asked += 1
                epoch = lengths_S[source]
                table = a_table([epoch[p % len(epoch)] for p in range(start, stop)], start=start)
                size_bytes = len(table) * weights_S[source]
                report = SamplesReported(source=source, table=table, size_bytes=size_bytes)
                commands += planner.handle(report)
        commands += planner.handle(StepTaken(step=step, dp_rank=0))
    return {step: plans[step] for step in range(STEPS)}


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@given(
    st.tuples(lengths, lengths),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.tuples(*(st.sampled_from([0, 4, 10_000, 1 << 22]) for _ in range(2))),
    st.sampled_from(["best_fit", "concat_and_split"]),
    st.sampled_from([None, "sample"]),
)
def test_steps_do_not_depend_on_how_reads_are_answered(lengths_S, most, weights_S, method, counted):
    mix = a_mix_of(method, counted)

    assert steps_of(mix, lengths_S, most, weights_S) == steps_of(mix, lengths_S, [1 << 20], (0, 0))
