"""Common code of both runtimes: the creation of a planner, and refusals before anything starts."""

from dataclasses import replace

import pytest

from omniload.actors.opening import runtime_of
from omniload.actors.plane import PlaneSpec, join_world
from omniload.actors.planner_journal import open_journal
from omniload.actors.planning import make_planner, make_successor, tokenizer_digest
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.machine.messages import (
    AppendJournal,
    AppendWorld,
    ChangeAsked,
    PublishPlans,
    ResizeAsked,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.mix.edits.edit import AddSource, Edit, FitCost
from omniload.mix.edits.edits_file import write_history
from omniload.mix.edits.found import found_in
from omniload.mix.edits.history import History
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.journal.reading import read_journal
from omniload.mix.sources import ParquetSource
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import World
from tests.support.plane.builders import a_mix, a_table, some_facts

FACTS = some_facts([100, 100])


def a_spec(tmp_path, mix=None, *, dp=1, cp=1, **changes):
    return PlaneSpec(
        mix=mix or a_mix(), base_dir=tmp_path, tree=ClientPlaceTree.of(dp=dp, cp=cp), **changes
    )


def test_a_new_run_starts_at_step_zero(tmp_path):
    planner = make_planner(a_spec(tmp_path, num_steps=9), FACTS)

    assert planner.state.step == 0
    assert planner.num_steps == 9


def test_a_saved_state_is_taken_up_by_another_mesh(tmp_path):
    first = make_planner(a_spec(tmp_path), FACTS)
    first.handle(Started())
    for s in range(2):
        first.handle(SamplesReported(source=s, table=a_table([10] * 60)))
    saved = first.state_at(3)

    assert make_planner(a_spec(tmp_path, dp=4, state=saved), FACTS).state_at(3) == saved


def test_a_state_of_another_mix_or_other_data_is_refused(tmp_path):
    saved = make_planner(a_spec(tmp_path), FACTS).state_at(0)

    with pytest.raises(StateError, match="seed: 7 saved, 8 now"):
        make_planner(a_spec(tmp_path, a_mix(seed=8), state=saved), FACTS)
    with pytest.raises(StateError, match=r"sources\.web\.records: 100 saved, 101 now"):
        make_planner(a_spec(tmp_path, state=saved), some_facts([100, 101]))


def test_the_journal_is_kept_in_the_folder_of_the_run(tmp_path):
    planner = make_planner(a_spec(tmp_path), FACTS)

    open_journal(tmp_path / "runs" / "a", planner).close()

    assert read_journal(tmp_path / "runs" / "a" / JOURNAL_NAME) == (planner.state_at(0), [])
    assert open_journal(None, planner) is None


@pytest.mark.parametrize(
    ("kind", "dp", "runtime"),
    [("auto", 1, "local"), ("auto", 2, "ray"), ("local", 2, "local"), ("ray", 1, "ray")],
)
def test_auto_takes_threads_for_one_rank_and_ray_for_several(tmp_path, kind, dp, runtime):
    spec = a_spec(tmp_path, a_mix(runtime={"kind": kind}), dp=dp)

    assert runtime_of(spec) == runtime


def test_the_digest_of_a_tokenizer_follows_its_file(tmp_path):
    mix = a_mix(tokenizer={"type": "bpe", "path": "t.json", "end_of_document": "<end>"})
    file = tmp_path / "t.json"
    file.write_text("one")
    first = tokenizer_digest(mix, tmp_path)
    file.write_text("two")

    assert tokenizer_digest(mix, tmp_path) != first
    assert first.endswith("<end>")
    begun = mix.tokenizer.model_copy(update={"begin_of_document": "<bos>"})
    assert tokenizer_digest(mix.model_copy(update={"tokenizer": begun}), tmp_path) not in {
        first,
        tokenizer_digest(mix, tmp_path),
    }


def test_the_digest_of_a_file_of_ranks_follows_what_the_mix_says_of_it(tmp_path):
    (tmp_path / "own.tiktoken").write_text("ranks")

    def digest(**changes):
        said = {"type": "tiktoken", "path": "own.tiktoken", "encoding": "gpt2", **changes}
        return tokenizer_digest(a_mix(tokenizer=said), tmp_path)

    others = [{"encoding": "o200k_base"}, {"special_tokens": {"<end>": 5}}]

    assert digest() == digest()
    assert len({digest(), *(digest(**other) for other in others)}) == 3
    assert digest(end_of_document="<|endoftext|>") == digest() + "<|endoftext|>"


def test_a_missing_tokenizer_is_a_configuration_error(tmp_path):
    mix = a_mix(tokenizer={"type": "bpe", "path": "t.json"})

    with pytest.raises(ConfigError, match=r"no such file; give the path of a tokenizer\.json"):
        tokenizer_digest(mix, tmp_path)


def test_bytes_and_no_tokenizer_need_no_file(tmp_path):
    assert tokenizer_digest(a_mix(), tmp_path) == "none"
    assert tokenizer_digest(a_mix(tokenizer={"type": "bytes"}), tmp_path) == "bytes"


def planned(planner, journal, lengths=(10,) * 60):
    """Plan as far as these samples go and no rank has taken a step; return the steps that were published."""
    steps = []
    tables = [a_table(lengths, start=floor) for floor in planner.state.floors()]
    events = [Started(), *(SamplesReported(source=s, table=t) for s, t in enumerate(tables))]
    for command in (command for event in events for command in planner.handle(event)):
        match command:
            case AppendJournal(record=record):
                journal.append(record)
            case PublishPlans(plans=plans):
                steps += [plan.step for plan in plans]
    return steps


def test_a_planner_takes_over_where_every_rank_must_be_and_knows_the_states_behind(tmp_path):
    spec = a_spec(tmp_path)
    first = make_planner(spec, FACTS)
    with open_journal(tmp_path, first, durable=False) as journal:
        planned(first, journal)
        for rank_has in range(4):
            for command in first.handle(StepTaken(step=rank_has, dp_rank=0)):
                if isinstance(command, AppendJournal):
                    journal.append(command.record)
    before = (tmp_path / JOURNAL_NAME).read_bytes()
    reached = first.state.step

    second, journal = make_successor(spec, FACTS, tmp_path, life=1)
    with journal:
        began_at = second.state.step
        known = [second.state_at(step) for step in range(began_at, reached + 1)]
        assert planned(second, journal)[0] == began_at

    assert began_at == reached - spec.mix.steps_ahead == 4
    assert known == [first.state_at(step) for step in range(began_at, reached + 1)]
    assert (tmp_path / JOURNAL_NAME).read_bytes().startswith(before)


def test_a_planner_that_takes_over_plans_for_the_ranks_that_were_noted_last(tmp_path):
    spec = a_spec(tmp_path)
    elastic = spec.mix.model_copy(
        update={"runtime": spec.mix.runtime.model_copy(update={"elastic": True})}
    )
    spec = replace(spec, mix=elastic)
    first = make_planner(spec, FACTS)
    with open_journal(tmp_path, first) as journal:
        planned(first, journal)
        for command in first.handle(ResizeAsked(dp=2, step=1)):
            if isinstance(command, AppendWorld):
                journal.append_world(command.world.to_json())

    second, journal = make_successor(spec, FACTS, tmp_path, life=1)
    journal.close()

    assert (second.world.dp, second.world.step, second.world.generation) == (2, 1, 1)
    assert second.handle(ResizeAsked(dp=2, step=1, generation=1)) == ()


def test_a_planner_never_takes_over_before_the_step_that_the_plane_started_from(tmp_path):
    first = make_planner(a_spec(tmp_path), FACTS)
    with open_journal(tmp_path, first) as journal:
        planned(first, journal)
    spec = a_spec(tmp_path, state=first.state_at(2))
    resumed = make_planner(spec, FACTS)
    open_journal(tmp_path, resumed).close()

    planner, journal = make_successor(spec, FACTS, tmp_path, life=1)
    journal.close()

    assert planner.state.step == 2


def test_a_state_from_before_a_fit_goes_on_with_the_journal_that_has_it(tmp_path):
    first = make_planner(a_spec(tmp_path), FACTS)
    with open_journal(tmp_path / "first", first) as journal:
        planned(first, journal)
    fit = FitCost(linear=1e-7, quadratic=2e-9, measured=32, residual=0.01)
    edits = (Edit(revision=1, step=2, change=fit, stages=()),)
    fitted = make_planner(a_spec(tmp_path, edits=edits), FACTS)
    with open_journal(tmp_path, fitted) as journal:
        planned(fitted, journal)

    for step in (1, 2, 3):
        resumed = make_planner(a_spec(tmp_path, edits=edits, state=first.state_at(step)), FACTS)
        assert resumed.state_at(step) == fitted.state_at(step)
        with open_journal(tmp_path, resumed) as journal:
            assert planned(resumed, journal)[0] == step
    assert {path.name for path in tmp_path.iterdir()} == {"first", JOURNAL_NAME}


def test_a_planner_that_finds_other_samples_than_were_recorded_publishes_nothing(tmp_path):
    spec = a_spec(tmp_path)
    first = make_planner(spec, FACTS)
    with open_journal(tmp_path, first) as journal:
        planned(first, journal)

    second, journal = make_successor(spec, FACTS, tmp_path, life=1)
    with journal, pytest.raises(IntegrityError, match="step 0 planned again has digest"):
        planned(second, journal, lengths=(9, 11) * 30)

    with pytest.raises(StateError, match=r"records: 100 saved, 101 now"):
        make_successor(spec, some_facts([101, 100]), tmp_path, life=1)


def adding(name, records):
    """Return a change that adds a source, and the findings about the source."""
    source = ParquetSource(type="parquet", path=f"{name}/*.parquet", tokens="tokens")
    return AddSource(name=name, source=source, weight=1.0), some_facts([records])[0]


def test_a_planner_forgets_what_was_found_in_a_source_that_was_never_added(tmp_path):
    spec = a_spec(tmp_path, run_dir=tmp_path)
    open_journal(tmp_path, make_planner(spec, FACTS)).close()
    refused, (change, facts) = some_facts([7])[0], adding("books", 55)

    planner, journal = make_successor(spec, [*FACTS, refused], tmp_path, life=1)
    journal.close()
    planner.handle(ChangeAsked(change=change, facts=facts))

    assert planner.names == ("code", "web", "books")
    assert list(planner.records_S) == [100, 100, 55]


def test_a_planner_that_was_lost_after_it_kept_an_added_source_is_followed_by_one_that_has_it(
    tmp_path,
):
    spec = a_spec(tmp_path, run_dir=tmp_path)
    open_journal(tmp_path, make_planner(spec, FACTS)).close()
    change, facts = adding("books", 55)
    history = History(spec.mix).edited(change, 0, found_in(change, facts))
    write_history(tmp_path, history)

    planner, journal = make_successor(spec, [*FACTS, facts], tmp_path, life=1)
    journal.close()

    assert list(planner.records_S) == [100, 100, 55]
    with pytest.raises(StateError, match="lost while source 'books' was being added"):
        make_successor(spec, FACTS, tmp_path, life=2)


@pytest.mark.parametrize(
    ("generation", "is_held_before", "asked"),
    [(None, False, [None]), (None, True, [None, 2]), (1, True, [1])],
)
def test_a_rank_in_the_place_of_one_that_is_gone_is_of_the_next_world_unless_it_names_its_own(
    generation, is_held_before, asked
):
    worlds, questions = [World(tree=ClientPlaceTree.of(dp=2))], []

    def resize(question):
        questions.append(question.generation)
        worlds.append(
            worlds[-1].followed_by(dp=3, step=question.step, generation=question.generation)
        )
        return worlds[-1]

    joined = join_world(
        ResizeAsked(dp=3, step=5, generation=generation), resize, lambda world: is_held_before
    )

    assert questions == asked
    assert joined.generation == len(asked)
