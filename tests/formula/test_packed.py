"""Documents packed into one sequence: what is kept, beside the trace, beside torch's own kernels, and in real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.varlen import varlen_attn

from jettison.core.errors import UsageError
from jettison.cost.flops import Counting, model_flops
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.presets import preset
from jettison.formula.region import layer_region
from jettison.ledger.compare import compare
from jettison.predict.forecast import forecast
from jettison.predict.stage_buffers import packed_batch
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.search import SearchRequest
from jettison.search.space import Space
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of, traced_call, written

LENGTH = 8


def packed_batch_of(case: FormulaCase) -> dict[str, torch.Tensor]:
    """Documents of unequal length: the closed form asks for the mean alone."""
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    first, rest = torch.arange(LENGTH), torch.arange(case.sequence - LENGTH)
    positions = torch.cat([first, rest]).expand(case.batch, -1).contiguous()
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "phi3 partial"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_is_kept_is_what_a_trace_keeps(family: str, attention: str) -> None:
    """transformers finds documents by their positions: masks, positions and rotary tables of each sequence."""
    case = FormulaCase(family=family, attention=attention, batch=2, sequence=16)
    found = traced_call(model_of(case), packed_batch_of(case))
    assert not compare(written(replace(run_of(case), packed=LENGTH)), found)
    assert compare(written(run_of(case)), found)  # it is another thing without


def run_with(**asked: object) -> Run:
    return resolve(preset("llama3-8b"), RunRequest(**asked)).run  # type: ignore[arg-type]


def test_torchs_kernel_of_many_lengths_keeps_this() -> None:
    """`varlen_attn` on fake tensors: query, key, value, output, a number a row, where documents begin, random state."""
    run = run_with(seq=64, packed=16, micro_batch=1)
    heads, groups, dim = 32, 8, 128
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        q, k, v = (
            torch.empty(64, count, dim, dtype=torch.bfloat16, requires_grad=True) for count in (heads, groups, groups)
        )
        bounds = torch.empty(64 // 16 + 1, dtype=torch.int32)
        varlen_attn(q, k, v, bounds, bounds, 16, 16, window_size=(-1, 0), enable_gqa=True)
    region = layer_region(run.signature, run.model.layers[0])
    (step,) = (step for step in region.tape.steps if "flash" in step.name)
    said = {s.value.storage: region.tape.sizes[s.value.storage] for s in step.saved}
    assert sorted(said.values()) == sorted(kept.values())


@pytest.mark.parametrize("seq", [512, 1100])
def test_a_mask_of_blocks_takes_this(seq: int) -> None:
    document = torch.arange(seq) // 128
    mask = create_block_mask(
        lambda _b, _h, i, j: (document[i] == document[j]) & (i >= j), B=2, H=None, Q_LEN=seq, KV_LEN=seq, device="cpu"
    )
    names = [
        f"{full}{axis}_{word}" for full in ("", "full_") for axis in ("kv", "q") for word in ("num_blocks", "indices")
    ]
    tensors = [getattr(mask, name) for name in names]
    assert packed_batch(run_with(seq=seq, packed=128, micro_batch=2, attention="flex"), ()) == 2 * 8 * seq + sum(
        t.untyped_storage().nbytes() for t in tensors
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_step_is_the_measured_one(attention: str, recompute: str) -> None:
    """A mask lives as long as the forward; where layers are computed again, until the last of them has been."""
    case = FormulaCase(family="llama", attention=attention, batch=2, sequence=64)
    model = model_of(case)
    if recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    batch = packed_batch_of(case)
    with AllocationCounter([*static_tensors(model, batch), *batch.values()]) as counter:
        model(**batch).loss.backward()
    run = replace(run_of(case), packed=LENGTH)
    run = replace(run, recompute=Recompute.parse(recompute, layers=run.model.depth))
    said = forecast(run)
    without = said.worst.peak.nbytes - said.worst.load.state  # a step without an optimizer
    assert without == pytest.approx(counter.peak_bytes, rel=0.01)


def test_attention_computes_within_documents_alone() -> None:
    """Of 8,192 tokens in documents of 1,024 an eighth of the scores; the mask of the other way skips nothing."""
    whole, packed = run_with(seq=8192), run_with(seq=8192, packed=1024)
    short = run_with(seq=1024, micro_batch=8)
    for counting in (Counting.LEDGER, Counting.CAUSAL, Counting.PALM):
        assert model_flops(packed, counting) == model_flops(short, counting) < model_flops(whole, counting)
    masked = run_with(seq=8192, packed=1024, kernels="huggingface", attention="sdpa")
    assert model_flops(masked) == model_flops(packed)
    device = hardware("h100-80gb")
    times = [estimate(run, device).step_seconds for run in (packed, whole, masked)]
    assert times == sorted(times)


def test_a_search_shares_no_documents() -> None:
    def space(**asked: str) -> Space:
        found = SearchRequest(seq=8192, packed=1024, **asked)  # type: ignore[arg-type]
        return found.space(preset("llama3-8b"), hardware("a100-80gb"), gpus=8, global_batch=8)

    assert space().axes.cp == (1,)
    with pytest.raises(UsageError, match="--cp 2 with --packed"):
        space(cp="2")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"packed": 0}, "packed"),
        ({"packed": 9000, "seq": 8192}, "tokens of a document, 1 to --seq 8192"),
        ({"packed": 1024, "cp": 2}, "--cp 2; documents across ranks"),
        ({"packed": 1024, "kernels": "huggingface", "attention": "flash-attn", "micro_batch": 2}, "packs one row only"),
    ],
)
def test_what_nobody_packs_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_with(**asked)


def test_positions_begin_anew_with_each_document() -> None:
    """GPT-2 has 1,024 positions, and takes longer sequences of shorter documents."""
    asked = RunRequest(seq=4096, packed=1024)
    assert resolve(preset("gpt2"), asked).run.seq == 4096
    with pytest.raises(UsageError, match="1024 positions"):
        resolve(preset("gpt2"), replace(asked, packed=2048))
