"""Compiled blocks under a plan: gradients of the same compiled blocks without one, and a peak within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import jettison
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.core.units import Bytes
from jettison.runtime.compiled_regions import CompiledRegion, compilations
from support.compiled_blocks import (
    INPUT_BYTES,
    LENGTH,
    QUIET,
    ROWS,
    WIDTH,
    batch,
    compiled_copy,
    equal,
    gradients,
    model_of,
    peak,
    smallest,
)
from support.compiled_families import Loss, blocks_of, language_model
from support.toys import Headed, Mlp

pytestmark = [pytest.mark.usefixtures("one_thread"), *QUIET]


@pytest.mark.parametrize("budgets", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_every_budget_holds_and_gradients_are_those_of_the_compiled_blocks(budgets: int) -> None:
    model, given = model_of(), batch()
    plain = compiled_copy(model)
    expected, most = gradients(plain, given), peak(plain, given)
    least = smallest(model, given)
    assert least < 0.7 * most
    measured = []
    for part in range(budgets):
        budget = least + (most + 300 - least) * part // (budgets - 1)
        with jettison.auto_checkpoint(model, given, Bytes(budget), compile="blocks") as handle:
            before = compilations()
            assert equal(gradients(model, given), expected)
            assert compilations() == before  # planning has compiled all of it
            measured.append(peak(model, given))
            assert handle.plan is not None
            assert measured[-1] <= budget
            assert measured[-1] == pytest.approx(handle.plan.predicted.peak_bytes, rel=0.03)
    assert measured == sorted(measured)
    assert measured[-1] <= most


def test_masks_that_backward_makes_again_are_those_of_forward() -> None:
    """By finite differences: a mask that was drawn anew would give the slope of another function."""
    model, (x,) = model_of(2, rate=0.5).double(), batch()
    x = x.double()
    with jettison.apply(model, "full", batch=(x,), compile="blocks") as handle:
        block, *_ = handle.report()
        assert block.kept_bytes == 2 * INPUT_BYTES + 8  # the input, and one seed
        x.requires_grad_()
        torch.manual_seed(3)
        model(x).backward()
        assert x.grad is not None
        direction = torch.randn_like(x) * 1e-4
        ends = []
        for sign in (1, -1):
            torch.manual_seed(3)
            ends.append(model((x + sign * direction).detach()).item())
        assert (ends[0] - ends[1]) / 2 == pytest.approx((x.grad * direction).sum().item(), rel=1e-5)


def saved_by_a_block(model: Headed) -> int:
    """Bytes that autograd saves in a call of the first block, beside parameters."""
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[0](x)
    return sum(nbytes for at, nbytes in saved.items() if at not in own)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_attention_that_draws_nothing_is_recomputed_without_a_random_state() -> None:
    torch.manual_seed(0)
    model, given = Headed([Attention() for _ in range(4)], WIDTH, 8), batch()
    expected = gradients(compiled_copy(model), given)
    names = [f"layers.{i}" for i in range(4)]
    with jettison.apply(model, "full", batch=given, compile="blocks", regions=names) as handle:
        assert any("attention" in name for name in handle.report()[0].recomputed_ops)
        assert equal(gradients(model, given), expected)
        assert saved_by_a_block(model) == INPUT_BYTES


@pytest.mark.parametrize(("word", "kept"), [("full", INPUT_BYTES), ("selective-op", 5 * INPUT_BYTES)])
def test_a_policy_says_what_a_compiled_block_keeps(word: str, kept: int) -> None:
    model, given = model_of(rate=0.0), batch()
    expected = gradients(compiled_copy(model), given)
    with jettison.apply(model, word, batch=given, compile="blocks") as handle:
        assert [report.kept_bytes for report in handle.report()[:-1]] == [kept] * 4
        assert equal(gradients(model, given), expected)
        assert saved_by_a_block(model) == kept


def test_blocks_that_are_compiled_already_are_planned_and_given_back() -> None:
    model, given = model_of(), batch()
    for layer in model.layers:
        layer.compile(options={"epilogue_fusion": False})
    before = [dict(vars(module)) for module in model.modules()]
    expected = gradients(model, given)
    handle = jettison.auto_checkpoint(model, given, Bytes(smallest(model, given)))
    region = handle.regions[0]
    assert isinstance(region, CompiledRegion)
    assert region.compiled.settings.options == (("epilogue_fusion", False),)
    assert model.layers[0]._compiled_call_impl is None
    assert equal(gradients(model, given), expected)
    handle.remove()
    after = [dict(vars(module)) for module in model.modules()]
    assert [state.keys() for state in after] == [state.keys() for state in before]
    assert all(a[key] is b[key] for a, b in zip(after, before, strict=True) for key in b if key != "training")


@pytest.mark.slow
def test_evaluation_runs_compiled_and_verify_compares_with_compiled_blocks() -> None:
    model, given = model_of(), batch()
    plain = compiled_copy(model).eval()
    handle = jettison.auto_checkpoint(model, given, Bytes(smallest(model, given)), compile="blocks")
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        expected = plain(*given)
        torch.manual_seed(5)
        assert torch.equal(model(*given), expected)
    model.train()
    proof = jettison.verify(model, given, handle=handle, rounds=2)
    assert proof.gradients_identical and proof.losses_identical and proof.random_state_identical
    assert proof.measured_peak_bytes <= (proof.budget_bytes or 0) < proof.baseline_peak_bytes
    handle.remove()


@pytest.mark.slow
def test_a_larger_batch_is_compiled_and_planned_for_when_it_comes() -> None:
    model, larger = model_of(), batch(ROWS + 4)
    budget = smallest(model, larger)
    expected = gradients(compiled_copy(model), larger)
    with jettison.auto_checkpoint(model, batch(), Bytes(budget), compile="blocks") as handle:
        gradients(model, batch())
        assert equal(gradients(model, larger), expected)
        assert peak(model, larger) <= budget
        assert [shape.steps for shape in handle.shapes()] == [4, 1]


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


class Breaks(Mlp):
    """A block that torch makes two graphs of."""

    def inner(self, h: Tensor) -> Tensor:
        return super().inner(broken(h))


def test_blocks_that_are_not_one_graph_run_op_by_op_and_that_is_said() -> None:
    torch.manual_seed(0)
    model, given = Headed([Breaks(WIDTH, 4 * WIDTH) for _ in range(3)], WIDTH, 8), batch()
    expected, most = gradients(copy.deepcopy(model), given), peak(model, given)
    with pytest.warns(UserWarning, match=r"blocks like layers\.0 do not run compiled: .*graph_break"):
        handle = jettison.auto_checkpoint(model, given, Bytes(int(0.8 * most)), compile="blocks")
    with handle:
        assert not any(isinstance(region, CompiledRegion) for region in handle.regions)
        assert equal(gradients(model, given), expected)
        assert peak(model, given) <= int(0.8 * most)


def test_under_a_dispatch_mode_blocks_run_op_by_op_as_torch_has_it() -> None:
    model, given = model_of(rate=0.0), batch()
    expected = gradients(copy.deepcopy(model), given)
    with jettison.apply(model, "full", batch=given, compile="blocks"):
        gradients(model, given)
        with (
            FlopCounterMode(display=False) as counter,
            pytest.warns(UserWarning, match="op by op under a dispatch mode"),
        ):
            got = gradients(model, given)
    assert equal(got, expected)
    assert counter.get_total_flops() > 0


def compile_whole(model: Headed) -> None:
    model.compile()


def compile_elsewhere(model: Headed) -> None:
    model.head.compile()


def compile_by(**how: Any) -> Callable[[Headed], None]:
    def compile_blocks(model: Headed) -> None:
        for layer in model.layers:
            layer.compile(**how)

    return compile_blocks


def compile_differently(model: Headed) -> None:
    for number, layer in enumerate(model.layers):
        layer.compile(options={"epilogue_fusion": bool(number)})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (compile_whole, r'compiled as a whole; .* with compile="blocks"'),
        (compile_by(backend="aot_eager"), "another backend than Inductor"),
        (compile_by(mode="reduce-overhead"), "CUDA graphs"),
        (compile_differently, r"layers\.0 and layers\.1 are compiled with different options"),
    ],
)
def test_what_no_plan_can_take_part_in_is_refused(how: Callable[[Headed], None], says: str) -> None:
    model = model_of()
    how(model)
    with pytest.raises(UnsupportedModule, match=says):
        jettison.auto_checkpoint(model, batch(), "1MiB")


def test_what_is_compiled_besides_blocks_is_refused() -> None:
    model = model_of()
    compile_elsewhere(model)
    with pytest.raises(UnsupportedModule, match="head is compiled and is no block of the plan"):
        jettison.auto_checkpoint(model, batch(), "1MiB", regions=["layers.0", "layers.1"])


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match="got compile='all'; expected \"blocks\""):
        jettison.auto_checkpoint(model_of(), batch(), "1MiB", compile="all")
    for word in ("selective", "every:2"):
        with pytest.raises(UsageError, match=f"got '{word}' for compiled blocks"):
            jettison.apply(model_of(), word, batch=batch(), compile="blocks")


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(UnsupportedModule, match=r"Inductor needs a C\+\+ compiler .* none was found"):
        jettison.auto_checkpoint(model_of(), batch(), "1MiB", compile="blocks")


@pytest.mark.slow  # three families, each compiled in seven ways
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_language_models_keep_twelve_budgets(kind: str) -> None:
    model = Loss(language_model(kind)).train()
    given = (torch.randint(0, 500, (8, 64), generator=torch.Generator().manual_seed(1)),)
    eager, plain = copy.deepcopy(model), copy.deepcopy(model)
    for block in blocks_of(plain):
        block.compile(dynamic=False)
    expected, most = gradients(plain, given), peak(plain, given)
    least = smallest(model, given)
    measured = []
    for twelfth in range(12):
        budget = least + (most + 300 - least) * twelfth // 11
        with jettison.auto_checkpoint(model, given, Bytes(budget), compile="blocks") as handle:
            got = gradients(model, given)
            assert equal(got, expected)
            measured.append(peak(model, given))
            assert handle.plan is not None
            assert measured[-1] <= budget
            assert measured[-1] == pytest.approx(handle.plan.predicted.peak_bytes, rel=0.03)
    assert measured == sorted(measured)
    if kind != "gpt2":  # whose masks are Inductor's, other ones than op by op
        for ours, theirs in zip(gradients(plain, given), gradients(eager, given), strict=True):
            assert ours is not None and theirs is not None
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)
