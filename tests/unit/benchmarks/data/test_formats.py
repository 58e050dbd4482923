"""The benchmark of formats, on a few documents: every format holds the same."""

import pytest

from benchmarks.data.format_shards import TEXT_FORMATS, TOKEN_FORMATS, documents_of
from benchmarks.data.formats import measured, table_of, write_shards

DOCUMENTS = 30


@pytest.mark.parametrize("forms", [TOKEN_FORMATS, TEXT_FORMATS], ids=["tokens", "text"])
def test_every_format_gives_the_tokens_of_the_documents(forms, tmp_path):
    found = {}
    for number, (name, form) in enumerate(forms.items()):
        folder = tmp_path / str(number)
        found[name] = write_shards(folder, form, DOCUMENTS), [measured(folder, form)]

    shards = [documents_of(shard, DOCUMENTS) for shard in range(4)]
    letters = sum(len(text) for shard in shards for text in shard.texts)
    wanted = letters if forms is TOKEN_FORMATS else letters + 4 * DOCUMENTS
    assert {name: runs[0].tokens for name, (_, runs) in found.items()} == dict.fromkeys(
        forms, wanted
    )
    assert [row[0] for row in table_of("x", found).rows] == list(forms)
    assert table_of("x", found).rows[0][-1] == "1.00"
