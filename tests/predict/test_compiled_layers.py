"""What a compiled layer keeps, by the description, beside what Inductor's partitioner keeps of the same layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.auto_recompute import choose, layer_policies
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Mode, Recompute
from support.compiled_blocks import QUIET
from support.compiled_families import Loss, blocks_of, language_model

pytestmark = [*QUIET]

B, S = 8, 64


def described(values: dict[str, Any], **given: object) -> Forecast:
    model = parse_config(values, name="small")
    request = RunRequest(seq=S, micro_batch=B, **({"precision": "fp32", "kernels": "huggingface"} | given))
    run = resolve(model, request).run
    return forecast(replace(run, compiled=True))


LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("kernels", ["huggingface", "pytorch"])
def test_a_llama_keeps_what_products_read_and_return(kernels: str) -> None:
    """Eight of b s h, three of the feed-forward width, a log-sum-exp, and of norms a number a row: nothing of SiLU."""
    rows = B * S
    found = dict(described(LLAMA, kernels=kernels).layer_bytes())["layers.1"]
    assert found == 4 * rows * (8 * 64 + 3 * 176 + 4 + 2)


def test_other_modes_are_as_without_it() -> None:
    full = described(LLAMA, recompute="full")
    assert full.peak_bytes == forecast(replace(full.run, compiled=False)).peak_bytes


@pytest.mark.parametrize(("mode", "checkpointed"), [("interval:2", {0, 2}), ("block:1", {0})])
def test_layers_beside_checkpoints_are_compiled_as_well(mode: str, checkpointed: set[int]) -> None:
    plain, full, found = (dict(described(LLAMA, recompute=m).layer_bytes()) for m in ("none", "full", mode))
    for number in range(4):
        other = full if number in checkpointed else plain
        assert found[f"layers.{number}"] == other[f"layers.{number}"]
    assert full["layers.1"] < plain["layers.1"]


@pytest.mark.parametrize("given", [{}, {"fp8_recipe": "tensorwise"}, {"lora": "4", "kernels": "huggingface"}], ids=str)
def test_a_plan_keeps_at_most_what_compiled_layers_keep(given: dict[str, str]) -> None:
    """With room for all it is the compiled run, in bytes and seconds; with less it recomputes some of that."""
    run = described(LLAMA, **{"kernels": "pytorch", "precision": "bf16"} | given).run
    plain, device = forecast(run), hardware("h100-80gb")
    roomy = choose(replace(run, recompute=Recompute(mode=Mode.AUTO)), plain.peak_bytes, device)
    assert roomy.forecast.peak_bytes == plain.peak_bytes and roomy.seconds == 0.0
    assert dict(roomy.forecast.layer_bytes()) == dict(plain.layer_bytes())
    assert {word for _, word in layer_policies(roomy)} == {"none"}
    took = estimate(run, device, chosen=[None] * run.model.depth)
    assert roomy.estimate.recomputed_flops == 0
    assert roomy.estimate.step_seconds == pytest.approx(took.step_seconds, rel=1e-9)
    tight = choose(replace(run, recompute=Recompute(mode=Mode.AUTO)), roomy.minimum_budget_bytes, device)
    assert tight.forecast.peak_bytes <= roomy.minimum_budget_bytes < plain.peak_bytes
    assert tight.step_seconds > roomy.step_seconds
    for share in range(5):  # budgets of which some leave layers parts of what they keep
        budget = roomy.minimum_budget_bytes + (plain.peak_bytes - roomy.minimum_budget_bytes) * share // 4
        found = choose(replace(run, recompute=Recompute(mode=Mode.AUTO)), budget, device)
        assert len(dict(layer_policies(found))) == run.model.depth
    rows = dict(plain.layer_bytes())
    assert all(nbytes <= rows[name] for name, nbytes in tight.forecast.layer_bytes())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kernels": "megatron"}, "whose layers are not compiled"),
        ({"recompute": "selective"}, "chooses within a layer, as the compiler does"),
    ],
)
def test_what_is_not_known_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        described(LLAMA, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lora"),
    [("llama", None), ("gpt2", None), ("qwen3", None), ("llama", "r=4,targets=q_proj+o_proj+down_proj")],
)
def test_it_is_inductors_choice_to_the_byte(kind: str, lora: str | None) -> None:
    """All but tables that every layer is given: two of fp32 for each place, of a head's width."""
    import torch
    from torch._inductor.compile_fx import compile_fx

    from jettison.runtime.compiled_partition import Partition, watching_splits
    from jettison.runtime.compiled_regions import one_graph
    from jettison.solve.checkpoint_policy import KeepAll

    model = Loss(language_model(kind))
    values = model.model.config.to_dict()
    if lora is not None:
        import peft

        model.model.enable_input_require_grads()
        targets = ["q_proj", "o_proj", "down_proj"]
        model.model = peft.get_peft_model(model.model, peft.LoraConfig(r=4, target_modules=targets)).base_model.model
    block = blocks_of(model)[0]

    def split_only(graph: Any, inputs: Any) -> Any:
        told = {"custom_partitioner_fn": Partition(KeepAll())}
        return compile_fx(graph, inputs, inner_compile=_as_it_is, config_patches=told)

    def _as_it_is(graph: Any, *_: Any, **__: Any) -> Any:
        return graph

    with watching_splits() as seen, torch._functorch.config.patch(enable_autograd_cache=False):
        block.forward = one_graph(block.forward, backend=split_only)
        model(torch.zeros(B, S, dtype=torch.int64))
    (split,) = seen
    tables = 0 if kind == "gpt2" else 2 * 4 * S * 16
    theirs = split.program.kept_bytes(split.kept) - tables
    found = described(
        values, lora=lora, dropout=0.1 if kind == "gpt2" else None, attention="eager" if kind == "gpt2" else None
    )
    assert dict(found.layer_bytes())["layers.1"] == theirs
