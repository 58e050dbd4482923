"""``omniload train crossover``: the file that it leaves."""

import orjson
from click.testing import CliRunner

from trainer_integration.commands.crossover import crossover
from trainer_integration.moe.parallel.crossover_table import Crossover, Measured, read_crossover
from trainer_integration.run import crossover_ranks

TRAIN = "{version: 1, mix: mix.yaml, steps: 10, parallel: {sp: 2}}"


def test_whoever_reads_a_crossover_as_it_is_measured_again_has_one_of_both_whole(
    tmp_path, monkeypatch
):
    row = Measured(top_k=1, seconds={"a2a": 1, "ag_rs": 2}, sent_bytes={"a2a": 1, "ag_rs": 2})
    found = Crossover(sp=2, tokens=4, dim=8, hidden=8, num_experts=2, rows=(row,))
    monkeypatch.setattr(crossover_ranks, "measured_crossover", lambda *_, **__: found)
    (tmp_path / "train.yaml").write_text(TRAIN)
    output = tmp_path / "crossover.json"
    output.write_bytes(before := orjson.dumps(found.model_dump()) + b" " * 4096)

    with output.open("rb") as held:
        result = CliRunner().invoke(crossover, [str(tmp_path / "train.yaml"), str(output)])
        assert held.read() == before

    assert result.exception is None, result.output
    assert read_crossover(output, sp=2) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crossover.json", "train.yaml"]
