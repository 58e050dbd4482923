"""Records that cannot be read, and are read ahead of the steps that need them."""

import json

import pytest

import omniload
from omniload.base.errors import IntegrityError

MIX = """
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {web: {type: jsonl, path: "web-*.jsonl", shuffle: {method: none}}}
mix: {stages: [{weights: {web: 1}}]}
pack: {length: 128}
batch: {tokens: 512, micro_tokens: 256}
"""


def steps_of(folder, runtime):
    """Return the steps of a run, up to what ends it, and that."""
    steps, why = [], None
    with omniload.open(folder / "mix.yaml", arrays="numpy", runtime=runtime, steps=400) as batches:
        try:
            for batch in batches:
                steps.append(batch.tokens.tolist())  # noqa: PERF401 -- those before an error count
        except IntegrityError as error:
            why = str(error)
    return steps, why


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_every_step_before_the_first_that_needs_a_bad_record_is_handed_out(tmp_path, runtime):
    good = [json.dumps({"text": f"document {i} " * (i % 7 + 1)}) for i in range(3000)]
    second = [json.dumps({"text": f"SECONDLY {i} " * (i % 7 + 1)}) for i in range(3000)]
    (tmp_path / "mix.yaml").write_text(MIX)
    (tmp_path / "web-0.jsonl").write_text("\n".join([*good, ""]))
    (tmp_path / "web-1.jsonl").write_text("\n".join(second))
    whole, _ = steps_of(tmp_path, "local")
    needed = next(
        n
        for n, rows in enumerate(whole)
        if b"SECOND" in bytes(t for r in rows for t in r if t < 256)
    )
    (tmp_path / "web-1.jsonl").write_text("\n".join([*second, '{"text": broken']))

    steps, why = steps_of(tmp_path, runtime)

    assert "web-1.jsonl:3001: is not JSON" in why
    assert steps == whole[: len(steps)]
    assert len(steps) == needed
