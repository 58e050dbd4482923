"""Hugging Face's Trainer with one changed import: its own batches, and exact resume."""

import json
import random
import sys
from itertools import pairwise
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import modeling_flash_attention_utils as flash

from omniload.base.errors import ConfigError, StateError
from tests.support.trainer.evaluated import loss_of_a_label
from tests.support.trainer.host_ranks import run_ranks
from trainer_integration import DataLoader
from trainer_integration.hosts.huggingface import (
    ExactResume,
    Trainer,
    flat_model_inputs,
    model_inputs,
)

LENGTH = 16
HELD_OUT = """
version: 2
seed: 17
tokenizer: {type: bytes}
sources: {web: {type: jsonl, path: web.jsonl}}
mix: {stages: [{from_step: 0, weights: {web: 1}}]}
pack: {length: 128}
batch: {tokens: 1024, micro_tokens: 512}
splits: {eval: 0.0408}
"""


def sample(index):
    tokens = torch.arange(index, index + LENGTH) % 60
    return {"input_ids": tokens, "labels": tokens}


class Texts(Dataset):
    """Sample ``i`` begins with token ``i``; ``loaded`` are the indices that this process asked for."""

    def __init__(self, length=22):
        self.length, self.loaded = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loaded.append(index)
        return sample(index)


class Endless(IterableDataset):
    def __iter__(self):
        return (sample(index) for index in range(1_000))


class Noting:
    """Notes the first token of each row that is trained on."""

    def training_step(self, model, inputs, *args, **keywords):
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"][:, 0].tolist()]
        return super().training_step(model, inputs, *args, **keywords)


class Ours(Noting, Trainer):
    pass


class Theirs(Noting, transformers.Trainer):
    pass


class GivenThen(Ours):
    """Takes a data set alone as it is made, as TRL's does, and the mix then."""

    def __init__(self, *, train_dataset, **words):
        super().__init__(train_dataset=Texts(), **words)
        self.train_dataset = train_dataset


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def small_model(vocab=64):
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=vocab, n_positions=512)
    return GPT2LMHeadModel(config)


def settings_of(folder, **arguments):
    return transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **arguments,
    )


def run(kind, folder, dataset, resume=None, **arguments):
    """Train, and return the trainer with what it has seen."""
    AcceleratorState._reset_state(reset_partial_state=True)
    defaults = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "save_steps": 5}
    settings = settings_of(folder, **(defaults | arguments))
    vocab = 512 if isinstance(dataset, DataLoader) else 64
    trainer = kind(model=small_model(vocab), args=settings, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


@pytest.mark.parametrize(
    ("arguments", "saved", "taken"),  # checkpoint's number, and batches before it
    [
        ({}, 5, 5),
        ({}, 11, 11),
        ({"dataloader_num_workers": 2}, 15, 15),
        ({"gradient_accumulation_steps": 3}, 5, 14),
    ],
    ids=["first epoch", "between epochs", "workers", "accumulated, second epoch"],
)
def test_a_checkpoint_of_a_dataset_resumes_at_the_next_batch(arguments, saved, taken, tmp_path):
    arguments = arguments | {"save_steps": saved}
    unbroken = run(Theirs, tmp_path / "theirs", Texts(), **arguments)
    assert run(Ours, tmp_path / "ours", Texts(), **arguments).seen == unbroken.seen
    texts = Texts()
    checkpoint = str(tmp_path / f"ours/checkpoint-{saved}")

    resumed = run(Ours, tmp_path / "again", texts, checkpoint, **arguments)

    assert resumed.seen == unbroken.seen[taken:]
    assert torch.equal(weights(resumed), weights(unbroken))
    if not arguments.get("dataloader_num_workers"):
        assert len(texts.loaded) == 2 * len(resumed.seen)  # nothing is loaded to get there
    assert resumed.state.epoch == unbroken.state.epoch == 2.0


def test_a_stream_resumes_and_so_does_a_resumed_run(tmp_path):
    arguments = {"max_steps": 12, "save_steps": 3}
    unbroken = run(Theirs, tmp_path / "theirs", Endless(), **arguments)
    folder = tmp_path / "ours"
    run(Ours, folder, Endless(), **(arguments | {"max_steps": 3}))
    second = run(Ours, folder, Endless(), True, **(arguments | {"max_steps": 6}))
    third = run(Ours, folder, Endless(), True, **arguments)

    assert second.seen == unbroken.seen[3:6]
    assert third.seen == unbroken.seen[6:]


def test_a_checkpoint_of_another_trainer_resumes_as_there(tmp_path):
    unbroken = run(Theirs, tmp_path / "theirs", Texts())

    resumed = run(Ours, tmp_path / "ours", Texts(), str(tmp_path / "theirs/checkpoint-5"))

    assert resumed.seen == unbroken.seen[5:]


def test_a_dataset_that_changed_is_refused(tmp_path):
    run(Ours, tmp_path / "ours", Texts(), max_steps=5)

    with pytest.raises(StateError, match="samples was 22"):
        run(Ours, tmp_path / "again", Texts(24), str(tmp_path / "ours/checkpoint-5"))


@pytest.mark.parametrize("kind", [Ours, GivenThen])
def test_a_mix_is_trained_on_and_resumes(mix, tmp_path, kind):
    def opened():
        return DataLoader(mix, labels="unshifted", collate_fn=model_inputs, steps=6)

    with opened() as loader:
        unbroken = run(kind, tmp_path / "whole", loader, max_steps=6, save_steps=2)
    with opened() as loader:
        again = tmp_path / "whole/checkpoint-2"
        resumed = run(kind, tmp_path / "again", loader, str(again), max_steps=6)

    assert len(unbroken.seen) == 6
    assert resumed.seen == unbroken.seen[2:]
    assert torch.equal(weights(resumed), weights(unbroken))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_sees_each_document_of_a_packed_row_alone(mix, family, attention):
    if family == "gpt2":
        model = small_model(512)
        model.set_attn_implementation(attention)
    else:
        torch.manual_seed(1)
        config = LlamaConfig(
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            vocab_size=512,
            attn_implementation=attention,
        )
        model = LlamaForCausalLM(config)
    model.eval()
    with DataLoader(mix, labels="unshifted") as loader, torch.no_grad():
        for batch in loader:
            bounds = batch.cu_seqlens.tolist()
            if len(bounds) - 1 > batch.num_rows:
                break
        packed = model(**model_inputs(batch)).logits.flatten(0, 1)
        tokens = batch.tokens.flatten()
        for begin, end in pairwise(bounds):
            alone = model(input_ids=tokens[None, begin:end], use_cache=False).logits[0]
            real = batch.labels.flatten()[begin:end].ne(-100).any()
            assert not real or torch.allclose(packed[begin:end], alone, atol=1e-5)


@pytest.fixture
def flash_attention(monkeypatch):
    """Return a function that gives a model flash attention, with plain attention in the place of the library's kernels.

    The functions that choose among the kernels are those of transformers.
    """

    def dense(q, k, v, **_others):
        heads = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **_others):
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        bounds = pairwise(cu_seqlens_q.tolist())
        return torch.cat([dense(*(x[None, a:b] for x in (q, k, v)))[0] for a, b in bounds])

    stand_ins = {"flash": dense, "flash_varlen": varlen, "pad": None, "unpad": None}
    for name, function in stand_ins.items():
        monkeypatch.setattr(flash, f"_{name}_fn", function)
    monkeypatch.setattr(flash, "_loaded_implementation", "flash_attention_2")
    read = flash._lazy_define_process_function(varlen)
    monkeypatch.setattr(flash, "_process_flash_kwargs_fn", read)

    def used_by(model):
        # Not by its public name, which asks for the library and a GPU.
        monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
        return model

    return used_by


@pytest.fixture
def short(tmp_path):
    """Return the path of a mix with several documents in each row, which ends within its fourth step."""
    lines = [json.dumps({"text": f"document {i} " * 5}) for i in range(55)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    finite = HELD_OUT.replace("mix: {", "mix: {stop: each_once, ").replace("splits", "# splits")
    (tmp_path / "mix.yaml").write_text(finite)
    return tmp_path / "mix.yaml"


def small_llama():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=2, **sizes)).eval()


def test_flash_attention_sees_each_document_of_flat_rows_alone(short, flash_attention):
    model = small_llama()
    with DataLoader(short, labels="unshifted") as loader, torch.no_grad():
        batch = next(iter(loader))
        apart = model(**model_inputs(batch))
        flat = flash_attention(model)(**flat_model_inputs(batch))

    assert len(batch.document_sources) > 2 * batch.num_rows > 2
    assert torch.allclose(flat.logits.flatten(0, 1), apart.logits.flatten(0, 1), atol=1e-5)
    assert flat.loss.item() == pytest.approx(apart.loss.item())


def test_packed_rows_that_flash_attention_would_attend_across_are_refused(
    short, flash_attention, tmp_path
):
    model = flash_attention(small_llama())
    for form, alone in ((model_inputs, False), (model_inputs, True), (flat_model_inputs, False)):
        method = {"pack_method": "none"} if alone else {}
        with DataLoader(short, labels="unshifted", collate_fn=form, **method) as loader:
            arguments = settings_of(tmp_path, max_steps=2, save_strategy="no")
            trainer = Trainer(model=model, args=arguments, train_dataset=loader)
            if form is model_inputs and not alone:
                with pytest.raises(ConfigError, match=r"flash_attention_2.*flat_model_inputs"):
                    trainer.train()
            else:
                trainer.train()


class InOrder(transformers.Trainer):
    """Takes the batches of a list one by one."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def test_an_optimisers_step_within_which_a_mix_ends_is_made(short, tmp_path):
    words = {"gradient_accumulation_steps": 3, "save_strategy": "no", "optim": "sgd"}
    words |= {"learning_rate": 0.1, "lr_scheduler_type": "constant"}
    form = {"labels": "unshifted", "collate_fn": model_inputs}

    with DataLoader(short, **form) as loader:
        batches = list(loader)
    with DataLoader(short, **form) as loader:
        arguments = settings_of(tmp_path, max_steps=9, **words)
        ours = Trainer(model=small_llama(), args=arguments, train_dataset=loader)
        ours.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = settings_of(tmp_path, max_steps=2, per_device_train_batch_size=1, **words)
    theirs = InOrder(
        model=small_llama(),
        args=arguments,
        train_dataset=batches,
        data_collator=lambda features: features[0],
    )
    theirs.train()

    assert len(batches) == 4
    assert ours.state.global_step == theirs.state.global_step == 2
    assert torch.allclose(weights(ours), weights(theirs), atol=1e-6)


def test_each_evaluation_goes_through_a_mix_from_its_beginning(mix, tmp_path):
    form = {"labels": "unshifted", "collate_fn": model_inputs}
    with (
        DataLoader(mix, steps=3, rank=0, world_size=1, **form) as held_out,
        DataLoader(mix, steps=3, rank=0, world_size=1, **form) as again,
    ):
        trainer = Trainer(
            model=(model := small_model(vocab=512)),
            args=settings_of(tmp_path),
            eval_dataset={"a": held_out, "b": held_out},
            # Its name ends as that of the loss, and it comes first.
            compute_metrics=lambda _: {"eval_a_another_loss": 7.0},
        )
        found = trainer.evaluate()
        expected = loss_of_a_label(model, again)

    assert [found["eval_a_loss"], found["eval_b_loss"]] == pytest.approx([expected] * 2, rel=1e-5)
    assert found["eval_a_another_loss"] == 7.0


def test_behind_an_evaluation_that_failed_training_counts_as_ever(mix, tmp_path):
    class Fails(Trainer):
        def compute_loss(self, *_args, **_keywords):
            raise RuntimeError("no memory")

    with DataLoader(mix, steps=3, labels="unshifted", collate_fn=model_inputs) as held_out:
        trainer = Fails(
            model=small_model(vocab=512), args=settings_of(tmp_path), eval_dataset=held_out
        )
        with pytest.raises(RuntimeError, match="no memory"):
            trainer.evaluate()

    batches = iter([{"labels": torch.ones(2, 5)}])
    _, counted = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
    assert counted is not None


@pytest.mark.soak
def test_two_ranks_evaluate_as_one_does_also_where_one_has_no_rows_at_the_end(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * 5}) for i in range(1500)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    (tmp_path / "mix.yaml").write_text(HELD_OUT)

    # Loaded anew: threads that computed here would be missing in a fork.
    script = "huggingface_rank.py"
    run_ranks(sys.executable, script, 2, str(tmp_path / "mix.yaml"), str(tmp_path / "out"))


def test_a_batch_without_rows_is_a_row_without_labels():
    empty = torch.zeros(0, 4, dtype=torch.int64)
    batch = SimpleNamespace(
        label_form="unshifted",
        tokens=empty,
        labels=empty,
        position_ids=empty,
        token_columns=("reward",),
        token_column=lambda name: torch.zeros(0, 4),
    )

    inputs = model_inputs(batch)

    assert inputs["labels"].tolist() == [[-100] * 4]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert inputs["reward"].tolist() == [[0.0] * 4]


def test_a_loader_over_a_dataset_is_no_evaluation_either(tmp_path):
    trainer = Trainer(
        model=small_model(), args=settings_of(tmp_path), eval_dataset=DataLoader(Texts())
    )

    with pytest.raises(ConfigError, match="eval_dataset is a loader over Texts"):
        trainer.evaluate()


def test_the_loader_that_is_trained_on_is_not_evaluated_on(mix, tmp_path):
    with DataLoader(mix, labels="unshifted", collate_fn=model_inputs, steps=2) as loader:
        trainer = Trainer(
            model=small_model(vocab=512),
            args=settings_of(tmp_path),
            train_dataset=loader,
            eval_dataset={"same": loader},
        )

        with pytest.raises(ConfigError, match="the loader that is trained on"):
            trainer.evaluate()


LABELLED = """
version: 2
seed: 17
sources: {sft: {type: parquet, path: sft.parquet, tokens: input_ids, columns: {labels: labels}}}
mix: {stages: [{from_step: 0, weights: {sft: 1}}]}
pack: {length: 64, method: best_fit}
batch: {tokens: 512, micro_tokens: 512}
"""


def test_on_labels_of_a_table_a_model_has_the_loss_that_transformers_has(tmp_path):
    drawn = random.Random(3)
    documents = [[drawn.randrange(1, 60) for _ in range(drawn.randrange(4, 40))] for _ in range(90)]
    prompts = [drawn.randrange(len(ids)) for ids in documents]
    labels_of = {
        tuple(ids): [-100] * prompt + ids[prompt:]
        for ids, prompt in zip(documents, prompts, strict=True)
    }
    table = pa.table({"input_ids": documents, "labels": list(labels_of.values())})
    pq.write_table(table, tmp_path / "sft.parquet", row_group_size=20)
    (tmp_path / "mix.yaml").write_text(LABELLED)
    with DataLoader(
        tmp_path / "mix.yaml", labels="unshifted", collate_fn=model_inputs, steps=1
    ) as loader:
        (inputs,) = list(loader)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)).eval()

    theirs = labels = 0
    starts = (inputs["position_ids"] == 0).flatten().nonzero().flatten().tolist()
    flat = inputs["input_ids"].flatten()
    for start, stop in pairwise([*starts, len(flat)]):
        ids = flat[start:stop]
        if (given := labels_of.get(tuple(ids.tolist()))) is None:
            assert not ids.any()  # padding
            continue
        if trained := sum(label != -100 for label in given[1:]):
            found = model(input_ids=ids[None], labels=torch.tensor([given])).loss.item()
            theirs, labels = theirs + found * trained, labels + trained

    assert labels > 100
    assert model(**inputs).loss.item() == pytest.approx(theirs / labels, rel=1e-5)


def test_shifted_labels_are_refused(mix):
    with (
        DataLoader(mix, collate_fn=model_inputs) as loader,
        pytest.raises(ConfigError, match="labels='unshifted'"),
    ):
        next(iter(loader))


def test_a_loader_over_a_dataset_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="loader over Texts"):
        run(Ours, tmp_path, DataLoader(Texts()), max_steps=1)


def test_another_trainer_is_made_exact_by_a_base_class(tmp_path):
    class Mine(ExactResume, Theirs):
        pass

    unbroken = run(Mine, tmp_path / "ours", Texts())
    resumed = run(Mine, tmp_path / "again", Texts(), str(tmp_path / "ours/checkpoint-5"))

    assert resumed.seen == unbroken.seen[5:]
