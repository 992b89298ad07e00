"""Two timelines held against each other: what is there at the peak of each, by module and role."""

from __future__ import annotations

from dataclasses import dataclass

from jettison.traces.timeline import MemoryTimeline, by_module_and_role


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Bytes and allocations of one module and role at the peaks of both."""

    module: str
    role: str
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int

    @property
    def change_bytes(self) -> int:
        """Growth in bytes; below 0 for a decrease."""
        return self.after_bytes - self.before_bytes

    @property
    def verdict(self) -> str:
        """In one word."""
        if not self.before_count:
            return "appeared"
        if not self.after_count:
            return "vanished"
        if self.change_bytes:
            return "grew" if self.change_bytes > 0 else "shrank"
        return "same" if self.before_count == self.after_count else "cut otherwise"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """``changes``: the largest change first; all of them, those that are the same too."""

    before_peak_bytes: int
    after_peak_bytes: int
    changes: tuple[Change, ...]

    def by_role(self) -> dict[str, tuple[int, int]]:
        """Bytes before and after of each role, the largest change first."""
        found: dict[str, tuple[int, int]] = {}
        for change in self.changes:
            before, after = found.get(change.role, (0, 0))
            found[change.role] = before + change.before_bytes, after + change.after_bytes
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), -item[1][1], item[0])))


def compare_timelines(before: MemoryTimeline, after: MemoryTimeline) -> Difference:
    """Compare what is allocated at the peak of each."""
    old = by_module_and_role(before.shares(before.peak_event))
    new = by_module_and_role(after.shares(after.peak_event))
    changes = []
    for key in {**old, **new}:
        before_bytes, before_count = old.get(key, (0, 0))
        after_bytes, after_count = new.get(key, (0, 0))
        changes.append(
            Change(
                module=key[0],
                role=key[1],
                before_bytes=before_bytes,
                after_bytes=after_bytes,
                before_count=before_count,
                after_count=after_count,
            )
        )
    changes.sort(key=lambda change: (-abs(change.change_bytes), -change.after_bytes, change.module, change.role))
    return Difference(before_peak_bytes=before.peak_bytes, after_peak_bytes=after.peak_bytes, changes=tuple(changes))
