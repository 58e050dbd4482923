"""Lightning's Trainer over our loaders: checkpoints at every place resume at the next batch."""

from itertools import chain

import lightning
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from omniload.base.errors import StateError, UnavailableError
from tests.frameworks.forks import run_ranks
from tests.support.trainer.loaders import Numbers, Stream, StreamWithState
from trainer_integration.hosts.lightning import DataLoader

LOADERS = {
    "map": lambda: DataLoader(Numbers(10), 2, shuffle=True),
    "workers": lambda: DataLoader(Numbers(10), 2, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(10), 2),
    "stream with state": lambda: DataLoader(StreamWithState(10), 2),
}


class Model(lightning.LightningModule):
    """Notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, _):
        numbers = batch if isinstance(batch, torch.Tensor) else batch.tokens.flatten()
        self.seen.append(numbers.tolist())
        return self.layer(numbers.float()[:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(folder, loader, steps, resume=None, model=None, validation=None, **arguments):
    """Train up to a step, with a checkpoint after each; return what was seen."""
    lightning.seed_everything(3, verbose=False)
    model = model or Model()
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )
    trainer.fit(model, loader, validation, ckpt_path=resume, weights_only=resume and False)
    return model.seen


@pytest.mark.parametrize("name", LOADERS)
def test_every_checkpoint_of_three_epochs_resumes_at_the_next_batch(name, tmp_path):
    make = LOADERS[name]
    unbroken = fit(tmp_path / "whole", make(), 15)
    assert sorted(chain.from_iterable(unbroken[:5])) == list(range(10))
    if "stream" not in name:
        assert unbroken[:5] != unbroken[5:10]

    for saved in (1, 3, 5, 7) if name == "map" else (3, 5):
        again = fit(tmp_path / f"from-{saved}", make(), 15, tmp_path / f"whole/step={saved}.ckpt")
        assert again == unbroken[saved:], saved


def test_a_resumed_run_is_resumed(tmp_path):
    unbroken = fit(tmp_path / "whole", LOADERS["stream"](), 5)
    for begun, end in ((0, 1), (1, 3), (3, 5)):
        resume = tmp_path / f"step={begun}.ckpt" if begun else None
        assert fit(tmp_path, LOADERS["stream"](), end, resume) == unbroken[begun:end]


@pytest.mark.parametrize("steps", [6, None], ids=["sized", "unsized"])
def test_a_mix_resumes(steps, mix, tmp_path):
    with DataLoader(mix, steps=steps) as loader:
        unbroken = fit(tmp_path / "whole", loader, 6)
    with DataLoader(mix, steps=steps) as loader:
        resumed = fit(tmp_path / "again", loader, 6, tmp_path / "whole/step=2.ckpt")

    assert len(unbroken) == 6
    assert resumed == unbroken[2:]


def test_each_validation_goes_through_all_that_a_mix_holds_out(mix, tmp_path):
    held = mix.with_name("held.yaml")
    held.write_text(mix.read_text() + "splits: {eval: 0.3}\n")
    seen = []

    class Validated(Model):
        def validation_step(self, batch, _):
            seen.append(batch.step)

    with DataLoader(held, steps=4) as training, DataLoader(held, split="eval", steps=3) as held_out:
        every_two = {"val_check_interval": 2, "num_sanity_val_steps": 1}
        fit(tmp_path, training, 4, model=Validated(), validation=held_out, **every_two)

    assert seen == [0, *[0, 1, 2] * 2]


def test_two_ranks_resume(tmp_path):
    run_ranks("lightning_rank.py", 2, str(tmp_path))


def test_the_order_of_later_epochs_is_the_loaders_own():
    loader = LOADERS["map"]()
    list(loader)
    torch.manual_seed(99)
    epoch = [batch.tolist() for batch in loader]
    torch.manual_seed(3)
    again = LOADERS["map"]()
    again.generator.manual_seed(loader.generator.initial_seed())
    list(again)

    assert [batch.tolist() for batch in again] == epoch


def test_rank_0s_place_in_a_stream_is_refused_by_another_rank(monkeypatch):
    loader = LOADERS["stream"]()
    next(iter(loader))
    state = loader.state_dict()
    monkeypatch.setenv("RANK", "1")

    with pytest.raises(StateError, match="rank 1 has no place"):
        LOADERS["stream"]().load_state_dict(state)


@pytest.mark.parametrize(("stop", "lengths"), [("never", {6}), ("each_once", {float("inf")})])
def test_a_mix_has_a_last_batch_for_lightning_wherever_it_ends(mix, tmp_path, stop, lengths):
    text = mix.read_text(encoding="utf-8").replace("mix:\n", f"mix:\n  stop: {stop}\n")
    text = text.replace("corpus/modules/*", "few").replace("corpus/", f"{mix.parent}/corpus/")
    (tmp_path / "mix.yaml").write_text(text, encoding="utf-8")
    rows = pa.table({"text": ["a few words to train on"] * 40})
    pq.write_table(rows, tmp_path / "few.parquet")
    found = []

    class Noting(Model):
        def training_step(self, batch, number):
            found.append((self.trainer.num_training_batches, self.trainer.is_last_batch))
            return super().training_step(batch, number)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    with DataLoader(tmp_path / "mix.yaml", steps=6) as loader:
        trainer.fit(Noting(), loader)

    assert {length for length, _ in found} == lengths
    assert [last for _, last in found].count(True) == 1
    assert found[-1][1]


@pytest.mark.parametrize("steps", [None, 9])
def test_another_fit_goes_on_behind_the_last_batch_that_was_trained_on(steps, mix, tmp_path):
    with DataLoader(mix, **({} if steps is None else {"steps": steps})) as loader:
        beginning = loader.mix.beginning
        unbroken = [
            batch.tokens.flatten().tolist() for _, batch in zip(range(7), loader, strict=False)
        ]
        loader.load_state_dict(beginning)
        parts = [fit(tmp_path / name, loader, 3) for name in ("first", "second")]
        left = next(iter(loader)).tokens.flatten().tolist()

    assert [*parts[0], *parts[1], left] == unbroken


def test_a_batch_that_waits_as_the_one_behind_it_fails_to_come_is_in_no_state_yet():
    class Failing(Stream):
        def __iter__(self):
            for number in super().__iter__():
                if number == 4:
                    raise UnavailableError("it did not come in time")
                yield number

    loader = DataLoader(Failing(10), 2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(UnavailableError):
        next(batches)
    # As a checkpoint on exception has it: of what was trained on, which is the first of them.
    state = loader.state_dict()

    again = LOADERS["stream"]()
    again.load_state_dict(state)

    assert next(iter(again)).tolist() == [2, 3]
