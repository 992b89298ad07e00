"""`calibrate`: runs the probes on one device and makes a hardware description of what they gave."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Final

import torch

from jettison.calibrate.clock import GIVE_UP_SECONDS, Clock, Probe, clock_for, undisturbed
from jettison.calibrate.collectives import measure_link
from jettison.calibrate.fit import Calibration, LinkFit, Measured, fit
from jettison.calibrate.probes import (
    CPU_SIZES,
    CUDA_SIZES,
    Pool,
    Sizes,
    attention_probes,
    counted,
    host_probes,
    product_probes,
    quick,
    step_of_blocks,
    step_of_layers,
    stream_probe,
)
from jettison.errors import UsageError
from jettison.progress import Progress, silent
from jettison.spec.hardware import Hardware

FULL_SECONDS, QUICK_SECONDS = 30.0, 5.0
"""That rounds may take; trying each call, and making data, comes on top."""
HOST_BYTES = 256 << 20
CHAIN = 200
"""Kernels in a row, to know the gap between them."""
_SHARES: Final = {"products": 0.6, "attention": 0.15, "rest": 0.25}


def calibrate(device: str | None = None, *, short: bool = False, ranks: int = 0, say: Progress = silent) -> Calibration:
    """Measure one device of this machine.

    Args:
        device: such as "cpu" or "cuda:0"; left out, the first accelerator, or the CPU.
        short: fewer shapes and rounds: some 10 seconds instead of 35.
        ranks: processes between which collectives are measured; 0: they are not.

    Raises:
        UsageError: there is no such device, or it is too slow to be measured.
    """
    began = time.perf_counter()
    where = _device(device)
    sizes = CUDA_SIZES if where.type == "cuda" else CPU_SIZES
    sizes = quick(sizes) if short else sizes
    with torch.random.fork_rng(devices=[where.index or 0] if where.type == "cuda" else []):
        torch.manual_seed(0)
        measured = _measured(where, sizes, QUICK_SECONDS if short else FULL_SECONDS, ranks, say)
    found = fit(measured, describe(where))
    return Calibration(hardware=found.hardware, comparisons=found.comparisons, took_seconds=time.perf_counter() - began)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda" and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        have = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise UsageError(f"got the device {name!r}; expected one that is here: {have}")
    return torch.device("cpu")


def _measured(device: torch.device, sizes: Sizes, seconds: float, ranks: int, say: Progress) -> Measured:
    clock = clock_for(device)
    on_gpu = device.type == "cuda"
    products = {}
    for dtype in ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16"):
        pool = Pool(sizes.pool_bytes, getattr(torch, dtype), device)
        listed = list(product_probes(sizes, pool, dtype))
        budget = seconds * _SHARES["products"] / 2
        took = undisturbed([probe for _, probe in listed], clock, seconds=budget, say=say)
        samples = tuple((product, took[probe.name]) for product, probe in listed if probe.name in took)
        if samples:
            products[dtype] = samples
    if not products:
        raise UsageError(f"no matrix product took less than {GIVE_UP_SECONDS} s: the machine is too slow, or too busy")
    ordinary = torch.bfloat16 if on_gpu else torch.float32
    attention = _attention(sizes, Pool(sizes.pool_bytes, ordinary, device), clock, seconds * _SHARES["attention"], say)
    stream_bytes, stream = stream_probe(sizes, device)
    (_, small), large = step_of_layers(8, 16, 2, device, ordinary), step_of_blocks(*sizes.block, device, ordinary)
    (_, plain), (slots, hooked) = (step_of_layers(*sizes.layer, device, ordinary, hooked=on) for on in (False, True))
    probes = [stream, Probe("tiny ops", small), Probe("ordinary ops", large)]
    probes += [Probe("layers", plain), Probe("layers with hooks", hooked)]
    took = undisturbed(probes, clock, seconds=seconds * _SHARES["rest"], needed=True, say=say)
    of_small, of_large = counted(small), counted(large)
    return Measured(
        products=products,
        attention=attention,
        stream=(stream_bytes, took["streaming"]),
        tiny=(of_small.kernels, took["tiny ops"]),
        block=(of_large.kernels, of_large.nbytes, took["ordinary ops"]),
        hooks=(slots, took["layers"], took["layers with hooks"]),
        gap=_gap(device, clock, say) if on_gpu else None,
        host=_host(device, clock, say) if on_gpu else None,
        link=_link(ranks, device, say) if ranks else None,
    )


def _attention(
    sizes: Sizes, pool: Pool, clock: Clock, seconds: float, say: Progress
) -> tuple[tuple[float, float, float], ...]:
    listed = list(attention_probes(sizes, pool))
    took = undisturbed([probe for *_, one, both in listed for probe in (one, both)], clock, seconds=seconds, say=say)
    return tuple(
        (flops, took[one.name], took[both.name])
        for _, flops, one, both in listed
        if one.name in took and both.name in took
    )


def _gap(device: torch.device, clock: Clock, say: Progress) -> float:
    """Seconds of one kernel with next to nothing to do, of many that the device was given at once."""
    x = torch.zeros(8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            x.add_(1.0)
    took = undisturbed(
        [Probe("gaps between kernels", lambda _turn: graph.replay())], clock, seconds=1.0, needed=True, say=say
    )
    return took["gaps between kernels"] / CHAIN


def _host(device: torch.device, clock: Clock, say: Progress, seconds: float = 2.0) -> tuple[int, float, float]:
    there, back = host_probes(HOST_BYTES, device)
    took = undisturbed([there, back], clock, seconds=seconds, needed=True, say=say)
    return HOST_BYTES, took[there.name], took[back.name]


def host_link(device: torch.device, say: Progress = silent) -> float:
    """Bytes a second between an accelerator and its host, in the slower direction: half a second's measuring."""
    nbytes, there, back = _host(device, clock_for(device), say, seconds=0.5)
    return nbytes / max(there, back)


def _link(ranks: int, device: torch.device, say: Progress) -> LinkFit:
    say(f"collectives between {ranks} ranks")
    return measure_link(ranks, device.type)


# what is there without measuring -----------------------------------------------------------------------------------


def describe(device: torch.device) -> Hardware:
    """Name, memory and units of a device, and who says so."""
    source = f"measured by jettison doctor --calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        usable = torch.cuda.mem_get_info(device)[1]
        return Hardware(
            name=properties.name,
            memory_bytes=properties.total_memory,
            usable_bytes=usable,
            source=f"{source}, {properties.name}",
            usable_source="torch.cuda.mem_get_info",
            units=properties.multi_processor_count,
            node=torch.cuda.device_count(),
            host_memory_bytes=host_bytes()[0] // torch.cuda.device_count(),
        )
    memory, available = host_bytes()
    threads = torch.get_num_threads()
    return Hardware(
        name=cpu_name(),
        memory_bytes=memory,
        usable_bytes=available,
        source=f"{source}, {cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, {clock_for(device)}",
        usable_source="memory that was available when this was measured",
        units=threads,
        node=1,
        synchronous=True,
    )


def host_bytes() -> tuple[int, int]:
    """The machine's memory, and what of it is available, as Linux says; elsewhere all of it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
    if "MemTotal" not in kib:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemTotal"]) << 10


def cpu_name() -> str:
    """As Linux has it, or the architecture's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
