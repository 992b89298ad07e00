"""Comparisons of Jettison with its peers, ahead or behind, one line each, from all sections' documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.cases import Status, gib

HEAD = (
    "| model | peer | Jettison | peak GiB | peer ÷ plain | Jettison ÷ plain | asked | |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison. Ratios are times of a step (of its host, where ``peer`` says so) divided by plain autograd's.

    Args:
        ours: which way of Jettison's, in words.
        peak_bytes: allocated, at most, that both may take; None where memory is not the question.
        peer_ratio: None where there is no peer, or no plain step fits on the device.
        asked: the ratio that is asked for; the peer's where there is none.
    """

    model: str
    peer: str
    ours: str
    ratio: float
    peak_bytes: int | None = None
    peer_ratio: float | None = None
    asked: float | None = None

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def bound(self) -> float | None:
        """The ratio that is asked for."""
        return self.peer_ratio if self.asked is None else self.asked

    @property
    def is_ahead(self) -> bool:
        """Whether Jettison takes no longer than the peer, and no longer than is asked for."""
        return all(bound is None or self.ratio <= bound for bound in (self.peer_ratio, self.asked))

    @property
    def verdict(self) -> str:
        """In words, with the difference in percent."""
        if self.peer_ratio is None:
            assert self.asked is not None
            return "holds" if self.is_ahead else f"**missed by {self.ratio / self.asked - 1:.1%}**"
        by = f"{abs(self.ratio / self.peer_ratio - 1):.1%}"
        said = f"ahead by {by}" if self.ratio <= self.peer_ratio else f"**behind by {by}**"
        missed = self.asked is not None and self.ratio > self.asked
        return f"{said}, above what is asked" if missed else said

    def row(self) -> str:
        """As Markdown."""
        cells = [
            self.model,
            self.peer or "plain",
            self.ours.replace(f"at the peak of: {self.peer}", "at its peak"),
            "" if self.peak_bytes is None else gib(self.peak_bytes),
            "" if self.peer_ratio is None else f"{self.peer_ratio:.3f}",
            f"{self.ratio:.3f}",
            "" if self.bound is None else f"≤ {self.bound:.3f}",
            self.verdict,
        ]
        return f"| {' | '.join(cells)} |"


def at_a_glance(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The top of the kit's page: a sentence, the lines, and what was not measured."""
    lines = [Line(**case["line"]) for document in documents for case in document["cases"] if "line" in case]
    if not lines:
        return []
    ahead = sum(line.is_ahead for line in lines)
    found = [
        f"Ahead of its peer, and as fast as asked, in **{ahead} of {len(lines)}** comparisons. Times are of forward "
        "and backward, divided by plain autograd's beside them.",
        "",
        *HEAD,
    ]
    found += [line.row() for line in lines]
    missing = [
        f"{document['section']}, {case['case']} ({case['said']})"
        for document in documents
        for case in document["cases"]
        if case["status"] in (Status.LEFT_OUT, Status.SKIPPED, Status.ERROR)
    ]
    return [*found, "", *([f"Not measured: {'; '.join(missing)}.", ""] if missing else [])]
