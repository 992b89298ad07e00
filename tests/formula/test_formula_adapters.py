"""Adapters in closed form beside PEFT on models of transformers: every saved tensor of every layer, every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.utils import logging

from formula.test_formula_encoders import TINY
from jettison.core.errors import UsageError
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.presets import preset
from jettison.formula.region import embedding_region, head_region, layer_region
from jettison.ledger.compare import compare
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.fine_tuning import HEAD, TABLE, Base, Tuning
from jettison.spec.kernels import Loss
from jettison.spec.precision import PRECISIONS, Gradients
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.formula_cases import FAMILIES as FAMILIES_OF_CASES
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of, traced_call, written

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
]

FAMILIES = ("llama", "qwen2", "gemma", "phi3", "gpt2")
QUICK = [("llama", "fp32"), ("qwen2", "bf16-pure"), ("gemma", "fp32"), ("phi3", "bf16-pure"), ("gpt2", "fp32")]


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """What transformers logs once, within a forward, goes to a text in memory here, which no recording can undo."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def tuned(case: FormulaCase, tuning: Tuning) -> Run:
    """The run of a case, with adapters."""
    run = run_of(case)
    sources = [None, *(layer.source for layer in run.model.layers)]
    layers = [
        replace(layer, detached=not tuning.inputs_need_gradients) if layer.source is not before else layer
        for before, layer in zip(sources, run.model.layers, strict=False)
    ]
    return replace(run, model=replace(run.model, layers=tuple(layers)), tuning=tuning)


def adapted(case: FormulaCase, tuning: Tuning, targets: Any = "all-linear", *, upcast: bool = False) -> Any:
    """The model, as PEFT makes it."""
    config = peft.LoraConfig(
        r=tuning.rank,
        target_modules=targets,
        lora_dropout=tuning.dropout,
        modules_to_save=sorted(tuning.full),
        task_type="CAUSAL_LM",
    )
    made = peft.get_peft_model(model_of(case), config, autocast_adapter_dtype=upcast)
    if tuning.inputs_need_gradients:
        made.enable_input_require_grads()
    return made


def differences(case: FormulaCase, tuning: Tuning, targets: Any = "all-linear") -> list[str]:
    """How PEFT's model differs from the closed form."""
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    found = traced_call(adapted(case, tuning, targets), {"input_ids": ids, "labels": ids.clone()})
    return [str(difference) for difference in compare(written(tuned(case, tuning)), found)]


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(family, precision, marks=[] if (family, precision) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for precision in ("fp32", "bf16-pure")
    ],
)
def test_saved_tensors_are_those_of_peft(family: str, precision: str) -> None:
    assert differences(FormulaCase(family=family, attention="sdpa", precision=precision), Tuning(rank=4)) == []


@pytest.mark.parametrize("targets", ["q_proj+v_proj", "gate_proj", "o_proj+down_proj"])
@pytest.mark.parametrize("asks", [False, True])
def test_some_targets_keep_the_inputs_of_theirs_alone(targets: str, asks: bool) -> None:
    tuning = Tuning(rank=4, targets=frozenset(targets.split("+")), inputs_need_gradients=asks)
    assert differences(FormulaCase(family="llama"), tuning, targets.split("+")) == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_of_what_adapters_read(attention: str) -> None:
    assert differences(FormulaCase(family="llama", attention=attention), Tuning(rank=4, dropout=0.1)) == []


def under_autocast(case: FormulaCase, tuning: Tuning) -> list[str]:
    """How PEFT's model with adapters in fp32 differs from the closed form under torch.autocast."""
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    with torch.autocast("cpu", torch.bfloat16):
        found = traced_call(adapted(case, tuning, upcast=True), {"input_ids": ids, "labels": ids.clone()})
    run = replace(tuned(case, tuning), precision=PRECISIONS["bf16-autocast"])
    return [str(difference) for difference in compare(written(run), found)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_wide_adapters_under_autocast(dropout: float) -> None:
    """The base in bf16, adapters in fp32, as a Trainer with bf16=True has it."""
    case = FormulaCase(family="llama", attention="sdpa", precision="bf16-pure")
    assert under_autocast(case, Tuning(rank=4, dropout=dropout)) == []


@pytest.mark.parametrize(
    ("family", "tuning"),
    [
        ("llama", Tuning(rank=4, base=Base.FP32)),
        ("llama", Tuning(rank=4, base=Base.FP32, dropout=0.1, inputs_need_gradients=True)),
        ("gpt2", Tuning(rank=4, base=Base.FP32)),
        pytest.param("gemma", Tuning(rank=4, base=Base.FP32), marks=pytest.mark.slow),
        pytest.param("phi3", Tuning(rank=4, base=Base.FP32), marks=pytest.mark.slow),
        pytest.param("olmo2", Tuning(rank=4, base=Base.FP32), marks=pytest.mark.slow),
    ],
)
def test_a_wide_base_under_autocast(family: str, tuning: Tuning) -> None:
    """Frozen weights in fp32: each product keeps a copy of its own, which no cache holds, and adapters cast x anew."""
    assert under_autocast(FormulaCase(family=family, attention="sdpa"), tuning) == []


FULL = [frozenset(names) for names in ({TABLE}, {HEAD}, {TABLE, HEAD})]
"""Modules that PEFT trains in full: NOTE [ Modules trained in full ] in `spec.fine_tuning`."""
TIED = "llama ungrouped"


@pytest.mark.parametrize("full", FULL, ids=lambda full: "+".join(sorted(full)))
@pytest.mark.parametrize("family", ["llama", TIED])
def test_modules_trained_in_full_keep_what_peft_keeps(family: str, full: frozenset[str]) -> None:
    tuning = Tuning(rank=4, full=full, inputs_need_gradients=TABLE in full)
    assert differences(FormulaCase(family=family, attention="sdpa"), tuning) == []


@pytest.mark.parametrize(
    ("like", "zero", "each", "base"),
    [("huggingface", 0, 2, None), ("huggingface", 3, 4, None), ("huggingface", 3, 2, "nf4"), ("deepspeed", 3, 2, None)],
)
def test_modules_trained_in_full_over_several_gpus(like: str, zero: int, each: int, base: str | None) -> None:
    """Copies are as loaded under DDP and over 4 bits, in fp32 under FSDP2, with an fp32 master under DeepSpeed."""
    found = []
    for full in ("", f",modules_to_save={TABLE}+{HEAD}"):
        request = RunRequest(seq=128, like=like, lora=f"r=4{full}", base=base, dp=4, zero=zero)
        found.append(forecast(resolve(preset("llama3-8b"), request).run).stages[0].static)
    elements = 2 * 128256 * 4096 // (4 if zero else 1)
    assert found[1].parameters - found[0].parameters == each * elements
    assert found[1].gradients - found[0].gradients == each * elements
    assert found[1].state - found[0].state == (12 if like == "deepspeed" else 2 * each) * elements


@pytest.mark.parametrize(
    ("recompute", "asks", "precision", "base", "full", "family"),
    [
        ("none", False, "fp32", Base.PLAIN, frozenset(), "llama"),
        ("none", True, "fp32", Base.PLAIN, frozenset(), "llama"),
        ("full", True, "fp32", Base.PLAIN, frozenset(), "llama"),
        ("full", True, "bf16-autocast", Base.PLAIN, frozenset(), "llama"),
        ("none", False, "bf16-autocast", Base.FP32, frozenset(), "llama"),
        ("full", True, "bf16-autocast", Base.FP32, frozenset(), "llama"),
        *(("full", True, "bf16-autocast", Base.PLAIN, full, family) for full in FULL for family in ("llama", TIED)),
        ("none", True, "fp32", Base.PLAIN, FULL[-1], TIED),
        ("full", True, "bf16-autocast", Base.FP32, FULL[-1], TIED),
    ],
)
def test_the_peak_of_a_step_is_the_measured_one(
    recompute: str, asks: bool, precision: str, base: Base, full: frozenset[str], family: str
) -> None:
    """Forward, backward and AdamW on the adapters, on real tensors; with layers computed again as torch does it, which
    needs an input with a gradient. Under autocast what PEFT casts to fp32 is there until an adapter is done. Copies of
    embedding and head, their gradients and moments have the dtype of the base.
    """
    narrow = precision == "bf16-autocast" and base is Base.PLAIN
    case = FormulaCase(
        family=family, attention="sdpa", batch=4, sequence=64, precision="bf16-pure" if narrow else "fp32"
    )
    tuning = Tuning(rank=4, inputs_need_gradients=asks, base=base, full=full)
    model = adapted(case, tuning, upcast=True)
    if recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    step()
    with AllocationCounter(static_tensors(model, ids, optimizer)) as counter:
        step()
    run = replace(tuned(case, tuning), precision=PRECISIONS[precision])
    run = replace(run, recompute=Recompute.parse(recompute, layers=run.model.depth))
    assert forecast(run).peak_bytes == pytest.approx(counter.peak_bytes, rel=0.0025)


@pytest.mark.parametrize(
    ("family", "full"),
    [
        *((family, frozenset[str]()) for family in FAMILIES),
        *((family, full) for family in ("phi3", TIED) for full in FULL),
    ],
)
def test_trained_weights_are_those_of_peft(family: str, full: frozenset[str]) -> None:
    case, tuning = FormulaCase(family=family), Tuning(rank=4, full=full)
    signature = tuned(case, tuning).signature
    regions = [
        embedding_region(signature),
        *(layer_region(signature, layer) for layer in signature.model.layers),
        head_region(signature),
    ]
    ours = [
        sum(w.numel for r in regions for w in r.weights if w.frozen is frozen and not w.tied)
        for frozen in (False, True)
    ]
    theirs = list(adapted(case, tuning).parameters())
    assert ours == [sum(p.numel() for p in theirs if p.requires_grad is learns) for learns in (True, False)]


def test_bytes_of_four_bits() -> None:
    """A matrix of 4096 x 4096: half a byte a number, and a scale for each 64; doubly, a byte for each and 1/64 more."""
    n = 4096 * 4096
    assert Base.NF4.packed_bytes(n, 4096) == n // 2 + 4 * n // 64 + 64
    assert Base.NF4_DOUBLE.packed_bytes(n, 4096) == n // 2 + n // 64 + 4 * n // 64 // 256 + 4 + 64


def test_bytes_of_a_gptq_matrix() -> None:
    """AutoGPTQ's tensors of 4096 inputs and 14336 outputs: qweight, qzeros and scales of 32 groups, g_idx."""
    inputs, outputs = 4096, 14336
    qweight, qzeros = inputs // 8 * outputs * 4, inputs // 128 * (outputs // 8) * 4
    scales, g_idx = inputs // 128 * outputs * 2, inputs * 4
    assert Base.GPTQ.packed_bytes(inputs * outputs, outputs) == qweight + qzeros + scales + g_idx
    assert Base.GPTQ.scale_bytes(inputs * outputs, outputs) == scales + g_idx
    run = resolve(preset("llama3-8b"), RunRequest(like="huggingface-4.48", lora="16", base="gptq")).run
    assert run.tuning is not None and str(run.tuning.upcast) == "none", "nothing is cast for training"


@pytest.mark.parametrize(("loss", "forwards"), [("fused", 2), ("chunked", 1), ("chunked-output", 1)])
def test_a_frozen_head_has_no_gradient_of_its_weight(loss: str, forwards: int) -> None:
    """Of a loss that makes gradients at once there are two products instead of three (Liger: ``grad_weight``)."""
    runs = [replace(run_of(FormulaCase(family="llama")), tuning=tuning) for tuning in (None, Tuning(rank=4))]
    runs = [replace(run, kernels=replace(run.kernels, loss=Loss(loss))) for run in runs]
    whole, frozen = (head_region(run.signature) for run in runs)
    assert not any("weight" in entry.role for entry in frozen.entries("head"))
    once = 2 * runs[0].micro_batch * runs[0].seq * runs[0].model.hidden * runs[0].model.vocab
    assert (whole.flops, frozen.flops) == (once * (3 if loss == "fused" else 1), once * forwards)


def test_a_list_of_logits_is_all_that_chunks_do_without() -> None:
    """Two bytes a logit between the passes; in backward, where a chunk of eight is in fp32 twice in the one and freed
    in the other, a second gradient of the weight as well: torchtune's loss in chunks.
    """
    run = resolve(preset("llama3-8b"), RunRequest(seq=2048, precision="bf16-pure", recompute="full")).run
    chunked, listed = (
        forecast(replace(run, kernels=replace(run.kernels, loss=Loss(w)))) for w in ("chunked", "chunked-output")
    )
    extra = 2 * 2048 * 128256
    assert sum(n for _, n in listed.layer_bytes()) - sum(n for _, n in chunked.layer_bytes()) == extra
    within = [forecast(replace(f.run, gradients=Gradients.IN_BACKWARD)).peak_bytes for f in (chunked, listed)]
    assert within[1] - within[0] == extra - extra // 8 + 2 * 4096 * 128256 - 2 * 2 * extra // 8
    frozen = forecast(replace(listed.run, tuning=Tuning(rank=4)))
    assert dict(frozen.layer_bytes())["head"] < dict(listed.layer_bytes())["head"], "its input is not saved"


@pytest.mark.parametrize("base", ["nf4", "nf4-double"])
def test_weights_in_four_bits_by_hand(base: str) -> None:
    """Llama 3 8B: seven matrices a layer in half a byte and scales; embedding, head, norms in 2; adapters in 4."""
    request = RunRequest(seq=128, lora="r=16", base=base, recompute="full")
    stage = forecast(resolve(preset("llama3-8b"), request).run).stages[0]
    h, kv, ffn = 4096, 1024, 14336
    matrices = [h * h] * 2 + [kv * h] * 2 + [ffn * h] * 3
    scales = {"nf4": lambda n: 4 * n // 64, "nf4-double": lambda n: n // 64 + 4 * n // 64 // 256 + 4}[base]
    packed = 32 * sum(n // 2 + scales(n) + 64 for n in matrices)
    adapters = 32 * 16 * (2 * 2 * h + 2 * (h + kv) + 3 * (h + ffn))
    assert adapters == 41_943_040
    plain = 2 * 128256 * h + (2 * 32 + 1) * h
    assert stage.static.parameters == packed + 2 * plain + 4 * adapters
    assert stage.static.gradients == 4 * adapters
    assert stage.static.state == 8 * adapters


def test_a_base_in_eight_bits() -> None:
    """A byte a number and a scale a row; products hold what they read, whether an adapter reads it or not."""
    assert Base.INT8.packed_bytes(176 * 64, 176) == 11968  # bitsandbytes 0.50.2: ``int8_vectorwise_quant``
    h, kv, ffn, rows = 4096, 1024, 14336, 128
    found = {}
    for base in ("plain", "int8"):
        request = RunRequest(
            seq=rows, lora="r=16,targets=q_proj", base=base, precision="bf16-pure", input_gradients=True
        )
        found[base] = forecast(resolve(preset("llama3-8b"), request).run)
    matrices = [(h, h), (h, h), (kv, h), (kv, h), (ffn, h), (ffn, h), (h, ffn)]
    less = 32 * sum(2 * m * n - m * n - 4 * m for m, n in matrices)
    statics = [found[base].stages[0].static.parameters for base in ("plain", "int8")]
    assert statics[0] - statics[1] == less
    layers = [dict(found[base].layer_bytes())["layers.1"] for base in ("plain", "int8")]
    assert layers[1] - layers[0] == 2 * rows * (h + ffn), "the second norm's result and the gated product"


@pytest.mark.parametrize("recompute", ["full", "selective-op", "auto"])
def test_inputs_of_eight_bits_are_out_of_a_checkpoints_reach(recompute: str) -> None:
    request = RunRequest(lora="r=16", base="int8", recompute=recompute)
    with pytest.raises(UsageError, match="only reentrant checkpoints free"):
        resolve(preset("llama3-8b"), request)


def test_a_reentrant_checkpoint_lets_go_of_inputs_of_eight_bits() -> None:
    """Its forward makes no graph that could hold them: a layer keeps what it would keep in 16 bits."""
    kept = []
    for base in ("plain", "int8"):
        request = RunRequest(seq=128, lora="r=16", base=base, recompute="full", reentrant=True)
        kept.append(dict(forecast(resolve(preset("llama3-8b"), request).run).layer_bytes())["layers.1"])
    assert kept == [2 * 128 * 4096] * 2


def test_what_lora_is_told_wrongly() -> None:
    with pytest.raises(UsageError, match="without a rank"):
        Tuning.parse("targets=qkv")
    with pytest.raises(UsageError, match="a number instead of 'x'"):
        Tuning.parse("r=x")


@pytest.mark.parametrize("targets", ["q_a_proj", "qkv_proj+gate_up_proj"])
def test_adapters_that_no_product_has_are_refused(targets: str) -> None:
    with pytest.raises(UsageError, match=r"llama3-8b has none of these modules"):
        resolve(preset("llama3-8b"), RunRequest(lora=f"r=8,targets={targets}"))
    assert resolve(preset("llama3-8b"), RunRequest(lora=f"r=8,targets={targets}+q_proj")).run.tuning is not None


def test_adapters_take_the_names_of_falcon() -> None:
    """``dense`` is the output of attention there, and any of three layers in an encoder."""
    names = {"query_key_value": "qkv", "dense": "out", "dense_h_to_4h": "up", "dense_4h_to_h": "down"}
    tuning = Tuning.parse(f"r=8,targets={'+'.join(names)}")
    assert [tuning.adapts(name) for name in (*names.values(), "gate")] == [True] * 4 + [False]
    with pytest.raises(UsageError, match=r"three layers of an encoder: give some of o_proj\+fc1\+fc2"):
        resolve(preset("bert-base"), RunRequest(lora="r=8,targets=query+dense"))


def test_adapters_take_the_names_of_bert() -> None:
    found = [
        forecast(resolve(preset("bert-base"), RunRequest(lora=f"r=8,targets={targets}")).run).peak_bytes
        for targets in ("query+key+value", "q_proj+k_proj+v_proj", "query")
    ]
    assert found[0] == found[1] > found[2]


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("targets", ["q+v", "all-linear"])
def test_an_encoder_with_a_decoder_as_peft_adapts_it(
    family: str, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stacks start without a gradient; so do biases by distance, whose table is frozen."""
    monkeypatch.setitem(FAMILIES_OF_CASES, family, TINY[family])
    case = FormulaCase(family=family, attention="sdpa")
    names = targets.split("+") if family == "t5" else ["q_proj", "v_proj"]
    tuning = Tuning(rank=4, targets=frozenset(names if targets != "all-linear" else [targets]))
    config = peft.LoraConfig(
        r=4, target_modules=names if targets != "all-linear" else targets, task_type="SEQ_2_SEQ_LM"
    )
    model = peft.get_peft_model(model_of(case), config, autocast_adapter_dtype=False)
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    found = traced_call(model, {"input_ids": ids, "labels": ids.clone()})
    assert [str(difference) for difference in compare(written(tuned(case, tuning)), found)] == []
