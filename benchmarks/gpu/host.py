"""Host time and launches of a step, where kernels are so small that the host is all that counts.

The models of `benchmarks.host_bound` in torch alone. Host time is from the call of a step to its return: the device is
waited for before and after, outside of what is timed. Launches are counted by torch's profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.gpu.cases import Case, Column, Found, Log
from benchmarks.gpu.families import Size, Variant, build
from benchmarks.gpu.glance import Line
from benchmarks.gpu.setting import Setting, fingerprints, quartiles
from benchmarks.host_bound import RIVALS
from benchmarks.rivals import Rival

SIZE = Size(layers=16, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=128, sequence=8, micro_batch=1)
MODELS = {"llama": Variant(), "gpt": Variant(dropout=0.1), "mixtral": Variant()}
ASKED = {"jettison none": 1.08, "jettison full": 1.45, "jettison selective-op": 1.40}
PEERS = {"jettison full": "checkpoint, every layer", "jettison selective-op": "selective contexts, save matmuls"}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "cudaGraphLaunch")
COLUMNS = (
    Column(title="host ms", key="host_milliseconds", show="{:.2f}".format),
    Column(title="÷ plain", key="ratio", show="{:.3f}".format),
    Column(title="quartiles", key="quartiles", show=lambda q: f"{q[0]:.3f}–{q[1]:.3f}"),
    Column(title="launches", key="launches"),
)


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Each model under each of the ways, beside a plain one."""
    log.columns = COLUMNS
    log.text = [f"{SIZE.layers} layers, h={SIZE.hidden}, {SIZE.sequence} tokens; forward and backward."]
    for family in ("llama",) if quick else MODELS:
        cases: dict[str, Case] = {}
        for rival in (RIVALS[0], RIVALS[-1]) if quick else RIVALS:
            peer = cases.get(PEERS.get(rival.name, ""))
            cases[rival.name] = log.case(
                f"{family}, {rival.name}", lambda f=family, r=rival, p=peer: _one(setting, f, r, p), expect=2.0
            )


def _one(setting: Setting, family: str, rival: Rival, peer: Case | None) -> Found:
    dtype = torch.bfloat16 if family == "mixtral" else torch.float32
    (model, batch), (twin, same) = (build(family, SIZE, setting.device, dtype, MODELS[family]) for _ in range(2))
    handle = rival.apply(model, batch)

    def step(of: nn.Module, its: dict[str, torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            of.zero_grad(set_to_none=True)
            of(**its).backward()

        return call

    ways = {"treated": step(model, batch), "plain": step(twin, same)}
    rounds = setting.rounds if setting.tiny else 4 * setting.rounds
    samples: list[tuple[float, float]] = []
    for number in range(rounds + 3):
        order = ("treated", "plain") if number % 2 else ("plain", "treated")
        took = {name: host_seconds(ways[name], setting.device) for name in order}
        samples.append((took["treated"], took["plain"]))
    low, ratio, high = quartiles([treated / plain for treated, plain in samples[3:]])
    launched = launches(ways["treated"], setting.device)
    problems = [] if not rival.name.startswith("jettison") or _same(ways, model, twin) else ["gradients differ"]
    handle.remove()
    figures = {
        "host_milliseconds": 1e3 * statistics.median(treated for treated, _ in samples[3:]),
        "ratio": ratio,
        "quartiles": [low, high],
        "launches": launched,
    }
    if rival.name in ASKED:
        figures["line"] = Line(
            model=f"{family}, host time",
            peer="" if peer is None else peer.name.removeprefix(f"{family}, "),
            ours=rival.name.removeprefix("jettison "),
            ratio=ratio,
            peer_ratio=None if peer is None else peer.figures.get("ratio"),
            asked=ASKED[rival.name],
        ).document()
    return Found(figures=figures, problems=problems)


def _same(ways: dict[str, Callable[[], None]], model: nn.Module, twin: nn.Module) -> bool:
    """Whether both give the same gradients from one random state, or plain ones differ from themselves."""
    found = []
    for way, of in (("treated", model), ("plain", twin), ("plain", twin)):
        torch.manual_seed(7)
        ways[way]()
        found.append(fingerprints(of))
    return found[0] == found[1] or found[1] != found[2]


def host_seconds(step: Callable[[], None], device: torch.device) -> float:
    """From the call to its return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


def launches(step: Callable[[], None], device: torch.device) -> int | None:
    """Kernels that a step launches; None without a device."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize(device)
    return sum(event.name.startswith(LAUNCHES) for event in profile.events())


def kernel_milliseconds(step: Callable[[], None], device: torch.device) -> float:
    """Device time of what a step runs, summed over kernels; 0 without a device."""
    if device.type != "cuda":
        return 0.0
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize(device)
    kinds = torch.autograd.DeviceType.CUDA
    return sum(event.time_range.elapsed_us() for event in profile.events() if event.device_type == kinds) / 1e3
