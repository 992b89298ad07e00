"""Policies for points of a block's Pareto front, packed points, and the points of a compiled block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from jettison.capture.model_trace import BlockClass, CompiledProgram
from jettison.capture.recorder import RegionTrace
from jettison.cost.kernel import memory_seconds, op_seconds
from jettison.dryrun.kernel_trial import REPEATS, one_run
from jettison.ledger.program import Program
from jettison.runtime.lossless_packing import Pack, PackedForm, pack_bytes, unpack_bytes
from jettison.runtime.recipe import compile_recipe
from jettison.solve.checkpoint_policy import SMALLEST_BYTES, CheckpointPolicy, Exactly, KeepAll, KeepShare, policy_named
from jettison.solve.frontier import NONE_KEY, FrontierPoint, pareto_frontier
from jettison.solve.offload_options import lean_points
from jettison.spec.hardware import Hardware

HULL_POINTS = 16
COMPILED_POINTS = 5
"""Most points of a compiled block besides Inductor's default: each is compiled and measured, which takes seconds."""


def policy_of(cls: BlockClass, point: FrontierPoint) -> CheckpointPolicy:
    return policy_kept(cls, point.key, point.kept, point.offloaded, point.packed)


def policy_kept(
    cls: BlockClass,
    option: str,
    kept: frozenset[int],
    offloaded: frozenset[int] = frozenset(),
    packed: frozenset[int] = frozenset(),
) -> CheckpointPolicy:
    if cls.compiled is None and cls.problem:
        return policy_named(option)
    if cls.compiled is not None and option == NONE_KEY:
        return KeepAll()  # with Inductor's own choice
    if cls.compiled is not None:  # its code does not depend on where saved tensors are stored
        return replace(exactly(cls.program, kept), offloaded_buffers=offloaded)
    return exactly(cls.program, kept, offloaded, packed)


def exactly(
    program: Program,
    kept: frozenset[int],
    offloaded: frozenset[int] = frozenset(),
    packed: frozenset[int] = frozenset(),
) -> Exactly:
    """This decision for this program and other shapes of it (a shorter batch); for others an equal share of bytes."""
    total = program.kept_bytes(program.saved_buffers())
    share = KeepShare(program.kept_bytes(kept - offloaded) / total if total else 1.0)
    return Exactly(program.digest(), kept, share, program.form(), offloaded_buffers=offloaded, packed_buffers=packed)


PACK: Final = "-pack"
LEAST_PACKED: Final = 0.02
"""Least saving of packing, as a share of a point's bytes, that is worth another option."""
PACKED_TRAFFIC: Final = 40
"""Cost of packing and unpacking a mask, in passes over its bytes, if it cannot be measured (by torch's ops, for masks
of 64 KiB to 16 MiB on a CPU core, 32 to 53 times the cost of a byte in a sum of two tensors; an index takes less).
"""

PACKED_POINTS: Final = 12
"""Kinds of points in which packed tensors count with their packed bytes."""


def with_packs(
    region: RegionTrace, points: Iterable[FrontierPoint], seconds: Sequence[float], price: Callable[[Pack], float]
) -> Iterator[FrontierPoint]:
    """Yield each point as it is, and with its kept tensors packed, if that is worth it and lossless; then points that
    keep a tensor because it packs. ``seconds`` to recompute each op; ``price``: seconds to pack and unpack a tensor.
    """
    program = region.program
    saved = program.saved_buffers()
    packs = compile_recipe(region, saved, packed=saved).packed
    known = set()
    for point in points:
        yield point
        packed = _packed(region, point, price) if packs else None
        if packed is not None:
            known.add(packed.kept)
            yield packed
    if not _is_worth(program, packs, program.kept_bytes(saved)):
        return
    buffers = tuple(replace(b, nbytes=packs[b.index].nbytes) if b.index in packs else b for b in program.buffers)
    thin = replace(program, buffers=buffers)
    for n, point in enumerate(pareto_frontier(thin, seconds, max_points=PACKED_POINTS)):
        whole = replace(point, key=f"thin{n}", kept_bytes=program.kept_bytes(point.kept))
        packed = _packed(region, whole, price) if point.kept not in known else None
        if packed is not None:
            yield packed


def _packed(region: RegionTrace, point: FrontierPoint, price: Callable[[Pack], float]) -> FrontierPoint | None:
    """A point with its kept tensors packed; None if that is not worth it."""
    packs = compile_recipe(region, point.kept, packed=point.kept - point.offloaded).packed
    if not _is_worth(region.program, packs, point.kept_bytes):
        return None
    return replace(
        point,
        key=f"{point.key}{PACK}",
        kept_bytes=point.kept_bytes - _bytes_saved(region.program, packs),
        seconds=point.seconds + sum(map(price, packs.values())),
        packed=frozenset(packs),
    )


SAMPLE_BYTES: Final = 1 << 24
"""Bytes of a tensor that is packed to measure the price; larger ones scale in proportion."""
_PACKING: dict[tuple[int, str, PackedForm, int], float] = {}
"""Prices of this process, by threads, device, form and bytes, so that planning twice gives the same plan."""


def packing_seconds(pack: Pack, device: str = "cpu") -> float:
    """Seconds to pack and unpack a kept tensor: the least of a few runs, independent of values."""
    nbytes = pack.move.nbytes
    tried = min(nbytes, SAMPLE_BYTES)
    key = torch.get_num_threads(), device, pack.form, tried
    if key not in _PACKING:
        with torch.no_grad():
            flat = torch.zeros(tried, dtype=torch.uint8, device=device)
            _PACKING[key] = min(  # the first is cold
                one_run(lambda: unpack_bytes(pack_bytes(flat, pack.form), pack.form, tried), (), {}, device)
                for _ in range(REPEATS + 1)
            )
            if flat.is_cuda:
                del flat
                torch.cuda.empty_cache()  # do not keep it cached
    return _PACKING[key] * nbytes / max(1, tried)


def seconds_by_traffic(pack: Pack, hardware: Hardware) -> float:
    """Estimated seconds to pack and unpack a tensor, if nothing can be run."""
    numbers = 4 * pack.move.nbytes if pack.form.of.is_floating_point else 0
    return memory_seconds(PACKED_TRAFFIC * pack.mask_bytes + numbers, hardware)


def _bytes_saved(program: Program, packs: Mapping[int, Pack]) -> int:
    return program.kept_bytes(frozenset(packs)) - sum(pack.nbytes for pack in packs.values())


def _is_worth(program: Program, packs: Mapping[int, Pack], kept_bytes: int) -> bool:
    spared = _bytes_saved(program, packs)
    return spared > LEAST_PACKED * kept_bytes and spared >= SMALLEST_BYTES


def compiled_points(compiled: CompiledProgram, hardware: Hardware) -> list[FrontierPoint]:
    """Points of a compiled block, from the fewest bytes to Inductor's default, which comes last."""
    program = compiled.program
    seconds = [op_seconds(op, hardware) for op in program.ops]
    plain_bytes = program.kept_bytes(compiled.default)
    plain = FrontierPoint(key=NONE_KEY, kept=compiled.default, kept_bytes=plain_bytes, seconds=0.0)
    hull = pareto_frontier(program, seconds, max_points=HULL_POINTS)
    found = [p for p in hull if p.kept_bytes < plain_bytes and p.key != NONE_KEY]
    while len(found) > COMPILED_POINTS:
        sizes = [p.kept_bytes for p in found] + [plain_bytes]
        closest = min(range(1, len(found)), key=lambda i: sizes[i + 1] - sizes[i - 1])
        del found[closest]
    lean = lean_points(program, found[0].kept, seconds, most=1) if found else ()
    known = {p.kept for p in found}
    found += [p for p in lean if p.kept not in known and p.kept_bytes < plain_bytes]
    return [*sorted(found, key=lambda p: p.kept_bytes), plain]
