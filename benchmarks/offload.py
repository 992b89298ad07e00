"""What a plan does on each GPU where layers may offload: writes docs/offload.md.

    python -m benchmarks.offload

Every row is `jettison plan` with the flags that stand above its table; `tests/predict/test_published.py` compares the
page with what this writes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.page_command import page_command
from jettison.core.errors import Infeasible
from jettison.core.units import GIB, format_bytes
from jettison.predict.forecast import available_bytes, forecast
from jettison.predict.time import estimate
from jettison.report.alternatives import layer_reasons
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.auto_recompute import AutoForecast, choose, layer_policies
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

PAGE = Path(__file__).parent.parent / "docs" / "offload.md"
TEMPLATE = Path(__file__).parent / "pages" / "offload.md"
GPUS = ("a100-40gb", "l40s-48gb", "a100-80gb", "h100-80gb", "h200-141gb", "gb200-192gb")
EIGHT = {"dp": 8, "zero": 3, "seq": 8192}
SEVENTY = {"dp": 8, "zero": 3, "micro_batch": 2, "seq": 8192}
GB200 = hardware("gb200-192gb")
PCIE5 = replace(GB200, name="gb200-192gb on PCIe 5", host_bytes_per_second=64 * 10**9)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan with and without offloading; None where there is none."""

    joint: AutoForecast | None
    alone: AutoForecast | None


def run_of(model: str, *, offload: bool, **asked: Any) -> Run:
    """A run that a planner decides about."""
    run = resolve(model_spec(model), RunRequest(**asked)).run
    return replace(run, recompute=Recompute(mode=Mode.AUTO, offload=offload))


@cache
def planned(model: str, device: Hardware, offload: bool, asked: tuple[tuple[str, Any], ...]) -> AutoForecast | None:
    """On what the device leaves; None where nothing fits."""
    run = run_of(model, offload=offload, **dict(asked))
    try:
        return choose(run, available_bytes(device, run), device)
    except Infeasible:
        return None


def row(model: str, device: Hardware, **asked: Any) -> Row:
    """Both plans of one device."""
    flags = tuple(sorted(asked.items()))
    return Row(joint=planned(model, device, True, flags), alone=planned(model, device, False, flags))


def seconds(answer: AutoForecast) -> float:
    """Of a step."""
    run = answer.forecast.run
    kept_buffers = {part.name: part.chosen for part in answer.forecast.parts}
    chosen = [kept_buffers[name] for name in run.model.layer_names]
    return estimate(run, answer.hardware, chosen=chosen).step_seconds


def words(answer: AutoForecast) -> str:
    """ "31 mixed, 1 none": layers by what they do."""
    counted = Counter(word for _, word in layer_policies(answer))
    return ", ".join(f"{count} {word}" for word, count in counted.most_common())


def cells(found: Row) -> str:
    """Of a table's row: the policy, bytes on the host, a step with and without."""
    if found.joint is None:
        return "nothing fits | – | – | –"
    alone = "nothing fits" if found.alone is None else f"{seconds(found.alone):.2f} s"
    host = format_bytes(found.joint.host_bytes)
    return f"{words(found.joint)} | {host} | {seconds(found.joint):.2f} s | {alone}"


def by_gpu(micro_batch: int) -> str:
    """Llama 3 8B on each GPU."""
    lines = []
    for name in GPUS:
        device = hardware(name)
        link = "–" if device.host_bytes_per_second is None else f"{device.host_bytes_per_second // 10**9} GB/s"
        lines.append(f"| {name} | {link} | {cells(row('llama3-8b', device, micro_batch=micro_batch, **EIGHT))} |")
    return "\n".join(lines)


def seventy() -> str:
    """Llama 3 70B over two links, and what one way alone takes."""
    lines = []
    for device in (GB200, PCIE5):
        found = row("llama3-70b", device, **SEVENTY)
        assert found.joint is not None
        link = f"{(device.host_bytes_per_second or 0) // 10**9} GB/s"
        named = replace(found.joint.forecast.run, recompute=Recompute(offload=True))
        lines.append(f"| {link} | {cells(found)} | {estimate(named, device).step_seconds:.2f} s |")
    return "\n".join(lines)


def hidden() -> str:
    """How much of the forward the copies of the plan on PCIe 5 fill."""
    found = row("llama3-70b", PCIE5, **SEVENTY).joint
    assert found is not None
    reasons = [reason for reason in layer_reasons(found).values() if reason.offloaded_bytes]
    share = sum(r.transfer_seconds for r in reasons) / sum(r.forward_seconds for r in reasons)
    return f"{share:.0%}"


def everything() -> str:
    """On the host, if all that 70B's layers save went there."""
    run = run_of("llama3-70b", offload=False, **SEVENTY)
    parts = [part for part in forecast(run).parts if part.is_layer]
    return format_bytes(sum(part.region.saved_bytes for part in parts[:-1]))


def cheap() -> str:
    """What most layers of 8B compute again on an H100."""
    found = row("llama3-8b", hardware("h100-80gb"), micro_batch=2, **EIGHT).joint
    assert found is not None
    counted = Counter(str(reason) for reason in layer_reasons(found).values())
    return counted.most_common(1)[0][0]


def stages(gib: int) -> str:
    """GPT-175B over eight stages, by stage."""
    run = run_of("gpt-175b", offload=False, tp=8, pp=8, micro_batches=64)
    found = choose(run, gib * GIB, hardware("a100-80gb"))
    policies = dict(layer_policies(found))
    lines = []
    for stage in found.forecast.stages:
        counted = Counter(policies[part.name] for chunk in stage.parts for part in chunk if part.is_layer)
        text = ", ".join(f"{count} {word}" for word, count in counted.most_common())
        lines.append(f"| {stage.index} | {stage.in_flight} | {text} | {format_bytes(stage.peak.nbytes)} |")
    return "\n".join(lines)


def page() -> str:
    """What docs/offload.md holds."""
    text = TEMPLATE.read_text(encoding="utf-8")
    values = {
        "one": by_gpu(1),
        "two": by_gpu(2),
        "four": by_gpu(4),
        "seventy": seventy(),
        "hidden": hidden(),
        "stages": stages(56),
        "everything": everything(),
        "cheap": cheap(),
    }
    for name, value in values.items():
        text = text.replace(f"{{{{ {name} }}}}", value)
    return text


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return PAGE.name


if __name__ == "__main__":
    page_command("benchmarks.offload", __doc__, write_page)
