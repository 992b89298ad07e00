"""Forecasts of whole runs: what must hold for any model under any layout."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jettison.core.errors import Infeasible, UsageError
from jettison.families.presets import PRESETS, preset
from jettison.formula.region import embedding_region, head_region, layer_region
from jettison.memory.span import Phase
from jettison.predict.forecast import Forecast, forecast
from jettison.search.auto_recompute import choose
from jettison.spec.hardware import hardware
from jettison.spec.layout import Layout, Schedule
from jettison.spec.model import Activation, Attention, DropoutSites, Layer, Mlp, ModelSpec, Moe, Norm, NormKind, Router
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.kernel_sets import KERNELS, MEGATRON, PYTORCH
from support.work import calls

SETTINGS = settings(deadline=None, max_examples=60)
H100 = hardware("h100-80gb")
EACH_KIND = ("deepseek-v3", "gemma3-27b", "gpt-oss-20b", "gpt2", "llama3-8b", "mixtral-8x7b")
OTHERS = sorted(PRESETS.keys() - EACH_KIND)
MODES = ("none", "selective", "selective-op", "full", "every:2", "block:1", "interval:2", "sqrt")


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Sizes that 1, 2, 4 and 8 divide."""
    kv_heads = draw(st.sampled_from((8, 16)))
    heads = kv_heads * draw(st.sampled_from((1, 2)))
    head_dim = draw(st.sampled_from((8, 16)))
    norm = Norm(kind=draw(st.sampled_from(NormKind)), bias=False)
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=draw(st.booleans()),
        rotary_dim=draw(st.sampled_from((0, head_dim))),
    )
    ffn = 64 * draw(st.integers(1, 4))
    activation = draw(st.sampled_from((Activation.GELU, Activation.SILU, Activation.GELU_WRITTEN)))
    dense = Mlp(ffn=ffn, activation=activation, gated=draw(st.booleans()))
    moe = Moe(experts=8, top_k=2, ffn=ffn, activation=Activation.SILU, router=Router.SOFTMAX_TOPK)
    layers = tuple(
        Layer(attention=attention, mlp=moe if draw(st.booleans()) else dense, norm=norm)
        for _ in range(draw(st.sampled_from((4, 8))))
    )
    return ModelSpec(
        name="drawn",
        family="llama",
        hidden=heads * head_dim,
        vocab=512,
        layers=layers,
        final_norm=norm,
        max_positions=4096,
        tied_embeddings=draw(st.booleans()),
        dropout_sites=DropoutSites(embedding=True, attention=True, residual=True),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    model = draw(models())
    pp = draw(st.sampled_from((1, 2, 4)))
    virtual = draw(st.sampled_from((1, 2))) if pp > 1 and model.depth == 8 and pp < 4 else 1
    of_one = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)
    of_two = (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_V)
    schedule = draw(st.sampled_from(of_one if virtual == 1 else of_two))
    dp = draw(st.sampled_from((1, 2, 4)))
    has_experts = any(isinstance(layer.mlp, Moe) for layer in model.layers)
    layout = Layout(
        tp=draw(st.sampled_from((1, 2, 4, 8))),
        sp=draw(st.booleans()),
        cp=draw(st.sampled_from((1, 2))),
        pp=pp,
        virtual_stages=virtual,
        schedule=schedule,
        dp=dp,
        ep=draw(st.sampled_from((1, dp))) if has_experts else 1,
        zero=draw(st.sampled_from((0, 1, 2, 3))),
        gathered_inputs=draw(st.booleans()),
    )
    kernels = draw(st.sampled_from(sorted(KERNELS)))
    attention = draw(st.sampled_from(("eager", "flash")))
    return Run(
        model=model,
        seq=64 * draw(st.integers(1, 4)),
        micro_batch=draw(st.integers(1, 3)),
        micro_batches=pp * draw(st.integers(1, 3)),
        layout=layout,
        kernels=KERNELS[kernels].with_attention(attention),
        recompute=Recompute.parse(draw(st.sampled_from(MODES)), layers=model.depth),
        dropout=draw(st.sampled_from((0.0, 0.1))),
        gradients=draw(st.sampled_from((Gradients.ONE_BY_ONE, Gradients.UPFRONT))),
    )


def saved(run: Run) -> int:
    """Bytes that one micro-batch leaves behind on one rank, all stages together."""
    return sum(nbytes for _, nbytes in forecast(run).layer_bytes())


@SETTINGS
@given(runs())
def test_bytes_are_not_negative_and_parts_add_up(run: Run) -> None:
    answer = forecast(run)
    for stage in answer.stages:
        moments = stage.timeline()
        assert all(moment.nbytes >= 0 for moment in moments)
        assert stage.peak.nbytes == max(moment.nbytes for moment in moments)
        held = stage.static.parameters + stage.static.state
        assert stage.peak.nbytes >= held + stage.static.gradients
        assert stage.first_step_peak.nbytes <= stage.peak.nbytes
    assert answer.peak_bytes == max(stage.peak.nbytes for stage in answer.stages)
    assert answer.ledger().on_rank(run.layout.mesh_sizes).by_layer() == dict(answer.layer_bytes())


@SETTINGS
@given(runs(), st.sampled_from(("micro_batch", "seq", "layers")))
def test_more_of_anything_never_needs_less(run: Run, what: str) -> None:
    if what == "layers":
        larger = replace(run, model=replace(run.model, layers=run.model.layers * 2))
    elif what == "seq":
        larger = replace(run, seq=2 * run.seq)
    else:
        larger = replace(run, micro_batch=run.micro_batch + 1)
    assume(str(run.recompute.mode) not in ("block", "interval") or what != "layers")
    assert forecast(larger).peak_bytes >= forecast(run).peak_bytes
    assert saved(larger) >= saved(run)


@SETTINGS
@given(runs())
def test_more_tensor_parallel_ranks_never_hold_more(run: Run) -> None:
    """With sequence parallelism, and where what a product saves is the shard."""
    layouts = [replace(run.layout, tp=t, sp=True, gathered_inputs=False) for t in (1, 2, 4, 8)]
    for recompute in ("none", "full"):
        mode = Recompute.parse(recompute, layers=run.model.depth)
        found = [saved(replace(run, layout=layout, recompute=mode)) for layout in layouts]
        assert found == sorted(found, reverse=True)


@SETTINGS
@given(runs())
def test_ranks_together_hold_every_tensor(run: Run) -> None:
    """Shards of an entry cover the whole of it, and a size that divides is not held twice along its axis."""
    answer = forecast(replace(run, recompute=Recompute()))
    mesh = run.layout.mesh_sizes
    for entry in answer.ledger():
        ranks = 1
        for axis in entry.placement:
            ranks *= mesh[axis]
        assert entry.local_bytes(mesh) * ranks >= entry.nbytes
        if all(entry.shape[dim] % mesh[axis] == 0 for axis, dim in entry.placement.items()) and len(
            set(entry.placement.values())
        ) == len(entry.placement):
            assert entry.local_bytes(mesh) * ranks == entry.nbytes


@SETTINGS
@given(runs())
def test_parameters_of_all_stages_are_the_models(run: Run) -> None:
    layout = replace(run.layout, zero=0)
    answer = forecast(replace(run, layout=layout))
    totals: dict[str, int] = defaultdict(int)
    signature = answer.run.signature
    for region in (
        embedding_region(signature),
        head_region(signature),
        *(layer_region(signature, x) for x in run.model.layers),
    ):
        for weight in region.weights:
            totals["tied" if weight.tied else "own"] += weight.total
    assert totals["own"] == answer.parameters
    assert (
        len({layer for stage in answer.stages for chunk in stage.parts for layer in chunk}) == len(run.model.layers) + 2
    )


@SETTINGS
@given(runs())
def test_recompute_modes_are_ordered(run: Run) -> None:
    """Selective keeps no more than none, and full no more than selective."""
    held = [
        saved(replace(run, recompute=Recompute.parse(mode, layers=run.model.depth)))
        for mode in ("none", "selective", "full")
    ]
    assert held == sorted(held, reverse=True)


@settings(deadline=None, max_examples=25)
@given(runs(), st.floats(0.3, 1.2))
def test_auto_fits_the_budget_or_says_what_would(run: Run, share: float) -> None:
    budget = int(share * forecast(replace(run, recompute=Recompute())).peak_bytes)
    try:
        found = choose(run, budget, H100)
    except Infeasible as error:
        assert error.minimum_budget_bytes > budget
        again = choose(run, error.minimum_budget_bytes, H100)
        assert again.forecast.peak_bytes <= error.minimum_budget_bytes
    else:
        assert found.forecast.peak_bytes <= budget
        assert found.minimum_budget_bytes <= budget


def test_auto_keeps_everything_where_it_fits_and_costs_less_with_more_room() -> None:
    run = Run(model=preset("llama3-8b"), seq=8192, layout=Layout(dp=8, zero=3), kernels=PYTORCH, recompute=Recompute())
    plain, full = (
        forecast(replace(run, recompute=Recompute.parse(mode, layers=32))).peak_bytes for mode in ("none", "full")
    )
    seconds = [choose(run, full + (plain - full) * tenth // 10, H100).seconds for tenth in range(0, 11, 2)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0.0


def test_the_worst_stage_of_a_pipeline_is_the_first_one() -> None:
    """1F1B: stage i holds p - i micro-batches, so that stages do not divide what the first one holds."""
    run = Run(
        model=preset("llama3-70b"),
        seq=4096,
        micro_batches=32,
        layout=Layout(tp=8, sp=True, pp=4, dp=2),
        kernels=MEGATRON,
        gradients=Gradients.UPFRONT,
    )
    answer = forecast(run)
    assert [stage.in_flight for stage in answer.stages] == [4, 3, 2, 1]
    assert answer.worst.index == 0
    assert answer.worst.peak.phase is Phase.BACKWARD
    layer = answer.layer_bytes()[1][1]
    one_stage = forecast(replace(run, layout=replace(run.layout, pp=1), micro_batches=8))
    held = dict(answer.stages[0].load.chunks and [(0, answer.stages[0].activation_bytes)])[0]
    assert held - 4 * answer.layer_bytes()[0][1] == 80 * layer
    assert one_stage.layer_bytes()[1][1] == layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": {"tp": 3}}, "--tp 3 does not divide the 32 attention heads"),
        ({"layout": {"pp": 5}}, "32 layers do not divide over 5 pipeline stages"),
        ({"layout": {"ep": 2, "dp": 2}}, "has no experts"),
        ({"layout": {"virtual_stages": 2}}, "without a pipeline"),
        ({"layout": {"zero": 4}}, "--zero 4"),
        ({"layout": {"tp": 8, "sp": True}, "seq": 1001}, "1001 does not divide over 8 ranks"),
        ({"micro_batch": 0}, "--micro-batch 0"),
        ({"dropout": 1.5}, "--dropout 1.5"),
        ({"layout": {"pp": 2, "virtual_stages": 2}, "micro_batches": 3}, "multiple of 2"),
    ],
)
def test_what_does_not_divide_is_refused(change: dict, message: str) -> None:
    values = {"model": preset("llama3-8b"), "seq": 1024} | change
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        forecast(Run(**(values | {"layout": Layout(**change.get("layout", {}))})))


def layouts(model: ModelSpec) -> list[Run]:
    found = []
    product = itertools.product((1, 2, 4, 8), (False, True), (1, 2, 4, 8), (1, 8, 64), (0, 1, 3), MODES[:5], (1, 2))
    for tp, sp, pp, dp, zero, mode, micro_batch in product:
        try:
            layout = Layout(tp=tp, sp=sp, pp=pp, dp=dp, zero=zero)
            found.append(
                Run(
                    model=model,
                    seq=min(model.max_positions, 2048),
                    micro_batch=micro_batch,
                    micro_batches=8,
                    layout=layout,
                    kernels=MEGATRON,
                    recompute=Recompute.parse(mode, layers=model.depth),
                )
            )
        except UsageError:
            continue
        if len(found) == 1000:
            break
    return found


@pytest.mark.parametrize("name", [*EACH_KIND, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_a_thousand_layouts_take_little_work(name: str) -> None:
    asked = layouts(preset(name))
    assert len(asked) >= 720  # some have heads or layers that divide in fewer ways
    answers: list[Forecast] = []
    assert calls(lambda: answers.extend(map(forecast, asked))) < 1500 * len(asked)  # 300 a call take 0.2 ms
    assert all(answer.peak_bytes > 0 for answer in answers)


@pytest.mark.parametrize("name", ["gemma2-9b", "gpt-175b", "llama3-8b", "qwen3-30b-a3b"])
def test_the_peak_is_the_highest_moment_of_the_timeline(name: str) -> None:
    for run in layouts(preset(name))[::23]:
        for stage in forecast(run).stages:
            assert stage.peak == max(stage.timeline(), key=lambda moment: moment.nbytes)
            assert stage.first_step_peak == max(stage.timeline(first_step=True), key=lambda moment: moment.nbytes)


def test_every_preset_forecasts() -> None:
    for name in PRESETS:
        model = preset(name)
        run = Run(model=model, seq=min(model.max_positions, 1024), kernels=PYTORCH)
        assert forecast(run).peak_bytes > 16 * forecast(run).parameters
