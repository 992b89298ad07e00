"""Runs that NVIDIA and SimuMax published since 2025, as they are described to the price model.

`tests/facts/nemo_bridge_throughput.csv`: the tables of NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and its
archive, pre-training of the models that there are presets for, in bf16 and fp8; what a row's columns do not say
(graphs, dispatcher, recompute) is in the configurations of the same repository, at the time of the release.
`tests/facts/simumax_times.csv`: docs/b200 of MooreThreads/SimuMax, Megatron-LM of its notes on eight B200.

NOTE [ Looked at ]
Every second row of NVIDIA's tables was looked at while terms were found (``listed``), and so were SimuMax's twelve runs
of Llama 3 70B at 4096 tokens. The others were compared when the terms were settled.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jettison.cost.execution import Execution, execution_of
from jettison.families.config import parse_config
from jettison.families.presets import PRESETS, preset
from jettison.predict.time import Estimate, estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.fp8 import fp8_recipe
from jettison.spec.hardware import hardware
from jettison.spec.model import ModelSpec
from jettison.spec.model_variants import with_quant_recipe
from jettison.spec.run import Run

FACTS = Path(__file__).parent.parent / "tests" / "facts"
GPUS = {"H100": "h100-80gb", "B200": "b200-192gb", "B300": "b300-288gb", "GB200": "gb200-192gb", "GB300": "gb300-288gb"}
RECIPES = {"BF16": None, "FP8-CS": "tensorwise", "FP8-BLOCKS": "blockwise", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
"""``scripts/performance/utils/precision.py`` of Megatron-Bridge."""
ROTATED = "NeMo 25.11"
"""The first release whose performance scripts set ``apply_rope_fusion``."""
FUSED = "NeMo 26.06"
"""The first release whose experts are few kernels, in MXFP8."""
KIMI_K2 = {
    **PRESETS["deepseek-v3"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""huggingface.co/moonshotai/Kimi-K2-Base, config.json: DeepSeek V3 with other numbers."""
NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
}
"""``Nemotron3NanoProvider`` of Megatron-Bridge (26.02), in the words of transformers."""
NEMOTRON_3_SUPER = {
    **NEMOTRON_3_NANO,
    "hidden_size": 4096,
    "intermediate_size": 2688,
    "num_hidden_layers": 88,
    "hybrid_override_pattern": "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
    "routed_scaling_factor": 5.0,
}
"""``nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16``: attention has as many heads as Nano's."""
CONFIGS = {
    "kimi-k2": KIMI_K2,
    "nemotron-3-nano": NEMOTRON_3_NANO,
    "nemotron-3.5-lightning": NEMOTRON_3_NANO,
    "nemotron-3-super": NEMOTRON_3_SUPER,
}
FURTHER = {"deepseek-v3": 1, "nemotron-3-super": 2, "nemotron-3.5-lightning": 2}
"""Tokens that are predicted beside the next (``mtp_num_layers`` of the recipes)."""
REPEATED = ("nemotron-3-super", "nemotron-3.5-lightning")
"""By one layer (``mtp_use_repeated_layer`` of the recipes)."""
PRODUCTS = {("nemotron-3-super", "NVFP4"): "last:14=bf16,mtp=bf16,attention.*=bf16,latent_*=bf16,mixer.out_proj=mxfp8"}
"""Products that a recipe leaves: ``nemotronh/te_quant.cfg`` of Megatron-Bridge, and the layers of
``nemotron_3_super_bf16_with_nvfp4_mixed`` in its ``mixed_precision.py``."""
ONE_DENSE = {"deepseek-v2": 1, "deepseek-v3": 1}
"""Dense layers that SimuMax's cut models begin with."""


@dataclass(frozen=True, kw_only=True)
class NewerRun:
    """One published run.

    Args:
        stack: whose software ran it: as `ranges.Row.stack`.
        published: tokens a second on each device.
        listed: was it looked at while terms were found?
    """

    name: str
    source: str
    gpu: str
    stack: str
    run: Run
    execution: Execution
    published: float
    listed: bool

    @cached_property
    def found(self) -> Estimate:
        """What it takes, as predicted."""
        return estimate(self.run, hardware(self.gpu), execution=self.execution)

    @property
    def error(self) -> float:
        """Relative, of the predicted throughput."""
        return self.found.tokens_per_second_per_gpu / self.published - 1

    @property
    def experts(self) -> bool:
        """Has the model any?"""
        return any(getattr(getattr(layer, "mlp", None), "experts", 0) for layer in self.run.model.layers)


def rows() -> list[NewerRun]:
    """NVIDIA's, then SimuMax's."""
    return [*_nemo_rows(), *_simumax_rows()]


def _read(name: str) -> Iterator[Mapping[str, str]]:
    with (FACTS / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _nemo_rows() -> Iterator[NewerRun]:
    for row in _read("nemo_bridge_throughput.csv"):
        run, how = nemo_run(row)
        fsdp = "fsdp " if row["fsdp"] != "0" else ""
        layout = " ".join(f"{axis}{row[axis]}" for axis in ("tp", "pp", "cp", "ep") if row[axis] not in ("1", ""))
        where = f"{row['gpus']} x {row['gpu']} {row['precision']}"
        yield NewerRun(
            name=f"{row['model']}, {where}, {fsdp}{layout or 'dp'}, s = {row['sequence']}, b = {row['micro_batch']}",
            source=row["source"],
            gpu=GPUS[row["gpu"]],
            stack="nemo",
            run=run,
            execution=how,
            published=float(row["tokens_per_second_per_gpu"]),
            listed=row["listed"] == "yes",
        )


def nemo_run(row: Mapping[str, str]) -> tuple[Run, Execution]:
    """Megatron-Core with Transformer Engine, ZeRO 1 or its FSDP, bf16 gradients and sends that hide; scales are found
    in the step itself. DeepSeek V3 has a layer for the token after next (`mtp`), unless the row says otherwise."""
    tp, pp, cp, ep, gpus = (int(row[name]) for name in ("tp", "pp", "cp", "ep", "gpus"))
    micro_batch, dp = int(row["micro_batch"]), gpus // (tp * pp * cp)
    model = model_of(row["model"])
    further = 0 if "w/o MTP" in row["note"] else FURTHER.get(row["model"], 0)
    fsdp, virtual = row["fsdp"] != "0", int(row["virtual_stages"])
    recipe = RECIPES[row["precision"]]
    if recipe == "tensorwise" and row["gpu"] != "H100":
        recipe += "-blackwell"
    gated = all(kind.mlp.gated for kind in model.described if kind.mlp is not None)  # fused experts are, in recipes
    described = not fsdp and "layernorm" not in row["recompute"]  # what copies stay is not, under these
    quant_recipe = PRODUCTS.get((row["model"], row["precision"]))
    request = RunRequest(
        seq=int(row["sequence"]),
        micro_batch=micro_batch,
        micro_batches=int(row["global_batch"]) // (micro_batch * dp),
        tp=tp,
        sp=tp > 1,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=1 if ep > 1 and tp > 1 else None,
        virtual_stages=virtual,
        stage_layers=_spread(model, pp * virtual)
        if row["model"] != "deepseek-v3"
        else _ending_early(model, pp * virtual),
        mtp_num_layers=further or None,
        mtp_use_repeated_layer=row["model"] in REPEATED or None,
        dp=dp,
        zero=3 if fsdp else 1,
        precision="bf16" if described or not recipe else "fp8",
        fp8_recipe=recipe if described else None,
        fp8_param_gather=bool(recipe) and described,
        quant_recipe=quant_recipe if described else None,
        recompute_modules=row["recompute"].replace("+", ",") or None,
        attention="flash",
        kernels="megatron",
        dispatcher="flex" if row["dispatcher"] in ("deepep", "hybridep") else None,
        ep_comm_overlap=row["a2a_overlap"] == "yes",
        lora="r=16,alpha=32,targets=qkv" if row["note"] == "LoRA" else None,
        cuda_graphs=row["graphs"] == "step" or "attn" in row["graphs"],
        stack="nemo-26.06" if row["source"] >= FUSED and row["precision"] == "MXFP8" and gated else "nemo",
        tp_comm_overlap=row["model"].startswith("llama") and tp > 1 and recipe != "nvfp4",
    )
    run = resolve(model, request).run
    if quant_recipe and not described:
        quantized = fp8_recipe(str(recipe), "megatron")
        run = replace(run, model=with_quant_recipe(run.model, quant_recipe, quantized))
    how = replace(
        execution_of(run),
        hides_stages=True,
        accumulates_in_gemm=not fsdp,
        rotates_in_place=row["source"] >= ROTATED,
        graphs_experts=row["graphs"] == "step",
        fp8_attention="attention" in row["narrow"],
        fp8_head="head" in row["narrow"],
    )
    return run, how if described or not recipe else replace(how, recipe=fp8_recipe(recipe, "megatron"))


def model_of(name: str) -> ModelSpec:
    """A preset, or what there is none of."""
    return parse_config(CONFIGS[name], name=name) if name in CONFIGS else preset(name)


def _spread(model: ModelSpec, chunks: int) -> str | None:
    """Layers of each chunk where they do not divide evenly: the first ones have one more."""
    each, more = divmod(model.depth, chunks)
    return ",".join(str(each + (index < more)) for index in range(chunks)) if more else None


def _ending_early(model: ModelSpec, chunks: int) -> str:
    """DeepSeek V3's: the last chunk has what is left over, and before the loss the layer for the token after next.

    Megatron-Bridge's ``recipes/deepseek/deepseek_v3.py``, ``set_deepseek_v3_pipeline_model_parallel_layout``; of 32
    chunks the performance recipes' ``Et|(tt|)*30mL``.
    """
    each = -(-model.depth // chunks)
    rest = model.depth - each * (chunks - 1)
    if rest < 0:
        return ",".join(map(str, (model.depth - each * (chunks - 2), *[each] * (chunks - 2), 0)))
    return ",".join(map(str, (*[each] * (chunks - 1), rest)))


def _simumax_rows() -> Iterator[NewerRun]:
    for row in _read("simumax_times.csv"):
        run = simumax_run(row)
        tokens = run.seq * run.micro_batch * run.micro_batches * run.layout.dp
        yield NewerRun(
            name=row["source"].split()[-1].removesuffix("_cef"),
            source="SimuMax v1.2",
            gpu="b200-192gb",
            stack="megatron",
            run=run,
            execution=execution_of(run).without_overlap(),
            published=tokens / float(row["step_ms"]) * 1e3 / int(row["gpus"]),
            listed=row["listed"] == "yes",
        )


def simumax_run(row: Mapping[str, str]) -> Run:
    """Megatron-LM with everything waited for, fp32 gradients, fused cross entropy, ZeRO 1, and the vocabulary of
    Megatron's NullTokenizer: one more, padded to a multiple of 128 t. Its 405B has 16 key-value heads."""
    tp, cp, layers = int(row["tp"]), int(row["cp"]), int(row["layers"])
    whole = preset(row["model"])
    pad = 128 * tp
    kept = whole.layers[:layers]
    if row["model"] in ONE_DENSE:
        kept = (*whole.layers[: ONE_DENSE[row["model"]]], *whole.layers[-(layers - ONE_DENSE[row["model"]]) :])
    if row["model"] == "llama3-405b":
        kept = tuple(replace(layer, attention=replace(layer.attention, kv_heads=16)) for layer in kept)
    model = replace(whole, layers=kept, vocab=-(-(whole.vocab + 1) // pad) * pad)
    dp = int(row["gpus"]) // (tp * cp * int(row["pp"]))
    asked = RunRequest(
        like="megatron-0.19",
        loss="te",
        seq=int(row["sequence"]),
        micro_batch=int(row["micro_batch"]),
        micro_batches=int(row["micro_batches"]),
        tp=tp,
        pp=int(row["pp"]),
        cp=cp,
        ep=int(row["ep"]),
        dp=dp,
        zero=1 if dp * cp > 1 else 0,
        stack="megatron",
        cp_comm_type="a2a" if cp > 1 else None,
    )
    return resolve(model, asked).run
