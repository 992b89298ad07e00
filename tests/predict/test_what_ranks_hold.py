"""What steps on random ranks showed that was not counted: by hand."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from jettison.families.config import parse_config
from jettison.formula.model_states import model_states
from jettison.formula.region import embedding_region, head_region, layer_region
from jettison.formula.tape import Tape, Weight
from jettison.predict.forecast import forecast
from jettison.predict.stage_buffers import buffers_of
from jettison.predict.stage_units import logits_returned
from jettison.predict.stages import outline
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.frameworks import FOLDER
from jettison.spec.kernels import CpCommType, Loss
from jettison.spec.layout import Layout
from jettison.spec.precision import PRECISIONS, Gradients, Optimizer
from jettison.spec.run import Run
from support.kernel_sets import HUGGINGFACE

H, F, HEADS, KV, V, S, B = 64, 96, 4, 2, 512, 32, 2
LLAMA = parse_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": H,
        "intermediate_size": F,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "vocab_size": V,
        "max_position_embeddings": S,
        "tie_word_embeddings": False,
    },
    name="tiny",
)


def run(**words: object) -> Run:
    fields = {"precision": PRECISIONS["fp32"], "kernels": HUGGINGFACE.on_cpu()} | words
    return Run(model=LLAMA, seq=S, micro_batch=B, **fields)  # type: ignore[arg-type]


def weight(name: str, numel: int) -> Weight:
    return Weight(name, (numel,), (), 4 * numel, numel)


def test_a_loop_over_parameters_has_a_name_for_the_one_before() -> None:
    """Two tensors of each, and one of its neighbour."""
    found = model_states(
        [weight("first", 100), weight("second", 90), weight("third", 10)],
        precision=PRECISIONS["fp32"],
        optimizer=Optimizer.ADAMW,
        layout=Layout(),
        in_layer=True,
    )
    assert found.largest == 4 * 100
    assert found.stepping == 4 * (100 + 2 * 90)


def test_buckets_stand_beside_gradients() -> None:
    """DistributedDataParallel as it comes: 4 bytes a parameter all along, and gradients one by one."""
    one, buckets = (
        forecast(run(layout=Layout(dp=2), gradients=kind)) for kind in (Gradients.ONE_BY_ONE, Gradients.BUCKETS)
    )
    assert buckets.peak_bytes - one.peak_bytes == 4 * one.parameters
    assert [m.nbytes - n.nbytes for m, n in zip(buckets.worst.timeline(), one.worst.timeline(), strict=True)] == [
        4 * one.parameters
    ] * len(one.worst.timeline())


@pytest.mark.parametrize(("batch", "copies"), [(1, 0), (2, 1)])
def test_rows_of_all_ranks_are_put_in_order(batch: int, copies: int) -> None:
    """b × s × h over s: a gather and a copy, a copy and a scatter; of one sequence neither."""
    tape = Tape(mesh={"tp": 2})
    shard = tape.source("shard", (batch, S, H), "float32", (("tp", 1),), grad=True)
    whole = tape.collective("all_gather_into_tensor", "tp", shard, (), backward="reduce_scatter_tensor")
    tape.collective("reduce_scatter_tensor", "tp", whole, (("tp", 1),), backward="all_gather_into_tensor")
    made = [step for step in tape.steps if step.outputs]
    assert sum(step.name == "aten.cat.default" for step in made) == 2 * copies
    assert sum(v.nbytes for step in made for v in step.outputs) == 4 * batch * S * H * (
        1 + 2 * copies + 0.5 + copies / 2
    ) - (copies * 2 * batch * S * H)
    assert len(tape.collectives) == 4


def test_logits_that_a_stage_returns_are_those_of_all_ranks() -> None:
    found = run(layout=Layout(tp=2, pp=2, stage_buffers=True))
    (chunk,) = outline(found)[-1]
    assert logits_returned(chunk[-1].part) == 4 * B * S * V
    sharded = replace(found, kernels=replace(found.kernels, loss=Loss.DTENSOR))
    (chunk,) = outline(sharded)[-1]
    assert logits_returned(chunk[-1].part) == 4 * B * S * V // 2


def test_a_gradient_of_dtensors_table_is_whole() -> None:
    ours, theirs = (
        forecast(run(layout=Layout(tp=2, sp=True, gathered_inputs=word))).worst.static for word in (False, True)
    )
    assert theirs.gradients - ours.gradients == 4 * V * H // 2
    assert theirs.parameters == ours.parameters


def test_keys_and_values_that_are_gathered_stay_in_no_pass() -> None:
    """Kept is what a ring keeps; backward has both, their gradients, and a piece of these once more."""
    ring, gathered = (
        run(layout=Layout(cp=2), kernels=replace(HUGGINGFACE.on_cpu(), cp_comm_type=word))
        for word in (CpCommType.RING, CpCommType.GATHER)
    )
    one, other = (layer_region(each.signature, LLAMA.layers[0]) for each in (ring, gathered))
    assert one.saved_bytes == other.saved_bytes
    (step,) = (s for s in other.tape.steps if s.name == "aten._scaled_dot_product_flash_attention.default")
    keys, queries = 4 * B * KV * S * (H // HEADS), 4 * B * S * H // 2
    assert step.workspace == (4 * keys + queries + keys // 2) - queries - keys


def test_autocast_casts_a_shard_once() -> None:
    """q, k and v keep one copy in 16 bits of the shard that is gathered again."""
    spec = run(layout=Layout(tp=2, sp=True), precision=PRECISIONS["bf16-autocast"])
    region = layer_region(spec.signature, LLAMA.layers[0])
    kept = {
        s.value.storage
        for step in region.tape.steps
        for s in step.saved
        if step.path.startswith("attention.") and s.role == "linear input"
    }
    assert len(kept) == 1


def test_ends_of_a_model_are_as_before() -> None:
    """On one rank nothing is gathered."""
    alone = run()
    assert not embedding_region(alone.signature).collectives
    assert not head_region(alone.signature).collectives


def test_buffers_of_frameworks_name_their_source() -> None:
    """Each row of ``frameworks/NAME/buffers.toml`` says where it was read, and is there in some run."""
    rows = [row for file in FOLDER.glob("*/buffers.toml") for row in tomllib.loads(file.read_text())["buffer"]]
    assert all(row.keys() == {"name", "when", "bytes", "from", "until", "source"} for row in rows)
    asked = {"pp": 4, "micro_batches": 8, "kernels": "megatron", "tp": 2}
    runs = (
        {"keep_received": True, "keep_batches": True, "dataloader_attention_mask": True, "wgrad_deferral_limit": 2},
        {"stage_buffers": True},
        {"stage_buffers": True, "schedule": "zero-bubble"},
    )
    described = [run_of("gpt-22b", RunRequest(**asked, **more)) for more in runs]
    described.append(run_of("gpt-22b", RunRequest(dp=2, zero=3, like="deepspeed")))
    described.append(run_of("gpt-22b", RunRequest(pp=4, micro_batches=8, like="deepspeed")))
    found = {
        row.name
        for run in described
        for stage in range(run.layout.pp)
        for row, nbytes in buffers_of(run, stage)
        if nbytes
    }
    assert found == {row["name"] for row in rows}
