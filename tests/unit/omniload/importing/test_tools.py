"""Files of other tools, as in their documentation, become mixes; settings without an equivalent are refused by name."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

import omniload
from omniload.base.errors import ConfigError
from omniload.importing.documents import parsed
from omniload.importing.fields import Report
from omniload.importing.imported import Asked, mix_text
from omniload.importing.tools import TOOLS, read_as, tool_of
from omniload.mix.config import BpeTokenizer, MixConfig
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.messages import MessageNames
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import CHATML, write_model

SIZES = {"row_tokens": 64, "step_tokens": 640, "micro_tokens": None, "seed": None}
TOKENIZER = {"type": "bytes"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Start in a folder of its own: tools take relative paths from there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(folder, tool, content, *, name="file.yaml", leave_out=(), sizes=(), **asked):
    """Return the mix that a file becomes, as in its mix file, and the notes."""
    file = folder / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    report = Report(left_out=frozenset(leave_out))
    found = read_as(tool, parsed(file.read_text(), name), Asked(file=file, report=report, **asked))
    report.raise_faults(name)
    text = mix_text(
        found,
        report.notes,
        beside=folder,
        heading="It.",
        sizes=SIZES | dict(sizes),
        tokenizer=TOKENIZER,
    )
    (folder / "written.yaml").write_text(text)
    return MixConfig.model_validate(yaml.safe_load(text)), "\n".join(report.notes)


def mix_written(folder):
    return (folder / "written.yaml").read_text()


def weights_of(mix, stage=0):
    weights = mix.mix.stages[stage].weights
    total = sum(weights.values())
    return {name: pytest.approx(weight / total) for name, weight in weights.items()}


IDX_BIN = ("idx", "bin")


def a_megatron(prefix, *, tokens, dtype):
    """Write one document of ``tokens`` tokens."""
    head = struct.pack("<QBQQ", 1, {np.int32: 4, np.uint16: 8}[dtype], 1, 2)
    body = np.int32(tokens).tobytes() + bytes(8) + np.array([0, 1], np.int64).tobytes()
    prefix.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + head + body)
    prefix.with_suffix(".bin").write_bytes(np.ones(tokens, dtype).tobytes())


class TestMegatron:
    def test_weights_and_prefixes_are_sources_of_rows_cut_from_joined_documents(self, folder):
        mix, notes = imported(
            folder, "megatron", "0.7 data/web_text_document\n0.3 /b/code_text_document\n"
        )

        assert mix.sources["web_text_document"].path == "data/web_text_document"
        assert mix.sources["code_text_document"].path == "/b/code_text_document"
        assert weights_of(mix) == {"web_text_document": 0.7, "code_text_document": 0.3}
        assert (mix.mix.level, mix.pack.method) == ("sequence", "best_fit")
        assert [source.concat_transform.tokens for source in mix.sources.values()] == [64, 64]
        assert "--split" in notes
        assert [source.keeps_documents_apart for source in mix.sources.values()] == [False, False]
        assert "for a run with --reset-attention-mask and --reset-position-ids give --doc" in notes
        assert mix.sources["web_text_document"].shuffle.method == "units"

    def test_documents_stay_apart_where_that_is_asked_for(self, folder):
        mix, notes = imported(folder, "megatron", "1 a 1 b", documents="apart")

        assert [source.concat_transform.documents for source in mix.sources.values()] == [
            "apart",
            "apart",
        ]
        assert mix.mix.level == "sequence"
        assert "as in Megatron with --reset-attention-mask and --reset-position-ids" in notes

    def test_the_training_split_of_a_file_of_splits_is_read(self, folder):
        splits = {"train": ["1", "a", "3", "b"], "valid": ["c"], "test": None}

        mix, notes = imported(folder, "megatron", json.dumps(splits))

        assert weights_of(mix) == {"a": 0.25, "b": 0.75}
        assert "valid: ['c'] has no equivalent" in notes

    def test_without_weights_tokens_are_whatever_the_bytes_of_each(self, folder):
        for name, dtype, tokens in (("a", np.int32, 100), ("b", np.uint16, 300)):
            a_megatron(folder / name, tokens=tokens, dtype=dtype)

        mix, notes = imported(folder, "megatron", "a ./b.bin")

        assert weights_of(mix) == {"a": 0.25, "b.bin": 0.75}
        assert "without weights are drawn in proportion to their tokens" in notes

    @pytest.mark.parametrize(
        ("write", "said"),
        [
            (lambda folder: None, "a: has no weight, and its tokens cannot be counted here: a.bin"),
            (lambda folder: (folder / "a.bin").touch(), "a: has no weight, and its tokens"),
            (
                lambda folder: [(folder / f"a.{end}").write_bytes(b"?" * 99) for end in IDX_BIN],
                "not an index of Megatron",
            ),
        ],
    )
    def test_a_prefix_without_weight_whose_tokens_nothing_says_is_refused(
        self, folder, write, said
    ):
        write(folder)

        with pytest.raises(ConfigError) as raised:
            imported(folder, "megatron", "a a")

        assert said in str(raised.value)
        assert "; write weights" in str(raised.value)

    @pytest.mark.parametrize("weight", ["1e400", "-0.3", "nan"])
    def test_a_weight_that_is_out_of_range_is_named_and_is_no_prefix(self, folder, weight):
        said = faults(folder, "megatron", f"{weight} web 0.3 code")

        assert said == [f"file.yaml: the weight {weight} of web is no number from 0 on"]

    @pytest.mark.parametrize(
        ("content", "noted"),
        [
            ("0.7 a 0.3 b", True),
            (["0.7", "a", "0.3", "b"], True),
            ({"train": ["0.7", "a", "0.3", "b"]}, False),
        ],
    )
    def test_a_split_by_the_command_line_is_spoken_of_where_the_file_has_none_of_its_own(
        self, folder, content, noted
    ):
        text = content if isinstance(content, str) else json.dumps(content)

        _, notes = imported(folder, "megatron", text)

        assert ("--split" in notes) == noted

    def test_a_prefix_alone_needs_neither_weight_nor_size(self, folder):
        mix, notes = imported(
            folder, "megatron", json.dumps({"train": ["gone"], "validation": ["v"]})
        )

        assert weights_of(mix) == {"gone": 1}
        assert "validation: ['v'] has no equivalent: declare it as an evaluation mix" in notes

    def test_words_that_are_no_pairs_are_refused(self, folder):
        with pytest.raises(
            ConfigError, match=r"its 3 words are no pairs of a weight and a prefix: '0\.7 a b'"
        ):
            imported(folder, "megatron", "0.7 a b")

    def test_equal_names_of_different_folders_stay_two_sources(self, folder):
        mix, _ = imported(folder, "megatron", "1 x/text 1 y/text")

        assert {name: source.path for name, source in mix.sources.items()} == {
            "text": "x/text",
            "text_2": "y/text",
        }


OLMO = {
    "sources": [
        {
            "source_name": "web",
            "target_ratio": 0.8,
            "paths": ["web/*.npy", "more/*.npy"],
            "max_repetition_ratio": 1.5,
        },
        {"source_name": "code", "target_ratio": 0.2, "paths": ["code/*.npy"]},
    ],
    "seed": 7,
}


class TestOlmoCore:
    def test_ratios_are_weights_of_tokens(self, folder):
        mix, notes = imported(folder, "olmo-core", OLMO, dtype="uint32", end_of_document=0)

        assert weights_of(mix) == {"web": 0.8, "code": 0.2}
        assert mix.sources["web"].path == ("web/*.npy", "more/*.npy")
        assert (mix.sources["code"].dtype, mix.sources["code"].end_of_document) == ("uint32", 0)
        assert mix.seed == 7
        assert (mix.sources["web"].max_repetition, mix.sources["code"].max_repetition) == (
            1.5,
            1.0,
        )
        assert (mix.mix.level, mix.pack.method) == ("token", "concat_and_split")
        assert {source.shuffle.method for source in mix.sources.values()} == {"units"}
        assert notes.startswith("units of all shards are drawn in a random order")
        assert notes.count("\n") == 1

    def test_tokens_that_are_requested_are_a_total_that_the_ratios_share(self, folder):
        mix, notes = imported(
            folder,
            "olmo-core",
            OLMO | {"requested_tokens": 1001},
            dtype="uint32",
            end_of_document=0,
        )

        assert {n: amount.tokens for n, amount in mix.mix.amounts.items()} == {
            "code": 200,
            "web": 801,
        }
        assert "requested_tokens" not in notes
        said = yaml.safe_dump(OLMO) + "requested_tokens: 1_001\n"
        assert imported(folder, "olmo-core", said, dtype="uint32", end_of_document=0)[0] == mix
        with pytest.raises(ConfigError, match="requested_tokens: is -5; a run draws 1 or more"):
            imported(folder, "olmo-core", OLMO | {"requested_tokens": -5}, dtype="uint32")

    @pytest.mark.parametrize(
        ("ratios", "total"), [((0.8, 0.3), "1.1"), ((3, 1), "4"), ((0.8, 0.1999), "0.9999")]
    )
    def test_ratios_that_do_not_sum_to_1_are_refused_as_olmo_core_does(self, folder, ratios, total):
        sources = [
            source | {"target_ratio": ratio}
            for source, ratio in zip(OLMO["sources"], ratios, strict=True)
        ]

        with pytest.raises(
            ConfigError, match=rf"sources: have target_ratio of {total} in all, and OLMo-core takes"
        ):
            imported(folder, "olmo-core", OLMO | {"sources": sources}, dtype="uint32")

    def test_ratios_that_sum_to_1_but_for_rounding_are_taken(self, folder):
        sources = [
            {"source_name": f"s{i}", "target_ratio": 0.333333, "paths": f"{i}.npy"}
            for i in range(3)
        ]

        mix, _ = imported(folder, "olmo-core", OLMO | {"sources": sources}, dtype="uint32")

        assert weights_of(mix) == {f"s{i}": pytest.approx(1 / 3) for i in range(3)}

    def test_a_part_of_a_source_is_refused(self, folder):
        content = {"sources": [OLMO["sources"][0] | {"max_source_fraction": 0.5}]}

        with pytest.raises(ConfigError, match=r"sources\[0\].max_source_fraction: is 0.5"):
            imported(folder, "olmo-core", content, end_of_document=0)

    def test_a_source_of_which_nothing_is_said_is_gone_through_once_as_olmo_core_does(self, folder):
        mix, notes = imported(folder, "olmo-core", OLMO, dtype="uint32")
        every = [source | {"max_repetition_ratio": 2} for source in OLMO["sources"]]
        _, unsaid = imported(folder, "olmo-core", OLMO | {"sources": every}, dtype="uint32")

        assert mix.sources["code"].max_repetition == 1
        assert "max_repetition_ratio: is 1 where nothing is said, as there" in notes
        assert "max_repetition_ratio" not in unsaid

        left_out = ("max_repetition_ratio",)
        free, _ = imported(folder, "olmo-core", OLMO, dtype="uint32", leave_out=left_out)
        assert {source.max_repetition for source in free.sources.values()} == {None}

    def test_a_list_of_sources_that_a_mixture_names_is_read(self, folder):
        """In the format of ``SourceMixtureDatasetConfig``, class names included."""
        listed = {"_CLASS_": "SourceMixtureList", "sources": OLMO["sources"]}
        content = {"source_list": listed, "seed": 7, "_CLASS_": "SourceMixtureDatasetConfig"}
        alone, _ = imported(folder, "olmo-core", OLMO, dtype="uint32")

        assert imported(folder, "olmo-core", content, dtype="uint32")[0] == alone
        sized = imported(folder, "olmo-core", content | {"requested_tokens": 1000}, dtype="uint32")[
            0
        ]
        assert sized.mix.amounts["web"].tokens == 800

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                {"source_list": {"sources": OLMO["sources"]}, "sources": OLMO["sources"]},
                "sources: stand beside those of source_list: write all of them there",
            ),
            (
                {"source_list": {"sources": [OLMO["sources"][0]]}},
                r"source_list\.sources: have target_ratio of 0\.8 in all",
            ),
            (
                {"source_list": {"sources": OLMO["sources"], "more": 1}},
                r"source_list\.more: this key is not known",
            ),
            (
                {"dataset": {"source_mixture_config": {"source_list": OLMO}}, "model": {}},
                "dataset: is of a training, .* write what stands at source_mixture_config to a file",
            ),
            (
                {"source_mixture_config": {"source_list": OLMO}, "sequence_length": 64},
                "source_mixture_config: is of a training, .* sequence_length by --length",
            ),
            (
                {"dataset": {"sources": ["a"]}, "source_list": []},
                "is no file of olmo-core, which has sources, a list of mappings, or source_list",
            ),
        ],
        ids=["both", "ratios", "unknown key", "training", "dataset", "none"],
    )
    def test_other_forms_are_refused_with_the_reason(self, folder, content, said):
        with pytest.raises(ConfigError, match=said):
            imported(folder, "olmo-core", content, dtype="uint32")

    def test_without_the_token_that_ends_documents_rows_are_cut_from_files_as_they_lie(
        self, folder
    ):
        mix, notes = imported(folder, "olmo-core", OLMO, dtype="uint32")

        assert (mix.mix.level, mix.pack.method) == ("sequence", "best_fit")
        assert (mix.sources["web"].row_tokens, mix.sources["code"].row_tokens) == (64, 64)
        assert "for documents of their own give --end-of-document ID" in notes

    def test_rows_of_documents_that_stay_apart_need_the_token_that_ends_them(self, folder):
        """As OLMo-core makes them by ``generate_doc_lengths``."""
        mix, _ = imported(
            folder, "olmo-core", OLMO, dtype="uint32", end_of_document=3, documents="apart"
        )
        joined, _ = imported(
            folder, "olmo-core", OLMO, dtype="uint32", end_of_document=3, documents="joined"
        )

        rows = [(s.row_tokens, s.end_of_document) for s in mix.sources.values()]
        assert rows == [(64, 3), (64, 3)]
        assert (mix.mix.level, mix.pack.method) == ("sequence", "best_fit")
        assert joined.sources["web"].end_of_document is None
        with pytest.raises(ConfigError, match="to stay apart; give --end-of-document ID"):
            imported(folder, "olmo-core", OLMO, dtype="uint32", documents="apart")


NANOTRON = {
    "data_stages": [
        {
            "name": "anneal",
            "start_training_step": 11,
            "data": {
                "dataset": {"dataset_folder": {"d/code": 1}, "token_size_in_bytes": 2},
                "seed": 42,
            },
        },
        {
            "name": "stable",
            "start_training_step": 1,
            "data": {
                "dataset": {
                    "dataset_folder": {"d/web": 0.8, "d/code/": 0.2},
                    "token_size_in_bytes": 2,
                    "vocab_size": 50_000,
                },
                "seed": 42,
                "num_loading_workers": 2,
            },
        },
    ],
    "tokens": {
        "sequence_length": 32,
        "micro_batch_size": 2,
        "batch_accumulation_per_replica": 3,
        "train_steps": 20,
    },
    "parallelism": {"dp": 4, "tp": 2},
    "model": {"anything": 1},
}


class TestNanotron:
    @pytest.mark.parametrize(
        ("config", "asked", "found"),
        [
            ({"_use_doc_masking": True, "eos_token_id": 2}, {}, (32, 2)),
            ({"_use_doc_masking": True, "eos_token_id": 2}, {"end_of_document": 0}, (32, 0)),
            ({"_use_doc_masking": True}, {"end_of_document": 0}, (32, 0)),
            ({"_use_doc_masking": True, "eos_token_id": 2}, {"documents": "joined"}, (32, None)),
            ({"_use_doc_masking": False, "eos_token_id": 2}, {}, (32, None)),
            ({"_use_doc_masking": None}, {}, (32, None)),
        ],
    )
    def test_a_mask_of_documents_in_the_model_keeps_them_apart(self, folder, config, asked, found):
        content = NANOTRON | {"model": {"model_config": config}}

        mix, notes = imported(
            folder, "nanotron", content, sizes={"row_tokens": None, "step_tokens": None}, **asked
        )

        rows = {(s.row_tokens, s.end_of_document) for s in mix.sources.values()}
        assert rows == {found}
        assert mix.mix.level == "sequence"
        guessed = "eos_token_id: is 2, and is taken for the token that ends documents"
        assert (guessed in notes) == (found[1] == 2)

    def test_a_mask_of_documents_without_a_token_that_ends_them_is_refused(self, folder):
        content = NANOTRON | {"model": {"model_config": {"_use_doc_masking": True}}}

        with pytest.raises(ConfigError, match="to stay apart; give --end-of-document ID"):
            imported(folder, "nanotron", content)

    def test_stages_sizes_and_folders(self, folder):
        mix, notes = imported(
            folder, "nanotron", NANOTRON, sizes={"row_tokens": None, "step_tokens": None}
        )

        assert [stage.from_step for stage in mix.mix.stages] == [0, 10]
        assert weights_of(mix) == {"web": 0.8, "code": 0.2}
        assert weights_of(mix, 1) == {"code": 1.0}
        assert mix.sources["web"].path == "d/web/*.ds"
        assert (mix.sources["web"].dtype, mix.sources["web"].row_tokens) == ("uint16", 32)
        assert (mix.pack.length, mix.batch.tokens, mix.batch.micro_tokens) == (
            32,
            32 * 2 * 3 * 4,
            64,
        )
        assert mix.seed == 42
        assert (mix.mix.level, mix.pack.method) == ("sequence", "best_fit")
        assert "vocab_size: 50000 has no equivalent" in notes

    def test_documents_of_their_own_share_rows_and_other_rows_are_cut_as_asked(self, folder):
        documents, _ = imported(folder, "nanotron", NANOTRON, end_of_document=0)
        rows, _ = imported(folder, "nanotron", NANOTRON, sizes={"row_tokens": 16})

        assert (documents.mix.level, documents.pack.method) == ("token", "concat_and_split")
        assert documents.sources["web"].end_of_document == 0
        assert (rows.pack.length, rows.sources["web"].row_tokens) == (16, 16)

    def test_a_list_of_folders_has_weights_beside_it_or_none(self, folder):
        stage = NANOTRON["data_stages"][0] | {"start_training_step": 1}
        content = NANOTRON | {"data_stages": [stage]}

        def weights(**dataset):
            stage["data"] = {"dataset": {"dataset_folder": ["a", "b"], **dataset}}
            return weights_of(imported(folder, "nanotron", content)[0])

        assert weights() == {"a": 0.5, "b": 0.5}
        assert weights(dataset_weights=[1, 3]) == {"a": 0.25, "b": 0.75}
        with pytest.raises(ConfigError, match="holds 1 entries, not 2 numbers from 0"):
            weights(dataset_weights=[1])

    @pytest.mark.parametrize("most", [[640], [None, 640], 640])
    def test_a_part_of_a_folder_is_refused(self, folder, most):
        dataset = {"dataset_folder": ["a", "b"], "dataset_max_tokens": most}
        stage = {"start_training_step": 1, "data": {"dataset": dataset}}

        with pytest.raises(ConfigError) as raised:
            imported(folder, "nanotron", NANOTRON | {"data_stages": [stage]})

        assert "dataset_max_tokens: " in str(raised.value)
        assert "a part of a folder cannot be declared: name a folder of fewer files" in str(
            raised.value
        )

    def test_no_limit_of_any_folder_is_none(self, folder):
        dataset = {"dataset_folder": ["a", "b"], "dataset_max_tokens": [None, None]}
        stage = {"start_training_step": 1, "data": {"dataset": dataset}}

        _, notes = imported(folder, "nanotron", NANOTRON | {"data_stages": [stage]})

        assert "dataset_max_tokens" not in notes

    def test_a_dataset_of_the_hub_is_refused(self, folder):
        stage = {"start_training_step": 1, "data": {"dataset": {"hf_dataset_or_datasets": "a/b"}}}

        with pytest.raises(ConfigError) as raised:
            imported(folder, "nanotron", NANOTRON | {"data_stages": [stage]})

        assert "dataset.dataset_folder: names no folder of tokens" in str(raised.value)
        assert "this key is not known" not in str(raised.value)

    def test_an_example_of_nanotron_is_read_with_its_nulls_and_readers(self, folder):
        dataset = {
            "dataset_folder": ["d/web"],
            "dataset_weights": None,
            "tokenizer_name": "HuggingFaceTB/cosmo2-tokenizer",
            "vocab_size": 49_152,
            "skip_in_stream": False,
            "pad_samples_to_global_batch_size": False,
            "shuffle_files": True,
            "dataset_max_tokens": None,
        }
        data = {"dataset": dataset, "num_loading_workers": 1, "seed": 42, "sequence_length": None}
        stage = {"name": "Stable", "start_training_step": 1, "data": data}

        def dtype():
            mix, notes = imported(folder, "nanotron", NANOTRON | {"data_stages": [stage]})
            assert "give --dtype" not in notes
            return mix.sources["web"].dtype

        # If the file does not give the bytes of a token, nanotron finds them in the same way.
        assert dtype() == "uint16"
        dataset["vocab_size"] = 128_256
        assert dtype() == "uint32"

    def test_the_type_of_a_folder_is_kept_where_a_later_stage_does_not_say_it(self, folder):
        stages = [
            {
                "start_training_step": first,
                "data": {"dataset": {"dataset_folder": ["d/web"], **size}},
            }
            for first, size in ((1, {"token_size_in_bytes": 4}), (5, {}))
        ]

        mix, _ = imported(folder, "nanotron", NANOTRON | {"data_stages": stages})

        assert mix.sources["web"].dtype == "uint32"


VEOMNI = {
    "sources": ["/data/web", "/data/code.jsonl"],
    "names": ["web", "code"],
    "schedule": [{"schedule_type": "const", "weights": [0.8, 0.2]}],
    "level": "token",
    "stopping_strategy": "first_exhausted",
}


class TestVeOmni:
    def test_parallel_lists_become_named_sources(self, folder):
        mix, _ = imported(folder, "veomni", VEOMNI, source_type="jsonl", text="content")

        assert weights_of(mix) == {"web": 0.8, "code": 0.2}
        assert (mix.mix.level, mix.mix.stop) == ("token", "first_exhausted")
        assert (mix.sources["web"].type, mix.sources["web"].text) == ("jsonl", "content")

    def test_a_folder_says_its_type_by_what_is_in_it(self, folder):
        (folder / "web").mkdir()
        (folder / "web" / "part-0.parquet").touch()

        mix, notes = imported(folder, "veomni", VEOMNI | {"sources": ["web", "code.jsonl"]})

        assert [source.type for source in mix.sources.values()] == ["jsonl", "parquet"]
        assert "the column of text is taken to be text" in notes

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"names": ["web"]}, "holds 1 names of 2 sources"),
            (
                {"schedule": [{"schedule_type": "linear", "weights": [1, 1]}]},
                "is 'linear'; const alone is known",
            ),
            (
                {"schedule": [{"weights": [1, -1]}]},
                "holds 2 entries, not 2 numbers from 0",
            ),
            ({"level": "byte"}, "level: is 'byte'"),
            ({"stopping_strategy": "soon"}, "stopping_strategy: is 'soon'"),
            ({"surprise": 1}, "surprise: this key is not known; --leave-out surprise"),
            (
                {"schedule": [{"init_token": 5, "weights": [1, 1]}]},
                "init_token: is 5: the first begins at 0",
            ),
            (
                {"schedule": [{"end_token": 9, "weights": [1, 1]}, {"init_token": 8}]},
                "schedule[1].init_token: is 8: the entry before ends at 9",
            ),
            (
                {"schedule": [{"weights": [1, 1]}, {"weights": [1, 1]}]},
                "schedule[1].init_token: is missing, and no end_token before it says",
            ),
            (
                {"schedule": [{"weights": [1, 1]}, {"init_token": 0, "weights": [1, 1]}]},
                "schedule[1].init_token: is 0, no later than that of the entry before",
            ),
            (
                {"schedule": [{"end_token": 0, "weights": [1, 1]}]},
                "end_token: is 0, and the entry begins at 0",
            ),
            (
                {
                    "schedule": [
                        {
                            "schedule_type": "changing",
                            "init_weights": [1, 0],
                            "end_weights": [0, 1],
                            "end_token": 10**9,
                        }
                    ]
                },
                "schedule[0].schedule_type: is 'changing'; const alone is known",
            ),
        ],
    )
    def test_what_is_not_known_is_refused(self, folder, change, said):
        with pytest.raises(ConfigError) as raised:
            imported(folder, "veomni", VEOMNI | change, source_type="jsonl")

        assert said in str(raised.value)

    @pytest.mark.parametrize(
        "says_where", [("init_token",), ("end_token",), ("init_token", "end_token")]
    )
    def test_entries_of_a_schedule_are_stages_from_so_many_tokens(self, folder, says_where):
        """A step has 640 tokens: 1000 of them are taken before step 2, 6400 before step 10."""
        schedule = [
            {"schedule_type": "const", "weights": weights}
            | {
                key: at
                for key, at in zip(("init_token", "end_token"), ends, strict=True)
                if key in says_where
            }
            for weights, ends in (
                ([8, 2], (0, 1000)),
                ([1, 1], (1000, 6400)),
                ([0, 1], (6400, 10**14)),
            )
        ]

        mix, notes = imported(
            folder, "veomni", VEOMNI | {"schedule": schedule}, source_type="jsonl"
        )

        assert [stage.from_step for stage in mix.mix.stages] == [0, 2, 10]
        found = [weights_of(mix, stage) for stage in range(3)]
        assert found[:2] == [{"web": 0.8, "code": 0.2}, {"web": 0.5, "code": 0.5}]
        assert found[2]["code"] == 1.0
        assert "schedule: holds several entries, of which a released VeOmni draws by" in notes
        ends = "end_token" in says_where
        assert ("schedule: ends at 100000000000000 tokens; here its last" in notes) == ends
        written = yaml.safe_load(mix_written(folder))
        assert written["version"] == 2
        assert [stage["from_tokens"] for stage in written["mix"]["stages"]] == [0, 1000, 6400]

    def test_an_example_of_veomni_is_read_without_the_source_that_it_never_draws(self, folder):
        content = {
            "sources": ["seed/share.jsonl", "seed/fineweb.jsonl"],
            "names": ["sharegpt4v_captioner", "fineweb_100BT"],
            "schedule": [
                {"schedule_type": "const", "init_token": 0, "end_token": 10**14, "weights": [1, 0]}
            ],
            "val_sources": ["seed/held-out.jsonl"],
            "upstream_sharded": True,
        }

        mix, notes = imported(folder, "veomni", content)

        assert weights_of(mix) == {"sharegpt4v_captioner": 1.0}
        assert mix.names == ("sharegpt4v_captioner",)
        assert "sources.fineweb_100BT: has weight 0 and was left out" in notes
        assert "val_sources: ['seed/held-out.jsonl'] has no equivalent: declare them" in notes

    def test_a_key_that_is_given_up_is_noted(self, folder):
        _, notes = imported(
            folder, "veomni", VEOMNI | {"surprise": 1}, source_type="jsonl", leave_out=["surprise"]
        )

        assert "surprise: was left out, as asked" in notes


def an_mds(folder, samples, columns=("tokens", "bytes")):
    folder.mkdir(parents=True)
    shard = {"samples": samples, "column_names": [columns[0]], "column_encodings": [columns[1]]}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard, shard]}))


def foundry(streams, **dataset):
    return {
        "max_seq_len": 32,
        "global_train_batch_size": 20,
        "device_train_microbatch_size": 5,
        "model": {"d_model": 64},
        "tokenizer": {"name": "gpt2"},
        "train_loader": {
            "name": "text",
            "dataset": {"streams": streams, "shuffle": True, "shuffle_seed": 9, **dataset},
            "drop_last": True,
            "num_workers": 8,
        },
    }


FROM_FILE = {"row_tokens": None, "step_tokens": None}


class TestLlmFoundry:
    def test_proportions_are_weights_of_samples(self, folder):
        an_mds(folder / "web" / "train", 10)
        streams = {
            "web": {"local": "web", "remote": "s3://b/web", "split": "train", "proportion": 0.8},
            "code": {"local": "code", "remote": "s3://b/code", "split": "train", "proportion": 0.2},
        }

        mix, notes = imported(folder, "llm-foundry", foundry(streams), sizes=FROM_FILE)

        assert weights_of(mix) == {"web": 0.8, "code": 0.2}
        assert (mix.mix.level, mix.seed) == ("sample", 9)
        web, code = mix.sources["web"], mix.sources["code"]
        assert (web.path, web.tokens, web.dtype) == ("web/train", "tokens", "int64")
        assert (code.path, code.text) == (
            "s3://b/code/train",
            "text",
        )  # no index here says whether it has tokens
        assert (mix.pack.length, mix.batch.tokens, mix.batch.micro_tokens) == (32, 640, 160)
        assert "num_workers: 8 has no equivalent: a matter of speed" in notes

    def test_a_step_holds_so_many_samples_as_its_batch_has_rows(self, folder):
        """Of texts that would fit into a row together, and of tokens that are shorter than a row."""
        (folder / "web.jsonl").write_text('{"text": "short"}\n' * 99)

        imported(folder, "llm-foundry", foundry({"web": {"local": "web"}}), sizes=FROM_FILE)

        mix = yaml.safe_load(mix_written(folder))
        mix["sources"]["web"] |= {"type": "jsonl", "path": str(folder / "web.jsonl")}
        (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
        with omniload.open(folder / "mix.yaml", steps=3, arrays="numpy") as loader:
            assert [len(batch.pieces()) for batch in loader] == [20] * 3

    def test_epochs_and_sizes_count_samples(self, folder):
        an_mds(folder / "a", 5)
        an_mds(folder / "b", 10, ("text", "str"))
        streams = {"a": {"local": "a", "repeat": 4}, "b": {"local": "b"}}

        mix, _ = imported(folder, "llm-foundry", foundry(streams))

        assert weights_of(mix) == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}
        assert mix.sources["b"].text == "text"

    @pytest.mark.parametrize(
        ("given", "methods", "said"),
        [
            ({}, {"none"}, "is missing and read as false, as llm-foundry does: records come as"),
            ({"shuffle": None}, {"none"}, "is missing and read as false"),
            ({"shuffle": False}, {"none"}, "false is read as records in the order that they are"),
            ({"shuffle": True}, {"units"}, "true is read as units of all shards in a random order"),
        ],
    )
    def test_sources_are_shuffled_where_the_file_says_so_and_the_report_says_what_was_read(
        self, folder, given, methods, said
    ):
        streams = {name: {"local": name, "proportion": 1} for name in ("web", "code")}
        content = foundry(streams)
        dataset = content["train_loader"]["dataset"]
        del dataset["shuffle"]
        dataset |= given

        mix, notes = imported(folder, "llm-foundry", content)

        assert {source.shuffle.method for source in mix.sources.values()} == methods
        assert f"train_loader.dataset.shuffle: {said}" in notes

    @pytest.mark.parametrize(
        ("stream", "said"),
        [
            ({"remote": "s3://b/x"}, "x.proportion: is not given, so its samples are its share"),
            (
                {"remote": "s3://b/x", "repeat": 2},
                "x.repeat: counts its samples, and s3://b/x/index.json",
            ),
            ({"local": "x", "proportion": 1, "repeat": 2}, "stands beside repeat"),
            ({"proportion": 1}, "local: and remote are missing"),
        ],
    )
    def test_a_stream_whose_share_is_not_known_is_refused(self, folder, stream, said):
        with pytest.raises(ConfigError) as raised:
            imported(
                folder, "llm-foundry", foundry({"x": stream, "y": {"local": "y", "choose": 3}})
            )

        assert said in str(raised.value)

    @pytest.mark.parametrize("share", [{}, {"repeat": 2}])
    def test_a_stream_alone_needs_no_share_and_no_index(self, folder, share):
        content = foundry({})
        content["train_loader"]["dataset"] |= {"remote": "s3://b/x"} | share
        del content["train_loader"]["dataset"]["streams"]

        mixes = [
            imported(folder, "llm-foundry", each)[0]
            for each in (content, foundry({"x": {"remote": "s3://b/x"} | share}))
        ]

        assert [list(weights_of(mix).values()) for mix in mixes] == [[1.0], [1.0]]

    @pytest.mark.parametrize("named", ["max_seq_len", "variables.max_seq_len"])
    def test_values_that_a_file_names_are_found_as_its_own_examples_write_them(self, folder, named):
        content = {
            "variables": {"max_seq_len": 32, "root": "./data", "local": "${variables.root}/c4"},
            "max_seq_len": 32,
            "remote": None,
            "global_train_batch_size": 4,
            "tokenizer": {"name": "gpt2", "kwargs": {"model_max_length": f"${{{named}}}"}},
            "train_loader": {
                "name": "text",
                "dataset": {
                    "local": "${variables.local}",
                    "remote": "${remote}",
                    "split": "train",
                    "shuffle": True,
                    "max_seq_len": f"${{{named}}}",
                    "proportion": 1,
                },
            },
            "eval_loader": {"name": "text"},
        }

        mix, notes = imported(folder, "llm-foundry", content, sizes=FROM_FILE)

        assert mix.sources["file"].path == "./data/c4/train"
        assert (mix.pack.length, mix.batch.tokens) == (32, 128)
        assert mix.pack.overlong == "truncate"  # as it cuts samples longer than max_seq_len
        assert mix.pack.method == "none"  # and pads shorter samples
        assert "each sample has a row of its own, cut at max_seq_len or padded" in notes
        assert "\nremote of the training, and not of its data, was not read" in notes
        assert "eval_loader: is not read: declare it as an evaluation mix" in notes

    @pytest.mark.parametrize(
        "text", ["${oc.env:DATA}/web", "${gone}/web", "${train_loader}", "${loop}", "${.local}"]
    )
    def test_what_names_no_value_of_the_file_is_refused_with_its_line(self, folder, text):
        content = foundry({"web": {"local": text, "proportion": 1}}) | {"loop": "${pool}"}

        with pytest.raises(ConfigError) as raised:
            imported(folder, "llm-foundry", content | {"pool": "a${loop}"})

        assert "streams.web.local: '" in str(raised.value)
        assert "names no value of this file: write the value in its place" in str(raised.value)
        assert str(raised.value).startswith("file.yaml:")

    def test_keys_that_name_others_twice_all_the_way_down_stay_small(self, folder):
        doubling = {f"k{i}": f"${{k{i + 1}}}${{k{i + 1}}}" for i in range(64)} | {"k64": "x"}
        content = foundry({"web": {"local": "${k0}", "proportion": 1}}) | doubling

        with pytest.raises(ConfigError, match="names no value of this file"):
            imported(folder, "llm-foundry", content)

    def test_other_loaders_are_refused_by_name(self, folder):
        content = foundry({})
        content["train_loader"]["name"] = "finetuning"

        with pytest.raises(ConfigError, match=r"train_loader.name: is 'finetuning'"):
            imported(folder, "llm-foundry", content)


def an_energon(folder, *, field_map, shards=("a.tar", "b.tar"), counts=(), **split):
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    settings = {"sample_type": {"__module__": "os", "__class__": "system"}, "field_map": field_map}
    (meta / "dataset.yaml").write_text(yaml.safe_dump(settings))
    (meta / "split.yaml").write_text(
        yaml.safe_dump({"split_parts": {"train": [*shards], "val": []}, **split})
    )
    if counts:
        (meta / ".info.json").write_text(json.dumps({"shard_counts": dict(counts)}))


def metadataset(split):
    return {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": split},
    }


PACKED = (
    "rows are packed, as by a task encoder that packs; pack.method none gives each sample a row"
)


class TestEnergon:
    def test_weights_multiply_down_the_tree_and_flavours_are_tags(self, folder):
        an_energon(folder / "coco", field_map={"caption": "json[caption]"})
        an_energon(folder / "text", field_map={"text": "txt"}, exclude=["b.tar"])
        (folder / "inner.yaml").write_text(
            yaml.safe_dump(
                metadataset(
                    {"blend": [{"path": "coco", "weight": 1}, {"path": "text", "weight": 3}]}
                )
            )
        )
        outer = {
            "blend": [
                {
                    "weight": 1,
                    "path": "./coco",
                    "subflavors": {"kind": "caption", "augmentation": False, "text_length": 100},
                },
                {"weight": 1, "path": "./inner.yaml"},
            ]
        }

        mix, notes = imported(folder, "energon", metadataset(outer))

        assert weights_of(mix) == {"coco": 0.5, "coco_2": 0.125, "text": 0.375}
        assert mix.mix.level == "sample"
        assert mix.sources["coco"].tags == {
            "kind": "caption",
            "augmentation": "False",
            "text_length": "100",
        }
        assert (mix.sources["coco"].text, mix.sources["coco"].key) == ("json", "caption")
        assert mix.sources["text"].paths == (str(folder / "text" / "a.tar"),)
        assert notes.splitlines() == [PACKED]

    def test_images_are_read_with_a_token_that_stands_for_them_or_left_out_by_name(self, folder):
        an_energon(folder / "coco", field_map={"caption": "json[caption]", "image": "jpg;png"})
        content = metadataset({"path": "coco"})

        with pytest.raises(ConfigError, match=r"image holds images: give --placeholder TOKEN"):
            imported(folder, "energon", content)

        mix, notes = imported(folder, "energon", content, placeholder=7)
        source = mix.sources["coco"]
        assert (source.text, source.key, source.images) == ("json", "caption", ("jpg", "png"))
        assert [(made.type, made.placeholder) for made in source.transforms] == [("images", 7)]
        assert "set patch and merge to those of the encoder" in notes

        mix, notes = imported(folder, "energon", content, leave_out=["image"])
        assert mix.sources["coco"].transforms == ()
        assert "field_map.image: was left out, as asked" in notes

    def test_a_file_of_json_lines_is_a_source_of_the_key_that_the_user_names(self, folder):
        content = metadataset({"blend": [{"path": "chats.jsonl"}, {"path": "notes.jsonl"}]})

        with pytest.raises(
            ConfigError, match=r"blend\[0\].path: .*chats.jsonl: .* give --text KEY"
        ):
            imported(folder, "energon", content)

        mix, _ = imported(folder, "energon", content, text="body")
        assert weights_of(mix) == {"chats": 0.5, "notes": 0.5}
        source = mix.sources["notes"]
        assert (source.type, source.text) == ("jsonl", "body")
        assert source.path == str(folder / "notes.jsonl")

    def test_other_fields_of_a_sample_are_refused_by_name(self, folder):
        an_energon(folder / "vqa", field_map={"text": "json[context]", "answers": "json[answers]"})

        with pytest.raises(
            ConfigError, match="answers of a sample is not read; --leave-out answers"
        ):
            imported(folder, "energon", metadataset({"path": "vqa"}))

    def test_repetitions_count_samples(self, folder):
        counts = {"s-0.tar": 10, "s-1.tar": 20, "held-out.tar": 99}
        an_energon(folder / "a", field_map={"text": "txt"}, shards=["s-{0..1}.tar"], counts=counts)
        an_energon(
            folder / "b", field_map={"text": "txt"}, shards=["s-0.tar"], counts={"s-0.tar": 15}
        )
        split = {"blend_epochized": [{"path": "a"}, {"path": "b", "repetitions": 2}]}

        mix, _ = imported(folder, "energon", metadataset(split))

        assert weights_of(mix) == {"a": 0.5, "b": 0.5}

    def test_repetitions_count_samples_of_the_yaml_that_an_older_energon_wrote(self, folder):
        for name, count in (("a", 10), ("b", 30)):
            an_energon(folder / name, field_map={"text": "txt"}, shards=["s.tar"])
            info = {"shard_counts": {"s.tar": count}}
            (folder / name / ".nv-meta" / ".info.yaml").write_text(yaml.safe_dump(info))
        content = metadataset({"blend_epochized": [{"path": "a"}, {"path": "b"}]})

        assert weights_of(imported(folder, "energon", content)[0]) == {"a": 0.25, "b": 0.75}

        # As Energon reads it: the newer file takes precedence over the older one.
        (folder / "a" / ".nv-meta" / ".info.json").write_text('{"shard_counts": {"s.tar": 30}}')
        assert weights_of(imported(folder, "energon", content)[0]) == {"a": 0.5, "b": 0.5}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, "neither .info.json nor .info.yaml of"),
            ("shard_counts: !!python/object/apply:os.system [true]", "tags are not read"),
            ("shard_counts: [1]", ".info.yaml holds no shard_counts"),
            ("# " + "x" * (1 << 20), "more than 1 MiB"),
        ],
    )
    def test_repetitions_of_samples_that_nothing_counts_are_refused(self, folder, text, said):
        an_energon(folder / "a", field_map={"text": "txt"})
        if text is not None:
            (folder / "a" / ".nv-meta" / ".info.yaml").write_text(text)

        (fault,) = faults(folder, "energon", metadataset({"blend_epochized": [{"path": "a"}]}))

        assert "repetitions: count samples, " in fault
        assert said in fault

    def test_a_join_that_leaves_nothing_behind_is_not_said_to_be_left_out(self, folder):
        an_energon(folder / "ok", field_map={"text": "txt"})
        join = {"primary": {"path": "ok"}, "secondary": {"path": "ok"}}
        entry = {"weight": 1, "join": join, "joiner": {"__module__": "a", "__class__": "B"}}

        (fault,) = faults(folder, "energon", metadataset({"blend": [{"path": "ok"}, entry]}))

        assert "blend[1].join: " in fault
        assert "take the entry out of the file" in fault
        assert "--leave-out" not in fault

    @pytest.mark.parametrize(
        ("split", "said"),
        [
            ({"path": "gone"}, "gone/.nv-meta/dataset.yaml: no such file"),
            ({"path": "s3://b/x"}, "cannot be read here"),
            ({"join": {"a": {"path": "a"}}}, "join: "),
            ({"path": "file.yaml"}, "is part of itself, by"),
            ({"path": "circle.yaml"}, "file.yaml:5: splits.train.path: "),
            ({"path": "ok", "subset": {"range": ["0%", "50%"]}}, "subset: "),
            ({"path": "ok", "split_part": "val"}, "names no shard of the split 'val'"),
            ({"path": "odd"}, "samples are not left out"),
            ({"path": "out"}, "'../x.tar' is outside the folder"),
            ({"path": "images"}, "holds no text"),
            (
                {"blend_epochized": [{"repetitions": 2, "blend": [{"path": "ok"}]}]},
                "repetitions: count the samples of a dataset, and here are several",
            ),
            (
                {"path": "ok", "split_config": "other.yaml"},
                "is 'other.yaml': split.yaml of .nv-meta is read",
            ),
            ({}, "path: is missing"),
        ],
    )
    def test_what_cannot_be_declared_is_refused(self, folder, split, said):
        (folder / "circle.yaml").symlink_to("circle.yaml")
        an_energon(folder / "ok", field_map={"text": "txt"})
        an_energon(folder / "odd", field_map={"text": "txt"}, exclude=["a.tar/0001"])
        an_energon(folder / "out", field_map={"text": "txt"}, shards=["../x.tar"])
        an_energon(folder / "images", field_map={"image": "jpg"})

        with pytest.raises(ConfigError) as raised:
            imported(folder, "energon", metadataset(split))

        assert said in str(raised.value)


AXOLOTL = {
    "base_model": "some/model",
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "datasets": [
        {"path": "notes.jsonl", "type": "completion", "field": "body"},
        {
            "path": "chats",
            "ds_type": "json",
            "type": "chat_template",
            "roles_to_train": ["assistant"],
        },
    ],
}


def said(asked, *answers):
    """Return messages of a user and, with an answer, of an assistant."""
    answered = [{"role": "assistant", "content": answer} for answer in answers]
    return [{"role": "user", "content": asked}, *answered]


def samples_in(folder, mix, record):
    """Return the text of each sample that a mix makes of one record, and of its trained part."""
    write_model(folder / "model", CHATML)
    (name,) = mix.names
    (folder / mix.sources[name].path).write_text(json.dumps(record) + "\n")
    tokenizer = BpeTokenizer(type="bpe", path="model", end_of_document="<eos>")
    spec = SourceSpec(name, mix.sources[name], base_dir=folder, tokenizer=tokenizer)
    block = open_source(spec).read(0, 1)
    library = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))

    def text_of(tokens):
        return library.decode(tokens.tolist(), skip_special_tokens=False)

    masks = block.others["loss_mask"]
    return [
        (text_of(block.tokens[i]), text_of(block.tokens[i][masks[i]]))
        for i in range(len(block.tokens))
    ]


class TestAxolotl:
    @pytest.fixture(autouse=True)
    def data(self, folder):
        (folder / "notes.jsonl").write_bytes(b"x" * 300)
        (folder / "chats").mkdir()
        (folder / "chats" / "a.jsonl").write_bytes(b"x" * 100)

    @pytest.mark.parametrize("dataset", [{}, {"type": None}, {"type": ""}])
    @pytest.mark.parametrize("file", ["ids.parquet", "ids.jsonl"])
    def test_a_dataset_without_a_type_holds_ids_and_labels(self, folder, dataset, file):
        """As in that tool; earlier, it was taken for texts."""
        (folder / file).write_bytes(b"x")
        content = AXOLOTL | {"datasets": [{"path": file} | dataset]}

        mix, _ = imported(folder, "axolotl", content)

        (source,) = mix.sources.values()
        assert (source.holds_text, source.tokens) == (False, "input_ids")
        assert source.columns == {"labels": "labels"}
        assert source.overlong == "drop"
        mix, _ = imported(folder, "axolotl", content, tokens="ids")
        assert mix.sources["ids"].tokens == "ids"

    def test_ids_in_fields_of_text_are_refused_with_what_to_do(self, folder):
        (folder / "notes.csv").write_bytes(b"x")
        content = AXOLOTL | {"datasets": [{"path": "notes.csv"}]}

        (fault,) = faults(folder, "axolotl", content)

        assert "datasets[0].type: is left out, so the files hold input_ids and labels" in fault

    def test_joined_datasets_go_through_once_by_size(self, folder):
        mix, notes = imported(folder, "axolotl", AXOLOTL, sizes=FROM_FILE)

        assert weights_of(mix) == {"notes": 0.75, "chats": 0.25}
        assert mix.mix.stop == "each_once"
        assert mix.sources["notes"].text == "body"
        assert mix.sources["chats"].text == "messages"
        assert [t.type for t in mix.sources["chats"].transforms] == ["chat"]
        assert (mix.pack.length, mix.batch.tokens, mix.batch.micro_tokens) == (64, 512, 128)
        assert "multiply it by your ranks" in notes

    def test_datasets_are_drawn_in_an_order_that_is_random_over_all_of_each(self, folder):
        mix, notes = imported(folder, "axolotl", AXOLOTL | {"shuffle_merged_datasets": False})

        assert {source.shuffle.method for source in mix.sources.values()} == {"units"}
        assert "shuffle_merged_datasets: is off: the trainer below" in notes

    def test_groups_of_like_length_are_no_order_of_ours_and_said(self, folder):
        _, notes = imported(folder, "axolotl", AXOLOTL | {"group_by_length": True})

        assert "group_by_length: True has no equivalent: the order is another" in notes

    @pytest.mark.parametrize(
        "said",
        [
            {"base_model": "here"},
            {"tokenizer_config": "here"},
            {"base_model_config": "here"},
            {"tokenizer_config": "here", "base_model_config": "gone"},
        ],
    )
    def test_the_tokenizer_is_that_of_a_model_that_is_here(self, folder, said):
        (folder / "here").mkdir()
        (folder / "here" / "tokenizer.json").write_text("{}")
        report = Report()

        found = read_as("axolotl", AXOLOTL | said, Asked(file=folder / "a.yaml", report=report))

        assert found.tokenizer == Path("here")
        assert "base_model" not in "".join(report.notes)

    def test_a_tokenizer_of_the_hub_is_asked_for(self, folder):
        report = Report()

        found = read_as("axolotl", AXOLOTL, Asked(file=folder / "a.yaml", report=report))

        assert found.tokenizer is None
        assert "tokenizer is that of 'some/model', whose" in "".join(report.notes)

    def test_samples_are_packed_where_the_file_says_so_and_else_have_rows_of_their_own(
        self, folder
    ):
        mix, notes = imported(folder, "axolotl", AXOLOTL)
        assert mix.pack.method == "none"
        assert "sample_packing: is off" in notes

        mix, _ = imported(folder, "axolotl", AXOLOTL | {"sample_packing": True})
        assert mix.pack.method == "best_fit"

    def test_long_conversations_are_left_out_and_long_texts_cut(self, folder):
        mix, _ = imported(folder, "axolotl", AXOLOTL)
        assert [mix.sources[name].overlong for name in ("notes", "chats")] == [None, "drop"]
        assert mix.pack.overlong == "split"

        mix, _ = imported(folder, "axolotl", AXOLOTL | {"excess_length_strategy": "truncate"})
        assert mix.sources["chats"].overlong == "truncate"

    @pytest.mark.parametrize("where", ["file", "dataset"])
    def test_a_template_of_axolotls_own_is_refused_until_a_file_stands_for_it(self, folder, where):
        content = AXOLOTL | {"chat_template": "chatml"}
        if where == "dataset":
            chats = AXOLOTL["datasets"][1] | {"chat_template": "chatml"}
            content = AXOLOTL | {"datasets": [chats]}

        with pytest.raises(ConfigError, match="chat_template: is 'chatml', which axolotl keeps"):
            imported(folder, "axolotl", content)

        mix, _ = imported(folder, "axolotl", content, template="chatml.jinja")
        assert mix.sources["chats"].transforms[0].template == "chatml.jinja"
        mix, _ = imported(folder, "axolotl", content, leave_out=["chat_template"])
        assert mix.sources["chats"].transforms[0].template is None

    def test_a_template_of_the_whole_file_is_refused_at_its_own_line_and_once(self, folder):
        content = """\
chat_template: chatml
sequence_len: 64
datasets:
  - {path: chats, ds_type: json, type: chat_template}
  - {path: chats, ds_type: json, type: sharegpt}
  - {path: chats, ds_type: json, type: chat_template, chat_template: llama3}
"""
        first, second = faults(folder, "axolotl", content)

        assert first.startswith("file.yaml:1: chat_template: is 'chatml', which axolotl keeps")
        assert second.startswith("file.yaml:6: datasets[2].chat_template: is 'llama3', which")

    @pytest.mark.parametrize(
        ("said", "column", "keys", "roles"),
        [
            ({}, "messages", {}, {"human": "user", "gpt": "assistant"}),
            (
                {
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "from", "content": "value"},
                    "roles": {"user": ["me", "you"], "assistant": ["it"]},
                    "roles_to_train": ["it"],
                },
                "conversations",
                {"role": "from", "content": "value"},
                {"me": "user", "you": "user", "it": "assistant"},
            ),
            (
                {"message_field_role": "who", "message_field_content": "what"},
                "messages",
                {"role": "who", "content": "what"},
                {"human": "user", "gpt": "assistant"},
            ),
            (
                {"type": "sharegpt", "chat_template": None},
                "conversations",
                {"role": "from", "content": "value"},
                {"human": "user", "gpt": "assistant"},
            ),
            (
                {"type": "sharegpt", "field_messages": "turns"},
                "turns",
                {"role": "from", "content": "value"},
                {"human": "user", "gpt": "assistant"},
            ),
        ],
    )
    def test_keys_and_roles_of_messages_are_carried_over(self, folder, said, column, keys, roles):
        chats = AXOLOTL["datasets"][1] | said

        mix, notes = imported(
            folder, "axolotl", AXOLOTL | {"datasets": [chats]}, leave_out=["conversation"]
        )

        (source,) = mix.sources.values()
        usual = {role: role for role in ("system", "user", "assistant", "tool")}
        names = MessageNames.model_validate({**keys, "roles": usual | roles})
        assert source.text == column
        assert source.transforms[0].messages == names
        assert source.transforms[0].loss == "assistant"
        assert (
            "a system text in a column beside them is not, nor tools: name their columns" in notes
        )

    def test_a_column_of_tools_that_is_named_is_read(self, folder):
        chats = AXOLOTL["datasets"][1] | {"field_tools": "functions"}

        mix, notes = imported(
            folder, "axolotl", AXOLOTL | {"datasets": [chats]}, leave_out=["conversation"]
        )

        (source,) = mix.sources.values()
        assert source.transforms[0].tools == "functions"
        assert "a system text in a column beside them is not" in notes

    def test_a_template_stands_for_that_of_sharegpt(self, folder):
        chats = AXOLOTL["datasets"][1] | {"type": "sharegpt", "conversation": "chatml"}
        content = AXOLOTL | {"datasets": [chats], "chat_template": "chatml"}

        mix, _ = imported(folder, "axolotl", content, template="chatml.jinja")
        assert mix.sources["chats"].transforms[0].template == "chatml.jinja"
        mix, _ = imported(folder, "axolotl", content, leave_out=["conversation"])
        assert mix.sources["chats"].transforms[0].template is None

    def test_prompts_are_trained_on_where_the_file_says_so_of_all_datasets(self, folder):
        mix, _ = imported(folder, "axolotl", AXOLOTL)
        assert mix.sources["chats"].transforms[0].loss == "assistant"

        mix, _ = imported(folder, "axolotl", AXOLOTL | {"train_on_inputs": True})
        assert mix.sources["chats"].transforms[0].loss == "all"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"rl": "kto"}, "rl: 'kto': pairs of dpo and ipo are known"),
            ({"reward_model": True}, "pairs are a transform of type preference"),
            ({"dataset_exact_deduplication": True}, "sources have dedupe: content"),
            ({"min_sample_len": 8}, "a transform of type filter has min_tokens"),
            (
                {"default_system_message": "Be brief."},
                "default_system_message: 'Be brief.': a template has its own; write it into the file of --template",
            ),
            ({"tokens": ["<extra>"]}, "add them to it"),
            ({"excess_length_strategy": "raise"}, "is 'raise'; drop and truncate are known"),
        ],
    )
    def test_what_would_change_samples_of_all_datasets_is_refused(self, folder, change, said):
        with pytest.raises(ConfigError) as raised:
            imported(folder, "axolotl", AXOLOTL | change)

        assert said in str(raised.value)

    @pytest.mark.parametrize("epochs", [3, 0.5])
    def test_epochs_other_than_one_are_amounts_of_every_dataset(self, folder, epochs):
        mix, notes = imported(folder, "axolotl", AXOLOTL | {"num_epochs": epochs})

        amount = Amount(epochs=epochs)
        assert mix.mix.amounts == {"notes": amount, "chats": amount}
        assert f"num_epochs: is {epochs:g}: mix.amounts goes through each dataset so often" in notes

    @pytest.mark.parametrize("epochs", [{}, {"num_epochs": 3}], ids=str)
    def test_steps_stand_above_epochs(self, folder, epochs):
        mix, notes = imported(folder, "axolotl", AXOLOTL | epochs | {"max_steps": 500})

        assert (mix.mix.amounts, mix.mix.stop) == (None, "never")
        assert "max_steps: is 500, above num_epochs: train for so many steps" in notes

        mix, _ = imported(folder, "axolotl", AXOLOTL | {"num_epochs": 1, "max_steps": -1})
        assert mix.mix.stop == "each_once"

    def test_no_epochs_are_refused(self, folder):
        with pytest.raises(ConfigError, match="num_epochs: is 0; give more, or max_steps"):
            imported(folder, "axolotl", AXOLOTL | {"num_epochs": 0})

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                {"type": "alpaca"},
                "type: is 'alpaca', which axolotl keeps: write its words to a file",
            ),
            ({"type": "reflection"}, "type: is 'reflection'; known are completion, chat_template"),
            ({"type": {"format": "{instruction}"}}, "is no text"),
            ({"path": "org/dataset"}, "datasets of the hub are downloaded first"),
            ({"split": "train[:10%]"}, "give the files of the split"),
            ({"ds_type": "xml"}, "ds_type: is 'xml'"),
            ({"type": "chat_template", "roles_to_train": ["user"]}, "roles_to_train: is ['user']"),
            (
                {"type": "chat_template", "message_property_mappings": {"tool_calls": "calls"}},
                "tool_calls: is 'calls'; role and content alone",
            ),
            (
                {"type": "sharegpt", "roles": {"input": ["human"]}},
                "input: names no role of a templ",
            ),
            ({"type": "sharegpt", "field_human": "me"}, "field_human: this key is not known"),
            ({"type": "sharegpt"}, "conversation: is 'vicuna_v1.1', which axolotl keeps"),
            ({"type": "sharegpt", "conversation": "chatml"}, "conversation: is 'chatml', which"),
            ({"shards": 4}, "shards: this key is not known"),
            ({"type": "chat_template", "train_on_eos": "last"}, "train_on_eos: is 'last'"),
        ],
    )
    def test_what_has_no_equivalent_is_refused(self, folder, change, said):
        content = AXOLOTL | {"datasets": [AXOLOTL["datasets"][0] | change]}

        with pytest.raises(ConfigError) as raised:
            imported(folder, "axolotl", content)

        assert said in str(raised.value)

    @pytest.mark.parametrize(
        ("form", "record", "prompt"),
        [
            ("alpaca", {"instruction": "add", "input": "1 1", "output": "2"}, "add\n\n1 1"),
            ("alpaca", {"instruction": "add", "input": "", "output": "2"}, "add"),
            ("alpaca:chat", {"instruction": "add", "output": "2"}, "add"),
            ("gpteacher", {"instruction": "add", "input": "1", "response": "2"}, "add\n\n1"),
            ("oasst", {"INSTRUCTION": "add", "RESPONSE": "2"}, "add"),
            ("alpaca_chat.load_qa", {"question": "add", "answer": "2"}, "add"),
            ("alpaca_chat.load_camel_ai", {"message_1": "add", "message_2": "2"}, "add"),
            ("summarizetldr", {"article": "add", "summary": "2"}, "add"),
        ],
    )
    def test_prompts_with_answers_in_the_shape_of_its_documentation_are_completions(
        self, folder, form, record, prompt
    ):
        dataset = {"path": "notes.jsonl", "type": form}

        mix, notes = imported(
            folder, "axolotl", AXOLOTL | {"datasets": [dataset]}, leave_out=["chat_template"]
        )

        (sample,) = samples_in(folder, mix, record)
        assert sample == (
            f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
            "2<|im_end|>\n",
        )
        assert ("a blank line joins instruction and input" in notes) == ("instruction" in record)
        assert mix.sources["notes"].overlong == "drop"

    def test_a_file_stands_for_the_words_of_a_type_and_all_of_a_prompt_may_be_trained_on(
        self, folder
    ):
        dataset = {"path": "notes.jsonl", "type": "alpaca"}
        content = AXOLOTL | {"datasets": [dataset], "train_on_inputs": True}

        mix, _ = imported(folder, "axolotl", content, template="alpaca.jinja")

        (transform,) = mix.sources["notes"].transforms
        assert (transform.template, transform.loss) == ("alpaca.jinja", "all")

    @pytest.mark.parametrize("rl", ["dpo", "ipo"])
    @pytest.mark.parametrize(
        ("form", "record"),
        [
            (
                "chatml.argilla",
                {"instruction": "a", "chosen_response": "b", "rejected_response": "c"},
            ),
            ("chatml.icr", {"input": "a", "chosen": "b", "rejected": "c"}),
            ("llama3.intel", {"question": "a", "chosen": "b", "rejected": "c"}),
            ("chatml.prompt_pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
            ("llama3.ultra", {"prompt": "a", "chosen": said("a", "b"), "rejected": said("a", "c")}),
            ("chatml.argilla_chat", {"chosen": said("a", "b"), "rejected": said("a", "c")}),
            ("chat_template.argilla_chat", {"chosen": said("a", "b"), "rejected": said("a", "c")}),
            (
                "chat_template.default",
                {"messages": said("a"), "chosen": said("", "b")[1], "rejected": said("", "c")[1]},
            ),
        ],
    )
    def test_pairs_in_the_shape_of_its_documentation_are_preferences(
        self, folder, rl, form, record
    ):
        dataset = {"path": "notes.jsonl", "type": form, "split": "train"}
        content = AXOLOTL | {"datasets": [dataset], "rl": rl}

        mix, notes = imported(folder, "axolotl", content, leave_out=["chat_template"])

        (sample,) = samples_in(folder, mix, record)
        asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        assert sample == (
            f"{asked}b<|im_end|>\n{asked}c<|im_end|>\n",
            "b<|im_end|>\nc<|im_end|>\n",
        )
        assert f"rl: '{rl}' has no equivalent: the loss is the trainer's" in notes
        assert ("a system text beside the prompt is not read" in notes) == (
            not form.startswith("chat_template")
        )

    def test_pairs_under_other_names_keep_them(self, folder):
        dataset = {
            "path": "notes.jsonl",
            "type": "chat_template.default",
            "field_messages": "conversation",
            "field_chosen": "good",
            "field_rejected": "bad",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles": {"user": ["human"], "assistant": ["gpt"]},
        }
        record = {
            "conversation": [{"from": "human", "value": "a"}],
            "good": {"from": "gpt", "value": "b"},
            "bad": {"from": "gpt", "value": "c"},
        }

        mix, _ = imported(folder, "axolotl", AXOLOTL | {"datasets": [dataset], "rl": "dpo"})

        (sample,) = samples_in(folder, mix, record)
        assert sample[1] == "b<|im_end|>\nc<|im_end|>\n"

    @pytest.mark.parametrize(
        ("change", "top", "message"),
        [
            ({"type": "chatml"}, {}, "is 'chatml'; of pairs are known chat_template.default"),
            ({"type": "zephyr.nectar"}, {}, "is 'zephyr.nectar'; of pairs are known"),
            ({"type": "chatml.intel"}, {}, "is 'chatml.intel', which axolotl keeps"),
            (
                {"type": "chat_template.default"},
                {"chat_template": "llama3"},
                "chat_template: is 'llama3', which axolotl keeps",
            ),
            (
                {"type": "chat_template.default"},
                {"excess_length_strategy": "truncate"},
                "is 'truncate', and a pair is never cut",
            ),
        ],
    )
    def test_pairs_that_are_not_known_are_refused(self, folder, change, top, message):
        content = AXOLOTL | {"datasets": [{"path": "notes.jsonl"} | change], "rl": "dpo"} | top

        with pytest.raises(ConfigError) as raised:
            imported(folder, "axolotl", content)

        assert message in str(raised.value)

    def test_a_share_that_is_held_out_is_a_split_and_a_number_of_documents_is_refused(self, folder):
        mix, notes = imported(folder, "axolotl", AXOLOTL | {"val_set_size": 0.1})

        assert mix.splits == {"eval": 0.1}
        assert "val_set_size: is the split eval" in notes
        with pytest.raises(ConfigError, match="val_set_size: is 200; a share below 1"):
            imported(folder, "axolotl", AXOLOTL | {"val_set_size": 200})


@pytest.mark.parametrize("tool", sorted(TOOLS))
@pytest.mark.parametrize(
    "content", ["", "5", "[]", "{}", "a: [b: {c: 1}]", "sources: 7\ndatasets: 1\nsplits: x"]
)
def test_a_file_of_something_else_is_refused(folder, tool, content):
    with pytest.raises(ConfigError):
        imported(folder, tool, content)


def test_a_source_of_weight_0_is_left_out_and_a_mix_of_nothing_else_refused(folder):
    mix, notes = imported(folder, "megatron", "0 a 1 b")

    assert mix.names == ("b",)
    assert "sources.a: has weight 0 and was left out" in notes
    with pytest.raises(ConfigError, match=r"^It: mix\.stages\.0\.weights: weights are all 0"):
        imported(folder, "megatron", "0 a 0 b")


def test_a_size_that_nobody_says_is_asked_for(folder):
    with pytest.raises(ConfigError, match="the tokens of a row are not in the file: give --length"):
        imported(folder, "megatron", "1 a", sizes=FROM_FILE)


def test_a_file_that_is_part_of_itself_many_times_over_is_refused_at_once(folder):
    split = {"blend": [{"path": "file.yaml"}] * 3}

    with pytest.raises(ConfigError) as raised:
        imported(folder, "energon", metadataset(split))

    assert str(raised.value).count("is part of itself") == 1


def test_a_file_that_names_too_many_others_is_refused(folder):
    (folder / "end.yaml").write_text(yaml.safe_dump(metadataset({"path": "gone"})))
    for level in range(12):
        below = f"level-{level - 1}.yaml" if level else "end.yaml"
        content = metadataset({"blend": [{"path": below, "weight": weight} for weight in (1, 2)]})
        (folder / f"level-{level}.yaml").write_text(yaml.safe_dump(content))

    with pytest.raises(ConfigError, match="more than 1000 metadatasets"):
        imported(folder, "energon", metadataset({"path": "level-11.yaml"}))


def test_files_that_name_each_other_too_deep_are_refused(folder):
    for level in range(400):
        content = metadataset({"blend": [{"path": f"level-{level + 1}.yaml"}]})
        (folder / f"level-{level}.yaml").write_text(yaml.safe_dump(content))

    with pytest.raises(ConfigError, match="lies deeper than 64 blends and files"):
        imported(folder, "energon", metadataset({"path": "level-0.yaml"}))


def test_values_that_may_be_secrets_are_not_shown(folder):
    secret = "hf_" + "a" * 30

    with pytest.raises(ConfigError) as raised:
        imported(folder, "veomni", VEOMNI | {"hf_token": secret}, source_type="jsonl")

    assert "hf_token: this key is not known" in str(raised.value)
    assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ("tool", "content"),
    [
        ("olmo-core", {"sources": [{"source_name": "a", "paths": "a", "target_ratio": 10**400}]}),
        ("veomni", VEOMNI | {"schedule": [{"weights": [True, 10**400]}]}),
        (
            "nanotron",
            NANOTRON
            | {
                "data_stages": [
                    {"data": {"dataset": {"dataset_folder": ["a"], "dataset_weights": [True]}}}
                ]
            },
        ),
    ],
)
def test_numbers_that_are_none_are_faults(folder, tool, content):
    with pytest.raises(ConfigError):
        imported(folder, tool, content, end_of_document=0)


def test_an_index_of_something_else_is_no_index(folder):
    (folder / "x").mkdir()
    (folder / "x" / "index.json").write_text('{"shards": [1]}')

    mix, _ = imported(folder, "llm-foundry", foundry({"x": {"local": "x", "proportion": 1}}))

    assert mix.sources["x"].text == "text"


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"shards": [{"samples": 1' + "0" * 400 + "}]}"],
    ids=["nested", "huge"],
)
def test_an_index_that_no_index_can_be_counts_for_nothing(folder, text):
    (folder / "x").mkdir()
    (folder / "x" / "index.json").write_text(text)

    mix, _ = imported(folder, "llm-foundry", foundry({"x": {"local": "x", "proportion": 1}}))

    assert mix.sources["x"].text == "text"
    with pytest.raises(ConfigError, match=r"weights|are its share"):
        imported(folder, "llm-foundry", foundry({"x": {"local": "x"}, "y": {"local": "y"}}))


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"shard_counts": {"s-0.tar": 1' + "0" * 400 + "}}"],
    ids=["nested", "huge"],
)
def test_counts_of_shards_that_none_can_have_refuse_the_file(folder, text):
    an_energon(folder / "a", field_map={"text": "txt"}, shards=["s-0.tar"], counts={"s-0.tar": 1})
    (folder / "a" / ".nv-meta" / ".info.json").write_text(text)

    with pytest.raises(ConfigError, match=r"weights|count samples"):
        imported(folder, "energon", metadataset({"blend_epochized": [{"path": "a"}]}))


def faults(folder, tool, content, **asked):
    with pytest.raises(ConfigError) as raised:
        imported(folder, tool, content, **asked)
    return str(raised.value).splitlines()


NO_PATH = ["\\ud800", "a\\u0000b", "a" * 5000]
"""Names that JSON can contain and paths cannot: half a pair of UTF-16, a zero byte, too many characters."""


@pytest.mark.parametrize("text", NO_PATH)
def test_texts_that_no_path_can_be_are_faults_of_their_keys(folder, text):
    tree = json.dumps(metadataset({"blend": [{"path": "TEXT.yaml"}]}))
    form = {"type": "completion"}
    datasets = json.dumps({"datasets": [{"path": "TEXT"} | form, {"path": "none"} | form]})

    assert (
        "splits.train.blend[0].path: " in faults(folder, "energon", tree.replace("TEXT", text))[0]
    )
    said = faults(folder, "axolotl", datasets.replace("TEXT", text))
    assert "datasets[0].path: " in said[0]
    assert "datasets[1].path: 'none' is no file or folder in " in said[2]


def test_a_stream_of_a_name_that_no_path_can_have_is_refused_with_the_others(folder):
    streams = {"a": {"local": "a" * 5000}, "b": {}}

    said = faults(folder, "llm-foundry", json.dumps(foundry(streams)))

    assert "streams.a.proportion: is not given, so its samples are its share" in said[0]
    assert "streams.b.local: and remote are missing" in said[1]


def test_what_a_note_quotes_adds_no_line_to_the_mix_file(folder):
    split = {"path": "text"}
    an_energon(folder / "text", field_map={"text": "txt"})
    content = metadataset(split)
    content["splits"]["val\nsurprise: 1\ud800"] = split

    mix, notes = imported(folder, "energon", json.dumps(content))

    assert "val\nsurprise: 1\ud800" in notes
    assert mix.names == ("text",)


def test_each_fault_has_the_line_of_its_key_or_of_what_it_is_missing_in(folder):
    content = """\
sources:
  - source_name: web
    target_ratio: -1
    paths: [a.npy]
    surprise: 1
  - target_ratio: 1
    paths: [b.npy]
processes: 4
color: red
"""
    assert faults(folder, "olmo-core", content, end_of_document=0) == [
        "file.yaml:3: sources[0].target_ratio: is -1.0; it is a number from 0 on",
        "file.yaml:5: sources[0].surprise: this key is not known; --leave-out surprise goes on without it",
        "file.yaml:6: sources[1].source_name: is missing",
        "file.yaml:9: color: this key is not known; --leave-out color goes on without it",
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["lr"], "lr of the training, and not of its data, was not read"),
        (["lr", "adapter"], "lr, adapter of the training, and not of its data, were not read"),
        ([*"abcdefg"], "a, b, c, d, e and 2 more keys of the training, and not of its data, were"),
        ([*"abcdef"], "a, b, c, d, e and 1 more key of the training, and not of its data, were"),
        (["k" * 99], f"{'k' * 60}... of the training"),
    ],
)
def test_keys_of_the_training_are_named_a_few_of_them(folder, keys, said):
    (folder / "notes.jsonl").touch()
    dataset = {"path": "notes.jsonl", "type": "completion"}
    content = {"datasets": [dataset], **dict.fromkeys(keys, "a secret")}

    _, notes = imported(folder, "axolotl", yaml.safe_dump(content, sort_keys=False))

    assert said in notes
    assert "a secret" not in notes


def test_json_has_lines_too(folder):
    content = json.dumps({"train": ["1", "a"], "valid": None, "surprise": 1}, indent=1)

    (fault,) = faults(folder, "megatron", content, name="blend.json")

    assert fault.startswith("blend.json:7: surprise: this key is not known")


def test_a_fault_of_a_file_that_another_names_has_that_file_and_its_line(folder):
    (folder / "more.yaml").write_text(yaml.safe_dump(metadataset({"path": "x"}) | {"odd": 1}))

    said = faults(folder, "energon", metadataset({"path": "more.yaml"}))

    assert any(fault.startswith(f"{folder}/more.yaml:3: odd: this key") for fault in said), said


@pytest.mark.parametrize(
    ("tool", "content", "remedy"),
    [
        ("veomni", NANOTRON, "give --from nanotron"),
        ("axolotl", VEOMNI, "give --from veomni"),
        ("energon", AXOLOTL, "give --from axolotl"),
        ("nanotron", "0.7 a 0.3 b", "give --from megatron"),
        ("llm-foundry", {"version": 1, "seed": 2}, "is it the file that was meant?"),
    ],
)
def test_a_file_of_another_tool_is_told_as_such_in_one_line(folder, tool, content, remedy):
    (said,) = faults(folder, tool, content)

    assert f"is no file of {tool}, which has {tool_of(tool).sign}; {remedy}" in said


@pytest.mark.parametrize(
    ("tool", "content"),
    [("axolotl", AXOLOTL), ("nanotron", NANOTRON), ("veomni", VEOMNI), ("megatron", "1 a")],
)
def test_a_file_is_of_one_tool(tool, content):
    assert [name for name in TOOLS if tool_of(name).holds(content)] == [tool]


def test_what_becomes_of_joined_documents_is_not_asked_of_a_tool_that_joins_none(folder):
    with pytest.raises(ConfigError, match=r"--documents is apart, and nothing that .* is cut from"):
        imported(folder, "veomni", VEOMNI, documents="apart")
