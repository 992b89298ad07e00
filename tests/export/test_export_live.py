"""Plans of modules: what is written runs, holds the bytes that were said, and gives the same gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import jettison
from jettison.cli.live_model import PlanReport
from jettison.core.errors import DoesNotFit, PlanMismatch, UsageError
from jettison.core.units import Bytes
from jettison.frameworks.export import Exported, exporter
from jettison.frameworks.layer_policies import (
    LayerAction,
    checkpointed,
    checkpointed_on_host,
    draws_again,
    kept_whole,
    savable,
    writes_in_place,
)
from jettison.frameworks.live_export import live_export
from jettison.frameworks.nearest_policy import CannotSay
from jettison.frameworks.transformers.write import code as transformers_code
from jettison.models.live_model import ModelRequest, load
from jettison.planner.planner import make_planner
from jettison.solve.plan import Plan
from jettison.verify.differences import compare_gradients, independent_copy
from support.export_cases import DEPTH, TOKENS, WIDTH, applied, held_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def planner(factory: str) -> Any:
    return make_planner(load(ModelRequest(model=f"support.export_cases:{factory}"), fake=True).trace(), measure=False)


@cache
def document(factory: str, share: float) -> dict[str, Any]:
    """A plan's document, for a budget so far between the smallest one and the plain step."""
    found = planner(factory)
    low, high = found.minimum_budget_bytes, found.plain_budget_bytes
    plan = jettison.plan(found.trace, Bytes(int(low + share * (high - low))), measure=False)
    request = ModelRequest(model=f"support.export_cases:{factory}", optimizer="none")
    return PlanReport(plan=plan, request=request).document()


@cache
def exported(to: str, factory: str = "stack", share: float = 0.7) -> Exported:
    return jettison.export_plan(document(factory, share), to=to)


def real(factory: str) -> Any:
    return load(ModelRequest(model=f"support.export_cases:{factory}"), fake=False)


def same_as_plain(found: Exported, factory: str, change: Callable[[Any], Any]) -> int:
    """Held bytes of a real step, whose gradients are those of a plain one."""
    loaded = real(factory)
    plain = independent_copy(loaded.model)
    torch.manual_seed(1)
    plain(*loaded.batch).backward()
    model = change(loaded.model)
    torch.manual_seed(1)
    held, loss = held_bytes(model, loaded.batch)
    loss.backward()
    theirs = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    assert all(torch.equal(p.grad, theirs[name]) for name, p in plain.named_parameters())
    return held


@pytest.mark.parametrize(("factory", "share"), [("stack", 0.7), ("noisy", 0.7), ("stack", 1.0)])
def test_plain_torch_holds_what_was_said_to_the_byte(factory: str, share: float) -> None:
    found = exported("torch", factory, share)
    assert same_as_plain(found, factory, lambda model: applied(found, model)) == found.cost.activation_bytes
    assert found.cost.peak_bytes <= found.subject.budget_bytes
    assert found.cost.layer_bytes == sum(policy.kept_bytes for policy in found.policies)


def test_hooks_around_a_model_see_the_same_with_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2.15 on, torch warns of selective contexts under outer hooks that are not told what to do."""
    found = exported("torch")
    loaded = real("stack")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        applied(found, loaded.model)(*loaded.batch).backward()  # a warning is an error

    def checkpoint(function: Any, *, respect_saved_tensors_hooks: bool | None = None) -> None: ...

    settings: dict[str, Any] = {}
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    exec(found.files["checkpointing.py"], settings)
    assert settings["PAST_HOOKS"] == {"respect_saved_tensors_hooks": False}
    assert "**PAST_HOOKS" in found.files["checkpointing.py"]


def test_what_is_written_in_place_is_not_handed_out_again() -> None:
    """torch refuses to: what `topk` made has changed when backward asks for it."""
    found = exported("torch", "routed", 0.3)
    for policy in found.policies:
        ops = policy.program.ops
        wanted = {op.index for op in ops if op.name.startswith("aten.topk")}
        assert wanted and savable(policy.program, frozenset(range(len(ops)))).isdisjoint(wanted)
    assert any(policy.action is LayerAction.SELECT for policy in found.policies)
    assert same_as_plain(found, "routed", lambda model: applied(found, model)) == found.cost.activation_bytes


def test_a_layer_that_can_be_said_keeps_what_the_plan_keeps() -> None:
    found = exported("torch", "stack", 0.7)
    chosen = [policy for policy in found.policies if policy.action is LayerAction.SELECT]
    assert chosen
    for policy in chosen:
        assert policy.kept >= policy.decision.kept
        beside = policy.kept - policy.decision.kept  # what the layer is given, and a call's other outputs
        makers = {policy.program.buffers[b].producer for b in policy.decision.kept}
        assert all(policy.program.buffers[b].producer in {None, *makers} for b in beside)


def test_nothing_in_place_is_saved_and_no_part_of_what_is_drawn() -> None:
    """Dropout on a CPU writes its mask in place: a plan keeps the mask, selective contexts must draw it again."""
    found = exported("torch", "noisy", 0.7)
    chosen = [policy for policy in found.policies if policy.action is LayerAction.SELECT]
    assert chosen and all(draws_again(policy) for policy in chosen)
    for policy in chosen:
        kept = {policy.program.buffers[b].producer for b in policy.decision.kept}
        assert any(op.index in kept and writes_in_place(op) for op in policy.program.ops)
        assert not [call for call in policy.saves if call.op.partition(".")[2].partition(".")[0].endswith("_")]
    assert not found.exact


def test_two_counts_agree_on_what_checkpoints_free() -> None:
    """What the steps hold differs by what the layers' programs say."""
    plain, found = exported("torch", "stack", 1.0), exported("torch", "stack", 0.7)
    assert plain.cost.activation_bytes is not None and found.cost.activation_bytes is not None
    assert (
        plain.cost.activation_bytes - found.cost.activation_bytes == plain.cost.layer_bytes - found.cost.layer_bytes > 0
    )


def test_lightning_wraps_the_layers_that_are_marked() -> None:
    pytest.importorskip("lightning")
    from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing

    found = exported("lightning", "noisy", 0.7)
    chosen = [policy.action is LayerAction.CHECKPOINT for policy in found.policies]
    assert 0 < sum(chosen) < DEPTH
    defined: dict[str, Any] = {"__name__": "exported"}
    exec(found.files["strategy.py"], defined)

    def change(model: Any) -> Any:
        strategy = defined["strategy"]()
        _setup_activation_checkpointing(defined["mark"](model), strategy._activation_checkpointing_kwargs)
        return model

    wrapped: list[bool] = []

    def seen(model: Any) -> Any:
        model = change(model)
        wrapped.extend(hasattr(layer, "_checkpoint_wrapped_module") for layer in model.layers)
        return model

    assert same_as_plain(found, "noisy", seen) == found.cost.activation_bytes
    assert wrapped == chosen


def test_accelerate_reads_its_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin

    found = exported("accelerate", "stack", 0.7)
    file = tmp_path / "accelerate.yaml"
    file.write_text(found.files["accelerate.yaml"])
    config = load_config_from_file(str(file))
    assert isinstance(config, ClusterConfig)
    assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert config.fsdp_config["fsdp_activation_checkpointing"] is True
    for name, value in config.fsdp_config.items():
        monkeypatch.setenv(name.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.activation_checkpointing
    assert {policy.action for policy in found.policies} == {LayerAction.CHECKPOINT}


def test_what_a_target_cannot_say_is_refused_by_name() -> None:
    with pytest.raises(CannotSay, match=r"layers\.0 is a Block, which is no GradientCheckpointingLayer"):
        exported("transformers")
    for target in ("megatron", "megatron-bridge"):
        with pytest.raises(CannotSay, match=f"{target} builds its own layers"):
            exported(target)


def test_what_no_checkpoint_can_reach_does_not_fit() -> None:
    budget = document("stack", 0.0)["budget_bytes"]
    with pytest.raises(DoesNotFit, match="torch can express which calls of ops stay") as caught:
        exported("torch", "stack", 0.0)
    assert caught.value.peak_bytes > budget == caught.value.limit_bytes


def test_a_brief_has_all_that_the_plan_has() -> None:
    found = exported("brief", "stack", 0.7)
    text = found.files["brief.md"]
    made = document("stack", 0.7)
    for part in (
        made["hash"],
        f"{made['budget_bytes']} bytes",
        f"{made['predicted']['peak_bytes']} bytes",
        "Open quest",
    ):
        assert part in text
    assert found.exact and found.cost == found.plan_cost


def test_plans_that_are_edited_or_unknown_are_refused() -> None:
    made = document("stack", 0.7)
    edited = made | {"budget_bytes": made["budget_bytes"] + 1}
    with pytest.raises(PlanMismatch, match="changed after it was written"):
        jettison.export_plan(edited, to="torch")
    with pytest.raises(UsageError, match="expected one of torch, torch_remat, transformers"):
        jettison.export_plan(made, to="tensorflow")
    with pytest.raises(UsageError, match=r"expected jettison\.plan/1"):
        jettison.export_plan({"schema": "jettison.proof/1"}, to="torch")
    with pytest.raises(UsageError, match="nothing to export"):
        jettison.export_plan({"schema": "jettison.plan/1", "feasible": False}, to="torch")
    other = made | {"made_by": made["made_by"] | {"model": "support.export_cases:noisy"}}
    with pytest.raises(PlanMismatch):
        jettison.export_plan(other, to="torch")


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
}


def test_transformers_carries_out_the_mask_and_its_trainer_takes_the_arguments(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # of its Trainer
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    request = ModelRequest(model=str(file), seq=48, micro_batch=2, precision="fp32", optimizer="none")
    made = make_planner(load(request, fake=True).trace(), measure=False)
    budget = (made.minimum_budget_bytes + made.plain_budget_bytes) // 2
    plan = jettison.plan(made.trace, Bytes(budget), measure=False)
    found = jettison.export_plan(PlanReport(plan=plan, request=request).document(), to="transformers")
    chosen = [policy.action is LayerAction.CHECKPOINT for policy in found.policies]
    assert 0 < sum(chosen) < len(chosen) and "TRAINING_ARGUMENTS" not in found.files["checkpointing.py"]
    loaded = load(request, fake=False)
    plain = independent_copy(loaded.model)
    plain(**loaded.batch).loss.backward()
    held, output = held_bytes(applied(found, loaded.model), loaded.batch)
    output.loss.backward()
    assert held == found.cost.activation_bytes
    assert [layer.gradient_checkpointing for layer in loaded.model.model.layers] == chosen
    assert compare_gradients(plain, loaded.model).identical
    _trainer_takes(found, loaded.model, tmp_path)


def _trainer_takes(found: Exported, model: Any, folder: Path) -> None:
    """A mask that is an ``every_n_layers`` as the Trainer's own arguments: the same switches, set by its own method."""
    from transformers import TrainingArguments

    every = tuple(checkpointed(d) if i % 2 == 0 else kept_whole(d) for i, d in enumerate(found.subject.decisions))
    defined: dict[str, Any] = {"__name__": "exported"}
    exec(transformers_code(found.subject, every), defined)
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, **defined["TRAINING_ARGUMENTS"])
    assert arguments.activation_checkpointing
    given = dict(arguments.activation_checkpointing_kwargs)
    step = given.pop("every_n_layers")
    model.activation_checkpointing_enable(given, every_n_layers=step)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [i % 2 == 0 for i in range(6)]


def written(to: Callable[..., Exported], factory: str, budget_bytes: int) -> Exported:
    """By a target, for a plan whose layers' inputs wait on the host."""

    def write(subject: Any, pricer: Any) -> Exported:
        moving = (
            replace(decision, kept=(full := checkpointed_on_host(decision)).kept, offloaded=full.offloaded)
            for decision in subject.decisions
        )
        return to(replace(subject, decisions=tuple(moving), budget_bytes=budget_bytes), pricer)

    made = document(factory, 0.7)
    return live_export(
        Plan.from_json(json.dumps(made)), made, write=write, gpu=None, model=None, progress=lambda _: None
    )


@pytest.mark.parametrize("target", ["accelerate", "deepspeed"])
def test_inputs_of_checkpoints_wait_on_the_host_where_nothing_else_fits(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = exporter(target)
    here = written(to, "many_rows", 10**9)
    assert here.policies[0].action is LayerAction.KEEP
    full = written(to, "many_rows", document("many_rows", 0.7)["budget_bytes"])
    assert full.cost.activation_bytes is not None and full.cost.host_bytes == 0
    there = written(to, "many_rows", full.cost.peak_bytes - 1)
    inputs = DEPTH * 64 * TOKENS * WIDTH * 4
    assert (
        there.cost.activation_bytes == full.cost.activation_bytes - inputs * (DEPTH - 1) // DEPTH
    )  # the batch itself stays
    assert there.cost.host_bytes == inputs
    assert there.cost.peak_bytes < full.cost.peak_bytes and there.cost.layer_bytes == 0
    if target == "deepspeed":
        assert json.loads(there.files["deepspeed.json"])["activation_checkpointing"]["cpu_checkpointing"] is True
        return
    assert "fsdp_activation_checkpointing_offload: true" in there.files["accelerate.yaml"]
    pytest.importorskip("accelerate")
    from accelerate.utils import FullyShardedDataParallelPlugin

    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing_offload


def test_accelerate_is_not_told_to_run_dropout_again() -> None:
    """Its checkpoints do not restore random generator states."""
    with pytest.raises(CannotSay, match="do not restore random generator states"):
        exported("accelerate", "noisy", 0.3)


@pytest.mark.parametrize(
    ("factory", "share"), [("noisy", 0.2), pytest.param("many_layers", 0.0, marks=pytest.mark.slow)]
)
def test_the_plans_own_bytes_are_those_of_its_document(factory: str, share: float) -> None:
    """Packed, or in segments: what is spared is not counted."""
    made, found = document(factory, share), exported("brief", factory, share)
    assert bool(made["segments"]) is (factory == "many_layers")
    assert any(layer["packed"] for layer in made["layers"]) is (factory == "noisy")
    assert [layer["plan_kept_bytes"] for layer in found.document()["layers"]] == [
        layer["kept_bytes"] for layer in made["layers"]
    ]
    assert found.plan_cost.layer_bytes == sum(layer["kept_bytes"] for layer in made["layers"])
    assert [layer["kept_bytes"] for layer in found.document()["layers"]] == [
        layer["kept_bytes"] for layer in made["layers"]
    ]  # a brief exports the plan as it is
