"""Line and bar charts as SVG text: the same input gives the same bytes, on every machine.

Series differ by dashes and by the symbol at their points, not by colour alone. Dark or light is the reader's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 44, 52
COLOURS = ("#0b6bcb", "#b3480b", "#1a7f37", "#8250df", "#57606a")
DASHES = ("", "7 4", "2 4", "10 3 2 3", "1 3")
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-size:15px;font-weight:600}
.grid{stroke:#8b949e;stroke-opacity:.3}
.axis{stroke:#57606a}.back{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.back{fill:#0d1117}
.axis{stroke:#8b949e}}
</style>"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """``ticks`` are where lines of the grid are, and the ends where the drawing ends."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; what is outside is drawn at the edge."""
        if self.is_log:
            value, low, high = math.log(value), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line. ``is_marked`` puts a symbol at each of its points."""

    name: str
    points: Sequence[tuple[float, float]]
    is_marked: bool = True


@dataclass(frozen=True, kw_only=True)
class Note:
    """Words beside a point."""

    words: str
    at: tuple[float, float]


def lines(title: str, x: Axis, y: Axis, series: Sequence[Series], notes: Sequence[Note] = ()) -> str:
    """A line chart, its legend inside."""
    parts = [*_frame(title, y), *_ticks_below(x)]
    for number, one in enumerate(series):
        parts += _line(number, one, x, y)
    for note in notes:
        px, py = _px(x, note.at[0]), _py(y, note.at[1])
        parts.append(f'<circle cx="{px}" cy="{py}" r="7" fill="none" class="axis"/>')
        parts.append(f'<text x="{px:.1f}" y="{py - 12:.1f}" text-anchor="middle">{escape(note.words)}</text>')
    return _document(title, parts)


def bars(title: str, label: str, values: Sequence[tuple[str, float, str]]) -> str:
    """Bars that lie, longest first or as they come: a name, a length, and what is written behind it."""
    room, high = (HEIGHT - TOP - 16) / len(values), max(value for _, value, _ in values)
    start, length = 190, WIDTH - 190 - 130
    parts = [f'<text class="title" x="16" y="24">{escape(title)}</text>']
    for number, (name, value, words) in enumerate(values):
        top, long = TOP + number * room, length * value / high
        middle = top + room / 2 + 4
        parts.append(f'<text x="{start - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        size = f'width="{max(long, 1):.1f}" height="{room * 0.7:.1f}"'
        parts.append(f'<rect x="{start}" y="{top + room * 0.15:.1f}" {size} fill="{COLOURS[0]}"/>')
        parts.append(f'<text x="{start + long + 6:.1f}" y="{middle:.1f}">{escape(words)}</text>')
    return _document(f"{title}: {label}", parts)


def _line(number: int, one: Series, x: Axis, y: Axis) -> list[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    points = [(_px(x, px), _py(y, py)) for px, py in one.points]
    path = " ".join(f"{px},{py}" for px, py in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>']
    if one.is_marked:
        parts += [_symbol(number, px, py, colour) for px, py in points]
    top = TOP + 16 + 20 * number
    left = WIDTH - RIGHT - 220
    parts.append(
        f'<line x1="{left}" x2="{left + 34}" y1="{top}" y2="{top}" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/>'
    )
    if one.is_marked:
        parts.append(_symbol(number, left + 17, top, colour))
    return [*parts, f'<text x="{left + 42}" y="{top + 4}">{escape(one.name)}</text>']


def _symbol(number: int, x: float, y: float, colour: str) -> str:
    shapes = (
        f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>',
        f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="{colour}"/>',
        f'<path d="M{x} {y - 5:.1f}l5 9h-10z" fill="{colour}"/>',
        f'<path d="M{x} {y - 5:.1f}l5 5l-5 5l-5-5z" fill="{colour}"/>',
        f'<circle cx="{x}" cy="{y}" r="3.5" fill="none" stroke="{colour}" stroke-width="2"/>',
    )
    return shapes[number % len(shapes)]


def _frame(title: str, y: Axis) -> list[str]:
    parts = [f'<text class="title" x="16" y="24">{escape(title)}</text>']
    for tick in y.ticks:
        height = _py(y, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>')
    return parts


def _ticks_below(x: Axis) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for tick in x.ticks:
        parts.append(f'<text x="{_px(x, tick)}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x.label)}</text>']


def _px(x: Axis, value: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * x.place(value), 1)


def _py(y: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y.place(value), 1)


def _document(description: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    body = [f"<title>{escape(description)}</title>", STYLE, f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>']
    return "\n".join([head, *body, *parts, "</svg>"]) + "\n"
