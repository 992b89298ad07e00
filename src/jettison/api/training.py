"""`jettison train`: lends the training loop what this library does to models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jettison.api.huggingface import ConfigRequest, build
from jettison.api.huggingface import read_config as read_hub_config
from jettison.api.planner import fingerprint
from jettison.api.request import _call
from jettison.api.scene import plan_parts
from jettison.api.verbs import Applied, _agreed, apply, apply_from_another_rank, likeness
from jettison.errors import PlanMismatch, TraceError, UsageError
from jettison.measure.rehearse import Scene
from jettison.parallel.agree import Agreement, groups_for
from jettison.parallel.reference import Gpt, GptConfig, Llama, LlamaConfig
from jettison.plan.artefact import Plan
from jettison.spec.config import parse_config, read_config
from jettison.spec.model import ModelSpec
from jettison.spec.presets import PRESETS, preset
from jettison.trace.model import ModelTrace, trace_model
from jettison.train.log import plan_name
from jettison.train.loop import train as run_recipe
from jettison.train.read import read_recipe
from jettison.train.recipe import ModelSection, PlanSection, TrainRecipe
from jettison.train.result import TrainResult
from jettison.train.tools import Built, Decision, Part, Say, shifted_before, shifted_within, silent
from jettison.units import parse_bytes


def train(
    recipe: TrainRecipe | str,
    *,
    steps: int | None = None,
    plan: PlanSection | None = None,
    gpu: str | None = None,
    must_resume: bool = False,
    progress: Callable[[str], None] = silent,
    warn: Callable[[str], None] = silent,
) -> TrainResult:
    """Train as a recipe says, on the ranks that torchrun started, or on this one.

    Args:
        recipe: one, or its TOML file, or ``module:name``.
        steps, plan, gpu: instead of what the recipe says.
        must_resume: fail where there is no checkpoint.

    Raises:
        UsageError: what was asked makes no sense on this machine or with these files.
        Infeasible: no plan fits the budget.
    """

    def made() -> TrainRecipe:
        found = read_recipe(recipe) if isinstance(recipe, str) else recipe
        if steps is not None:
            found = replace(found, steps=steps)
        if plan is not None:
            found = replace(found, plan=plan)
        if gpu is not None:
            found = replace(found, log=replace(found.log, gpu=gpu, peak_tflops=None))
        return found

    return run_recipe(made, _Tools(), must_resume=must_resume, say=progress, warn=warn)


class _Tools:
    """See `jettison.train.tools.Tools`."""

    def build(self, section: ModelSection, *, seq: int, device: torch.device) -> Built:
        """A model of random weights, on the device."""
        if section.factory is not None:
            return _from_factory(section.factory, device)
        if (section.code or ("reference" if section.architecture else "huggingface")) == "reference":
            return _reference(section, seq, device)
        values, spec = _described(section, seq)
        asked = ConfigRequest(precision="fp32", attention=section.attention)
        with device:
            model = build(values, asked, None)
        return Built(model=model, call=shifted_within, spec=spec)

    def decide(self, parts: Sequence[Part], section: PlanSection, scene: Scene | None, say: Say) -> Decision:
        """Plan, on this rank alone."""
        if section.file is not None:
            return _from_files(Path(section.file), parts)
        if section.policy is not None:
            return Decision(policy=section.policy)
        assert section.budget is not None and scene is not None
        traces = [_trace(part) for part in parts]
        say("planning")
        counts = [part.in_flight for part in parts]
        made = plan_parts(traces, counts, scene, parse_bytes(section.budget), progress=say)
        return Decision(
            plans=tuple(plan.to_json() for plan in made), likenesses=tuple(map(likeness, traces)),
            predicted_peak_bytes=max(plan.predicted.peak_bytes for plan in made),
        )  # fmt: skip

    def apply(self, parts: Sequence[Part], decision: Decision) -> int:
        """The decision, on this rank's modules."""
        if decision.policy is not None:
            word = decision.policy
            return sum(
                _recomputed_flops(apply(p.model, word, batch=p.batch, loss_fn=p.loss_fn, regions=p.regions))
                for p in parts
            )
        return sum(
            _recomputed_flops(_apply(part, text, like))
            for part, text, like in zip(parts, decision.plans, decision.likenesses, strict=True)
        )

    def forward_flops(self, built: Built, batch: Any) -> int | None:
        """From a trace on fake tensors."""
        try:
            traced = trace_model(built.model, batch, loss_fn=built.loss_fn)
        except TraceError:
            return None
        programs = [traced.root.program, *(traced.program(call) for call in traced.calls)]
        return sum(op.flops for program in programs for op in program.ops)


def _from_factory(target: str, device: torch.device) -> Built:
    """What a factory returns, without the batch that it may have for other verbs."""
    module, colon, name = target.partition(":")
    if not colon or not name:
        raise UsageError(f"model.factory: got {target!r}; expected module:function")
    made = _call(target, module, name)
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        got = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"{target} returned ({got}); expected a model, (model, batch) or (model, batch, loss_fn)")
    model, _, loss_fn = (*parts, None, None)[:3]
    return Built(model=model.to(device).train(), call=shifted_within, loss_fn=loss_fn)


def _reference(section: ModelSection, seq: int, device: torch.device) -> Built:
    """Our own code, which has one form of each architecture."""
    values = _sizes(section, seq)
    spec = parse_config(values, name=str(section.architecture))
    fixed: dict[str, Any] = {"tied": False, "attention": "sdpa"}
    if section.architecture == "gpt":
        fixed = {"tied": True, "attention": "eager", "ffn": 4 * section.hidden}
    for name, only in fixed.items():
        if getattr(section, name) not in (None, only):
            raise UsageError(f'model.{name}: the reference model has {only} only; set code = "huggingface"')
    config: Any
    if section.architecture == "gpt":
        config = GptConfig(
            layers=section.layers, hidden=section.hidden, heads=section.heads, vocab=section.vocab,
            positions=values["n_positions"], dropout=section.dropout,
        )  # fmt: skip
    elif section.architecture == "llama":
        config = LlamaConfig(
            layers=section.layers, hidden=section.hidden, heads=section.heads,
            kv_heads=values["num_key_value_heads"], head_dim=section.hidden // section.heads,
            ffn=values["intermediate_size"], vocab=section.vocab,
        )  # fmt: skip
    else:
        raise UsageError('model.code: "reference" goes with an architecture and its sizes')
    with device:
        model: nn.Module = Gpt(config) if section.architecture == "gpt" else Llama(config)
    return Built(model=model.train(), call=shifted_before, spec=spec)


def _described(section: ModelSection, seq: int) -> tuple[Any, ModelSpec]:
    """A configuration as transformers has it, and what it comes to."""
    if section.config is not None:
        path = Path(section.config)
        return read_hub_config(path), read_config(path)
    if section.preset is not None:
        spec = preset(section.preset)
        return _hub_config(PRESETS[section.preset]), spec
    values = _sizes(section, seq)
    return _hub_config(values), parse_config(values, name=str(section.architecture))


def _sizes(section: ModelSection, seq: int) -> dict[str, Any]:
    """The sizes of a section as a config.json would write them."""
    positions = section.positions or seq
    if section.architecture == "gpt":
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), section.dropout)
        if section.kv_heads not in (None, section.heads):
            raise UsageError("model.kv_heads: a GPT has as many as heads")
        return {
            "model_type": "gpt2", "n_embd": section.hidden, "n_layer": section.layers, "n_head": section.heads,
            "n_inner": section.ffn or 4 * section.hidden, "vocab_size": section.vocab, "n_positions": positions,
            "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": section.tied is not False,
            "dtype": "float32", "bos_token_id": None, "eos_token_id": None, **dropout,
        }  # fmt: skip
    if section.dropout:
        raise UsageError("model.dropout: a Llama has none")
    return {
        "model_type": "llama", "hidden_size": section.hidden, "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads, "num_key_value_heads": section.kv_heads or section.heads,
        "intermediate_size": section.ffn or -(-8 * section.hidden // 3 // 64) * 64, "vocab_size": section.vocab,
        "max_position_embeddings": positions, "tie_word_embeddings": bool(section.tied),
        "dtype": "float32", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _hub_config(values: Any) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UsageError("this model's code is that of transformers: pip install 'jettison[hf]'") from error
    return AutoConfig.for_model(**values)


def _from_files(path: Path, parts: Sequence[Part]) -> Decision:
    """Plans that were made before, for this model as it is on this rank."""
    if parts[0].number is not None and path.is_file():
        raise UsageError(
            f"plan.file: got the file {path}, and every stage of a pipeline has a plan of its own; expected the folder "
            f"that holds {plan_name(0)} and those that follow, such as the log folder of a run under a budget"
        )
    found = [_from_file(path / plan_name(part.number) if path.is_dir() else path, part) for part in parts]
    return Decision(
        plans=tuple(text for text, _, _ in found), likenesses=tuple(like for _, like, _ in found),
        predicted_peak_bytes=max(peak for _, _, peak in found),
    )  # fmt: skip


def _from_file(path: Path, part: Part) -> tuple[str, str, int]:
    """A plan's text, what a module has to be like for it, and the peak that it states."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"plan.file: {path} cannot be read: {error}") from None
    traced = _trace(part)
    digests = {call.name: traced.program(call).digest() for call in traced.calls}
    plan = Plan.from_json(text)
    try:
        plan.require(model=fingerprint(traced), digests={"": traced.root.program.digest()} | digests)
    except PlanMismatch as error:
        raise PlanMismatch(f"plan.file: {path} is of another model, batch or layout: {error}") from None
    return text, likeness(traced), plan.predicted.peak_bytes


def _apply(part: Part, plan_text: str, like: str) -> Applied:
    """The planning rank's plan on this rank's programs.

    Raises:
        PlanMismatch: this rank's model is another one, or ranks would not run the same.
    """
    with Agreement(groups_for(part.model, None)) as agreement:
        return _agreed(apply_from_another_rank(part.model, _trace(part), plan_text, like), agreement)


def _trace(part: Part) -> ModelTrace:
    traced = trace_model(
        part.model, part.batch, loss_fn=part.loss_fn, regions=part.regions, mode=part.mode
    )  # fmt: skip
    traced.holds_output = False
    return traced


def _recomputed_flops(applied: Applied) -> int:
    """FLOPs that a backward of one micro-batch spends on computing again. Regions without a program count nothing."""
    total = 0
    for region in applied.regions:
        recipes = [prepared.recipe for prepared in region.prepared.values() if prepared.recipe is not None]
        for recipe in recipes[:1]:
            total += sum(recipe.trace.program.ops[i].flops for i in recipe.recomputed_ops)
    return total
