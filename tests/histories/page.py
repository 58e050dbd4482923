"""A history as a page: a lane for each role, a mark for each message that it handled, and marks for faults on top."""

from collections.abc import Sequence
from html import escape

from tests.histories.checking import Outcome
from tests.histories.worlds import World
from tests.support.plane.messages import Moment

__all__ = ["page_of"]

_WIDTH, _LANE, _LEFT = 1600, 26, 150
_STYLE = """
body{font:14px system-ui;margin:24px;color:#222}svg{background:#fafafa;border:1px solid #ddd}
.told{fill:#9bb3cc}.takes{fill:#2a8f4f}.fault{fill:#c8321e}.lane{stroke:#e4e4e4}
td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top}
.broken{color:#c8321e}code{background:#f2f2f2;padding:2px 4px}
"""


def page_of(world: World, outcome: Outcome) -> str:
    """Return the page of a history that was traced."""
    trace = outcome.trace
    lanes = {role: i for i, role in enumerate(sorted({m.role for m in trace}, key=_place))}
    last = max((moment.at for moment in trace), default=1) or 1
    marks = [_mark(moment, lanes[moment.role], last) for moment in trace]
    height = _LANE * (len(lanes) + 1)
    names = [
        f'<text x="8" y="{_LANE * (i + 1) + 5}">{escape(role or "the world")}</text>'
        f'<line class="lane" x1="{_LEFT}" x2="{_WIDTH}" y1="{_LANE * (i + 1)}" y2="{_LANE * (i + 1)}"/>'
        for role, i in lanes.items()
    ]
    verdict = (
        f'<span class="broken">{escape(outcome.broken)}</span>'
        if outcome.broken
        else "every promise held"
    )
    words = escape(world.to_words())
    rows = [
        f"<tr><td>{moment.at}</td><td>{escape(moment.role)}</td><td>{escape(_said(moment))}</td></tr>"
        for moment in trace
        if _kind(moment) != "told"
    ]
    seen = ", ".join(f"{escape(what)} ({count})" for what, count in outcome.seen.items() if count)
    return f"""<!doctype html><meta charset="utf-8"><title>History {world.seed}</title><style>{_STYLE}</style>
<h1>History {world.seed}</h1><p>{outcome.messages:,} messages: {verdict}.</p>
<p>Again: <code>python -m tests.histories --world {words}</code></p>
<svg width="{_WIDTH + 20}" height="{height}" role="img" aria-label="messages by role">{"".join(names + marks)}</svg>
<p>Blue: a message is heard. Green: a rank takes a step. Red: a fault, and what became of it. Time is the number of
messages delivered.</p><p>Came about: {seen or "nothing"}.</p>
<table><tr><th>at</th><th>where</th><th>what</th></tr>{"".join(rows)}</table>
"""


def _place(role: str) -> tuple[int, str]:
    order: Sequence[str] = ("planner", "keeper", "loader", "constructor", "rank")
    kind = role.split("-", maxsplit=1)[0].split(" ", maxsplit=1)[0]
    return (order.index(kind) if kind in order else -1, role)


def _kind(moment: Moment) -> str:
    if moment.what.startswith("takes step"):
        return "takes"
    return "told" if moment.content else "fault"


def _said(moment: Moment) -> str:
    return moment.what.replace("_", " ")


def _mark(moment: Moment, lane: int, last: int) -> str:
    kind = _kind(moment)
    x = _LEFT + (_WIDTH - _LEFT) * moment.at / last
    y = _LANE * (lane + 1)
    size = 3 if kind == "told" else 5
    said = escape(f"{moment.at}: {moment.role} {_said(moment)}")
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="{size}"><title>{said}</title></circle>'
