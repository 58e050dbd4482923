"""A state that is refused as unreachable is never one that a run has reached, whatever the mix."""

import json

from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.possible import require_possible
from omniload.mix.state import MixState
from tests.support.plane.builders import PACKS, a_mix, with_overlong, with_packs
from tests.support.plane.simulation import Simulation

NAMES = ("books", "code", "web")
STEPS = 12

records = st.lists(st.integers(1, 50), min_size=1, max_size=3) | st.just([])
epochs = st.lists(records, max_size=12).map(lambda rows: [*rows, [9]])
overlongs = st.sampled_from(["split", "truncate", "drop"])

packs = st.sampled_from([None, None, *PACKS])


@st.composite
def mixes(draw):
    def weights():
        return {name: draw(st.integers(1, 5)) for name in NAMES}

    stages = [{"from_step": 0, "weights": weights()}]
    if draw(st.booleans()):
        stages.append({"from_step": 4, "weights": weights(), "ramp_steps": 2})
    mix = a_mix(
        sources=NAMES,
        rows=draw(st.sampled_from([1, 2, 8])),
        micro_rows=1,
        length=16,
        pack={
            "method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"])),
            "lookahead_rows": draw(st.integers(0, 4)),
            "overlong": draw(overlongs),
        },
        mix={
            "stages": stages,
            "level": draw(st.sampled_from(["token", "sample"])),
            "stop": draw(
                st.sampled_from(["never", "first_exhausted", "all_exhausted", "each_once"])
            ),
        },
        runtime={"prefetch_steps": draw(st.sampled_from([1, 4, 16]))},
    )
    mix = with_overlong(mix, [draw(st.none() | overlongs) for _ in NAMES])
    return with_packs(mix, [draw(packs) for _ in NAMES])


@given(mixes(), st.lists(epochs, min_size=3, max_size=3))
def test_every_state_of_a_run_is_a_possible_one(mix, lengths):
    simulation = Simulation(mix=mix, epochs=lengths, num_steps=STEPS)
    simulation.run()

    assert simulation.states
    for saved in simulation.states.values():
        content = json.loads(json.dumps(saved))
        state = MixState.from_json(content, mix.names, simulation.planner.fingerprint)
        require_possible(state, mix, [len(epoch) for epoch in simulation.epochs])
