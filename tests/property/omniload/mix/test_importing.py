"""Any file of another tool becomes a mix or a fault that names its key, never a traceback."""

from contextlib import suppress

import yaml
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.importing.fields import Report
from omniload.importing.imported import Asked, mix_text
from omniload.importing.tools import TOOLS, read_as
from omniload.mix.config import MixConfig

KEYS = st.sampled_from([
    "sources", "names", "schedule", "weights", "level", "paths", "source_name", "target_ratio", "data_stages", "data",
    "dataset", "dataset_folder", "dataset_weights", "start_training_step", "tokens", "sequence_length", "train_loader",
    "name", "streams", "local", "proportion", "repeat", "choose", "max_seq_len", "splits", "train", "blend", "path",
    "blend_epochized", "weight", "subflavors", "__class__", "datasets", "type", "field", "sequence_len", "seed",
    "micro_batch_size", "surprise", "rl", "init_token", "end_token", "schedule_type", "field_chosen",
    "batch_size", "shuffle",
])  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.sampled_from(
        [
            "",
            "a",
            "../a",
            "text",
            "completion",
            "alpaca",
            "dpo",
            "MetadatasetV2",
            "s3://b/a",
            "\x00",
            "1",
        ]
    )
)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


@given(tool=st.sampled_from(sorted(TOOLS)), document=DOCUMENTS)
def test_any_document_is_a_mix_or_a_fault(tmp_path_factory, tool, document):
    report = Report()
    asked = Asked(
        file=tmp_path_factory.getbasetemp() / "file.yaml", report=report, end_of_document=0
    )
    sizes = {"row_tokens": 8, "step_tokens": 64, "micro_tokens": None, "seed": None}
    # Any other error is a defect of ours, and fails the test.
    with suppress(ConfigError):
        found = read_as(tool, document, asked)
        report.raise_faults("file.yaml")
        text = mix_text(
            found,
            report.notes,
            beside=found.base,
            heading="It.",
            sizes=sizes,
            tokenizer={"type": "bytes"},
        )
        MixConfig.model_validate(yaml.safe_load(text))
