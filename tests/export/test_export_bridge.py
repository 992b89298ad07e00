"""Overrides in Megatron-Bridge's own parser, on the container that its recipes begin with, checked as before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.target_packages import BRIDGE, MEGATRON, answered, fetched
from support.target_plans import MODELS, PLANS, exported, world

pytestmark = pytest.mark.slow

RECIPES_OWN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""As 23 of its recipes begin."""
PUBLISHED = {"gpt-22b": 2048, "mixtral-8x7b": 4096, "deepseek-v3": 4096, "llama3-8b": 8192}
"""Tokens of a sequence where none are asked for."""


def overrides(name: str) -> list[str]:
    return exported(name, "megatron-bridge").files["overrides.txt"].splitlines()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    folder = tmp_path_factory.mktemp("bridge")
    return (
        fetched(folder / "bridge", "megatron-bridge==0.6.2", how=BRIDGE),
        fetched(folder / "megatron", "megatron-core==0.19.2", how=MEGATRON),
        fetched(folder / "hydra", "hydra-core==1.3.4", "omegaconf==2.3.1", "PyYAML"),
        fetched(folder / "antlr", "antlr4-python3-runtime==4.9.3", source=True) / "src",
    )


def test_megatron_bridges_parser_takes_the_overrides(packages: tuple[Path, ...]) -> None:
    """Whatever the recipe had before; `runtime_config_update` then checks all of its sections."""
    jobs: list[dict[str, Any]] = []
    for own in ({}, RECIPES_OWN):
        for name in PLANS:
            model = MODELS[PLANS[name][0]] | own
            jobs.append({"model": model, "overrides": overrides(name), "world": world(name)})
    first = jobs[0]
    wrong = [
        {**first, "overrides": [*overrides("dense"), "model.recompute_modulez=[core_attn]"]},
        {**first, "overrides": [*overrides("dense"), "model.recompute_modules=[core_attention]"]},
        {**first, "overrides": [line for line in overrides("dense") if not line.startswith("dataset")]},
        {**first, "model": first["model"] | RECIPES_OWN, "overrides": ['model.recompute_granularity="selective"']},
    ]
    answers = answered("support.target_bridge", [*jobs, *wrong], *packages)
    for name, found in zip([*PLANS, *PLANS], answers, strict=False):
        model, _, asked = PLANS[name]
        settings = json.loads(exported(name, "megatron").files["transformer_config.json"])
        granularity = settings.get("recompute_granularity")
        expected = settings | {
            "recompute_granularity": granularity,
            "recompute_num_layers": settings.get("recompute_num_layers"),
            "fine_grained_activation_offloading": "offload_modules" in settings,
            "num_layers": MODELS[model]["num_layers"],
            "tensor_model_parallel_size": asked["tp"],
            "pipeline_model_parallel_size": asked.get("pp", 1),
            "expert_model_parallel_size": asked.get("ep", 1),
            "virtual_pipeline_model_parallel_size": asked.get("virtual_stages"),
            "sequence_parallel": True,
        }
        assert "refused" not in found, (name, found)
        assert {field: found["model"][field] for field in expected} == expected, name
        assert found["train"]["micro_batch_size"] == asked.get("micro_batch", 1)
        assert found["dataset"]["seq_length"] == found["model"]["seq_length"] == asked.get("seq", PUBLISHED[model])
        sharded = asked.get("zero", 0) > 0
        assert found["ddp"]["use_distributed_optimizer"] is found["optimizer"]["use_distributed_optimizer"] is sharded
    reasons = ("recompute_modulez", "recompute_modules", "sequence length", "recompute_num_layers")
    for reason, found in zip(reasons, answers[len(jobs) :], strict=True):
        assert reason in found["refused"], found
