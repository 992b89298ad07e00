"""Traps 13 to 23 of docs/traps.md: routing, control flow, side effects, several backwards, side lists, messages."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import jettison
from jettison.core.errors import Infeasible, JettisonError, UnsupportedModule
from jettison.core.units import Bytes
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.runtime.saved_tensor_hooks import Frame
from jettison.verify.differences import compare_gradients, independent_copy
from support.stacks import POLICIES, WIDTH, Block, Stack, apply, compare, rows, stack
from support.training import assert_same, sgd, train

every_plan = pytest.mark.parametrize("policy", [*POLICIES, "smallest"])
BATCHES = [rows(1), rows(2), rows(3)]


pytestmark = pytest.mark.usefixtures("one_thread")


class Router(Block):
    """Top-2 of four experts; the gate starts at zero, so that all logits are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        nn.init.zeros_(self.gate.weight)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def inner(self, h: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(h).softmax(-1), 2)
        mixed = torch.einsum("nw,nkwv->nkv", h, self.experts[chosen])
        return nn.functional.gelu((mixed * weights[..., None]).sum(1))


@every_plan
def test_trap_13_tied_routing_decisions_are_kept(policy: str) -> None:
    """13. Discrete decisions: with tied logits a second top-k may choose otherwise, so there is none."""
    handle = compare(stack(Router), BATCHES, policy)
    for report in handle.report():
        assert not any("topk" in name for name in report.recomputed_ops)


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_in_inference_mode_has_the_plain_gradients(policy: str) -> None:
    """Tensors that are made there have no version counter; plain autograd lets such a backward run."""
    model = stack()
    plain = independent_copy(model)
    apply(model, policy, rows())
    for _ in range(2):
        for one in (model, plain):
            one.zero_grad()
            loss = one(*rows())
            with torch.inference_mode():
                loss.backward()
        assert compare_gradients(model, plain).identical


class Stop(Exception):
    """Control flow."""


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, out: list[Tensor]) -> Tensor:
        out.append(nn.functional.gelu(self.linear(h)))
        raise Stop


class EarlyExit(Block):
    """A submodule leaves by raising; the block catches it and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.raising = Raising()

    def inner(self, h: Tensor) -> Tensor:
        found: list[Tensor] = []
        with contextlib.suppress(Stop):
            self.raising(h, found)
        return super().inner(found[0])


def count_hooks(model: nn.Module, counts: Counter[str]) -> None:
    """Count hook calls on every leaf module."""
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_, name=name: counts.update([f"{name} before"]))
            module.register_forward_hook(lambda *_, name=name: counts.update([f"{name} after"]))


def live_frames() -> int:
    return sum(issubclass(type(found), Frame) for found in gc.get_objects())


@every_plan
def test_trap_16_exceptions_as_control_flow_within_a_block(policy: str) -> None:
    """16. Hooks run as often as without a plan, and memory is flat over 20 steps."""
    model = stack(EarlyExit)
    twin = independent_copy(model)
    counts: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    count_hooks(twin, expected)
    train(twin, [rows()] * 20)
    before = live_frames()  # a test that failed earlier may still hold some
    with apply(model, policy, rows()):
        count_hooks(model, counts)
        batch = rows()
        counter = AllocationCounter(static_tensors(model, batch))
        levels = []
        for _ in range(20):
            with counter:
                model(*batch).backward()
                model.zero_grad()
            gc.collect()
            levels.append((counter.live_bytes, live_frames()))
    assert counts == expected
    assert len(set(levels[1:])) == 1, levels
    assert levels[-1][1] == before, "frames outlive their backward"


@every_plan
def test_trap_16_an_exception_that_leaves_the_model(policy: str) -> None:
    """16. A step that fails half-way leaves nothing behind: the next ones train as if it had not been."""

    class Failing(Block):
        fail = False

        def inner(self, h: Tensor) -> Tensor:
            if self.fail:
                raise Stop
            return super().inner(h)

    model = stack(Failing)
    twin = independent_copy(model)
    plain = train(twin, BATCHES, optimizer=sgd(twin.parameters()))
    with apply(model, policy, rows()):
        for module in (model.blocks[1], model.blocks[2]):
            module.fail = True
            with pytest.raises(Stop):
                model(*rows())
            module.fail = False
        planned = train(model, BATCHES, optimizer=sgd(model.parameters()))
    assert_same(planned, plain)


class Counting(Block):
    """Writes to its buffers in the forward, as BatchNorm and load counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("load", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def inner(self, h: Tensor) -> Tensor:
        normed = self.norm(h)
        self.load.add_((normed.detach() > 0).sum(0))
        self.calls += 1
        return nn.functional.gelu(normed)


@every_plan
def test_trap_17_buffers_are_written_once(policy: str) -> None:
    """17. Side effects twice: BatchNorm's statistics and counters, a load counter."""
    model = stack(Counting)
    compare(model, BATCHES, policy)
    assert [int(block.calls) for block in model.blocks] == [3, 3, 3]


class CountOps(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.update([func._schema.name])
        return func(*args, **(kwargs or {}))


@every_plan
@pytest.mark.filterwarnings("ignore:backward (keeps the graph|stops before):UserWarning")
def test_trap_19_a_graph_that_is_retained(policy: str) -> None:
    """19. `retain_graph=True`: each backward computes again what was dropped, exactly once."""
    model = stack()
    twin = independent_copy(model)
    twice = twin(*rows())
    twice.backward(retain_graph=True)
    twice.backward()
    with apply(model, policy, rows()) as handle:
        model(*rows()).backward()
        model.zero_grad()
        loss = model(*rows())
        expected = sum(op.startswith("aten.gelu") for report in handle.report() for op in report.recomputed_ops)
        for last in (False, True):
            with CountOps() as ops:
                loss.backward(retain_graph=not last)
            assert ops.counts["aten::gelu"] == expected
    assert compare_gradients(model, twin).identical


class Twice(Stack):
    """Runs every block twice, the second time on what the first made."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = torch.tanh(block(block(h)))
        return self.leave(h).square().mean()


@every_plan
def test_trap_19_a_module_used_twice_in_one_forward(policy: str) -> None:
    """19. Double use: each call has its own values."""
    torch.manual_seed(0)
    compare(Twice(), BATCHES, policy)


@every_plan
@pytest.mark.parametrize("first", ["inputs", "weights"])
@pytest.mark.filterwarnings("ignore:backward (keeps the graph|stops before):UserWarning")
def test_trap_19_backward_split_into_inputs_and_weights(policy: str, first: str) -> None:
    """19. Zero-bubble pipelines run two or more partial backwards over one graph."""

    def split(model: nn.Module) -> list[Tensor]:
        x = rows()[0].requires_grad_()
        loss = model(x)
        parts: list[list[Tensor]] = [[x], list(model.parameters())]
        if first == "weights":
            parts.reverse()
        found: list[Tensor] = []
        for n, part in enumerate(parts):
            found += torch.autograd.grad(loss, part, retain_graph=n == 0)
        return found

    model = stack()
    expected = split(independent_copy(model))
    with apply(model, policy, (rows()[0].requires_grad_(),)):
        got = split(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class SideList(Stack):
    """Blocks leave hidden states in a list that the loss reads (router logits, auxiliary heads)."""

    def forward(self, x: Tensor) -> Tensor:
        h, side = self.enter(x), []
        for block in self.blocks:
            h = block(h, side)
        return self.leave(h).square().mean() + sum(s.square().mean() for s in side)


class Leaves(Block):
    def forward(self, x: Tensor, side: list[Tensor]) -> Tensor:
        h = self.inner(self.up(x))
        side.append(h * 2)
        return x + self.down(h)


class HookedList(Stack):
    """The same through forward hooks on a submodule, as Hugging Face collects router logits."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.side: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(self.collect)

    def collect(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.side.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.side.clear()
        loss = super().forward(x)
        extra = sum(s.square().mean() for s in self.side)
        self.side.clear()
        return loss + extra


class FilledKeys(Stack):
    """The model fills a cache that all blocks read (prefix tuning)."""

    def forward(self, x: Tensor) -> Tensor:
        h, cache = self.enter(x), Cache()
        cache.keys = self.blocks[0].up(h).sigmoid()
        for block in self.blocks:
            h = block(h, cache=cache)
        return self.leave(h).square().mean() + cache.keys.mean()


class SharedKeys(Stack):
    """The first block makes keys that the later ones read out of a cache (KV sharing between layers)."""

    def forward(self, x: Tensor) -> Tensor:
        h, cache = self.enter(x), Cache()
        for block in self.blocks:
            h = block(h, cache=cache)
        return self.leave(h).square().mean()


class Cache:
    """Not a container that a tree walk opens, like Hugging Face's."""

    keys: Tensor | None = None


class ReadsCache(Block):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        h = self.up(x)
        if cache.keys is None:
            cache.keys = torch.tanh(h)
        return x + self.down(self.inner(h * cache.keys))


SIDE_EFFECTS = {
    "list": (SideList, Leaves),
    "hook": (HookedList, Block),
    "cache": (SharedKeys, ReadsCache),
    "filled": (FilledKeys, ReadsCache),
}


@every_plan
@pytest.mark.parametrize("kind", SIDE_EFFECTS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*cannot be planned tensor by tensor")
@pytest.mark.filterwarnings("ignore:.*is planned as one region instead of block by block")
@pytest.mark.filterwarnings("ignore:policy .* changes nothing here")
def test_trap_20_tensors_that_leave_or_enter_a_block_by_the_side(policy: str, kind: str) -> None:
    """20. Captured tensors: every parameter's gradient is right, or the model is refused with an error that says so."""
    whole, block = SIDE_EFFECTS[kind]

    def build() -> Stack:
        torch.manual_seed(0)
        return whole(block)

    model, twin = build(), build()
    plain = train(twin, BATCHES, optimizer=sgd(twin.parameters()))
    try:
        handle = apply(model, policy, rows())
    except JettisonError:
        assert kind not in ("cache", "filled")
        return
    with handle:
        assert kind not in ("cache", "filled") or len(handle.report()) == 4  # three blocks and the rest
        assert_same(train(model, BATCHES, optimizer=sgd(model.parameters())), plain)


class Nested(Block):
    """Checkpoints itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(super().forward, x, use_reentrant=self.reentrant)


@every_plan
@pytest.mark.filterwarnings("ignore:.*cannot be planned tensor by tensor")
def test_trap_21_a_block_that_checkpoints_inside(policy: str) -> None:
    """21. Nested plans: composed, or refused; here the gradients are the same."""
    model = stack(Nested)
    twin = independent_copy(model)
    plain = train(twin, BATCHES, optimizer=sgd(twin.parameters()))
    try:
        handle = apply(model, policy, rows())
    except JettisonError as refusal:
        assert "checkpoint" in str(refusal)
        return
    with handle:
        assert_same(train(model, BATCHES, optimizer=sgd(model.parameters())), plain)


def test_trap_21_gradient_checkpointing_that_is_on_is_refused() -> None:
    """21. A model that checkpoints by a switch of its own is told to switch it off, and a plan is not put on a plan."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.gradient_checkpointing = True  # what gradient_checkpointing_enable() sets
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UnsupportedModule, match="gradient_checkpointing_disable"):
        jettison.auto_checkpoint(model, {"input_ids": ids, "labels": ids}, "1GiB")
    model.transformer.gradient_checkpointing = False
    with jettison.auto_checkpoint(model, {"input_ids": ids, "labels": ids}, "1GiB"):
        model(input_ids=ids, labels=ids).loss.backward()
        model.transformer.gradient_checkpointing = True
        with pytest.raises(UnsupportedModule, match=r"transformer .* after planning.* call gradient_checkpointing_dis"):
            model(input_ids=ids, labels=ids)
        model.transformer.gradient_checkpointing = False
        model(input_ids=ids, labels=ids).loss.backward()
    planned = stack()
    with apply(planned, "full", rows()), pytest.raises(UnsupportedModule, match="already runs under a plan"):
        apply(planned, "full", rows())


def test_trap_23_nothing_to_do_and_impossible_do_not_look_alike() -> None:
    """23. A budget that needs nothing gives a plan that keeps everything; one that nothing fits is an error."""
    model = stack()
    with jettison.auto_checkpoint(model, rows(), "1GiB") as handle:
        plan = handle.plan
        assert plan is not None
        assert {layer.policy for layer in plan.layers} == {"none"}
        assert (plan.predicted.overhead_fraction, plan.solver.gap) == (0, 0)
        model(*rows()).backward()
        assert sum(report.slots_dropped for report in handle.report()) == 0
    model.zero_grad(set_to_none=True)  # with gradients there it would be another step
    with pytest.raises(Infeasible, match=r"no plan fits .* smallest feasible budget is") as infeasible:
        jettison.auto_checkpoint(model, rows(), "1KiB")
    assert infeasible.value.exit_code == 3
    minimum = infeasible.value.minimum_budget_bytes
    with jettison.auto_checkpoint(model, rows(), f"{minimum}B") as handle:
        assert handle.plan is not None
        assert handle.plan.predicted.peak_bytes <= minimum
    with pytest.raises(Infeasible):
        jettison.auto_checkpoint(model, rows(), Bytes(minimum - 1))
