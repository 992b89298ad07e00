"""Correctness traps 1 to 12 of docs/traps.md: values. Each runs under every plan, against an independent copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from jettison.verify.differences import compare_gradients, independent_copy
from jettison.verify.verify import observed_saved_bytes
from support.stacks import POLICIES, ROWS, WIDTH, Block, Stack, apply, compare, rows, stack
from support.training import assert_same, sgd, train

pytestmark = pytest.mark.usefixtures("one_thread")


every_plan = pytest.mark.parametrize("policy", [*POLICIES, "smallest"])
every_policy = pytest.mark.parametrize("policy", POLICIES)
BATCHES = [rows(1), rows(2), rows(3)]


class Dropout(Block):
    """Shows its dropout's result, and where its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.rand(ROWS, WIDTH))
        self.shown: list[Tensor] = []

    def inner(self, h: Tensor) -> Tensor:
        out = nn.functional.dropout(nn.functional.gelu(h).abs() + 1 + self.probe, 0.5)
        self.shown.append(out.detach() != 0)
        return torch.tanh(out * out * 0.01)


@every_plan
def test_trap_1_the_dropout_mask_of_backward_is_the_forwards(policy: str) -> None:
    """1. Dropout under partitioning: `(out != 0) == (grad != 0)`, element by element, for every block."""
    model = stack(Dropout)
    with apply(model, policy, rows()):
        for block in model.blocks:
            block.shown.clear()
        torch.manual_seed(3)
        model(*rows()).backward()
        for block in model.blocks:
            assert len(block.shown) == 1, "the Python of the block ran again"
            assert 0.3 < block.shown[0].float().mean() < 0.7
            assert torch.equal(block.probe.grad != 0, block.shown[0])
    compare(stack(Dropout), BATCHES, policy)


class OwnGenerator(Block):
    """Draws from the default stream and from a generator that travels with the module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def inner(self, h: Tensor) -> Tensor:
        own = torch.rand(h.shape, generator=self.generator)
        return nn.functional.gelu(h * own) * torch.rand_like(h) + nn.functional.dropout(h, 0.2)


@every_plan
def test_trap_2_every_random_stream_ends_where_the_unplanned_run_ends(policy: str) -> None:
    """2. RNG streams: the default one and a private `torch.Generator`, after every step."""
    model = stack(OwnGenerator)
    plain_model = stack(OwnGenerator)
    streams = [{str(n): b.generator for n, b in enumerate(m.blocks)} for m in (model, plain_model)]
    plain = train(plain_model, BATCHES, optimizer=sgd(plain_model.parameters()), generators=streams[1])
    with apply(model, policy, rows()):
        planned = train(model, BATCHES, optimizer=sgd(model.parameters()), generators=streams[0])
    assert_same(planned, plain)


@every_plan
def test_trap_2_tracing_and_planning_draw_nothing(policy: str) -> None:
    """2. RNG streams: making a plan leaves them alone."""
    model = stack(OwnGenerator)
    torch.manual_seed(11)
    before = [torch.get_rng_state(), *(b.generator.get_state() for b in model.blocks)]
    apply(model, policy, rows()).remove()
    after = [torch.get_rng_state(), *(b.generator.get_state() for b in model.blocks)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


class Convention(Stack):
    """Calls its blocks in one of several ways."""

    convention = "positional"

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        scale = torch.sigmoid(h)
        for block in self.blocks:
            h = self.call(block, h, scale)
        return self.leave(h).square().mean()

    def call(self, block: nn.Module, h: Tensor, scale: Tensor) -> Tensor:
        if self.convention == "list":
            return block([h, scale])[0]
        if self.convention == "dict":
            return block({"h": h, "scale": scale})["h"]
        if self.convention == "keyword":
            return block(scale=scale, h=h)
        if self.convention == "nested":
            return block({"pair": (h, [scale])})["pair"][0]
        return block(h, scale)


class AnyArguments(Block):
    def forward(self, h: Any, scale: Any = None) -> Any:
        if isinstance(h, list):
            return [self.mix(h[0], h[1])]
        if isinstance(h, dict):
            return {"pair": (self.mix(h["pair"][0], h["pair"][1][0]),)} if "pair" in h else {"h": self.mix(**h)}
        return self.mix(h, scale)

    def mix(self, h: Tensor, scale: Tensor) -> Tensor:
        return h + self.down(self.inner(self.up(h)) * scale)


@every_policy
@pytest.mark.parametrize("convention", ["positional", "list", "dict", "keyword", "nested"])
def test_trap_4_planned_bytes_are_observed_bytes_however_a_block_is_called(convention: str, policy: str) -> None:
    """4. Hook blind spots: list, dict, nested and keyword inputs and outputs."""

    def build() -> Convention:
        torch.manual_seed(0)
        model = Convention(AnyArguments)
        model.convention = convention
        return model

    compare(build(), BATCHES, policy)
    model = build()
    with apply(model, policy, rows()) as handle:
        observed = observed_saved_bytes(model, rows())
        planned = {report.name: report.kept_bytes for report in handle.report()}
    middle = "blocks.1"  # owns neither the first input nor the last output, which the root may own as well
    assert observed.get(middle, 0) == planned[middle]
    reference = build()
    reference.convention = "positional"
    with apply(reference, policy, rows()) as handle:
        assert {report.name: report.kept_bytes for report in handle.report()} == planned


class Scaled(Block):
    """Takes a tensor that the caller can still write to, and shows an intermediate one."""

    shown: Tensor | None = None

    def forward(self, h: Tensor, *, scale: Tensor) -> Tensor:
        kept = torch.exp(self.up(h) * scale)
        self.shown = kept
        return h + self.down(kept)


class ScaledStack(Stack):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, scale=scale)
        return self.leave(h).square().mean()


def scaled() -> tuple[ScaledStack, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return ScaledStack(Scaled), (rows()[0], (torch.rand(ROWS, WIDTH) + 0.5).requires_grad_())


@every_plan
@pytest.mark.parametrize("written", ["weight", "argument", "optimizer"])
def test_trap_5_a_write_between_the_passes_raises(policy: str, written: str) -> None:
    """5. A parameter or input written between the passes: `weight.add_()`, `kw.mul_()`, `optimizer.step()`."""
    model, batch = scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply(model, policy, batch):
        model(*batch).backward()
        loss = model(*batch)
        with torch.no_grad():
            if written == "weight":
                model.blocks[1].up.weight.add_(1)
            elif written == "argument":
                batch[1].mul_(2)
            else:
                optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_plan
def test_trap_5_a_bias_that_only_a_recompute_reads(policy: str) -> None:
    """5. Plain autograd does not save a bias, and so does not mind a write to it: the same gradients, or an error."""
    model = stack()
    twin = independent_copy(model)
    twin(*rows()).backward()
    with apply(model, policy, rows()):
        loss = model(*rows())
        with torch.no_grad():
            model.blocks[1].up.bias.add_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            assert policy != "none" and "modified by an inplace operation" in str(error)
        else:
            assert compare_gradients(model, twin).identical


@every_plan
def test_trap_6_a_write_to_a_kept_tensor_raises(policy: str) -> None:
    """6. Hooks switch off version checks: a saved intermediate that is written to raises where it is kept.

    Where it is computed again instead, the write cannot reach it, and the gradients are those of an untouched run.
    """
    model, batch = scaled()
    twin, twin_batch = independent_copy(model), tuple(t.detach().clone() for t in batch)
    twin(*twin_batch).backward()
    with apply(model, policy, batch):
        model.zero_grad()
        loss = model(*batch)
        shown = model.blocks[1].shown
        assert shown is not None
        with torch.no_grad():
            shown.mul_(2)
        model.blocks[1].shown = shown = None
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            assert policy != "full" or "kept" in str(error)
        else:
            assert policy not in ("none", "selective")
            assert compare_gradients(model, twin).identical


class Identities(Block):
    """Saves views that look alike: a square matrix and its transpose, offset slices, an expanded row, reused memory."""

    def inner(self, h: Tensor) -> Tensor:
        square = h.T @ h
        mixed = torch.tanh(square) @ torch.tanh(square).T
        mixed = mixed @ square.T - square @ mixed.T
        left, right = h[:, :8], h[:, 8:16]
        row = torch.sin(h[3]).expand(ROWS, WIDTH)
        for _ in range(3):
            h = h + torch.relu(h * 0.5)  # temporaries of one size, whose memory is used again
        crossed = torch.cat([left * right, right * right.flip(0), h[:, 16:] * h[:, 8:24]], dim=1)
        columns = h.unfold(1, 8, 8).square().sum(-1).repeat(1, 8)  # overlapping sizes, other strides
        return torch.tanh(crossed * row + (h @ mixed) * 1e-2 + columns * 0.1 + h.view(WIDTH, ROWS).T.sigmoid())


@every_plan
def test_trap_7_views_are_told_from_their_bases(policy: str) -> None:
    """7. Identity of saved tensors: transpose of a square matrix, offset slice, stride-0 expand, reused storage."""
    compare(stack(Identities), BATCHES, policy)


@every_plan
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_trap_9_shared_weights_under_autocast(policy: str, cache: bool) -> None:
    """9. Autocast's weight cache, and one weight in two regions: the second use finds the cast copy of the first."""
    model = stack(blocks=4)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[3] = model.blocks[1]

    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=cache)
    twin = independent_copy(model)
    plain = train(twin, BATCHES, optimizer=sgd(twin.parameters()), context=autocast)
    with autocast():
        handle = apply(model, policy, rows())
    with handle:
        planned = train(model, BATCHES, optimizer=sgd(model.parameters()), context=autocast)
    assert_same(planned, plain)
    assert not any(report.fallback for report in handle.report())


class Attention(Block):
    def inner(self, h: Tensor) -> Tensor:
        heads = h.view(2, 2, ROWS // 2, WIDTH // 2)
        return nn.functional.scaled_dot_product_attention(heads, heads.flip(2), heads.sin()).reshape(ROWS, WIDTH)


@every_plan
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
@pytest.mark.filterwarnings("ignore:backward runs inside autocast:UserWarning")
def test_trap_10_backward_outside_the_kernels_context(policy: str, backend: SDPBackend) -> None:
    """10. Contexts not restored in recompute: forward inside `sdpa_kernel`, backward outside, or inside another one."""
    model = stack(Attention)
    twin = independent_copy(model)
    other = SDPBackend.FLASH_ATTENTION if backend is SDPBackend.MATH else SDPBackend.MATH

    def step(model: nn.Module) -> None:
        with sdpa_kernel(backend):
            loss = model(*rows())
        with sdpa_kernel(other), torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()

    step(twin)
    with sdpa_kernel(backend):
        handle = apply(model, policy, rows())
    with handle:
        step(model)
        ran = {name for report in handle.report() for name in report.recomputed_ops}
    assert compare_gradients(model, twin).identical
    if backend is SDPBackend.MATH:
        assert not any("flash" in name for name in ran)


@every_plan
def test_trap_10_recompute_runs_at_the_forwards_precision(policy: str) -> None:
    """10. Precision flags: recompute gives what the forward gave; backward's own products follow the flag, as ever."""
    model = stack(blocks=2)
    twin = independent_copy(model)

    def step(model: nn.Module) -> None:
        loss = model(*rows())
        torch.set_float32_matmul_precision("medium")
        try:
            loss.backward()
        finally:
            torch.set_float32_matmul_precision("highest")

    step(twin)
    with apply(model, policy, rows()):
        step(model)
    assert compare_gradients(model, twin).identical


class Flagged(Block):
    """Takes another path of the same shapes: by an attribute, or by a global."""

    flag = True

    def inner(self, h: Tensor) -> Tensor:
        first, second = (h, h.flip(0)) if self.flag else (h.flip(0), h)
        out = (second.T @ first) if SWAPPED else (first.T @ second)
        dropped = nn.functional.dropout(h, 0.3, self.training)
        activated = torch.tanh(dropped) if FLAG else torch.sigmoid(dropped)
        return activated @ torch.sin(out)


FLAG = True
SWAPPED = False


@every_policy
@pytest.mark.parametrize("what", ["eval", "attribute", "global", "swap"])
@pytest.mark.parametrize("when", ["between the passes", "between steps"])
def test_traps_11_and_12_another_path_of_the_same_shapes(policy: str, what: str, when: str) -> None:
    """11, 12. Same-shape divergence: train/eval, an attribute or a global flips, or two matmuls swap their operands.

    Between the passes it must not matter; between steps it must be noticed. Never silently other gradients.
    """

    def flip(model: nn.Module) -> None:
        if what == "eval":
            model.train(not model.training)
        elif what == "attribute":
            for block in model.blocks:
                block.flag = not block.flag
        else:
            name = "FLAG" if what == "global" else "SWAPPED"
            globals()[name] = not globals()[name]

    def steps(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        found = []
        for batch in [*BATCHES, rows(4)]:
            model.zero_grad()
            loss = model(*batch)
            if when == "between the passes":
                flip(model)
            loss.backward()
            flip(model)
            found += [p.grad.clone() for p in model.parameters()]
        return found

    model = stack(Flagged)
    expected = steps(independent_copy(model))
    with apply(model, policy, rows()):
        got = steps(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
