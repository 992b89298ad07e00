"""Copies for narrow products: sizes as TransformerEngine and torchao have them, added up by hand here."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from benchmarks import megatron_golden

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.formula.fp8 import torchao_bytes
from jettison.formula.region import layer_region
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.search.search import SearchRequest
from jettison.spec.fp8 import RECIPES, Library, Scales, fp8_recipe, scale_shape
from jettison.spec.hardware import hardware

H, FFN, QKV, S = 4096, 14336, 6144, 4096
"""Of Llama 3 8B."""
TE = {"kernels": "megatron", "precision": "bf16-main32"}
OFTEN = ("tensorwise", "tensorwise-blackwell", "blockwise", "mxfp8", "nvfp4")


def saved_bytes(model: str, **request: Any) -> int:
    run = run_of(model, RunRequest(**{"seq": S, **TE, **request}))
    return layer_region(run.signature, run.model.layers[-1]).saved_bytes


@pytest.mark.parametrize(
    ("kind", "rowwise", "columnwise"),
    [
        (Scales.TENSOR, (1,), (1,)),
        (Scales.ROW, (4000,), (1440,)),
        (Scales.LINES, (12, 4000), (32, 1440)),
        (Scales.SQUARES, (32, 12), (12, 32)),
        (Scales.MX, (4096, 48), (128, 1536)),
        (Scales.NV, (4096, 92), (1536, 252)),
    ],
)
def test_scales_are_padded(kind: Scales, rowwise: tuple[int, ...], columnwise: tuple[int, ...]) -> None:
    """4000 rows of 1440, which no block divides: ``get_scale_shape`` of csrc/quantizer.cpp, worked out on paper."""
    assert scale_shape(kind, 4000, 1440, columnwise=False) == rowwise
    assert scale_shape(kind, 4000, 1440, columnwise=True) == columnwise


def input_bytes(recipe: str, rows: int, columns: int) -> int:
    """What stays of one product's input, of sizes that all blocks divide."""
    data = rows * columns
    return {
        "delayed": data + 4,
        "tensorwise": data + 4,
        "tensorwise-blackwell": data + 4,
        "blockwise": data + 4 * data // 128,
        "mxfp8": data + data // 32,
        "nvfp4": data // 2 + data // 16 + 4,
    }[recipe]


@pytest.mark.parametrize("recipe", ["delayed", *OFTEN])
def test_what_a_layer_keeps(recipe: str) -> None:
    """In bf16 four inputs of products: of these qkv's, gate_up's and down's are copies, and attention keeps out's."""
    products = [(S, H), (S, H), (S, FFN)] + ([(S, H)] if recipe == "delayed" else [])
    expected = saved_bytes("llama3-8b") - sum(2 * S * k for _, k in products[:3])
    assert saved_bytes("llama3-8b", fp8_recipe=recipe) == expected + sum(input_bytes(recipe, *one) for one in products)


@pytest.mark.parametrize("recipe", OFTEN)
def test_a_sharded_input_stays_as_a_shard(recipe: str) -> None:
    """Two ranks of tensor parallelism: behind norms a shard stays, under nvfp4 both of its copies."""
    plain = saved_bytes("llama3-8b", tp=2) - 2 * (2 * S // 2 * H + S * FFN // 2)
    ways = 2 if recipe == "nvfp4" else 1
    kept = 2 * ways * input_bytes(recipe, S // 2, H) + input_bytes(recipe, S, FFN // 2)
    assert saved_bytes("llama3-8b", tp=2, fp8_recipe=recipe) == plain + kept


@pytest.mark.parametrize(
    ("recipe", "eighths", "more"),
    [
        ("delayed", 16, 4 + 5 * 4 * 2),
        ("delayed:1024", 16, 4 + 5 * 4 * 1025),
        ("tensorwise", 16, 4),
        ("tensorwise-blackwell", 8, 4),
        ("mxfp8", 16.5, 0),
        ("nvfp4", 9, 8),
    ],
)
def test_copies_of_weights_stay(recipe: str, eighths: float, more: int) -> None:
    """Beside the parameter, or as it is; the embedding, the head and norms have none."""
    numbers = 32 * (H * QKV + H * H + 3 * H * FFN)
    copies = int(numbers * eighths / 8) + 32 * 4 * more
    plain, beside, alone = (
        forecast(run_of("llama3-8b", RunRequest(seq=S, **TE, **one))).stages[0]  # type: ignore[arg-type]
        for one in ({}, {"fp8_recipe": recipe}, {"fp8_recipe": recipe, "fp8_param_gather": True})
    )
    assert beside.static.parameters == plain.static.parameters + copies
    assert alone.static.parameters == plain.static.parameters + copies - 2 * numbers
    assert beside.static.state == alone.static.state == plain.static.state


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_adapters_beside_a_narrow_base(recipe: str) -> None:
    """Frozen products keep no input, whatever they read, and both copies of their weights; adapters are in bf16."""
    lora = {"lora": "r=16,targets=qkv"}
    assert saved_bytes("llama3-8b", fp8_recipe=recipe, **lora) == saved_bytes("llama3-8b", **lora)
    numbers = 32 * (H * QKV + H * H + 3 * H * FFN)
    copies = int(numbers * {"tensorwise": 2, "mxfp8": 16.5 / 8}[recipe]) + (32 * 4 * 4 if recipe == "tensorwise" else 0)
    plain, beside, alone = (
        forecast(run_of("llama3-8b", RunRequest(seq=S, **TE, **lora, **one))).stages[0]  # type: ignore[arg-type]
        for one in ({}, {"fp8_recipe": recipe}, {"fp8_recipe": recipe, "fp8_param_gather": True})
    )
    assert beside.static.parameters == plain.static.parameters + copies
    assert alone.static.parameters == plain.static.parameters + copies - 2 * numbers
    assert beside.static.state == plain.static.state


def test_squares_of_a_weight() -> None:
    found = fp8_recipe("blockwise", "megatron")
    assert found.weight_bytes((QKV, H)) == 2 * (QKV * H + 4 * (QKV // 128) * (H // 128))
    assert found.weight_bytes((8, 1000, 200)) == 8 * (2 * 200_000 + 4 * (8 * 4 + 2 * 8))


@pytest.mark.parametrize(("recipe", "padded"), [("tensorwise", 1088), ("mxfp8", 1088), ("nvfp4", 1152)])
def test_rows_of_experts_are_filled_up(recipe: str, padded: int) -> None:
    """4320 tokens, two choices each, eight experts: 1080 rows for each, padded to 16, 32 or 128."""
    hidden, ffn = 4096, 14336
    plain = saved_bytes("mixtral-8x7b", seq=4320)
    rows = 8 * padded
    in_bf16 = 8 * 1080 * (2 * hidden + 3 * 2 * ffn + 4)  # fc1's input, both halves and fc2's input, weights of rows
    experts = 8 * (input_bytes(recipe, padded, hidden) + input_bytes(recipe, padded, ffn)) + rows * (2 * 2 * ffn + 4)
    if recipe == "mxfp8":  # scales of 1088 rows: 34 by columns, padded to 36
        experts += 8 * 2 * (hidden + ffn)
    attention = 4320 * hidden
    if recipe == "mxfp8":
        attention += 136 * hidden  # 135 blocks of rows, padded to 136
    elif recipe == "nvfp4":
        attention = attention // 2 + 272 * hidden + 4
    else:
        attention += 4
    expected = plain - in_bf16 - 2 * 4320 * hidden + experts + attention
    assert saved_bytes("mixtral-8x7b", seq=4320, fp8_recipe=recipe) == expected


def test_megatron_in_fp8() -> None:
    """Megatron-LM's own test on H100, whose weights are bytes (tests/facts/megatron_golden.csv)."""
    rows = [row for row in megatron_golden.rows() if "native_fp8" in row.name]
    hopper, blackwell = sorted(rows, key=lambda row: "B200" in row.gpu)
    assert max(hopper.errors) < 0.015
    assert blackwell.errors[2] < 0.005
    assert hopper.predicted()[2] - blackwell.predicted()[2] == pytest.approx(0.009, abs=0.0005), "copies by columns"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"fp8_recipe": "rowwise", **TE}, "TransformerEngine has delayed, delayed-blackwell"),
        ({"fp8_recipe": "nvfp4"}, "torchao has tensorwise, rowwise"),
        ({"fp8_recipe": "mxfp8:4", **TE}, "got --fp8-recipe 'mxfp8:4'"),
        ({"fp8_recipe": "delayed:0", **TE}, "got --fp8-recipe 'delayed:0'"),
        ({"fp8_recipe": "mxfp8", **TE, "seq": 4000, "tp": 2, "micro_batch": 3}, "should be a multiple of 32"),
        ({"fp8_recipe": "mxfp8", **TE, "zero": 3, "dp": 2}, "give --zero 1"),
        ({"fp8_recipe": "tensorwise", "kernels": "megatron", "precision": "fp32"}, "give one in bf16"),
        ({"fp8_param_gather": True}, "without a recipe"),
        ({"fp8_recipe": "rowwise", "fp8_param_gather": True}, "for tensorwise only"),
        ({"fp8_recipe": "tensorwise", "lora": "r=16"}, "both are modelled for TransformerEngine only"),
        ({"fp8_recipe": "mxfp8", **TE, "lora": "r=16", "base": "nf4"}, "got --base nf4 with --lora and --fp8-recipe"),
        ({"fp8_recipe": "mxfp8", **TE, "recompute_modules": "layernorm"}, "layernorm"),
    ],
)
def test_what_is_not_described_is_refused(request_: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_of("llama3-8b", RunRequest(**request_))


def test_experts_and_compiled_mx_tensors_of_torchao_are_refused() -> None:
    with pytest.raises(UsageError, match="give --kernels megatron"):
        run_of("mixtral-8x7b", RunRequest(fp8_recipe="tensorwise"))
    with pytest.raises(UsageError, match="MX tensors"):
        replace(run_of("llama3-8b", RunRequest(fp8_recipe="mxfp8")), compiled=True)


@pytest.mark.parametrize(
    ("recipe", "less"),
    [("tensorwise", 2 * 2 * S * H + 2 * S * FFN), ("rowwise", 2 * 2 * S * H + 2 * S * FFN), ("rowwise_with_gw_hp", 0)],
)
def test_a_compiler_casts_again(recipe: str, less: int) -> None:
    """What both norms return, and what down reads, is computed again for its copy; not where a product reads it."""
    plain, narrow = (
        dict(forecast(replace(run_of("llama3-8b", RunRequest(seq=S, **one)), compiled=True)).layer_bytes())
        for one in ({}, {"fp8_recipe": recipe})
    )
    assert plain["layers.7"] - narrow["layers.7"] == less


def test_a_search_leaves_out_what_does_not_divide() -> None:
    asked = SearchRequest(fp8_recipe="mxfp8", kernels="megatron", seq=4128)
    gpu = hardware("b200-192gb")
    space = asked.space(preset("llama3-8b"), gpu, gpus=8, global_batch=8)
    assert space.setups
    assert max(setup.layout.zero for setup in space.setups) < 3
    assert all(4128 * setup.micro_batch // setup.layout.cp % 32 == 0 for setup in space.setups)
    with pytest.raises(UsageError, match="should be a multiple of 32"):
        replace(asked, seq=4100).space(preset("llama3-8b"), gpu, gpus=1, global_batch=1)
    with pytest.raises(UsageError, match="--fp8-recipe mxfp8 is modelled for"):
        replace(asked, zero="3").space(preset("llama3-8b"), gpu, gpus=8, global_batch=8)


# torchao ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [name for library, name in RECIPES if library is Library.TORCHAO])
def test_torchao_keeps_what_it_is_given(recipe: str) -> None:
    plain, narrow = (
        forecast(run_of("llama3-8b", RunRequest(seq=512, micro_batch=8, **one))).stages[0]
        for one in ({}, {"fp8_recipe": recipe})
    )
    assert narrow.static == plain.static
    assert narrow.activation_bytes == plain.activation_bytes
    assert narrow.peak.nbytes >= plain.peak.nbytes


def test_torchao_gathers_bytes() -> None:
    request = {"seq": 512, "dp": 8, "zero": 3, "precision": "bf16-autocast"}
    plain, narrow, bytes_ = (
        forecast(run_of("llama3-8b", RunRequest(**request, **one))).stages[0].static.gathered  # type: ignore[arg-type]
        for one in ({}, {"fp8_recipe": "tensorwise"}, {"fp8_recipe": "tensorwise", "fp8_param_gather": True})
    )
    assert plain == narrow
    assert plain - bytes_ == 32 * (H * QKV + H * H + 3 * H * FFN)


WITHOUT = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (pip install torchao==0.18.0)"
)


@WITHOUT
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_compiled_block_of_torchao(recipe: str) -> None:
    """A Llama's, split by Inductor and then run op by op; but for rotary tables and for scales, six bytes a product."""
    import torch
    from torch._inductor.compile_fx import compile_fx
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from support.compiled_families import Loss, blocks_of, language_model

    model = Loss(language_model("llama")).bfloat16()
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    block = blocks_of(model)[1]
    compiled = torch.compile(
        block.forward,
        backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=lambda made, *_, **__: made),
    )
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            return compiled(*args, **kwargs)

    block.forward = watched
    model(torch.zeros(8, 64, dtype=torch.int64))
    asked = RunRequest(seq=64, micro_batch=8, precision="bf16-pure", kernels="huggingface", fp8_recipe=recipe)
    spec = parse_config(model.model.config.to_dict(), name="small")
    own = dict(forecast(replace(run_of(spec, asked), compiled=True)).layer_bytes())["layers.1"]
    tables = 2 * 2 * 64 * 16
    assert 0 <= sum(seen.values()) - own - tables <= 7 * (2 + 4)


@WITHOUT
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("sizes", [(512, 1024, 2048), (1024, 512, 256), (2048, 256, 1024)])
def test_a_backward_of_torchao(recipe: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, whose narrow product takes fp32 copies of its own: in its place nothing is computed."""
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from jettison.dryrun.counter import allocation_deltas

    def nothing(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", nothing)
    columns, features, rows = sizes
    model = torch.nn.Sequential(torch.nn.Linear(columns, features, bias=False)).bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    x = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    out = model(x)
    peak = max(itertools.accumulate(allocation_deltas(lambda: out.backward(torch.ones_like(out)))))
    own = torchao_bytes(fp8_recipe(recipe, "pytorch"), rows, columns, features)
    returned = 2 * (rows * columns + columns * features)
    incoming = 2 * prod(out.shape)
    assert own + returned + incoming == pytest.approx(peak, rel=0.005)
