"""`selective` is the paper's (arXiv 2205.05198, §5) at every length: the attention core runs again, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.parallel_layer import ROWS, A, B, H
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import jettison
from jettison.capture.randomness import ADVANCE
from jettison.capture.recorder import RegionTrace
from jettison.capture.tracer import trace_region
from jettison.ledger.program import Buffer, Op, Program, Slot, Source
from jettison.models.reference import Gpt, GptConfig, GptLayer, causal_mask
from jettison.parallel import apply_tensor_parallel
from jettison.predict.forecast import forecast
from jettison.runtime.recipe import compile_recipe
from jettison.solve.checkpoint_policy import Selective, policy_named
from jettison.spec.recompute import Recompute
from jettison.verify.differences import compare_gradients, independent_copy

D = H // A
LENGTHS = (D, 8 * D, 16 * D)
"""The second is the last at which a tensor of s × b × h is an eighth of the scores."""
LAYOUTS = ((1, False), (2, False), (2, True), (4, True))
CORE = [
    ("aten.baddbmm.default", "attention"),
    ("aten._softmax.default", "attention"),
    ("aten.native_dropout.default", "attention.dropout"),
]
LOAN = [(ADVANCE, "attention")]
"""Without sequence parallelism the core draws from a stream of the rank's own."""


@pytest.fixture
def layer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes the trace of one layer on rank 0 of t, which do not exist."""

    def made(t: int, sp: bool, s: int) -> RegionTrace:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=t)
        model = nn.ModuleList([GptLayer(GptConfig(layers=1, hidden=H, heads=A, vocab=8, positions=8, dropout=0.1))])
        model = model.to(torch.bfloat16)
        if t > 1:
            apply_tensor_parallel(model, init_device_mesh("cpu", (t,)), sequence_parallel=sp)
        x_sbh = torch.randn(s // (t if sp else 1), B, H, dtype=torch.bfloat16, requires_grad=True)
        return trace_region(model[0], (x_sbh, causal_mask(s, x_sbh)), {}, shared=frozenset([1]))

    yield made
    distributed.destroy_process_group()


def ledger_bytes(t: int, sp: bool, s: int, word: str) -> int:
    run = replace(ROWS["tp_sp" if sp else "tp"].run(t), seq=s, recompute=Recompute.parse(word, layers=1))
    return dict(forecast(run).layer_bytes())["layers.0"]


def repeated(trace: RegionTrace, word: str) -> tuple[int, list[tuple[str, str]]]:
    """Bytes kept, and what runs again: op and module."""
    kept = policy_named(word).kept(trace.program)
    ops = [trace.program.ops[i] for i in compile_recipe(trace, kept).recomputed_ops]
    return trace.program.kept_bytes(kept), [(op.name, op.path) for op in ops]


@pytest.mark.parametrize("s", LENGTHS)
@pytest.mark.parametrize(("t", "sp"), LAYOUTS)
def test_the_core_runs_again_and_nothing_else(layer: Any, t: int, sp: bool, s: int) -> None:
    nbytes, ops = repeated(layer(t, sp, s), "selective")
    assert ops == [*(LOAN if t > 1 and not sp else []), *CORE]
    outside = s * B * H * (34 if sp or t == 1 else 10 * t + 24)
    statistics = 4 * 2 * s * B * (1 if sp or t == 1 else t)
    assert nbytes == (outside + statistics) // t + torch.get_rng_state().nbytes
    assert nbytes == ledger_bytes(t, sp, s, "selective")


@pytest.mark.parametrize("s", LENGTHS)
@pytest.mark.parametrize(("t", "sp"), LAYOUTS)
def test_products_and_sums_over_ranks_stay_under_selective_op(layer: Any, t: int, sp: bool, s: int) -> None:
    nbytes, ops = repeated(layer(t, sp, s), "selective-op")
    assert not [name for name, _ in ops if "c10d" in name or ".mm." in name or ".addmm." in name]
    # the layer's input, q, k and v, both sums, and what goes into GeLU; scores are no module's output
    whole = 2 * s * B * H
    assert nbytes == whole * (10 if sp or t == 1 else 3 * t + 7) // t + torch.get_rng_state().nbytes


@pytest.mark.parametrize("word", ["selective", "selective-op", "full"])
@pytest.mark.parametrize("s", [4, 16, 96])
def test_gradients_at_every_length(s: int, word: str) -> None:
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=2, hidden=32, heads=4, vocab=64, positions=96, dropout=0.1))
    plain = independent_copy(model)
    ids = torch.randint(64, (2, s), generator=torch.Generator().manual_seed(1))
    with jettison.apply(model, word, batch=(ids, ids)) as handle:
        for seed in range(2):
            for each in (plain, model):
                torch.manual_seed(seed)
                each.zero_grad()
                each(ids, ids).backward()
            assert compare_gradients(model, plain).identical
        assert all(region.slots_dropped and not region.fallback for region in handle.report() if region.name)


def test_what_of_the_core_hangs_on_a_collective_stays() -> None:
    """Keys that are gathered for each layer's scores and saved by nobody: the scores' product would gather again."""
    wide = 4096

    def buffer(index: int, producer: int | None, *, keepable: bool = True) -> Buffer:
        source = Source.INPUT if producer is None else Source.OP
        return Buffer(index=index, nbytes=wide, source=source, producer=producer, keepable=keepable)

    names = ("c10d.all_gather_into_tensor", "aten.bmm.default", "aten._softmax.default", "aten.bmm.default")
    ops = tuple(
        Op(index=i, name=name, inputs=(i,), outputs=(i + 1,), flops=0, bytes_moved=0) for i, name in enumerate(names)
    )
    buffers = (buffer(0, None), *(buffer(i + 1, i, keepable=i != 0) for i in range(len(names))))
    slots = tuple(Slot(index=n, buffer=b, shape=(), dtype="float32") for n, b in enumerate((3, 4)))
    program = Program(buffers=buffers, ops=ops, slots=slots, outputs=(4,))
    assert program.recompute_set(Selective().kept(program)) == ()
    without = replace(program, ops=(replace(ops[0], name="aten.mul.Tensor"), *ops[1:]))
    assert program.recompute_set(Selective().kept(without)) == (0, 1, 2)
