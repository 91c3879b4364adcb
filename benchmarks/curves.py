"""Latency against rate, as a table for the terminal and as a plot in SVG. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 70, 20, 40, 60
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


@dataclass(frozen=True)
class Point:
    """What was measured at one rate; milliseconds are of the worst seed."""

    rate: float
    """Arrivals a second."""
    first_p50_ms: float
    first_p99_ms: float
    """Of the time to the first token, from the scheduled arrival."""
    gap_mean_ms: float
    """Between tokens."""
    tokens_per_s: float


def stored(rows: Iterable[Mapping[str, Any]], start: str) -> dict[str, list[Point]]:
    """The curves of a result file's rows whose names begin so, each by what it was measured on."""
    return {
        row["name"].removeprefix(start).partition(", 128 in")[0]: [
            Point(**point) for point in row["curve"]
        ]
        for row in rows
        if row["name"].startswith(start) and "curve" in row
    }


def table(points: Sequence[Point]) -> str:
    """One line a rate."""
    titles = ("requests/s", "first p50 ms", "first p99 ms", "gap ms", "tokens/s")
    lines = ["{:>10} {:>13} {:>13} {:>8} {:>10}".format(*titles)]
    lines += [
        f"{p.rate:>10g} {p.first_p50_ms:>13.1f} {p.first_p99_ms:>13.1f} {p.gap_mean_ms:>8.2f} "
        f"{p.tokens_per_s:>10.0f}"
        for p in points
    ]
    return "\n".join(lines)


def svg(curves: Mapping[str, Sequence[Point]], limit_ms: float) -> str:
    """The 99th percentile of the time to the first token over the rate, a line for each curve."""
    points = [point for curve in curves.values() for point in curve]
    most_rate = max((point.rate for point in points), default=1.0)
    # What is far above the limit says no more than that it is.
    most_ms = min(max([limit_ms, *(point.first_p99_ms for point in points)]), 3 * limit_ms)

    def x(rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * rate / most_rate

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(ms, most_ms) / most_ms

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<path d="M{LEFT} {y(limit_ms):.1f}H{right}" stroke="grey" stroke-dasharray="4"/>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 15}" text-anchor="middle">'
        "arrivals a second</text>",
        f'<text x="15" y="{TOP - 15}">time to the first token, p99, ms</text>',
    ]
    for tick in range(6):
        rate, ms = most_rate * tick / 5, most_ms * tick / 5
        parts += [
            f'<text x="{x(rate):.1f}" y="{bottom + 18}" text-anchor="middle">{rate:.4g}</text>',
            f'<text x="{LEFT - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:.4g}</text>',
        ]
    for at, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[at % len(COLOURS)]
        places = [(x(point.rate), y(point.first_p99_ms)) for point in curve]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
        parts.append(
            f'<text x="{LEFT + 12}" y="{TOP + 16 * (at + 1)}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
