"""A run against its unbroken replay."""

import pytest
from click.testing import CliRunner

from omniload.actors.plane import PlaneSpec
from omniload.base.cli import main
from omniload.base.errors import IntegrityError, StateError
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from tests.support.trainer.run_lines import a_run_folder, a_step
from trainer_integration.cli import command
from trainer_integration.report.proof import (
    PROOF_NAME,
    compared,
    logged_digests,
    prove,
    read_proof,
    replayed_digests,
)


@pytest.fixture
def corpus(tmp_path):
    """A mix of two token sources, and the digests of its first six steps."""
    mix = a_corpus(tmp_path, records=60, shards=1)
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1), num_steps=6)
    return mix, dict(replayed_digests(spec))


def a_run(tmp_path, corpus, steps=range(6), **changed):
    mix, digests = corpus
    wrong = {int(name.removeprefix("step_")): digest for name, digest in changed.items()}
    lines = [a_step(step, digest=wrong.get(step, digests[step])) for step in steps]
    return a_run_folder(tmp_path, mix, lines)


def test_equal_digests_in_every_attempt_are_a_proof():
    proof = compared({0: "a", 1: "b"}, {0: ["a"], 1: ["b", "b"]}, 1.0)

    assert proof.holds
    assert proof.num_logged == 3
    assert [step.step for step in proof.repeated] == [1]
    assert proof.require() is proof


def test_the_first_step_that_differs_is_named_with_both_digests():
    proof = compared({0: "a", 1: "b", 2: "c"}, {0: ["a"], 1: ["x"], 2: ["y"]}, 1.0)

    with pytest.raises(IntegrityError, match=r"step 1 was trained on samples x, .* sees b"):
        proof.require()


def test_an_earlier_attempt_counts_though_a_later_one_was_right():
    proof = compared({0: "a"}, {0: ["x", "a"]}, 1.0)

    with pytest.raises(IntegrityError, match=r"step 0 .* x and a"):
        proof.require()


def test_a_step_that_no_attempt_logged_breaks_the_proof():
    proof = compared({0: "a", 1: "b", 2: "c"}, {0: ["a"], 2: ["c"]}, 1.0)

    with pytest.raises(IntegrityError, match="step 1 is in no line of the log"):
        proof.require()


def test_a_step_beyond_the_end_of_the_mix_breaks_the_proof():
    with pytest.raises(IntegrityError, match=r"step 1 .* no samples at all"):
        compared({0: "a"}, {0: ["a"], 1: ["b"]}, 1.0).require()


def test_digests_are_gathered_over_attempts_in_the_order_of_the_log():
    lines = [a_step(0, digest="a"), a_step(1, digest="b"), a_step(1, digest="c", attempt=1)]

    assert logged_digests(lines, 0) == {0: ["a"], 1: ["b", "c"]}
    assert logged_digests(lines, 1) == {1: ["b", "c"]}


def test_a_run_without_digests_cannot_be_proved():
    with pytest.raises(StateError, match="digest: true"):
        logged_digests([a_step(0, digest=None)], 0)


def test_a_run_without_steps_cannot_be_proved():
    with pytest.raises(StateError, match="no step from step 7 on"):
        logged_digests([a_step(0)], 7)


def test_a_run_is_replayed_from_its_own_record(tmp_path, corpus):
    run = a_run(tmp_path, corpus)
    told = []

    proof = prove(run, tell=lambda done, total: told.append((done, total)))

    assert proof.holds
    assert [step.step for step in proof.steps] == list(range(6))
    assert told[-1] == (6, 6)
    assert read_proof(run) == proof


def test_a_mix_file_that_was_edited_after_the_run_does_not_matter(tmp_path, corpus):
    run = a_run(tmp_path, corpus)
    (tmp_path / "mix.yaml").write_text("version: 1")

    assert prove(run).holds


def test_a_log_that_begins_late_lacks_its_first_steps(tmp_path, corpus):
    run = a_run(tmp_path, corpus, steps=range(2, 6))

    with pytest.raises(IntegrityError, match="step 0 is in no line"):
        prove(run).require()


def test_a_proof_from_a_later_step_needs_the_journal(tmp_path, corpus):
    run = a_run(tmp_path, corpus)

    with pytest.raises(StateError, match="no journal"):
        prove(run, from_step=3)


def test_a_proof_from_a_later_step_starts_where_the_journal_says(tmp_path, corpus):
    mix, _ = corpus
    run = a_run(tmp_path, corpus)
    spec = PlaneSpec(
        mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1), run_dir=run, num_steps=6
    )
    assert len(list(replayed_digests(spec))) == 6

    proof = prove(run, from_step=3)

    assert proof.holds
    assert [step.step for step in proof.steps] == [3, 4, 5]


def test_a_folder_without_a_proof_has_none(tmp_path):
    assert read_proof(tmp_path) is None


def test_a_damaged_proof_is_refused(tmp_path):
    (tmp_path / PROOF_NAME).write_text('{"version": 9}')

    with pytest.raises(StateError, match="not a proof of this release"):
        read_proof(tmp_path)


def test_verify_ends_with_5_where_a_digest_differs(tmp_path, corpus, capsys):
    run = a_run(tmp_path, corpus, step_4="feedfeedfeedfeed")

    with pytest.raises(SystemExit) as ended:
        main(["train", "verify", str(run)])

    assert ended.value.code == 5
    shown = capsys.readouterr()
    assert "step 4 was trained on samples feedfeedfeedfeed" in shown.err
    assert "not proved" in shown.out


def test_verify_tells_a_proof_and_puts_it_into_the_report(tmp_path, corpus):
    run = a_run(tmp_path, corpus)

    result = CliRunner().invoke(command, ["verify", str(run)], catch_exceptions=False)

    assert result.exit_code == 0
    assert "proved: steps 0 to 5" in result.output
    assert "Proved: same samples" in (run / "report.html").read_text()


def test_verify_finds_the_run_of_a_training_file(tmp_path, corpus):
    a_run(tmp_path, corpus)
    (tmp_path / "train.yaml").write_text("{version: 1, mix: mix.yaml, steps: 60, run_dir: run}")

    result = CliRunner().invoke(command, ["verify", str(tmp_path / "train.yaml"), "--json"])

    assert '"holds": true' in result.output


def test_verify_refuses_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["train", "verify", str(tmp_path)])

    assert ended.value.code == 4
