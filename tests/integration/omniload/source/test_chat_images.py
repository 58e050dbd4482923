"""Mixes of conversations and pairs with images: the same steps for any ranks, after kills, and in a vision model."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.batch.digest import batch_digest, combined
from omniload.batch.images import images_of, places_of
from omniload.client import Client
from omniload.mix.config import MixConfig, load_mix
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.drawn import PLACEHOLDER, an_images_transform, are_all_placed, png_of, ramp
from tests.support.plane.local_runs import OneRank, a_spec, require_resumed_exactly, steps_of
from tests.support.trainer.vision_cases import a_vision_model
from trainer_integration.vision.model import VisionInputs

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PICTURE = an_images_transform().model_dump()
STEPS = 4
KINDS = pytest.mark.parametrize(
    "pairs", [False, True, "texts"], ids=["chats", "pairs", "pairs of texts"]
)


def a_chat_mix(folder, *, pairs=False, **changes):
    """Write conversations, a third of them without an image, and return a mix of them and of plain text.

    ``pairs`` makes them pairs of messages, or of texts if it is that word.
    """
    (folder / "t.jinja").write_text(TEMPLATE)
    rows = []
    for i in range(60):
        images = [png_of(ramp(4 + 4 * (i % 3), 4 + 4 * k)) for k in range(i % 3)]
        asked = {"role": "user", "content": "<image>" * len(images) + f"what is {i}?"}
        said = [{"role": "assistant", "content": f"it is {i}" + "!" * k} for k in (i % 5, 6)]
        row = {"images": images}
        row |= (
            {"prompt": [asked], "messages": [said[0]], "rejected": [said[1]]}
            if pairs is True
            else {"prompt": asked["content"]}
            | {
                key: answer["content"]
                for key, answer in zip(("messages", "rejected"), said, strict=True)
            }
            if pairs
            else {"messages": [asked, said[0]] * (1 if images else 1 + i % 4)}
        )
        rows.append(row)
    schema = pa.schema({"images": pa.list_(pa.binary())})
    table = pa.Table.from_pylist([{"images": row.pop("images")} for row in rows], schema)
    for name in rows[0]:
        table = table.append_column(name, pa.array([row[name] for row in rows]))
    pq.write_table(table, folder / "a.parquet", row_group_size=16)
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"plain {i} " * 4}) + "\n" for i in range(80))
    )
    transform = {"type": "chat", "template": "t.jinja", "image": "[IMG]"}
    if pairs:
        transform |= {"type": "preference"}
    if pairs == "texts":
        transform = {"type": "preference", "form": "text"}
    mix = {
        "version": 1,
        "seed": 5,
        "tokenizer": {"type": "bytes"},
        "sources": {
            "see": {
                "type": "parquet",
                "path": "a.parquet",
                "text": "messages",
                "images": "images",
                "transforms": [transform, PICTURE],
            },
            "read": {"type": "jsonl", "path": "b.jsonl"},
        },
        "mix": {"stages": [{"from_step": 0, "weights": {"see": 2, "read": 1}}]},
        "pack": {"length": 96, "overlong": "drop" if pairs else "split"},
        "batch": {"tokens": 6 * 96, "micro_tokens": 96},
        "runtime": {"prefetch_steps": 2},
    }
    (folder / "mix.yaml").write_text(json.dumps(mix | changes))
    return MixConfig.model_validate(mix | changes)


def digests(steps):
    return [combined(batch_digest(batch) for batch in step) for step in steps]


@KINDS
def test_any_ranks_train_on_the_same_and_every_placeholder_has_its_image(tmp_path, pairs):
    mix = a_chat_mix(tmp_path, pairs=pairs)
    alone = steps_of(a_spec(tmp_path, mix))
    three = steps_of(a_spec(tmp_path, mix, dp=3))

    assert digests(alone) == digests(three)
    images = 0
    for rows in (m for step in three for batch in step for m in batch.microbatches):
        for count, image in zip(places_of(rows)[:, 1].tolist(), images_of(rows), strict=True):
            assert count == image.grid[0] * image.grid[1]
            images += 1
        assert are_all_placed(rows)
    assert images > 0


@KINDS
def test_images_dealt_apart_from_rows_change_nothing(tmp_path, pairs):
    hybrid = {"strategy": "hybrid", "linear": 1.0, "encoder_linear": 1.0}
    alone = steps_of(a_spec(tmp_path, a_chat_mix(tmp_path, pairs=pairs)))
    mix = a_chat_mix(tmp_path, pairs=pairs, balance=hybrid)

    dealt = steps_of(a_spec(tmp_path, mix, dp=2))

    assert digests(dealt) == digests(alone)


@KINDS
def test_a_run_resumes_exactly_before_every_step(tmp_path, pairs):
    mix = a_chat_mix(tmp_path, pairs=pairs)

    require_resumed_exactly(tmp_path, mix)


KILLED = """
import json, sys
from omniload.batch.digest import batch_digest
from omniload.actors.local.plane import LocalPlane
from omniload.mix.config import load_mix
from tests.support.plane.local_runs import OneRank, a_spec

mix, folder = load_mix(sys.argv[1])
with OneRank(LocalPlane(a_spec(folder, mix))) as rank:
    while True:
        found = batch_digest(next(rank))
        print(json.dumps([int(found), rank.state_dict()]), flush=True)
"""


@pytest.mark.scripts_start_warm
def test_a_run_that_was_killed_goes_on_with_the_same_steps(tmp_path):
    mix = a_chat_mix(tmp_path)
    wanted = [
        found
        for (found,) in (
            [batch_digest(b) for b in step] for step in steps_of(a_spec(tmp_path, mix))
        )
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "mix.yaml")], stdout=subprocess.PIPE
    )
    lines = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    again, folder = load_mix(tmp_path / "mix.yaml")
    with OneRank(LocalPlane(a_spec(folder, again, state=lines[-1][1]))) as rank:
        rest = [batch_digest(next(rank)) for _ in range(STEPS - 2)]

    assert [line[0] for line in lines] + rest == wanted


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shadows", [0, 1])
def test_ranks_on_ray_get_the_same_steps_though_the_loader_of_images_is_killed(tmp_path, shadows):
    mix = a_chat_mix(tmp_path)
    count = 3 * STEPS
    alone = digests(steps_of(a_spec(tmp_path, mix), count))
    runtime = {"kind": "ray", "prefetch_steps": 2, "loaders": 1, "shadows": shadows}
    mix = a_chat_mix(tmp_path, runtime=runtime)

    found, holders = [], []
    spec = a_spec(tmp_path, mix, dp=2)
    with open_plane(spec) as plane, ExitStack() as opened:
        clients = [opened.enter_context(Client(plane.handle(rank))) for rank in range(2)]
        for step in range(count):
            if step in (STEPS, 2 * STEPS):
                holders.append(plane.pids()["loader-0"])
                os.kill(holders[-1], signal.SIGKILL)
            found.append([client.next_batch() for client in clients])
        holders.append(plane.pids()["loader-0"])

    assert digests(found) == alone
    assert len(set(holders)) == 3


def test_the_vision_model_takes_conversations_as_it_takes_captions(tmp_path):
    mix = a_chat_mix(tmp_path)
    model = a_vision_model()

    for (batch,) in steps_of(a_spec(tmp_path, mix))[:1]:
        for microbatch in batch.microbatches:
            model(VisionInputs.of_microbatch(microbatch)).token_loss.backward()

    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    encoder = [grad for name, grad in found.items() if "encoder" in name or "vision" in name]
    assert encoder
    assert all(grad is not None and grad.isfinite().all() for grad in encoder)


@pytest.mark.parametrize("pairs", [True, "texts"], ids=["messages", "texts"])
def test_a_loader_holds_and_sends_images_of_a_pair_once(tmp_path, pairs):
    mix = a_chat_mix(tmp_path, pairs=pairs)
    source = open_source(
        SourceSpec(
            "see",
            mix.sources["see"],
            seed=mix.seed,
            tokenizer=mix.tokenizer,
            base_dir=tmp_path,
            row_length=mix.pack.length,
        )
    )

    others = source.read(0, 60).others

    shown = others["grids"].values_V.reshape(-1, 2).prod(1).sum() * 4 * 4 * 3
    assert 2 * len(others["images"].values_V) == shown > 0


def test_both_sides_of_a_pair_have_the_images_of_its_prompt(tmp_path):
    a_chat_mix(tmp_path, pairs=True)
    pairs = images = 0

    with omniload.open(tmp_path / "mix.yaml", steps=STEPS) as loader:
        for batch in loader:
            flat = batch.tokens.reshape(-1).numpy()
            labels = batch.labels.reshape(-1).numpy()
            bounds = batch.cu_seqlens.numpy()
            assert not (labels == PLACEHOLDER).any()
            sizes = [rows * columns for rows, columns in batch.images.grids.tolist()]
            each = batch.images.patches.split(sizes)
            grids = {
                int(f): (g, patches.tolist())
                for (f, _), g, patches in zip(
                    batch.images.places.tolist(), batch.images.grids.tolist(), each, strict=True
                )
            }
            for both in batch.pairs.tolist():
                ranges = [(bounds[side], bounds[side + 1]) for side in both]
                shown = [[g for at, g in sorted(grids.items()) if a <= at < b] for a, b in ranges]
                assert shown[0] == shown[1], "grids and pixels"
                held = [[grid for grid, _ in side] for side in shown]
                assert [int((flat[a:b] == PLACEHOLDER).sum()) for a, b in ranges] == [
                    sum(rows * columns for rows, columns in each) for each in held
                ]
                pairs, images = pairs + 1, images + len(held[0])
    assert pairs > 0 < images
