"""What of a compiled block goes to the host: options that differ from measured ones in where tensors wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jettison.capture.model_trace import ModelTrace
from jettison.ledger.program import Program
from jettison.planner.host import ALL, MOVE_SECONDS, SEND, movable
from jettison.runtime.install import returned
from jettison.solve.actions import parts_to_send
from jettison.solve.frontier import FrontierPoint
from jettison.solve.policy import SMALLEST_BYTES, can_move
from jettison.solve.problem import RegionOption, Sent

Saved = Mapping[str, Mapping[int, Sent]]
"""By point and buffer, tensors that could wait on the host, as they were seen when the block was measured."""


def with_moves_of_compiled(
    trace: ModelTrace, class_key: str, points: Iterable[FrontierPoint], saved: Saved, kinks: Sequence[int]
) -> Iterator[FrontierPoint]:
    """Each point as it is, and with parts of what it saves on the host, as `planner.host.with_moves`."""
    program, senders = trace.classes[class_key].program, movable(trace, class_key)
    lives = {place for name, places in returned(trace).items() if name in senders for place in places}
    for point in points:
        yield point
        seen = saved[point.key]
        sizes = as_seen(program, seen)
        free = frozenset(
            b
            for b, sent in seen.items()  # Inductor may save something else in the place of what is kept: that stays
            if b in point.kept and can_move(program, b) and sent.nbytes >= SMALLEST_BYTES and sent.place not in lives
        )
        for part in parts_to_send(sizes, point.kept, free, sorted(set(kinks))):
            if part:
                sent_bytes = sizes.kept_bytes(part)
                yield replace(
                    point,
                    key=f"{point.key}{SEND}{ALL if part == free else sent_bytes}",
                    kept_bytes=point.kept_bytes - program.kept_bytes(part),
                    seconds=point.seconds + MOVE_SECONDS * len(part),
                    moved=part,
                )


def as_seen(program: Program, seen: Mapping[int, Sent]) -> Program:
    """With the bytes that Inductor gave these buffers."""
    buffers = tuple(replace(b, nbytes=seen[b.index].nbytes) if b.index in seen else b for b in program.buffers)
    return replace(program, buffers=buffers)


def option_at(
    point: FrontierPoint, measured: Mapping[str, RegionOption], saved: Saved, program: Program
) -> RegionOption:
    """A point's levels: those that were measured where all stays, with what it sends in nobody's resident bytes."""
    key = point.key.partition(SEND)[0]
    option = measured[key]
    if not point.moved:
        return option
    sent = tuple(one for b, one in saved[key].items() if b in point.moved)
    moved_bytes = sum(s.nbytes for s in sent)
    return replace(
        option,
        key=point.key,
        seconds=option.seconds + MOVE_SECONDS * len(sent),
        resident_bytes=max(0, option.resident_bytes - moved_bytes),
        offloaded_bytes=moved_bytes,
        sent=sent,
    )
