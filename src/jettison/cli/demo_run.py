"""The whole story on a small example: the same training twice, plainly and under a budget well below that peak.

A byte-level Llama (the Hugging Face implementation, random weights) learns the Python standard library's own source
files, which are real text and always there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor, nn

from jettison.capture.model_trace import Loop
from jettison.capture.tracer import trace_model
from jettison.cli.report import report
from jettison.core.errors import ProofFailed, UsageError
from jettison.core.files import write_whole, writing
from jettison.core.progress import Progress, silent
from jettison.core.units import format_bytes, format_percent
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.step import fake_optimizer
from jettison.planner.apply import apply_candidate
from jettison.planner.handle import Applied
from jettison.planner.planner import make_planner
from jettison.report.plan import plan_table
from jettison.report.proof import Proof, proof_table
from jettison.solve.plan import Plan
from jettison.train.data import standard_library_text
from jettison.verify.differences import independent_copy, same_bits
from jettison.verify.verify import verify

PREDICTION_WITHIN = 0.02


@dataclass(frozen=True, kw_only=True)
class DemoSize:
    """L layers, h hidden, a heads, k KV heads, f FFN width, s sequence, b micro-batch."""

    layers: int = 6
    hidden: int = 192
    heads: int = 6
    kv_heads: int = 3
    ffn: int = 512
    sequence: int = 256
    micro_batch: int = 4


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Both trainings, the plan, and the proof."""

    losses_plain: tuple[float, ...]
    losses_planned: tuple[float, ...]
    losses_identical: bool
    plan: Plan
    proof: Proof
    out: Path

    @property
    def report(self) -> Path:
        """The page that shows the proof."""
        return self.out / "report.html"

    def failures(self) -> tuple[str, ...]:
        """Return the claims that failed."""
        found = list(self.proof.failures())
        if not self.losses_identical:
            found.append("the losses of the two trainings differ")
        if not self.proof.saved_bytes_agree:
            found.append("a layer held other bytes than predicted")
        error = self.proof.prediction_error
        if error is None or abs(error) > PREDICTION_WITHIN:
            found.append(f"the predicted peak is more than {format_percent(PREDICTION_WITHIN)} off")
        return tuple(found)

    def require(self) -> None:
        """Nothing, if all was shown. Raise `ProofFailed` if something was not."""
        if self.failures():
            raise ProofFailed("the demo did not show what it should: " + "; ".join(self.failures()))

    def table(self) -> RenderableType:
        """The story as it is printed."""
        steps = len(self.losses_plain)
        same = "bitwise identical at every step" if self.losses_identical else "DIFFERENT"
        peaks = (self.proof.baseline_peak_bytes, self.proof.measured_peak_bytes, self.plan.budget_bytes)
        plain, measured, budget = map(format_bytes, peaks)
        first, last, planned = self.losses_plain[0], self.losses_plain[-1], self.losses_planned[-1]
        lines = [
            "A byte-level language model, trained on the Python standard library's source files with AdamW, twice.",
            f"loss from {first:.6f} to {last:.6f} in {steps} steps plainly, to {planned:.6f} under the budget: {same}",
            f"peak of a step: {plain} plainly, {measured} under a budget of {budget} "
            f"(predicted: {format_bytes(self.plan.predicted.peak_bytes)})",
            f"step time: {self.proof.step_time_ratio:.2f}× the plain one",
            "",
        ]
        files = Text(f"wrote {self.out / 'plan.json'}, {self.out / 'proof.json'} and the report {self.report}")
        return Group(*map(Text, lines), plan_table(self.plan), Text(""), proof_table(self.proof), files)


def run_demo(
    out: Path, *, steps: int, size: DemoSize | None = None, rounds: int = 6, progress: Progress = silent
) -> DemoResult:
    """Train twice, prove, and write ``plan.json``, ``proof.json`` and ``report.html`` into ``out`` (they are replaced).
    Raise `UsageError` if ``steps`` is not at least 1, or ``out`` cannot be a folder.
    """
    if steps < 1:
        raise UsageError(f"got {steps} steps; expected 1 or more")
    with writing(out, "--out: "):
        out.mkdir(parents=True, exist_ok=True)
    size = size or DemoSize()
    progress("reading the standard library")
    text = standard_library_text()
    batches = list(islice(batches_of(text, size), steps))
    model = build(size)
    plain = independent_copy(model)
    optimizer, plain_optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, plain))
    applied = _under_budget(model, batches[0], optimizer, progress)
    assert applied.plan is not None
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, batch in enumerate(batches, start=1):
        progress(f"training plainly and under the budget: step {number} of {steps}")
        losses[0].append(_step(plain, plain_optimizer, batch))
        losses[1].append(_step(model, optimizer, batch))
    del plain, plain_optimizer
    proof = verify(model, batches[0], handle=applied, optimizer=optimizer, rounds=rounds, progress=progress)
    applied.remove()
    write_whole(out / "plan.json", applied.plan.to_json())
    write_whole(out / "proof.json", proof.to_json())
    result = DemoResult(
        losses_plain=tuple(loss.item() for loss in losses[0]),
        losses_planned=tuple(loss.item() for loss in losses[1]),
        losses_identical=all(map(same_bits, *losses)),
        plan=applied.plan,
        proof=proof,
        out=out,
    )
    write_whole(result.report, report([out / "proof.json"]).html())
    return result


def build(size: DemoSize) -> nn.Module:
    """The model, the same for the same size."""
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.sequence,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def batches_of(text: bytes, size: DemoSize) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text, the same in every run."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(data) - size.sequence, (size.micro_batch,), generator=generator)
        ids = torch.stack([data[s : s + size.sequence] for s in starts.tolist()]).long()
        yield {"input_ids": ids, "labels": ids.clone()}


def _under_budget(
    model: nn.Module, batch: dict[str, Tensor], optimizer: Any, progress: Callable[[str], None]
) -> Applied:
    """A plan for a quarter more than the smallest budget there is, or less where that is near the plain peak."""
    progress("tracing")
    traced = trace_model(model, batch, loop=Loop(elsewhere_bytes=elsewhere_bytes(model, batch, optimizer)))
    planner = make_planner(traced, optimizer=fake_optimizer(optimizer, model, traced), progress=progress)
    smallest, plain = planner.minimum_budget_bytes, planner.plain_budget_bytes
    budget_bytes = min(smallest + smallest // 4, (smallest + plain) // 2)
    return apply_candidate(model, planner, planner.plan(budget_bytes), budget_bytes)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()
