"""What a described plan moves to the host, in the words of trainers that can offload."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import jettison
from jettison.cli.plan import PlanFlags, plan, remade
from jettison.core.errors import DoesNotFit
from jettison.frameworks.export import Exported
from jettison.frameworks.layer_policies import LayerAction, LayerPolicy, kept_whole
from jettison.frameworks.megatron.write import _offloaded_sets, by_modules, offloading
from jettison.frameworks.nearest_policy import DescribedPricer, decisions_of
from jettison.request.options import RunRequest
from jettison.spec.recompute import OFFLOADED

GPT = {"tp": 8, "micro_batch": 4, "kernels": "megatron", "offload": True}
LLAMA = {"dp": 8, "zero": 3, "micro_batch": 2, "offload": True}
MIXTRAL = {"tp": 4, "ep": 8, "dp": 8, "zero": 1, "micro_batch": 4, "kernels": "megatron", "offload": True}


@cache
def document(model: str, budget: str, **asked: Any) -> dict[str, Any]:
    return plan(model, RunRequest(**asked), PlanFlags(budget=budget, gpu="h100-80gb")).document()


def exported(made: dict[str, Any], to: str) -> Exported:
    return jettison.export_plan(made, to=to)


def priced(made: dict[str, Any]) -> DescribedPricer:
    return DescribedPricer(remade(made["made_by"]).choice)


@pytest.mark.parametrize(
    ("model", "budget", "asked"),
    [("gpt-22b", "46GiB", GPT), ("llama3-8b", "23GiB", {"tp": 4, "micro_batch": 2, "pp": 2, "micro_batches": 8})],
)
def test_a_plans_own_moves_are_priced_as_the_plan_prices_them(model: str, budget: str, asked: dict[str, Any]) -> None:
    pricer = priced(document(model, budget, **(asked | {"kernels": "megatron", "offload": True})))
    decisions = decisions_of(pricer.choice)
    assert any(decision.offloaded for decision in decisions)
    own = [
        LayerPolicy(
            decision=d,
            action=LayerAction.SELECT,
            kept=d.kept,
            offloaded=d.offloaded,
            again=d.program.recompute_set(d.kept),
        )
        for d in decisions
    ]
    assert pricer.cost(own) == pricer.plan()


def test_a_module_sends_what_the_paper_says_that_it_saves() -> None:
    """arXiv 2205.05198, equation 2 and its list, in bytes of one rank: sbh/t is one of them."""
    pricer = priced(document("gpt-22b", "46GiB", **GPT))
    run, decision = pricer.choice.forecast.run, decisions_of(pricer.choice)[0]
    model = run.model
    sbh = run.seq * run.micro_batch * model.hidden // 8
    scores = run.micro_batch * 64 * run.seq**2 // 8
    sends = {
        "attn_norm": 2 * sbh,
        "qkv_linear": 2 * sbh,
        "core_attn": 6 * sbh + 5 * scores,
        "attn_proj": 2 * sbh,
        "mlp_norm": 2 * sbh,
    }
    whole = kept_whole(decision)
    for module, nbytes in sends.items():
        sent = offloading(whole, [module])
        assert decision.program.kept_bytes(sent.offloaded) == whole.kept_bytes - sent.kept_bytes == nbytes, module
    everything = offloading(whole, OFFLOADED)
    assert decision.program.kept_bytes(everything.offloaded) == sum(sends.values())
    again = offloading(by_modules(decision, ["layernorm"]), ["attn_norm"])
    # a recomputed norm still needs what it was given
    assert decision.program.kept_bytes(again.offloaded) == 2 * sbh


def test_megatron_is_told_which_modules_wait_on_the_host() -> None:
    made = document("gpt-22b", "46GiB", **GPT)
    found = exported(made, "megatron")
    settings = json.loads(found.files["transformer_config.json"])
    assert settings["fine_grained_activation_offloading"] is True
    modules = settings["offload_modules"]
    flags = found.files["megatron-flags.txt"]
    assert f"--fine-grained-activation-offloading\n--offload-modules {' '.join(modules)}\n" in flags
    lines = exported(made, "megatron-bridge").files["overrides.txt"].splitlines()
    assert f"model.offload_modules=[{','.join(modules)}]" in lines
    moved = [policy.program.kept_bytes(policy.offloaded) for policy in found.policies]
    assert moved[-1] == 0 < moved[0]  # of the last layer backward begins at once
    assert found.cost.host_bytes == sum(moved)
    plain = document("gpt-22b", "46GiB", **(GPT | {"offload": False}))
    assert found.cost.step_seconds < exported(plain, "megatron").cost.step_seconds  # type: ignore[operator]
    assert "other tensors" in found.lost[0]
    assert "mlp" in settings["recompute_modules"] and any("hangs" in note for note in found.notes)


def test_what_fits_without_the_host_leaves_it_alone() -> None:
    made = document("gpt-22b", "79GiB", **GPT)
    assert "offload" not in exported(made, "megatron").files["megatron-flags.txt"]


def test_sets_of_modules_are_those_that_the_configuration_takes() -> None:
    found = exported(document("mixtral-8x7b", "44GiB", **MIXTRAL), "megatron").subject
    beside_nothing = set(_offloaded_sets(found, ()))
    assert {module for modules in beside_nothing for module in modules} >= {"core_attn", "moe_act", "attn_norm"}
    assert all("core_attn" in modules for modules in beside_nothing if "attn_proj" in modules)
    assert not {m for modules in _offloaded_sets(found, ("moe",)) for m in modules} & {"moe_act", "expert_fc1"}
    assert not any("core_attn" in modules for modules in _offloaded_sets(found, ("core_attn",)))


def test_checkpoints_on_the_host_where_nothing_else_fits() -> None:
    made = document("llama3-8b", "25.5GiB", **LLAMA)
    with pytest.raises(DoesNotFit):
        exported(
            plan("llama3-8b", RunRequest(**(LLAMA | {"offload": False})), PlanFlags(budget="25.5GiB")).document(),
            "torch",
        )
    found = exported(made, "transformers")
    for target in ("torch", "torchtitan"):  # the same words, carried out by hooks in the file
        assert exported(made, target).cost == found.cost
    text = found.files["checkpointing.py"]
    assert '"every_n_layers": 1, "offload": True}' in text and "enable(dict(KWARGS), offload=True)" in text
    assert json.loads(exported(made, "deepspeed").files["deepspeed.json"])["activation_checkpointing"][
        "cpu_checkpointing"
    ]
    run = remade(made["made_by"]).choice.forecast.run
    inputs = 2 * run.seq * run.micro_batch * run.model.hidden
    assert found.cost.host_bytes == 31 * inputs and found.cost.layer_bytes == inputs
    assert found.cost.peak_bytes <= made["budget_bytes"]
    beside = priced(made).cost(found.policies)  # the same, with copies beside what is computed
    assert beside.peak_bytes == found.cost.peak_bytes and beside.step_seconds < found.cost.step_seconds  # type: ignore[operator]
    larger = document("llama3-8b", "30GiB", **LLAMA)
    assert "offload" not in exported(larger, "transformers").files["checkpointing.py"]
    assert "ON_HOST" not in exported(larger, "torch").files["checkpointing.py"]


def small_llama() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=32)
    return transformers.LlamaForCausalLM(config).train(), torch.randint(0, 32, (1, 4))


def test_plain_torch_carries_out_by_number_what_waits_on_the_host() -> None:
    model, batch = small_llama()
    from jettison.verify.differences import compare_gradients, independent_copy
    from support.export_cases import applied

    plain, names = independent_copy(model), list(model.state_dict())
    plain(batch, labels=batch).loss.backward()
    applied(exported(document("llama3-8b", "25.5GiB", **LLAMA), "torch"), model)
    assert [type(layer).__name__ for layer in model.model.layers] == ["_Waiting"] * 31 + ["CheckpointWrapper"]
    assert list(model.state_dict()) == names
    model(batch, labels=batch).loss.backward()
    assert compare_gradients(plain, model).identical


def test_transformers_takes_the_words_for_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies want pinned memory, which a machine without an accelerator does not have: here they are not pinned."""
    torch = pytest.importorskip("torch")
    model, batch = small_llama()
    from jettison.verify.differences import compare_gradients, independent_copy
    from support.export_cases import applied

    asked: list[bool] = []

    def save_on_cpu(*, pin_memory: bool, device_type: str) -> Any:
        asked.append(pin_memory)
        return torch.autograd.graph.save_on_cpu(pin_memory=False)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", save_on_cpu)
    plain = independent_copy(model)
    plain(batch, labels=batch).loss.backward()
    applied(exported(document("llama3-8b", "25.5GiB", **LLAMA), "transformers"), model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model(batch, labels=batch).loss.backward()
    assert asked == [True] * 32
    assert compare_gradients(plain, model).identical
