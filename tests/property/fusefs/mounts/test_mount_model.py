"""The mount as a state machine, compared with a plain directory; Hypothesis makes failures small."""

import os
import random
import shutil

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.fusefs.model import mounted_pair, random_operation

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_any_sequence_of_operations_answers_as_a_plain_directory_does(bridge):
    with mounted_pair({"bridge": bridge}) as pair:

        class MountAgainstDirectory(RuleBasedStateMachine):
            def __init__(self):
                super().__init__()
                pair.empty()
                self.steps = 0

            @rule(seed=st.integers(0, 2**32))
            def step(self, seed):
                pair.do(*random_operation(random.Random(seed)))
                self.steps += 1

            @rule(slot=st.integers(0, 3))
            def reopen_everything(self, slot):
                for other in range(4):
                    if other != slot:
                        pair.do("close", other)

            @invariant()
            def trees_agree_now_and_then(self):
                if self.steps % 20 == 19:
                    pair.check()

            def teardown(self):
                pair.check()

        run_state_machine_as_test(
            MountAgainstDirectory,
            settings=settings(
                max_examples=25,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
