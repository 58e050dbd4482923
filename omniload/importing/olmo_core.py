"""OLMo-core's source mixture: ratios of sources of numpy files, with limits on repetition.

::

    requested_tokens: 100_000_000_000    # in all, which the sources share
    source_list:                         # or its list alone, as a file of its own
      sources:
        - source_name: web
          target_ratio: 0.8
          paths: [s3://bucket/web/*.npy]
          max_repetition_ratio: 1.5      # how often a token may come: once, where nothing is said
          max_source_fraction: 0.9       # how much of the source may be used
"""

import numpy as np

from omniload.importing.fields import Fields
from omniload.importing.files import numpy_source, of_token_files
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_sources

__all__ = ["TOOL"]

_LIST, _OF_A_DATASET, _OF_A_TRAINING = "source_list", "source_mixture_config", "dataset"
_MOST = "max_repetition_ratio"
_CLASS = "_CLASS_"
"""Key with the class of a mapping, in files that OLMo-core wrote."""


def _holds(document: object) -> bool:
    """Return whether a document contains a mixture, either alone or as part of the settings of a training."""
    has = has_sources(dict)
    for key in (_OF_A_TRAINING, _OF_A_DATASET, _LIST):
        if has(document):
            return True
        inner = document.get(key) if isinstance(document, dict) else None
        document = document if inner is None else inner
    return has(document)


def _read(document: object, asked: Asked) -> Imported:
    """Return the mixture that ``document``, the file's content, declares."""
    found = of_token_files(asked)
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    for key in (_OF_A_TRAINING, _OF_A_DATASET):
        if top.peek(key) is not None:
            top.refuse(
                key,
                f"is of a training, which says more than its mixture: write what stands at {_OF_A_DATASET} to a file "
                "and give that, with its sequence_length by --length, and --documents apart for generate_doc_lengths",
            )
            return found
    listed = top if top.peek(_LIST) is None else top.inner(_LIST)
    if listed is not top and top.peek("sources") is not None:
        top.refuse("sources", f"stand beside those of {_LIST}: write all of them there")
        top.take("sources", object, None)
    by_name = _read_sources(listed, asked, found)
    if not found.sources:
        listed.refuse("sources", "names no source")
    elif not np.isclose(total := sum(by_name.values()), 1):
        listed.refuse(
            "sources",
            f"have target_ratio of {total:.6g} in all, and OLMo-core takes 1; write ratios that sum to 1",
        )
    top.note(
        {
            "global_batch_size": "give --batch",
            "processes": "loaders are counted by runtime",
            "quiet": "a matter of output",
            "render_tables": "a matter of output",
        }
    )
    found.total_tokens = top.take("requested_tokens", int, 0) or None
    if found.total_tokens is not None and found.total_tokens < 1:
        top.refuse("requested_tokens", f"is {found.total_tokens}; a run draws 1 or more")
    found.seed = top.take("seed", int, 0)
    for each in {id(each): each for each in (top, listed)}.values():
        each.take(_CLASS, str, "")
        each.end()
    found.stages.append((0, by_name))
    return found


def _read_sources(listed: Fields, asked: Asked, found: Imported) -> dict[str, float]:
    """Read the sources of a list, and return the ratio of each."""
    by_name: dict[str, float] = {}
    for source in listed.items("sources"):
        name = new_name(source.need("source_name", str, "source"), found.sources)
        by_name[name] = source.number("target_ratio") or 0.0
        paths = source.texts("paths")
        if not paths:
            source.refuse("paths", "is missing")
        found.sources[name] = numpy_source(paths, asked)
        most = source.number(_MOST, least=1.0)
        if most is None and _MOST not in asked.report.left_out:
            most = 1.0
            asked.report.note(
                _MOST,
                "is 1 where nothing is said, as there: a run that would go through such a source again stops before; "
                f"--leave-out {_MOST} sets no limit",
            )
        if most is not None:
            found.sources[name]["max_repetition"] = most
        if (part := source.number("max_source_fraction")) is not None and part < 1:
            source.refuse(
                "max_source_fraction", f"is {part:g}: a part of a source cannot be declared"
            )
        source.take(_CLASS, str, "")
        source.take("_resolved_paths", list, [])
        source.end()
    return by_name


TOOL = Tool(
    read=_read,
    sign=f"sources, a list of mappings, or {_LIST} with such",
    holds=_holds,
)
