"""What `benchmarks.step_times` found: predicted beside measured, how far off, and the page for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model under one policy: seconds, and the ratio to the plain step, predicted and measured.

    ``seconds`` is the lower quartile over rounds and ``high`` the upper one; ``ratio`` is one of lower quartiles,
    ``ratio_low`` and ``ratio_high`` are quartiles of ratios taken inside each round.
    """

    model: str
    policy: str
    predicted_seconds: float
    seconds: float
    median_seconds: float
    high_seconds: float
    wall_seconds: float
    predicted_ratio: float
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def error(self) -> float:
        """Of the predicted seconds, relative to the measured ones."""
        return self.predicted_seconds / self.seconds - 1

    @property
    def ratio_points(self) -> float:
        """Of the predicted ratio, in percentage points."""
        return 100 * (self.predicted_ratio - self.ratio)

    @property
    def cells(self) -> tuple[str, ...]:
        """As the page has them."""
        plain = self.policy == "none"
        return (
            self.model,
            self.policy,
            f"{self.predicted_seconds * 1e3:.1f}",
            f"{self.seconds * 1e3:.1f}",
            f"{self.median_seconds * 1e3:.1f}, {self.high_seconds * 1e3:.1f}",
            f"{self.error:+.1%}",
            "" if plain else f"{self.predicted_ratio:.3f}",
            "" if plain else f"{self.ratio:.3f}",
            "" if plain else f"{self.ratio_low:.3f} to {self.ratio_high:.3f}",
            "" if plain else f"{self.ratio_points:+.1f}",
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Over all rows: errors of seconds as shares, differences of ratios in points."""

    median_error: float
    worst_error: float
    median_ratio_points: float
    worst_ratio_points: float


def summary(rows: Sequence[Row]) -> Summary:
    """How far predictions are off, whichever way."""
    errors = [abs(row.error) for row in rows]
    points = [abs(row.ratio_points) for row in rows if row.policy != "none"]
    return Summary(
        median_error=statistics.median(errors),
        worst_error=max(errors),
        median_ratio_points=statistics.median(points),
        worst_ratio_points=max(points),
    )


def markdown(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A table for people, with what was run."""
    found = summary(rows)
    when = f", {document['date']}" if document["date"] else ""
    lines = [
        f"# Step times on {document['device']}, predicted and measured",
        "",
        f"torch {document['torch']}, one thread, its own seconds, {document['rounds']} interleaved rounds{when}.",
        "Figures of the machine from `jettison doctor --calibrate`, before any model ran: nothing else is known of it",
        f"to the predictions. Plan: layers do {', '.join(document['plan'])} in turn.",
        "",
        f"Step times are off by {found.median_error:.1%} (median; worst {found.worst_error:.1%}), ratios to plain by "
        f"{found.median_ratio_points:.1f} points (worst {found.worst_ratio_points:.1f}).",
        "",
        "Measured is the lower quartile over rounds, beside it the median and the upper quartile: the machine is",
        "shared, and others only make a step longer. A ratio is one of lower quartiles; beside it are the quartiles of",
        f"ratios taken inside each round.{_patience(document['patience'])}",
        "",
        "| model | policy | predicted ms | measured ms | median, upper | off | predicted ratio | measured ratio | "
        "quartiles in rounds | off, points |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *("| " + " | ".join(row.cells) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _patience(patience: int) -> str:
    return " Rounds in which others kept a core busy are not among them." if patience > 1 else ""
