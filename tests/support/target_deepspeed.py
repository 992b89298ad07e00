"""DeepSpeed's own reading of its configuration, and its checkpoints in a step of its engine on a CPU."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from support.target_process import prepare

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
prepare()

import deepspeed  # noqa: E402
import deepspeed.comm.torch as collectives  # noqa: E402
import torch  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402

import jettison  # noqa: E402
from jettison.cli.live_model import PlanReport  # noqa: E402
from jettison.models.live_model import ModelRequest, load  # noqa: E402
from jettison.planner.planner import make_planner  # noqa: E402
from jettison.verify.differences import independent_copy  # noqa: E402
from support.export_cases import Stack, held_bytes  # noqa: E402


def read(settings: dict[str, Any]) -> dict[str, Any]:
    """What its configuration says, or why it does not take it."""
    try:
        found = DeepSpeedConfig(settings)
    except (ValueError, AssertionError) as error:
        return {"refused": str(error)}
    return {
        "activation_checkpointing": vars(found.activation_checkpointing_config),
        "stage": found.zero_optimization_stage,
        "micro_batch": found.train_micro_batch_size_per_gpu,
        "bf16": found.bfloat16_config.enabled,
    }


class Asking(Stack):
    """A model whose code asks for DeepSpeed's checkpoints, as it wants them asked for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x)
        return x.square().mean()


def stepped(factory: str) -> dict[str, Any]:
    """A live plan that only checkpoints of all layers fit, exported, and carried out by the engine."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    collectives.build_shm_op = lambda: None  # would be compiled, for sums within a machine
    deepspeed.init_distributed(dist_backend="gloo")
    request = ModelRequest(model=f"support.export_cases:{factory}", optimizer="none")
    made = make_planner(load(request, fake=True).trace(), measure=False)
    budget = (3 * made.minimum_budget_bytes + 2 * made.plain_budget_bytes) // 5
    plan = jettison.plan(made.trace, jettison.Bytes(budget), measure=False)
    found = jettison.export_plan(PlanReport(plan=plan, request=request).document(), to="deepspeed")
    settings = json.loads(found.files["deepspeed.json"])
    loaded = load(request, fake=False)
    plain, model = independent_copy(loaded.model), Asking(loaded.model.layers[0].rate)
    model.load_state_dict(loaded.model.state_dict())
    torch.manual_seed(1)
    plain(*loaded.batch).backward()
    deepspeed.checkpointing.configure(None, deepspeed_config=settings)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    (batch,) = (given.clone().requires_grad_() for given in loaded.batch)  # else the first layer's gradients are None
    torch.manual_seed(1)
    held, loss = held_bytes(engine, (batch,))
    engine.backward(loss)
    same = all(map(torch.equal, (p.grad for p in plain.parameters()), (p.grad for p in model.parameters())))
    before = model.layers[0].down.weight.detach().clone()
    engine.step()
    return {
        "settings": settings,
        "said": found.cost.activation_bytes,
        "held": held,
        "layers": len(model.layers),
        "same": same,
        "moved": not torch.equal(before, model.layers[0].down.weight),
    }


if __name__ == "__main__":
    job = json.load(sys.stdin)
    configs = [read(settings) for settings in job.get("configs", ())]
    print(json.dumps({"configs": configs, "steps": [stepped(one) for one in job.get("steps", ())]}))
