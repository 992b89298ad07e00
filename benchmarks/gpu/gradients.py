"""Gradients to the bit and peaks within budgets: the zoo's architectures, by kernel, precision, optimizer and dropout.

Each case trains three steps at its smallest budget and at one half way to the plain step's peak, next to a plain model
from the same seed. Losses, gradients, parameters, buffers and random streams must have the same bits, and the
allocator's peak of no step may be above the budget. Plain training goes twice first: what differs from itself is
compared under deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cases import Column, Found, Log, Skip, mib
from benchmarks.gpu.families import Size, Variant, build
from benchmarks.gpu.setting import Setting, planner_for, restored_determinism
from jettison.dryrun.counter import have_workspaces, measured_peak, static_tensors
from jettison.planner.apply import apply_candidate
from jettison.planner.planner import Planner
from jettison.verify.differences import same_bits

STEPS = 3
SEED = 7
KERNELS = {
    "any": (),
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64, micro_batch=2, experts=4)
COLUMNS = (
    Column(title="plain MiB", key="plain_peak_bytes", show=mib),
    Column(title="smallest MiB", key="smallest_budget_bytes", show=mib),
    Column(title="its peak MiB", key="smallest_peak_bytes", show=mib),
    Column(title="middle MiB", key="middle_budget_bytes", show=mib),
    Column(title="its peak MiB", key="middle_peak_bytes", show=mib),
    Column(title="dropped", key="smallest_dropped"),
    Column(title="deterministic algorithms", key="deterministic", show=lambda on: "on" if on else ""),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table: what is trained, and how."""

    family: str
    kernel: str = "any"
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False  # weights in fp32, products in bf16
    optimizer: str = "fused AdamW"
    dropout: float = 0.0
    tiny: bool = False  # among the few that a quick test runs

    @property
    def name(self) -> str:
        """What tables call it."""
        precision = "autocast" if self.autocast else str(self.dtype).removeprefix("torch.")
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return f"{self.family}, {self.kernel} attention, {precision}, {self.optimizer}{dropout}"


FP32 = torch.float32
KINDS = (
    Kind(family="llama", kernel="flash"),
    Kind(family="gpt", kernel="flash", dropout=0.1),
    Kind(family="llama-repeated", kernel="memory-efficient"),
    Kind(family="llama-repeated", kernel="math", dtype=FP32),
    Kind(family="mixtral", kernel="flash"),
    Kind(family="llama", kernel="flash", dtype=FP32, autocast=True),
    Kind(family="gpt", kernel="memory-efficient", dropout=0.1),
    Kind(family="gpt", kernel="math", dtype=FP32, dropout=0.1, tiny=True),
    Kind(family="gpt", dtype=FP32, autocast=True, dropout=0.1),
    Kind(family="qwen3", kernel="flash"),
    Kind(family="bert", kernel="memory-efficient", dropout=0.1),
    Kind(family="resnet", dtype=FP32),
    Kind(family="t5", kernel="memory-efficient", dropout=0.1),
    Kind(family="gemma", kernel="memory-efficient", dtype=FP32, autocast=True),
    Kind(family="gpt-eager", dropout=0.1, optimizer="AdamW over lists"),
    Kind(family="deepseek"),
    Kind(family="llama", kernel="cudnn"),
    Kind(family="falcon", kernel="flash", optimizer="SGD"),
    Kind(family="vit", dtype=FP32, autocast=True, dropout=0.1),
    Kind(family="mamba"),
    Kind(family="lora", kernel="flash"),
    Kind(family="llama", kernel="math"),
    Kind(family="llama-repeated", kernel="memory-efficient", dtype=FP32, optimizer="AdamW, one by one"),
    Kind(family="qwen3", dtype=torch.float16, optimizer="SGD"),
    Kind(family="gru", dtype=FP32),
)


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """All kinds; a few where it is to be quick."""
    log.columns = COLUMNS
    have_workspaces(setting.device)
    longest = 1.0 if setting.device.type == "cpu" else 6.0
    for kind in KINDS:
        if quick and not kind.tiny:
            continue
        case = log.case(kind.name, lambda kind=kind: prove(kind, setting), expect=longest)
        longest = max(longest, 0.7 * case.seconds)


def prove(kind: Kind, setting: Setting) -> Found:
    """One kind; under deterministic algorithms where it is not the same twice without."""
    before = ""
    with restored_determinism():
        for deterministic in (False, True):
            if deterministic:
                torch.use_deterministic_algorithms(True, warn_only=True)
            plain = _plain(kind, setting)
            if plain is None:
                before = "plain training differs from itself"
                continue
            found = _proven(kind, setting, plain)
            if not found.problems or deterministic or setting.device.type == "cpu":
                return Found(figures={**found.figures, "without": before}, problems=found.problems)
            before = "; ".join(found.problems)
    raise Skip("plain training differs from itself, under deterministic algorithms as well")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What some steps left behind, on the CPU: their losses, everything by name, the streams; and their peaks."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    streams: list[bytes]
    peaks: list[int]


class Run:
    """A model in training, which can begin again."""

    def __init__(self, kind: Kind, setting: Setting) -> None:
        self.kind, self.device = kind, setting.device
        self.size = TINY if setting.tiny else Size()
        variant = Variant(repeat=kind.kernel == "memory-efficient", dropout=kind.dropout)
        try:
            self.model, self.batch = build(kind.family, self.size, self.device, kind.dtype, variant)
        except NotImplementedError as missing:
            raise Skip(str(missing)) from None
        self.optimizer = _optimizer(kind.optimizer, self.model)
        self._start = {name: t.to("cpu", copy=True) for name, t in self.model.state_dict().items()}

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The kernel of attention and autocast, as in the loop."""
        with contextlib.ExitStack() as stack:
            if KERNELS[self.kind.kernel]:
                stack.enter_context(sdpa_kernel(list(KERNELS[self.kind.kernel])))
            if self.kind.autocast:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            yield

    def step(self, losses: list[Tensor]) -> None:
        """Forward, backward outside of autocast as torch asks for, the optimizer."""
        with self.settings():
            loss = self.model(**self.batch)
        loss.backward()
        losses.append(loss.detach())
        self.optimizer.step()

    def train(self) -> Trained:
        """Three steps from the first weights, without gradients and without the optimizer's state."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.model.load_state_dict(self._start)
        torch.manual_seed(SEED)
        losses: list[Tensor] = []
        peaks = []
        for _ in range(STEPS):
            self.optimizer.zero_grad(set_to_none=True)
            static = static_tensors(self.model, self.batch, self.optimizer)
            peaks.append(measured_peak(lambda: self.step(losses), static_tensors=static).peak_bytes)
            losses[-1] = losses[-1].to("cpu", copy=True)
        state = {f"gradient of {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        state |= dict(self.model.state_dict())
        streams = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
        return Trained(
            losses=losses,
            state={name: t.detach().to("cpu", copy=True) for name, t in state.items()},
            streams=[bytes(stream.tolist()) for stream in streams],
            peaks=peaks,
        )


def differences(got: Trained, expected: Trained) -> list[str]:
    """What is not the same to the bit; empty where everything is."""
    found = [
        f"loss of step {i}"
        for i, (a, b) in enumerate(zip(got.losses, expected.losses, strict=True))
        if not same_bits(a, b)
    ]
    found += [f"only one side has the {name}" for name in sorted(got.state.keys() ^ expected.state.keys())]
    found += [n for n, t in got.state.items() if n in expected.state and not same_bits(t, expected.state[n])]
    found += ["a random stream"] if got.streams != expected.streams else []
    return (
        [f"differs: {', '.join(found[:3])}{f' and {len(found) - 3} more' if len(found) > 3 else ''}"] if found else []
    )


def _plain(kind: Kind, setting: Setting) -> Trained | None:
    """Plain training; None where it is not the same twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first, second = Run(kind, setting).train(), Run(kind, setting).train()
        except RuntimeError as error:  # no such kernel here, or no room
            raise Skip(f"plain training does not run here: {str(error).splitlines()[0][:200]}") from None
    if not all(loss.isfinite() for loss in first.losses):
        raise AssertionError(f"the plain losses are {[loss.item() for loss in first.losses]}: the case is badly made")
    return None if differences(second, first) else first


def _proven(kind: Kind, setting: Setting, plain: Trained) -> Found:
    """Both budgets."""
    run = Run(kind, setting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with run.settings():
            planner = planner_for(run.model, run.batch, run.optimizer)
        smallest = planner.minimum_budget_bytes
        middle = max(smallest, (smallest + max(plain.peaks)) // 2)
        figures: dict[str, Any] = {
            "plain_peak_bytes": max(plain.peaks),
            "smallest_budget_bytes": smallest,
            "middle_budget_bytes": middle,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        problems = []
        for word, budget in (("smallest", smallest), ("middle", middle)):
            of_budget, wrong = _under(run, planner, budget, plain)
            figures |= {f"{word}_{key}": value for key, value in of_budget.items()}
            problems += [f"{word} budget {text}" for text in wrong]
        if not figures["smallest_dropped"] and smallest < max(plain.peaks) - 4096 and not figures["smallest_fallbacks"]:
            problems.append("nothing was dropped at the smallest budget, so nothing was tested")
    return Found(figures=figures, problems=problems)


def _under(run: Run, planner: Planner, budget: int, plain: Trained) -> tuple[dict[str, Any], list[str]]:
    with run.settings():
        handle = apply_candidate(run.model, planner, planner.plan(budget), budget)
    try:
        trained = run.train()
        reports = handle.report()
    finally:
        handle.remove()
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.state.clear()
    assert handle.plan is not None
    figures = {
        "predicted_bytes": handle.plan.predicted.peak_bytes,
        "peak_bytes": max(trained.peaks),
        "dropped": sum(report.slots_dropped for report in reports),
        "fallbacks": [f"{report.name or 'root'}: {report.fallback}" for report in reports if report.fallback],
    }
    over = [peak - budget for peak in trained.peaks if peak > budget]
    return figures, [*differences(trained, plain), *(f"exceeded by {nbytes} bytes" for nbytes in over)]


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    how = {
        "fused AdamW": {"fused": True},
        "AdamW over lists": {"foreach": True},
        "AdamW, one by one": {"foreach": False},
    }
    return torch.optim.AdamW(parameters, lr=1e-3, **how[name])  # type: ignore[arg-type]
