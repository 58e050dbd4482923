"""``omniload mix``: look at a mix of sources before, during and after a run, and change it meanwhile."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_VERBS = {
    "add": (
        "omniload.commands.edits.verbs:add",
        "Add source NAME to RUN, from a step on; stages of the file that begin later give it the same share.",
    ),
    "audit": (
        "omniload.commands.runs.audit:audit",
        "Say which samples were in a step and on which rank, and prove it.",
    ),
    "bench": (
        "omniload.commands.bench:bench",
        "Measure the data plane alone: tokens per second, waits, balance.",
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
        "Say what is slow in RUN, who waits for whom, and what to change.",
    ),
    "drawn": (
        "omniload.commands.runs.drawn:drawn",
        "Write which records RUN had drawn, for a run of other rows, another batch or tokenizer.",
    ),
    "import": ("omniload.commands.import_:import_mix", "Read FILE of another tool as a mix file."),
    "plan": ("omniload.commands.plan:plan", "Say what a run will draw, before anything starts."),
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
        "Build a corpus of very different sources from this Python installation, and a tokenizer.",
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
        "Show how far a run has come: steps, shares against their targets, epochs, edits, losses, groups, costs.",
    ),
    "simulate": (
        "omniload.commands.simulate:simulate",
        "Say what the data plane of a job would do, before it is started.",
    ),
    "skip": (
        "omniload.commands.edits.skip:skip",
        "Leave out what made the loss of RUN jump: steps that it trained on, a shard, or a source.",
    ),
    "stats": ("omniload.commands.stats:stats", "Look at the data of FILE before it is trained on."),
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
        "Make the tokens of FILE before its run, and keep them in its token cache.",
    ),
    "top": (
        "omniload.commands.runs.top:top",
        "Watch what each role of the data plane of RUN is doing.",
    ),
    "undo": (
        "omniload.commands.edits.verbs:undo",
        "Undo the latest edit of RUN that still holds: from a step on, what held before it holds again.",
    ),
    "watch": (
        "omniload.commands.edits.watch:watch",
        "Keep the mix of RUN as FILE says, now and each time FILE is saved.",
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
