"""``omniload mix``: look at a mix of sources before, during and after a run, and change it meanwhile."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_VERBS = {
    "add": (
        "omniload.commands.edits.verbs:add",
        "Add source NAME to RUN from a step on, with the same share in all later stages of the file.",
    ),
    "audit": (
        "omniload.commands.runs.audit:audit",
        "Show which samples were in a step and on which rank, and prove it.",
    ),
    "bench": (
        "omniload.commands.bench:bench",
        "Measure the data plane without a trainer: tokens per second, waits, balance.",
    ),
    "check": (
        "omniload.commands.check:check",
        "Check a mix file and everything it names: files, footers, tokenizer, batch.",
    ),
    "diff": (
        "omniload.commands.runs.diff:diff",
        "Compare ONE with OTHER: each a mix file or the folder of a run.",
    ),
    "doctor": (
        "omniload.commands.runs.doctor:doctor",
        "Show what is slow in RUN, which role waits for which, and what to change.",
    ),
    "drawn": (
        "omniload.commands.runs.drawn:drawn",
        "Write which records RUN has drawn, for a run with other rows, another batch or another tokenizer.",
    ),
    "import": (
        "omniload.commands.import_:import_mix",
        "Turn FILE of another tool into a mix file.",
    ),
    "plan": (
        "omniload.commands.plan:plan",
        "Predict what a run will draw, before anything starts.",
    ),
    "preview": (
        "omniload.commands.preview:preview",
        "Show a few real rows of a step: their documents, bounds and first words.",
    ),
    "retire": (
        "omniload.commands.edits.verbs:retire",
        "Stop drawing from source NAME of RUN, from a step on, and in all later stages of the file.",
    ),
    "sample": (
        "omniload.commands.corpus.sample:sample",
        "Build a tokenizer and a corpus of very different sources from this Python installation.",
    ),
    "schema": (
        "omniload.commands.schema:schema",
        "Print the JSON schema of a mix file: every key, its meaning, range and default.",
    ),
    "set": (
        "omniload.commands.edits.verbs:set_weights",
        "Give sources of RUN new weights or amounts, from a step on.",
    ),
    "show": (
        "omniload.commands.runs.show:show",
        "Show the progress of a run: steps, shares and their targets, epochs, edits, losses, groups, costs.",
    ),
    "simulate": (
        "omniload.commands.simulate:simulate",
        "Simulate the data plane of a job before the job is started.",
    ),
    "skip": (
        "omniload.commands.edits.skip:skip",
        "Leave out the steps, the shard or the source that made the loss of RUN jump.",
    ),
    "stats": ("omniload.commands.stats:stats", "Analyse the data of FILE before training on it."),
    "steer": (
        "omniload.commands.edits.steer:steer",
        "Adjust the weights of RUN while it runs, by the policy of FILE.",
    ),
    "stop": (
        "omniload.commands.runs.stop:stop",
        "End the detached data plane of RUN, which outlives its job (runtime.lifetime).",
    ),
    "tokenise": (
        "omniload.commands.corpus.tokenise:tokenise",
        "Tokenise the text of FILE before its run, and store the tokens in its token cache.",
    ),
    "top": (
        "omniload.commands.runs.top:top",
        "Watch what each role of the data plane of RUN is doing.",
    ),
    "undo": (
        "omniload.commands.edits.verbs:undo",
        "Undo the latest edit of RUN that is in effect, from a step on.",
    ),
    "watch": (
        "omniload.commands.edits.watch:watch",
        "Apply FILE to the mix of RUN, now and each time FILE is saved.",
    ),
}
"""Where each verb lies, and what ``--help`` says of it.

A command that reads a file does not load what opens a data plane.
"""


@click.group(name="mix", cls=Verbs, verbs=_VERBS)
def command() -> None:
    """Check, plan and preview a mix file; watch, change and audit its run.

    \b
    Example:
      omniload mix sample demo/corpus
      omniload mix check examples/quickstart.yaml
    """  # noqa: D301 -- click's own marker
