"""What only an accelerator brings, as far as it can be shown on a CPU; `python -m zoo --device cuda` shows the rest."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import jettison
from jettison.capture.dispatch import tracing
from jettison.capture.fake_copies import fake_mode
from jettison.capture.model_trace import Loop
from jettison.capture.op_traits import op_cost, unwritten_results, writes
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible, TraceError
from jettison.core.units import Bytes
from jettison.dryrun import step as rehearse
from jettison.dryrun.counter import AllocationCounter, elsewhere_bytes, measured_peak, static_tensors
from jettison.runtime import witness
from jettison.runtime.checked_run import SequenceCheck
from jettison.runtime.witness import look, spots_of
from jettison.solve.checkpoint_policy import KeepAll
from support.toys import Mlp, Net

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread")


# bytes ----------------------------------------------------------------------------------------------------------------


def test_an_accelerators_blocks_are_counted_and_nothing_else() -> None:
    with FakeTensorMode(), AllocationCounter(device="cuda") as counter:
        held = [torch.empty(10, device="cuda"), torch.empty(1000), torch.empty(129, device="cuda")]
        assert counter.live_bytes == 512 + 1024
        held.pop()
        assert counter.live_bytes == 512


def test_nothing_is_elsewhere_on_the_cpu() -> None:
    model = nn.Linear(4, 4)
    assert elsewhere_bytes(model, torch.ones(2, 4), torch.optim.AdamW(model.parameters())) == 0


def test_a_rehearsed_optimizer_takes_the_steps_that_the_real_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default an optimizer works on lists on a GPU and tensor by tensor on fakes; the peaks are not the same."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch = (torch.randn(1, 64),)
    traced = trace_model(model, batch, loss_fn=Tensor.sum)
    asked: list[Any] = []

    def decide(params: list[Tensor], differentiable: bool, use_fused: bool) -> tuple[bool, bool]:
        asked.extend(params)
        return False, True

    monkeypatch.setattr(rehearse, "_default_to_fused_or_foreach", decide)
    one, all_of_them = (
        rehearse.dry_run_batch(traced, {}, KeepAll(), optimizer=optimizer)
        for optimizer in (
            rehearse.fake_optimizer(torch.optim.AdamW(model.parameters(), foreach=False), model, traced),
            rehearse.fake_optimizer(torch.optim.AdamW(model.parameters()), model, traced),
        )
    )
    assert all(a is b for a, b in zip(asked, model.parameters(), strict=True)), "fake parameters cannot tell"
    weights = sum(p.nbytes for p in model.parameters())
    assert all_of_them.optimizer_peak_bytes - one.optimizer_peak_bytes >= weights // 2


def test_planning_leaves_the_seed_of_a_device_that_is_not_in_use_yet() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    torch.manual_seed(42)
    tracker: Any = torch.cuda._lazy_seed_tracker
    queued = tracker.get_calls()
    assert queued, "torch seeds a device once it is in use"
    jettison.auto_checkpoint(model, (torch.randn(1, 64),), "1MiB", loss_fn=Tensor.sum).remove()
    assert tracker.get_calls() == queued


class CountingOnTheDevice(torch.optim.SGD):
    """As fused and capturable optimizers, with the meta device as the device."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("step", torch.zeros((), device="meta"))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_rehearsed_optimizer_holds_no_memory_of_the_device(stepped: bool) -> None:
    model = nn.Linear(4, 4)
    traced = trace_model(model, (torch.randn(1, 4),), loss_fn=Tensor.sum)
    optimizer = CountingOnTheDevice(model.parameters())
    if stepped:
        optimizer.step()
    mirrored = rehearse.fake_optimizer(optimizer, model, traced)
    rehearse.dry_run_batch(traced, {}, KeepAll(), optimizer=mirrored)
    assert [type(state["step"]) for state in mirrored.state.values()] == [FakeTensor] * 2


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_over_lists_is_rehearsed_to_the_byte(optimizer: Any) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch = (torch.randn(1, 64),)
    tuned = optimizer(model.parameters(), lr=1e-3, foreach=True)
    traced = trace_model(model, batch, loss_fn=Tensor.sum, loop=Loop(keep_output=False))
    mirrored = rehearse.fake_optimizer(tuned, model, traced)
    found = rehearse.dry_run_batch(traced, {}, KeepAll(), optimizer=mirrored)

    def step() -> None:
        model(*batch).sum().backward()
        tuned.step()

    for _ in range(2):
        tuned.zero_grad(set_to_none=True)
        peak = measured_peak(step, static_tensors=static_tensors(model, batch, tuned))
    assert abs(found.peak_bytes - peak.peak_bytes) <= 256


def test_looks_that_wait_for_the_end_of_backward_are_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "is_told_at_once", lambda tensor: False)
    torch.manual_seed(0)
    model, batch = Net(Mlp(32, 64, 0.1) for _ in range(6)), (torch.randn(256, 32, requires_grad=True),)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, batch, Bytes(1), check="full")
    budget_bytes = refused.value.minimum_budget_bytes
    with jettison.auto_checkpoint(model, batch, Bytes(budget_bytes), check="full") as handle:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            batch[0].grad = None
            peak = measured_peak(lambda: model(*batch).backward(), static_tensors=static_tensors(model, batch))
        assert sum(report.slots_dropped for report in handle.report()) > 0
    assert peak.peak_bytes <= budget_bytes


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_look_at_a_fake_tensor_is_fake(dtype: torch.dtype) -> None:
    """Real ones hold what stood in that memory before, and would be compared."""
    mode = fake_mode()
    with tracing(mode, values_known=True):
        seen = torch.nn.Parameter(mode.from_tensor(torch.zeros(40, 40))).detach().to(dtype)
        spots = spots_of((40, 40), (40, 1))
        assert isinstance(look(seen, spots, 3), FakeTensor)
        assert isinstance(witness.digest(seen, spots), FakeTensor)


# ops ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"])
def test_batch_norms_move_their_statistics_in_training(name: str) -> None:
    x, weight, mean, variance = torch.ones(2, 3), torch.ones(3), torch.zeros(3), torch.ones(3)
    op = getattr(aten, name).default
    assert writes(op, (x, weight, weight, mean, variance, True, 0.1, 1e-5), {}) == [mean, variance]
    assert writes(op, (x, weight, weight, mean, variance, False, 0.1, 1e-5), {}) == []
    assert writes(op, (x, weight, weight, None, None, True, 0.1, 1e-5), {}) == []


def test_every_op_of_torch_with_running_statistics_is_known() -> None:
    """Their schemas do not tell, so a new one has to be looked at."""
    silent = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(argument.name.startswith("running_") for argument in schema.arguments)
        and not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    }
    composite = {"aten::batch_norm", "aten::instance_norm", "aten::_batch_norm_impl_index"}
    reading = {name for name in silent if name.endswith(("_backward", "_functional", "_no_training", "_no_update"))}
    from jettison.capture.op_traits import MOVE_STATISTICS

    assert silent - composite - reading == set(MOVE_STATISTICS)


def flash(dropout: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Eight heads of queries, two of keys; and results as the kernel gives them."""
    q, k = torch.zeros(1, 8, 16, 4), torch.zeros(1, 2, 16, 4)
    out = (q, torch.zeros(1, 8, 16), None, None, 16, 16, torch.zeros(2), torch.zeros(()), torch.zeros(0))
    return (q, k, k, dropout), out


def test_places_that_no_kernel_writes_are_known() -> None:
    op = aten._scaled_dot_product_flash_attention.default
    for dropout, expected in ((0.0, (6, 7)), (0.1, (7,))):
        args, out = flash(dropout)
        assert [id(t) for t in unwritten_results(op, args, {}, out)] == [id(out[i]) for i in expected]
    assert unwritten_results(aten.add.Tensor, (out[0], 1), {}, out[0]) == []


def test_flops_of_attention_with_fewer_keys_than_queries() -> None:
    args, out = flash(0.0)
    flops, _ = op_cost(aten._scaled_dot_product_flash_attention.default, args, {}, out)
    assert flops == 2 * 8 * 16 * 16 * (4 + 4)


def test_ctc_with_lengths_elsewhere_is_refused_in_words() -> None:
    """torch takes lengths on the CPU, and under any dispatch mode it fails."""
    lengths = torch.tensor([4])
    with fake_mode(allow_non_fake_inputs=True), pytest.raises(TraceError, match=r"move the lengths to the device"):
        scores = torch.empty(4, 1, 5, device="cuda")
        aten._ctc_loss.Tensor(scores, torch.empty(1, 2, dtype=torch.int64, device="cuda"), lengths, lengths)


# an op that does not say what it writes -----------------------------------------------------------------------------


@pytest.fixture
def counting() -> Any:
    library = torch.library.Library("jettison_tests_accelerators", "DEF")
    library.define("count(Tensor x, Tensor seen) -> Tensor")

    def count(x: Tensor, seen: Tensor) -> Tensor:
        seen.data.add_(1)
        return x * 2

    library.impl("count", count, "CompositeExplicitAutograd")
    name = "jettison_tests_accelerators::count"
    torch.library.register_fake(name, lambda x, seen: torch.empty_like(x), lib=library)
    torch.library.register_autograd(name, lambda ctx, grad: (grad * 2, None), lib=library)
    yield torch.ops.jettison_tests_accelerators.count
    library._destroy()


class Counts(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(16, 16), op
        self.register_buffer("seen", torch.zeros(100))  # more than a call takes a copy of

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.op(torch.tanh(x), self.seen)).sin().exp()


def counts_after(counting: Any) -> tuple[list[float], list[str]]:
    """What three steps under a plan leave in the buffers, and what was said."""
    model = nn.Sequential(Counts(counting), Counts(counting), Counts(counting))
    plain, x = copy.deepcopy(model), torch.randn(8, 16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with jettison.apply(model, "full", batch=(x,), loss_fn=Tensor.sum, regions=["0", "1", "2"]):
            for _ in range(3):
                for one in (model, plain):
                    one.zero_grad()
                    one(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    return [float(block.seen[-1]) for block in model], [str(w.message) for w in said]


def test_an_op_that_writes_without_saying_so_runs_once(counting: Any) -> None:
    seen, said = counts_after(counting)
    assert seen == [3.0, 3.0, 3.0]
    assert any("its schema does not say so" in text for text in said)


def test_without_the_look_at_buffers_it_runs_twice(counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceCheck, "_readings", lambda *_: [])
    assert counts_after(counting)[0] == [6.0, 6.0, 6.0]


# the table's command ------------------------------------------------------------------------------------------------


def zoo(*words: str) -> Any:
    tests = Path(__file__).parents[1]
    path = f"{tests}:{tests.parent / 'src'}"
    return subprocess.run(
        [sys.executable, "-m", "zoo", *words], capture_output=True, text=True, env={"PYTHONPATH": path, "PATH": ""}
    )


def test_an_unknown_family_is_refused() -> None:
    done = zoo("no-such-family")
    assert done.returncode == 2 and "got 'no-such-family'" in done.stderr and "llama" in done.stderr
