"""Muon over ranks that have whole tensors, and what Newton-Schulz allocates: by hand, on a CPU, and Megatron's runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks import megatron_golden

from jettison.core.errors import UsageError
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.predict.optimizer_step import WholeTensor, in_shards, muon_step_bytes, ping_pong, tensors_of
from jettison.report.explain import explain
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.search.largest_fit import fit
from jettison.search.search import SearchRequest
from jettison.spec.hardware import hardware
from jettison.spec.precision import Optimizer

H, FFN, QKV, VOCAB = 4096, 14336, 6144, 128256
"""Of Llama 3 8B."""


def tensor(rows: int, columns: int, *, matrix: bool = True) -> WholeTensor:
    numel = rows * columns
    return WholeTensor(
        rows=rows,
        columns=columns,
        matrix=matrix,
        expert=False,
        whole=(rows, columns),
        state=4 * numel,
        master=4 * numel,
    )


def run(**request: Any) -> Any:
    asked = {"kernels": "megatron", "precision": "bf16-main32", "seq": 512, "zero": 1, **request}
    return run_of("llama3-8b", RunRequest(**asked))


def test_there_and_back() -> None:
    """The ten parameters of ``_shard_params_ping_pong``'s own example, on four ranks."""
    shares = ping_pong([tensor(1, n + 1, matrix=False) for n in range(10)], 4)
    assert [[t.numel - 1 for t in share] for share in shares] == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]


def test_shards_are_padded_to_the_fullest() -> None:
    """Three matrices of one size on two ranks: one rank has two of them, the other as much padding as one."""
    shares, padding = in_shards([tensor(64, 100)] * 3, 2)
    assert [len(share) for share in shares] == [2, 1]
    assert padding == 64 * 100


def test_work_and_not_size_decides() -> None:
    """A square takes more work than a longer matrix of as many numbers."""
    shares, _ = in_shards([tensor(512, 512), tensor(128, 2048), tensor(128, 2048), tensor(128, 2048)], 2)
    assert sorted(len(share) for share in shares) == [2, 2], "1.3 of an even share is not three matrices"
    wide, _ = in_shards([tensor(1024, 1024), *[tensor(64, 1024)] * 8], 2)
    assert sorted(len(share) for share in wide) == [1, 8]


def test_the_biggest_rank_of_a_model() -> None:
    """Four ranks: 32 layers divide evenly, so that each rank has eight layers' matrices and a share of the rest."""
    matrices = 32 * (H * QKV + H * H + 3 * H * FFN)
    rest = 2 * VOCAB * H + 65 * H
    found = forecast(run(dp=4, optimizer="dist-muon")).stages[0]
    assert found.static.state == 8 * matrices // 4 + 12 * rest // 4
    assert found.static.master == 4 * (matrices + rest) // 4
    assert found.static.gradients == 4 * (matrices + rest), "whole on every rank"
    pong = forecast(run(dp=4, optimizer="dist-muon-pingpong")).stages[0]
    assert pong.static.state > found.static.state, "the largest tensors, embedding and head, are whole on two ranks"
    alone = forecast(run(optimizer="dist-muon")).stages[0]
    assert alone.static.state == 8 * matrices + 12 * rest


def test_an_uneven_model_says_what_its_biggest_rank_has() -> None:
    """Seven ranks: none has less than an even share, and what is there in all is what one rank would have."""
    asked = run(dp=7, optimizer="dist-muon-pingpong")
    tensors = list(tensors_of(asked, forecast(asked).stages[0].groups))
    shares = [sum(t.state + t.master for t in share) for share in ping_pong(tensors, 7)]
    one = forecast(run(optimizer="dist-muon-pingpong")).stages[0].static.state
    assert sum(shares) == one
    assert forecast(asked).stages[0].static.state == max(shares) > one / 7


def test_experts_are_shared_out_among_those_that_have_them() -> None:
    asked = run_of(
        "mixtral-8x7b",
        RunRequest(kernels="megatron", precision="bf16-main32", seq=512, zero=1, dp=4, ep=4, optimizer="dist-muon"),
    )
    tensors = list(tensors_of(asked, forecast(asked).stages[0].groups))
    own = [t for t in tensors if t.expert]
    assert len(own) == 32 * 2 * 2, "two experts of each layer, two matrices each"
    assert {t.numel for t in own} == {4096 * 14336, 2 * 4096 * 14336}
    assert forecast(asked).stages[0].static.state > sum(t.state + t.master for t in own), "no rank beside has them"


def step_bytes(**request: Any) -> int:
    asked = run(**request)
    return muon_step_bytes(asked, forecast(asked).stages[0].groups)


def test_buffers_of_newton_schulz() -> None:
    """Of gate and up together, the largest: 28672 x 4096."""
    largest = 2 * FFN * H
    assert step_bytes(dp=4, optimizer="dist-muon") == 12 * largest
    assert step_bytes(dp=4, tp=2, optimizer="dist-muon") == 14 * largest
    assert step_bytes(optimizer="muon") == 8 * largest + 4 * H * H
    assert step_bytes(optimizer="muon", precision="bf16-pure") == 6 * largest + 4 * H * H
    assert step_bytes(optimizer="adamw") == 0
    everything = 32 * (H * QKV + H * H + 3 * H * FFN) + 2 * VOCAB * H + 65 * H
    assert step_bytes(dp=4, optimizer="dist-muon-pingpong") == 2 * everything, "updated tensors are gathered apart"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(128, 512), (256, 256), (512, 128)])
def test_a_step_of_torchs_muon(dtype: str, sizes: tuple[int, int]) -> None:
    """Without what kernels take for themselves, which differs from processor to processor."""
    import torch

    from jettison.dryrun.counter import AllocationCounter
    from jettison.predict.optimizer_step import torch_bytes

    weight = torch.nn.Parameter(torch.randn(sizes, dtype=getattr(torch, dtype)))
    optimizer = torch.optim.Muon([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    there = [weight, weight.grad, *(t for found in optimizer.state.values() for t in found.values())]
    with AllocationCounter(there) as counter:
        before = counter.live_bytes
        optimizer.step()
    assert counter.peak_bytes - before == torch_bytes(tensor(*sizes), weight.element_size())


def test_megatrons_own_run() -> None:
    """Its functional test on H100, whose last rank has the embedding (tests/facts/megatron_golden.csv)."""
    (row,) = (r for r in megatron_golden.rows() if "dist_muon" in r.name and r.gpu.startswith("H100"))
    assert row.run.optimizer is Optimizer.DIST_MUON_PINGPONG
    assert max(row.errors) < 0.006
    with_adamw = replace(row, run=replace(row.run, optimizer=Optimizer.ADAMW))
    assert with_adamw.errors[2] > 0.2, "what a distributed AdamW has between steps is another figure"


def test_a_distributed_muon_needs_zero_1() -> None:
    with pytest.raises(UsageError, match="expected --zero 1"):
        run(dp=4, zero=2, optimizer="dist-muon")
    space = SearchRequest(optimizer="dist-muon", kernels="megatron").space(
        preset("llama3-8b"), hardware("h100-80gb"), gpus=4, global_batch=4
    )
    assert {setup.layout.zero for setup in space.setups} == {1}
    with pytest.raises(UsageError, match="is modelled for"):
        SearchRequest(optimizer="dist-muon", kernels="megatron", zero="0").space(
            preset("llama3-8b"), hardware("h100-80gb"), gpus=4, global_batch=4
        )


@pytest.mark.parametrize("more", [{"optimizer": "dist-muon"}, {"fp8_recipe": "mxfp8"}])
def test_what_would_fit_leaves_out_what_is_not_described(more: dict[str, str]) -> None:
    asked = run(dp=4, **more)
    assert fit(asked, budget_bytes=80 * 2**30).zero.value in (1, 2)
    changes = [variant.change for variant in explain(forecast(asked)).sharding]
    assert "--zero 3" not in changes
