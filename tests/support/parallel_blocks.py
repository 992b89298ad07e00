"""What ranks do for tests/parallel/test_parallel_blocks.py: a tensor-parallel layer's collectives, inputs, masks."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DistStoreError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import jettison
from jettison.core.errors import JettisonError, UsageError
from jettison.models.reference import Gpt, GptLayer, Llama, LlamaLayer, causal_mask, rotary_tables
from jettison.parallel import BlockInput, ColumnParallel, Replicated, RowParallel, apply_tensor_parallel, seed_ranks
from jettison.parallel.tp_collectives import Axis, finish_gather, gather, own_part, split, start_gather
from support.collective_counts import CollectiveBytes
from support.parallel_checks import GPT, LLAMA, B, S, batch, gap, gathered, shaken, tp_mesh

# what a block's backward does -----------------------------------------------------------------------------------------


class _Names(TorchDispatchMode):
    """Names of collectives and products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in ("mm", "addmm", "bmm", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def backward_order(_: Any) -> dict[str, Any]:
    """A Llama layer with sequence parallelism: transfers, their order, and what is left out where nobody asks."""
    mesh = tp_mesh()
    found: dict[str, Any] = {}

    def layer() -> tuple[nn.Module, Tensor, Any]:
        torch.manual_seed(0)
        made = apply_tensor_parallel(LlamaLayer(LLAMA).double(), mesh)
        x_bsh = torch.randn(B, S // mesh.size(), LLAMA.hidden, dtype=torch.float64, requires_grad=True)
        return made, x_bsh, rotary_tables(S, LLAMA, x_bsh)

    module, x_bsh, tables = layer()
    output = module(x_bsh, tables).sum()
    with _Names() as order, CollectiveBytes() as sent:
        output.backward()
    found["order"] = order.names
    found["sent"] = {t.kind: n for t, n in sent.calls.items()}

    module, x_bsh, tables = layer()
    output = module(x_bsh, tables).sum()
    parameters = list(module.parameters())
    with CollectiveBytes() as first:
        (dx,) = torch.autograd.grad(output, [x_bsh], retain_graph=True)
    with CollectiveBytes() as second:
        dw = torch.autograd.grad(output, parameters, retain_graph=True)
    both = torch.autograd.grad(output, [x_bsh, *parameters])
    found["split"] = [{t.kind: n for t, n in c.calls.items()} for c in (first, second)]
    found["split_equal"] = torch.equal(dx, both[0]) and all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(dw, both[1:], strict=True)
    )

    module, x_bsh, tables = layer()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name)
    with CollectiveBytes() as sent:
        module(x_bsh, tables).sum().backward()
    found["frozen"] = {t.kind: n for t, n in sent.calls.items() if t.backward}

    found["autocast"] = _autocast(mesh)
    try:
        split(torch.randn(B, S - 1), Axis.of(mesh), 1)
    except UsageError as error:
        found["odd"] = str(error)
    return found


def _autocast(mesh: DeviceMesh) -> dict[str, float]:
    """Largest difference of each gradient under bf16 autocast to a whole layer's, as a share of its largest element."""
    torch.manual_seed(0)
    whole = shaken(LlamaLayer(LLAMA), torch.float32)
    module = apply_tensor_parallel(copy.deepcopy(whole), mesh)
    x_bsh = torch.randn(B, S, LLAMA.hidden, generator=torch.Generator().manual_seed(2))
    tables = rotary_tables(S, LLAMA, x_bsh)
    for layer, x in ((whole, x_bsh), (module, own_part(x_bsh, Axis.of(mesh), 1))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x.requires_grad_(), tables)
        output.float().square().sum().backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    return {
        n: gap(gathered(p.grad, p), expected[n]) / expected[n].abs().max().item() for n, p in module.named_parameters()
    }


# what a block is given ------------------------------------------------------------------------------------------------

Gradients = dict[str, Tensor]


def inputs(_: Any) -> dict[str, Any]:
    """A Llama layer with sequence parallelism under all that callers do: gaps to a whole layer, in fp64."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    whole = shaken(LlamaLayer(LLAMA), torch.float64)
    module = apply_tensor_parallel(copy.deepcopy(whole), mesh)
    x_bsh = torch.randn(B, S, LLAMA.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tables = rotary_tables(S, LLAMA, x_bsh)
    own = own_part(x_bsh, Axis.of(mesh), 1)

    def worst(expected: Gradients) -> float:
        held = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert held.keys() == expected.keys(), held.keys() ^ expected.keys()
        return max(gap(gathered(held[n], g), g) for n, g in expected.items())

    def expected_of(*backwards: Callable[[], Tensor]) -> Gradients:
        whole.zero_grad()
        for output in backwards:
            output().backward()
        return {n: p.grad.clone() for n, p in whole.named_parameters() if p.grad is not None}

    def loss(layer: nn.Module, x: Tensor, power: int = 2) -> Tensor:
        return (layer(x, tables) ** power).sum()

    once = expected_of(lambda: loss(whole, x_bsh))
    found: dict[str, Any] = {}
    scattered = own.transpose(0, 1).contiguous().transpose(0, 1)
    assert not scattered.is_contiguous()
    for name, x in (("contiguous", own), ("scattered", scattered), ("asks for its gradient", own.clone())):
        module.zero_grad()
        loss(module, x.requires_grad_("asks" in name)).backward()
        found[name] = worst(once)

    module.zero_grad()
    first, second = loss(module, own), loss(module, 2 * own, 3)
    second.backward()
    first.backward()
    found["two in flight"] = worst(expected_of(lambda: loss(whole, x_bsh), lambda: loss(whole, 2 * x_bsh, 3)))

    module.zero_grad()
    output = loss(module, own)
    torch.autograd.grad(output, [module.attention.key.weight], retain_graph=True)  # one of three that share a gather
    output.backward(retain_graph=True)
    output.backward()
    found["several backwards"] = worst({n: 2 * g for n, g in once.items()})

    frozen = ("attention.query.weight", "mlp.down.weight", "mlp_norm.weight")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    module.zero_grad()
    loss(module, own).backward()
    found["frozen"] = worst({n: g for n, g in once.items() if n not in frozen})
    module.requires_grad_(True)

    for name, context in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with context():
            expected, got = whole.eval()(x_bsh, tables), module.eval()(own, tables)
            found[name] = gap(gather(got, Axis.of(mesh), 1), expected)
            assert not got.requires_grad
    return found


def by_hand(_: Any) -> dict[str, bool]:
    """A layer's gradients with styles in a dict, given to torch and to us, beside those of the plan that we find."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    layer = shaken(LlamaLayer(LLAMA), torch.float32)
    x_bsh = own_part(torch.randn(B, S, LLAMA.hidden), Axis.of(mesh), 1)
    tables = rotary_tables(S, LLAMA, x_bsh)
    columns = {f"attention.{name}": ColumnParallel(unit=LLAMA.head_dim) for name in ("query", "key", "value")}
    plan = {
        "attention_norm": Replicated(sharded=True),
        "attention": BlockInput(dim=1),
        **columns,
        "attention.out": RowParallel(dim=1),
        "mlp_norm": Replicated(sharded=True),
        "mlp": BlockInput(dim=1),
        "mlp.gate": ColumnParallel(),
        "mlp.up": ColumnParallel(),
        "mlp.down": RowParallel(dim=1),
    }

    def gradients(made: nn.Module) -> list[Tensor]:
        made(x_bsh, tables).square().sum().backward()
        return [p.grad.to_local() for p in made.parameters()]

    expected = gradients(apply_tensor_parallel(copy.deepcopy(layer), mesh))
    return {
        "torch": _equal(gradients(parallelize_module(copy.deepcopy(layer), mesh, plan)), expected),
        "ours": _equal(gradients(apply_tensor_parallel(copy.deepcopy(layer), mesh, plan=plan)), expected),
    }


def asynchronous(_: Any) -> bool:
    """Does a gather get under way on rank 0 while the others have not come to it?"""
    axis, shard = Axis.of(tp_mesh()), torch.ones(4, 4)
    gather(shard, axis, 0)  # connections are made
    store = distributed.distributed_c10d._get_default_store()
    if axis.rank == 0:
        pending = start_gather(shard, axis)
        store.set("a gather is under way", "")
        finish_gather(pending, axis, 0)
        return True
    try:
        store.wait(["a gather is under way"], timedelta(seconds=300))
    except DistStoreError:
        return False
    finally:
        finish_gather(start_gather(shard, axis), axis, 0)
    return True


def refusals(_: Any) -> dict[str, Any]:
    """What is said where something does not divide, and whether the model is as it was."""
    mesh, (ids, labels) = tp_mesh(), batch()
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except JettisonError as error:
            found[name] = str(error)

    few = Llama(replace(LLAMA, kv_heads=1))
    attempt("heads", lambda: apply_tensor_parallel(few, mesh))
    found["as it was"] = not any(isinstance(p, DTensor) for p in few.parameters()) and bool(few(ids, labels))
    sharded = apply_tensor_parallel(Llama(LLAMA), mesh)
    attempt("sequence", lambda: sharded(ids[:, 1:], labels[:, 1:]))
    attempt("twice", lambda: apply_tensor_parallel(sharded, mesh))
    planned = Llama(LLAMA)
    jettison.apply(planned, "full", batch=(ids, labels))
    attempt("planned", lambda: apply_tensor_parallel(planned, mesh))
    return found


# random streams -------------------------------------------------------------------------------------------------------


class _Masks(TorchDispatchMode):
    """A digest of each dropout mask that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            self.digests.append(hashlib.sha256(out[1].numpy().tobytes()).hexdigest()[:12])
        return out


def random_streams(_: Any) -> dict[str, Any]:
    """Masks by site, in order: embedding, then core, attention output, feed-forward output of each layer."""
    mesh, (ids, labels) = tp_mesh(), batch()
    found: dict[str, Any] = {}
    for sp in (False, True):
        model = apply_tensor_parallel(shaken(Gpt(GPT), torch.float32), mesh, sequence_parallel=sp)
        runs = []
        for seed in (7, 7, 8):
            seed_ranks(seed, mesh, sequence_parallel=sp)
            with _Masks() as masks:
                model(ids, labels).backward()
            state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]
            runs.append({"masks": masks.digests, "state": state})
        found["tp_sp" if sp else "tp"] = runs
        found[f"recompute {'tp_sp' if sp else 'tp'}"] = _recompute(mesh, sp=sp)
    found["failed forward"] = _failed_forward(mesh)
    return found


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GptLayer(GPT) for _ in range(2))
        self.checkpointed = False

    def forward(self, x_sbh: Tensor, mask_ss: Tensor) -> Tensor:
        for layer in self.layers:
            x_sbh = (
                checkpoint(layer, x_sbh, mask_ss, use_reentrant=False) if self.checkpointed else layer(x_sbh, mask_ss)
            )
        return x_sbh.square().sum()


def _recompute(mesh: DeviceMesh, *, sp: bool) -> dict[str, bool]:
    """Gradients bit by bit, with dropout: plain beside torch's checkpoint and Jettison's policies; twice each."""
    model = shaken(_Stack(), torch.float32)
    apply_tensor_parallel(model.layers, mesh, sequence_parallel=sp)
    generator = torch.Generator().manual_seed(3)
    x_sbh = torch.randn(S // (mesh.size() if sp else 1), B, GPT.hidden, generator=generator)
    mask_ss = causal_mask(S, x_sbh)

    def gradients(seed: int = 5) -> list[Tensor]:
        seed_ranks(seed, mesh, sequence_parallel=sp)
        model.zero_grad()
        for _ in range(2):
            model(x_sbh.clone().requires_grad_(), mask_ss).backward()
        return [p.grad.to_local().clone() for p in model.parameters()]

    plain = gradients()
    found = {"again": _equal(plain, gradients())}
    model.checkpointed = True
    found["checkpoint"] = _equal(plain, gradients())
    model.checkpointed = False
    for policy in ("selective", "full"):
        with jettison.apply(model, policy, batch=(x_sbh.clone().requires_grad_(), mask_ss)) as applied:
            found[policy] = _equal(plain, gradients())
            found[f"{policy} is planned"] = not any(region.fallback for region in applied.report())
    found["another seed"] = _equal(plain, gradients(6))
    return found


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _failed_forward(mesh: DeviceMesh) -> list[bool]:
    """A forward that fails while the loan runs gives the stream back, and so does one that is not training."""
    layer = apply_tensor_parallel(GptLayer(GPT), mesh, sequence_parallel=False)
    x_sbh = torch.randn(S, B, GPT.hidden)
    outcomes = []
    for training, mask_ss in ((True, torch.zeros(3, 3)), (False, causal_mask(S, x_sbh))):
        layer.train(training)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        if training:
            before = _after_one_number(before)
        with contextlib.suppress(RuntimeError):
            layer(x_sbh, mask_ss)
        outcomes.append(bool(torch.equal(torch.get_rng_state(), before)))
    return outcomes


def _after_one_number(state: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    torch.randint(2**62, (), generator=generator)
    return generator.get_state()


def blocks(_: Any) -> dict[str, Any]:
    """All of the above."""
    checks = (backward_order, inputs, by_hand, asynchronous, refusals, random_streams)
    return {check.__name__: check(_) for check in checks}
