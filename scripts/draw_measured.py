"""Draw the pictures of ``docs/measured.md`` from the reports that they show.

::

    python scripts/draw_measured.py

A test compares the drawn pictures with those in ``docs/pictures``.
"""

from pathlib import Path

__all__ = ["PICTURES", "drawn", "main", "memory", "step_sizes", "table_of"]

ROOT = Path(__file__).parents[1]
_REPORTS = ROOT / "benchmarks/reports"
_OURS, _OTHERS = "#1b4f72", ("#b9770e", "#7f8c8d", "#2e7d4f")
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-size="15" role="img"'
    ' font-family="Helvetica, Arial, sans-serif">\n<title>{title}</title>\n'
    '<rect width="960" height="{height}" fill="#ffffff"/>'
)


def table_of(report: str, first: str) -> list[list[str]]:
    """Return the rows of cells, header first, of the table of a report whose header begins with ``first``.

    Raises:
        ValueError: The report has no such table.
    """
    lines = report.splitlines()
    at = next((at for at, line in enumerate(lines) if line.startswith(f"| {first} |")), None)
    if at is None:
        raise ValueError(f"the report has no table that begins with {first!r}")
    rows = []
    for line in lines[at:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def _number(cell: str) -> float:
    return float(cell.split(maxsplit=1)[0].replace(",", ""))


def step_sizes(report: str) -> str:
    """Return a chart of tokens per second by tokens of a step: a line for each loader, with its name at the end."""
    header, *rows = table_of(report, "tokens a step")
    names = header[1:-1]
    title = "Tokens a second of one rank, by the size of a step"
    parts = [_HEAD.format(height=400, title=title)]
    parts.append('<text x="16" y="26">tokens a second</text>')
    xs = [110 + 165 * at for at in range(len(rows))]
    for value in range(0, 101, 20):
        y = 340 - value * 3
        parts.append(f'<path d="M80 {y:.1f} H610" stroke="#dddddd"/>')
        parts.append(f'<text x="70" y="{y + 5:.1f}" text-anchor="end">{value} M</text>')
    for x, row in zip(xs, rows, strict=True):
        parts.append(f'<text x="{x}" y="368" text-anchor="middle">{row[0]}</text>')
    parts.append('<text x="357" y="392" text-anchor="middle">tokens a step</text>')
    for column, (name, colour) in enumerate(zip(names, (_OURS, *_OTHERS), strict=True), start=1):
        ys = [340 - _number(row[column]) * 3 for row in rows]
        points = " ".join(f"{x},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        width = 4 if colour == _OURS else 2
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        )
        parts.append(f'<text x="617" y="{ys[-1] + 5:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def memory(report: str) -> str:
    """Return a chart of memory: two bars for each job, paler if the report extrapolated the figure."""
    header, *rows = table_of(report, "sources")
    ours, theirs = header.index("omniload, GiB"), len(header) - 2
    widest = max(_number(row[theirs]) for row in rows)
    height = 60 + 70 * len(rows)
    title = "Memory of all processes, by sources and ranks"
    parts = [_HEAD.format(height=height, title=title)]
    parts.append(f'<text x="16" y="30" fill="{_OURS}" font-weight="bold">omniload</text>')
    parts.append(
        f'<text x="110" y="30" fill="{_OTHERS[0]}">{header[theirs].removesuffix(", GiB")}</text>'
    )
    for at, row in enumerate(rows):
        y = 50 + 70 * at
        parts.append(f'<text x="16" y="{y + 30}">{row[0]} sources, {row[1]} ranks</text>')
        for down, column, colour in ((0, ours, _OURS), (24, theirs, _OTHERS[0])):
            width = _number(row[column]) / widest * 560
            pale = ' fill-opacity="0.4"' if "from" in row[column] else ""
            said = row[column].replace(" (from its line)", " GiB, reckoned from its line")
            said = said if "GiB" in said else f"{said} GiB"
            parts.append(
                f'<rect x="190" y="{y + down}" width="{width:.1f}" height="20" fill="{colour}"{pale}/>'
            )
            inside = width > 400
            where = (
                f'x="{180 + width:.1f}" text-anchor="end"' if inside else f'x="{198 + width:.1f}"'
            )
            parts.append(f'<text {where} y="{y + down + 16}">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


PICTURES = {
    "step_sizes.svg": (step_sizes, "loaders/2026-11-30-2core-step_sizes.md"),
    "memory.svg": (memory, "loaders/2026-11-28-2core-ranks.md"),
}
"""The function that draws each picture, and the report that the picture shows."""


def drawn(name: str) -> str:
    """Return a picture from its present report."""
    draw, report = PICTURES[name]
    return draw((_REPORTS / report).read_text(encoding="utf-8"))


def main() -> None:
    """Write every picture."""
    for name in PICTURES:
        (ROOT / "docs/pictures" / name).write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
