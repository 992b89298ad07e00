"""A planned step that is captured as a CUDA graph: here the CPU is captured, op by op, and its ops are replayed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import jettison
from jettison.core.errors import UsageError, WrongValue
from jettison.runtime import cuda_graphs, recompute_code, witness
from jettison.runtime import device as devices
from silent.kit import rows, stack
from support.compiled_blocks import QUIET, batch, compiled_copy, model_of

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
}


class Graph(TorchDispatchMode):
    """Ops of a step, run once and then again on the same memory. As on a GPU, none may be waited for.

    ``ops`` can be changed between replays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, out in self.ops:
                again = func(*args, **kwargs)
                if func.is_view or torch.Tag.inplace_view in func.tags:
                    continue
                for was, now in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(was, Tensor) and was.data_ptr() != now.data_ptr():
                        was.copy_(now)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is an accelerator in what matters: differences are told late."""
    monkeypatch.setattr(witness, "is_told_at_once", lambda tensor: False)
    monkeypatch.setattr(witness, "_flags", {})


def compiling(test: Any) -> Any:
    """Mark a test that compiles."""
    for mark in (pytest.mark.usefixtures("one_thread"), *QUIET):
        test = mark(test)
    return test


class CompiledGraph(Graph):
    """The same, with each graph of Inductor's as one op."""

    __module__ = "jettison.test"  # blocks run op by op under other people's modes

    def __enter__(self) -> CompiledGraph:
        self.own = CompiledFxGraph.__call__
        CompiledFxGraph.__call__ = lambda code, given: self.call(code, given)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        CompiledFxGraph.__call__ = self.own  # type: ignore[method-assign]

    def call(self, code: CompiledFxGraph, given: Any) -> Any:
        def run(*args: Any) -> Any:
            return self.own(code, list(args))

        run.is_view, run.tags = False, ()  # type: ignore[attr-defined]
        args = tuple(given)
        given.clear()
        with _disable_current_modes():
            out = run(*args)
        self.ops.append((run, args, {}, out))
        return out


@contextlib.contextmanager
def capture(monkeypatch: pytest.MonkeyPatch, kind: type[Graph] = Graph) -> Iterator[Graph]:
    with monkeypatch.context() as patched, kind() as graph:
        patched.setattr(cuda_graphs, "is_capturing", lambda: True)
        for module in ("device", "planned_forward", "checkpoint_fallback", "recompute_code"):
            patched.setattr(f"jettison.runtime.{module}.is_capturing", lambda: True)
        patched.setattr("jettison.planner.batch_plans.is_capturing", lambda: True)
        yield graph


def block(s: Any, v: Tensor) -> Tensor:
    return v + s.b(torch.tanh(s.a(v)).exp())


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def planned_graph(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor, kind: type[Graph] = Graph) -> Graph:
    """A step with zeroed gradients, after three to warm up."""
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(x).backward()
    with capture(monkeypatch, kind) as graph:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        model(x).backward()
    return graph


@pytest.mark.parametrize("check", ["always", "full", "exact", "sampled"])
@pytest.mark.parametrize("policy", ["full", "selective-op", "none"])
def test_replays_give_the_gradients_of_plain_steps_and_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch, policy: str, check: str
) -> None:
    model, x = stack(block), rows(0)
    alone = copy.deepcopy(model)
    with jettison.apply(model, policy, batch=(x,), check=check) as handle:
        graph = planned_graph(monkeypatch, model, x)
        for seed in (1, 2):
            with torch.no_grad():
                x.copy_(rows(seed))
                for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                    p.add_(0.01 * seed)
                    q.add_(0.01 * seed)
            graph.replay()
            alone.zero_grad()
            alone(rows(seed)).backward()
            assert all(map(torch.equal, gradients(model), gradients(alone)))
        dropped = sum(report.slots_dropped for report in handle.report())
        assert (dropped > 0) == (policy != "none")


@compiling
@pytest.mark.parametrize("policy", ["full", "none"])
def test_replays_of_compiled_blocks_give_the_gradients_of_compiled_steps(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    model, (x,) = model_of(), batch()
    alone = compiled_copy(model)
    with jettison.apply(model, policy, batch=(x,), compile="blocks"):
        graph = planned_graph(monkeypatch, model, x, CompiledGraph)
        assert sum(not hasattr(func, "_schema") for func, *_ in graph.ops) == 2 * len(model.layers)
        for seed in (1, 2):
            with torch.no_grad():
                x.mul_(0.5)
            torch.manual_seed(seed)
            graph.replay()
            torch.manual_seed(seed)
            alone.zero_grad()
            alone(x).backward()
            assert all(map(torch.equal, gradients(model), gradients(alone)))


@compiling
def test_a_capture_that_compiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of(rate=0.0), batch()
    with jettison.apply(model, "full", batch=given, compile="blocks"):
        model(*given).backward()
        model.layers[1].rate = 0.5
        with capture(monkeypatch, CompiledGraph), pytest.raises(UsageError, match=r"layers\.1 is compiled, which"):
            model(*given)
        model(*given).backward()
        planned_graph(monkeypatch, model, *given, CompiledGraph)


def spoilt(graph: Graph, amount: float) -> None:
    """Recompute another value from now on: the last ``tanh`` of the graph is one of backward's."""
    at = max(i for i, (func, *_) in enumerate(graph.ops) if func is torch.ops.aten.tanh.default)
    _, args, kwargs, out = graph.ops[at]
    graph.ops[at] = (lambda v: torch.tanh(v) * (1 + amount), args, kwargs, out)
    graph.ops[at][0].is_view, graph.ops[at][0].tags = False, ()  # type: ignore[attr-defined]


def test_a_wrong_value_in_a_replay_is_told_by_the_report_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(block), rows(0)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        graph = planned_graph(monkeypatch, model, x)
        graph.replay()
        handle.report()
        whole = list(graph.ops)
        spoilt(graph, 0.5)
        graph.replay()
        graph.ops = whole
        graph.replay()  # a right one after it hides nothing
        with pytest.raises(WrongValue, match="a replayed CUDA graph"):
            handle.report()
        assert "full" in repr(handle)
        handle.report()


def test_a_wrong_value_in_a_replay_is_told_by_the_next_eager_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(block), rows(0)
    with jettison.apply(model, "full", batch=(x,)):
        graph = planned_graph(monkeypatch, model, x)
        spoilt(graph, 0.5)
        graph.replay()
        with pytest.raises(WrongValue, match="a replayed CUDA graph"):
            model(x).backward()
        model(x).backward()


@pytest.mark.parametrize(("check", "told"), [("always", False), ("exact", True)])
def test_rounding_in_a_replay_is_told_where_the_check_is_exact(
    monkeypatch: pytest.MonkeyPatch, check: str, told: bool
) -> None:
    model, x = stack(block), rows(0)
    with jettison.apply(model, "full", batch=(x,), check=check) as handle:
        graph = planned_graph(monkeypatch, model, x)
        spoilt(graph, 2e-7)
        graph.replay()
        with pytest.raises(WrongValue) if told else contextlib.nullcontext():
            handle.report()


# refusals -------------------------------------------------------------------------------------------------------------


def test_a_capture_before_any_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(block), rows(0)
    with jettison.apply(model, "full", batch=(x,)):
        with capture(monkeypatch), pytest.raises(UsageError, match="three training steps"):
            model(x)
        planned_graph(monkeypatch, model, x)


def test_a_capture_on_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(block), rows(0)
    with jettison.auto_checkpoint(model, (x,), "1GiB"):
        planned_graph(monkeypatch, model, x)
        with capture(monkeypatch), pytest.raises(UsageError, match="a CUDA graph is being captured"):
            model(torch.cat([x, x]))


def test_a_capture_of_a_region_that_runs_its_python_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(lambda s, v: block(s, v) if bool(v.sum() < 1e9) else v), rows(0)
    with pytest.warns(UserWarning, match="checkpointed whole"):
        handle = jettison.apply(model, "full", batch=(x,))
        model(x).backward()
    with handle, capture(monkeypatch), pytest.raises(UsageError, match=r"Python of .* is rerun"):
        model(x)


def test_a_capture_of_a_plan_that_offloads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = devices.Accelerator.__new__(devices.Accelerator)
    with capture(monkeypatch), pytest.raises(UsageError, match="offload=False"):
        moving.current_stream()


# random states --------------------------------------------------------------------------------------------------------


class Philox:
    """The generator of a GPU: a seed and an offset, of which a capture has one of its own."""

    def __init__(self) -> None:
        self.offset = 0
        self.set_to: list[int] = []

    def get(self) -> Tensor:
        return torch.tensor([7, self.offset]).view(torch.uint8)

    def set(self, state: Tensor) -> None:
        seed, self.offset = state.view(torch.int64).tolist()
        assert seed == 7
        self.set_to.append(self.offset)


def test_recomputed_draws_go_back_inside_of_their_graph_only(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Philox()
    monkeypatch.setattr(torch.cuda, "get_rng_state", generator.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", generator.set)
    first = recompute_code.get_state("cuda")
    generator.offset = 12  # the forward has drawn
    with capture(monkeypatch):
        with recompute_code.Drawing("cuda", first):
            generator.offset += 4
        assert generator.set_to == [0, 12]
        generator.offset = 0  # another capture begins: that of a backward alone
        with pytest.raises(UsageError, match=r"one torch\.cuda\.graph"):
            recompute_code.Drawing("cuda", first)
    with recompute_code.Drawing("cuda", first):  # eagerly any state will do
        pass


def test_looks_that_wait_hold_no_tensor_that_was_recomputed_from() -> None:
    model, x = stack(block), rows(0)
    given: list[StorageWeakRef] = []
    alive: list[int] = []
    with jettison.apply(model, "full", batch=(x,)):
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, args: given.append(StorageWeakRef(args[0].untyped_storage())))
        next(model.parameters()).register_hook(lambda _: alive.append(sum(not one.expired() for one in given)))
        model(x).backward()
    assert len(given) == 3 and alive == [1], "of the inputs of blocks, when the first block's backward has run"
