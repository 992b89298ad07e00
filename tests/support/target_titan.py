"""torchtitan's own Llama on a CPU under an exported file: bytes that a step holds, and its gradients."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any

from support.target_process import prepare

if __name__ == "__main__":
    prepare()

ROWS, LENGTH, WORDS, LAYERS = 4, 256, 2048, 4


def llama() -> Any:
    """A factory for `jettison plan`: its debug model with four layers, a batch and a loss."""
    import torch
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model
    config.layers = [
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, inner_attention=ScaledDotProductAttention.Config())
        )
        for layer in config.layers[:LAYERS]
    ]
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    return model, {"tokens": ids, "positions": positions}, loss_of


def loss_of(output: Any) -> Any:
    """Next to nothing beside the output."""
    return output.square().mean()


def applied(text: str, model: Any, *, away: bool = False) -> Any:
    """The model under torchtitan's own class.

    Args:
        away: what waits on the host is NumPy's, since a CPU's own memory is the device's here.
    """
    import torch

    from support.export_cases import numpy_host

    module = sys.modules["planned_ac"] = types.ModuleType("planned_ac")
    exec(compile(text, "planned_ac.py", "exec"), vars(module))
    if away and "_Away" in vars(module):
        vars(module)["_OnHost"] = numpy_host(module._Away)
    config = module.PlannedAC.Config()
    with torch.no_grad():
        config.build().apply(model)
    return model


def live() -> dict[str, Any]:
    """A plan of the model itself, exported and carried out."""
    import torch

    import jettison
    from jettison.cli.live_model import PlanReport
    from jettison.models.live_model import ModelRequest, load
    from jettison.planner.planner import make_planner
    from jettison.verify.differences import independent_copy
    from support.export_cases import held_bytes

    torch.set_num_threads(1)
    request = ModelRequest(model="support.target_titan:llama", optimizer="none")
    made = make_planner(load(request, fake=True).trace(), measure=False)
    budget = (made.minimum_budget_bytes + 2 * made.plain_budget_bytes) // 3
    plan = jettison.plan(made.trace, jettison.Bytes(budget), measure=False)
    found = jettison.export_plan(PlanReport(plan=plan, request=request).document(), to="torchtitan")
    loaded = load(request, fake=False)
    plain = independent_copy(loaded.model)
    without, loss = held_bytes(plain, loaded.batch, loss_of)
    loss.backward()
    model = applied(found.files["planned_ac.py"], loaded.model)
    held, loss = held_bytes(model, loaded.batch, loss_of)
    loss.backward()
    theirs = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {
        "said": found.cost.activation_bytes,
        "held": held,
        "without": without,
        "selective": sum(bool(policy.saves) for policy in found.policies),
        "same": all(torch.equal(p.grad, theirs[name]) for name, p in plain.named_parameters()),
    }


def moving() -> dict[str, Any]:
    """A plan that moves: all that a layer saves, its three largest tensors, and what checkpoints are given."""
    import torch

    import jettison
    from jettison.cli.live_model import PlanReport
    from jettison.frameworks.export import exporter
    from jettison.frameworks.live_export import live_export
    from jettison.models.live_model import ModelRequest, load
    from jettison.planner.planner import make_planner
    from jettison.verify.differences import independent_copy
    from support.export_cases import MOVING, held_bytes

    torch.set_num_threads(1)
    request = ModelRequest(model="support.target_titan:llama", optimizer="none")
    made = make_planner(load(request, fake=True).trace(), measure=False)
    plan = jettison.plan(made.trace, jettison.Bytes(made.plain_budget_bytes), measure=False)

    def write(subject: Any, pricer: Any) -> Any:
        decisions = tuple(way(decision) for way, decision in zip(MOVING, subject.decisions, strict=True))
        return exporter("torchtitan")(dataclasses.replace(subject, decisions=decisions), pricer)

    document = PlanReport(plan=plan, request=request).document()
    found = live_export(plan, document, write=write, gpu=None, model=None, progress=lambda _: None)
    loaded = load(request, fake=False)
    plain = independent_copy(loaded.model)
    loss_of(plain(**loaded.batch)).backward()
    model = applied(found.files["planned_ac.py"], loaded.model, away=True)
    held, loss = held_bytes(model, loaded.batch, loss_of)
    loss.backward()
    theirs = [p.grad for p in model.parameters()]
    return {
        "said": found.cost.activation_bytes,
        "held": held,
        "host": found.cost.host_bytes,
        "same": all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), theirs, strict=True)),
    }


def given(text: str) -> dict[str, Any]:
    """A file on the model: which layers it wrapped, and whether gradients are those of a copy."""
    import torch

    from jettison.verify.differences import independent_copy

    torch.set_num_threads(1)
    model, batch, _ = llama()
    plain = independent_copy(model)
    loss_of(plain(**batch)).backward()
    model = applied(text, model)
    loss_of(model(**batch)).backward()
    theirs = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {
        "wrapped": [hasattr(layer, "_checkpoint_wrapped_module") for layer in model.layers.children()],
        "same": all(torch.equal(p.grad, theirs[name]) for name, p in plain.named_parameters()),
    }


if __name__ == "__main__":
    job = json.load(sys.stdin)
    answer = {"given": [given(text) for text in job["files"]]}
    if job.get("live"):
        answer |= {"live": live(), "moving": moving()}
    print(json.dumps(answer))
