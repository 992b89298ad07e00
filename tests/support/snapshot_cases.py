"""CUDA memory snapshots in the structure that torch's allocator writes, made by hand: there is no device here."""

import random
from typing import Any

from jettison.memory.timeline import Label, MemoryTimeline, TimelineWriter

FORWARD = [
    {"name": "at::empty_cuda", "filename": "??", "line": 0},
    {"name": "forward", "filename": "/venv/site-packages/torch/nn/modules/linear.py", "line": 125},
    {"name": "forward", "filename": "/home/me/model/blocks.py", "line": 41},
    {"name": "_call_impl", "filename": "/venv/site-packages/torch/nn/modules/module.py", "line": 1780},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 9},
]
ENGINE = [{"name": "torch::autograd::Engine::evaluate_function(...)", "filename": "??", "line": 0}]
OPTIMIZER = [
    {"name": "_init_group", "filename": "/venv/site-packages/torch/optim/adamw.py", "line": 150},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 12},
]


def event(action: str, addr: int, size: int, frames: list[dict[str, Any]], time_us: int) -> dict[str, Any]:
    """One entry of a trace, with the keys that torch 2.13 writes."""
    return {
        "action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "compile_context": "N/A",
        "user_metadata": "", "frames": frames,
    }  # fmt: skip


def block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    used = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    return {
        "device": device, "address": address, "total_size": sum(b["size"] for b in blocks), "allocated_size": used,
        "active_size": used, "requested_size": used, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip


def small_snapshot() -> dict[str, Any]:
    """1,024 bytes whose birth is lost and that are freed, 500 that stay throughout; a forward, a backward, a state.

    Allocated: 1524, 3572, 1524, 5620 (the peak), 4596, 5108.
    """
    trace = [
        event("alloc", 4096, 2048, FORWARD, 10),
        event("free_requested", 4096, 2048, [], 20),
        event("free_completed", 4096, 2048, [], 21),
        event("segment_alloc", 1 << 21, 1 << 21, ENGINE, 29),
        event("alloc", 1 << 21, 4096, ENGINE, 30),
        event("free_requested", 2048, 1024, [], 40),
        event("free_completed", 2048, 1024, [], 41),
        event("alloc", 4096, 512, OPTIMIZER, 50),
        event("snapshot", 0, 0, [], 60),
    ]
    first = segment(
        0,
        [
            block(0, 2048, 2048, "inactive", []),
            block(2048, 1536, 1536, "inactive", []),
            block(3584, 512, 500, "active_allocated", OPTIMIZER),
            block(4096, 512, 512, "active_allocated", OPTIMIZER),
            block(4608, 1024, 1024, "inactive", []),
        ],
    )
    second = segment(
        1 << 21,
        [
            block(1 << 21, 4096, 4096, "active_allocated", ENGINE),
            block((1 << 21) + 4096, (1 << 21) - 4096, 0, "inactive", []),
        ],
    )
    return {"segments": [first, second], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


def random_timeline(births: int, *, seed: int = 0, most_live: int = 3000) -> MemoryTimeline:
    """So many allocations by chance, in an order that could be a step's: what is left at the end is freed."""
    chance, writer = random.Random(seed), TimelineWriter(f"{births} allocations by chance")
    labels = [Label(module=f"layers.{i // 8}", role=f"role {i % 9}", site="forward") for i in range(256)]
    live: list[int] = []
    time_ns = made = 0
    while made < births or live:
        time_ns += chance.randrange(500, 3000)
        full = len(live) > most_live or made >= births
        if live and (full or (chance.random() < 0.5 and len(live) > most_live // 15)):
            writer.free(live.pop(chance.randrange(len(live))), time_ns)
        else:
            live.append(writer.allocate(chance.randrange(1, 4096) * 512, labels[made % 256], time_ns))
            made += 1
    return writer.timeline()


State = list[list[tuple[int, int, int]]]
"""Segments: address, size and requested bytes of each block, -1 where it is free."""


def fragmented_snapshot(events: int = 300, *, seed: int = 0) -> tuple[dict[str, Any], list[State]]:
    """A snapshot of the large pool of a caching allocator, and its segments after each event.

    Best fit in segments of 20 MiB (or of the request); what is left of a block is split off above 1 MiB; free
    neighbours merge; now and then free segments go back to the driver.
    """
    chance, mib = random.Random(seed), 1 << 20
    segments: dict[int, list[tuple[int, int, int]]] = {}
    live: dict[int, int] = {}  # address to its segment
    trace: list[dict[str, Any]] = []
    states: list[State] = []
    stacks = (FORWARD, OPTIMIZER, ENGINE)

    def happened(action: str, address: int, nbytes: int) -> None:
        frames = stacks[nbytes % 3] if action == "alloc" else []
        trace.append(event(action, address, nbytes, frames, len(trace)))

    def allocate(nbytes: int) -> None:
        wide = -(-nbytes // 512) * 512
        free = [(b[1], at, b) for at, own in segments.items() for b in own if b[2] < 0 and b[1] >= wide]
        if not free:
            size = 20 * mib if wide < 10 * mib else -(-wide // (2 * mib)) * 2 * mib
            at = (1 << 40) + len(trace) * 64 * mib
            segments[at] = [(at, size, -1)]
            happened("segment_alloc", at, size)
            free = [(size, at, segments[at][0])]
        size, at, found = min(free)
        rest = size - wide if size - wide > mib else 0
        own, place = segments[at], segments[at].index(found)
        own[place : place + 1] = [(found[0], size - rest, nbytes), (found[0] + size - rest, rest, -1)][: 1 + bool(rest)]
        live[found[0]] = at
        happened("alloc", found[0], nbytes)

    def free(address: int) -> None:
        at = live.pop(address)
        merged: list[tuple[int, int, int]] = []
        for start, size, nbytes in segments[at]:
            if start == address:
                happened("free_requested", address, nbytes)
                happened("free_completed", address, nbytes)
                nbytes = -1
            if merged and nbytes < 0 and merged[-1][2] < 0:
                merged[-1] = (merged[-1][0], merged[-1][1] + size, -1)
            else:
                merged.append((start, size, nbytes))
        segments[at] = merged

    for _ in range(events):
        if live and chance.random() < 0.45:
            free(chance.choice(sorted(live)))
        else:
            allocate(chance.randrange(mib + 1, 16 * mib))
        states.append([list(own) for _, own in sorted(segments.items())])
        if chance.random() < 0.1 and len(states) < events:
            for at in [at for at, own in segments.items() if len(own) == 1 and own[0][2] < 0]:
                happened("segment_free", at, segments.pop(at)[0][1])
    written = [
        segment(at, [block(a, n, max(0, r), "active_allocated" if r >= 0 else "inactive", FORWARD) for a, n, r in own])
        for at, own in sorted(segments.items())
    ]
    return small_snapshot() | {"segments": written, "device_traces": [trace]}, states
