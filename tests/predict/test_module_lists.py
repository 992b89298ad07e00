"""Megatron's lists of modules in described runs: what they free, in whole bytes, and what goes to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.frameworks.layer_policies import Decision
from jettison.frameworks.megatron.write import by_modules, offloading
from jettison.frameworks.nearest_policy import DescribedPricer
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.auto_recompute import choose
from jettison.search.evaluate import Evaluator, SearchQuestion, Task
from jettison.search.search import SearchRequest
from jettison.search.space import SearchCandidate
from jettison.spec.hardware import hardware
from jettison.spec.model import ModelSpec
from jettison.spec.recompute import Recompute

H, F, HEADS, S, B, TP, TOP, EXPERT = 512, 1024, 8, 1024, 2, 2, 2, 256
GQA = {"num_attention_heads": HEADS, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": S}
LLAMA = parse_config(
    {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": H, "intermediate_size": F, **GQA}, name="dense"
)
MIXTRAL = parse_config(
    {
        **GQA,
        "model_type": "mixtral",
        "num_hidden_layers": 4,
        "hidden_size": H,
        "intermediate_size": EXPERT,
        "num_local_experts": 4,
        "num_experts_per_tok": TOP,
    },
    name="experts",
)
NOPE, ROPE, VALUE = 64, 32, 64
LATENT = parse_config(
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "hidden_size": H,
        "intermediate_size": F,
        "moe_intermediate_size": EXPERT,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": 4,
        "num_experts_per_tok": TOP,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 4096,
        "max_position_embeddings": S,
        "num_nextn_predict_layers": 0,
    },
    name="latent",
)
ROWS = S * B
"""Tokens of a micro-batch."""
NORM = (2 * H + 4) * ROWS // TP
"""What a norm returns, of one share of the sequence, and its statistics."""


def asked(model: ModelSpec, **given: object) -> Forecast:
    fields = {"kernels": "megatron", "seq": S, "micro_batch": B, "tp": TP, "sp": True} | given
    return forecast(resolve(model, RunRequest(**fields)).run)


def freed(model: ModelSpec, modules: str, **given: object) -> list[int]:
    """By layer."""
    plain, listed = asked(model, **given), asked(model, recompute_modules=modules, **given)
    rows = zip(plain.layer_bytes(), listed.layer_bytes(), strict=True)
    return [before - after for (name, before), (_, after) in rows if name.startswith("layers.")]


def test_what_each_module_frees() -> None:
    """16-bit tensors of one rank: 2 bytes, and of what tensor-parallel ranks share a half."""
    assert freed(LLAMA, "mlp") == 4 * [2 * ROWS * 3 * F // TP], "gate and up, and their product"
    assert freed(LLAMA, "core_attn") == 4 * [4 * ROWS * HEADS // TP], "the log-sum-exp; attention's output is saved"
    assert freed(LLAMA, "layernorm") == 4 * [2 * NORM]
    assert freed(MIXTRAL, "moe_act") == 4 * [2 * TOP * ROWS * EXPERT // TP], "what the last product reads"
    heads = HEADS * (2 * (NOPE + ROPE) + VALUE)
    assert freed(LATENT, "mla_up_proj", workspaces="te-hopper") == 3 * [2 * ROWS * heads // TP]
    assert freed(LATENT, "shared_experts") == [0, *2 * [2 * ROWS * 3 * EXPERT // TP]]
    assert freed(LATENT, "mlp") == [2 * ROWS * 3 * F // TP, 0, 0]


def test_norms_of_transformer_engine_are_parts_of_products() -> None:
    """What stands before multi-latent attention and before experts is a module of its own."""
    te = {"workspaces": "te-hopper"}
    assert freed(LATENT, "layernorm") == 3 * [2 * NORM]
    assert freed(LATENT, "layernorm", **te) == [NORM, *2 * [2 * NORM]]
    assert freed(MIXTRAL, "layernorm", **te) == 4 * [NORM]
    with pytest.raises(UsageError, match="which no layer of dense has, since TransformerEngine"):
        asked(LLAMA, recompute_modules="layernorm", **te)


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, LATENT], ids=lambda model: model.name)
def test_lists_are_what_an_export_says(model: ModelSpec) -> None:
    """A plan that is said with the same lists has the same peak and holds the same bytes."""
    again, sent = ("layernorm", "core_attn"), ("attn_norm", "qkv_linear")
    plain = asked(model, micro_batch=4)
    device = hardware("h100-80gb")
    pricer = DescribedPricer(choose(plain.run, plain.peak_bytes, device))
    stay, policies = pricer.last_of_chunks(), []
    for part in (part for part in plain.parts if part.is_layer):
        decision = Decision(layer=part.name, policy="none", program=part.region.program, kept=part.kept)
        policy = by_modules(decision, again)
        policies.append(policy if part.name in stay else offloading(policy, sent))
    said = pricer.cost(policies)
    listed = asked(model, micro_batch=4, recompute_modules=",".join(again), offload_modules=",".join(sent))
    assert listed.peak_bytes == said.peak_bytes
    assert _host_bytes(listed) == said.host_bytes > 0


def _host_bytes(found: Forecast) -> int:
    """As a search says it."""
    run = found.run
    asked_for = SearchRequest(kernels="megatron", seq=S, tp="2", sp=True, pp="1", cp="1", ep="1", micro_batch="4")
    space = asked_for.space(run.model, hardware("h100-80gb"), gpus=TP, global_batch=4)
    (setup, *_) = space.setups
    with Evaluator(SearchQuestion(template=space.template, hardware=hardware("h100-80gb"))) as evaluator:
        (figures,) = evaluator.figures([Task(candidate=SearchCandidate(setup=setup, recompute=run.recompute))])
    assert figures.peak_bytes == found.peak_bytes
    return figures.host_bytes


def test_what_is_sent_is_what_the_modules_read() -> None:
    """Of all layers but the last of a stage, what is large: experts read top-k rows of the hidden state."""
    plain = asked(MIXTRAL, seq=S, micro_batch=4)
    sent = asked(MIXTRAL, seq=S, micro_batch=4, offload_modules="expert_fc1")
    rows = 2 * TOP * 4 * S * H
    held = [stage.activation_bytes for found in (plain, sent) for stage in found.stages]
    assert held[0] - held[1] == 3 * rows
    small = asked(MIXTRAL, seq=S // 4, micro_batch=1, offload_modules="expert_fc1")
    assert small.worst.activation_bytes == asked(MIXTRAL, seq=S // 4, micro_batch=1).worst.activation_bytes


def test_parts_run_again_and_take_time() -> None:
    device = hardware("h100-80gb")
    steps = [
        estimate(asked(LLAMA, recompute_modules=names).run, device).recomputed_flops
        for names in ("mlp", "mlp,core_attn")
    ]
    products = 2 * 3 * ROWS * H * F * 4  # of all ranks, in four layers: the whole part runs again, down as well
    assert steps[0] == products
    assert steps[1] > steps[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recompute_modules": "mlp", "kernels": "pytorch"}, "whose code has none: give --kernels megatron"),
        ({"recompute_modules": "gdn_norm_out"}, "expected some of core_attn"),
        ({"recompute_modules": "mla_up_proj"}, "which no layer of dense has"),
        ({"recompute_modules": "moe_act"}, "which no layer of dense has"),
        ({"offload_modules": "attn_proj"}, "without core_attn"),
        ({"recompute_modules": "mlp", "recompute": "full"}, "a mode of its own"),
        ({"offload_modules": "core_attn", "recompute": "full"}, "does not go with --recompute full"),
        ({"offload_modules": "core_attn", "offload": True}, "does not go with --offload"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(LLAMA, **given)


def test_all_of_the_experts_and_a_part_of_them_are_not_both_listed() -> None:
    with pytest.raises(UsageError, match="recomputes all of the experts"):
        asked(MIXTRAL, recompute_modules="moe", offload_modules="expert_fc1")


def test_a_search_tries_lists() -> None:
    asked_for = SearchRequest(
        kernels="megatron", seq=S, recompute_modules="mlp", recompute="none,full", tp="2", pp="1,2", micro_batch="1"
    )
    space = asked_for.space(LLAMA, hardware("h100-80gb"), gpus=4, global_batch=8)
    mlp = Recompute.parse("modules:mlp", layers=4)
    assert space.plans(space.setups[0]) == (Recompute(), Recompute.parse("full", layers=4), mlp)
    alone = replace(asked_for, recompute=None).space(LLAMA, hardware("h100-80gb"), gpus=4, global_batch=8)
    assert alone.every_plan == (mlp,)
    assert SearchCandidate(setup=alone.setups[0], recompute=mlp).flags.endswith("--recompute modules:mlp")
