"""Published throughput of described runs, one rule for each source.

No number of a row was fitted. What a row needs beyond its columns is a rule of its source, in `RULES`, and what the
hardware reaches is in the hardware files. llm-foundry's rows come from its benchmark page; those in
`llm_foundry_throughput.csv` are not among the published runs, and most were predicted before they were looked at.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from jettison.cost.execution import Execution, execution_of
from jettison.cost.flops import model_flops, tokens
from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.predict.forecast import available_bytes
from jettison.predict.time import Estimate, estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.largest_fit import most_whole
from jettison.spec.hardware import hardware
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

FACTS = Path(__file__).parent.parent / "tests" / "facts"
BEFORE = Path(__file__).parent / "results" / "blackwell-2025-before.csv"
GPUS = {
    "A100-40GB": "a100-40gb",
    "A100-80GB": "a100-80gb",
    "H100-80GB": "h100-80gb",
    "H100-96GB": "h100-96gb",
    "H100": "h100-96gb",
    "H200": "h200-141gb",
    "B200-180GB": "b200-192gb",
    "GB200-186GB": "gb200-192gb",
}
"""An H100 in torchtitan's own pull requests is Meta's."""
MPT = {
    "mpt-125m": (768, 12, 12),
    "mpt-350m": (1024, 24, 16),
    "mpt-760m": (1536, 24, 12),
    "mpt-1b": (2048, 24, 16),
    "mpt-3b": (2560, 32, 20),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 48, 56),
    "mpt-70b": (8192, 80, 64),
}
"""Hidden size, layers and heads. The page's parameter counts say that these are GPTs with biases and learned positions,
tied embeddings and 50,368 tokens, not MPT with ALiBi: 13 h biases and norms a layer, s h positions."""
ACCUMULATED = {
    ("mpt-70b", 2048): 4,
    ("mpt-30b", 2048): 3,
    ("mpt-13b", 2048): 1,
    ("mpt-13b", 1024): 3,
    ("mpt-7b", 2048): 1,
    ("mpt-7b", 4096): 2,
}
"""Micro-batches in a step, as the page has them for the rows that the published runs list."""
FOREACH = ("torchtitan benchmarks 2024-12", "torchtitan docs/performance", "pytorch PR 129721")
"""From before 24 February 2025: torchtitan's AdamW was not fused (its pull request 881)."""
NANOTRON_TOKENS = 1 << 20
"""In a step: what nanotron's scaling_benchmarks.py sets."""
NEMO_GPT = {"gpt3-5b": (4096, 24, 32), "gpt3-20b": (6144, 44, 48)}
"""Hidden size, layers and heads."""
NEMOTRON_4 = {"nemotron4-15b": (6144, 32, 48), "nemotron4-340b": (18432, 96, 96)}
"""Hidden size, layers and heads; feed-forward layers four times as wide, squared ReLU."""
NEMO_TOKENS = 1 << 22
"""In a step, where the page states no batch: a guess. Four times as much changes a prediction by less than 1 %."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One published throughput and the run that stands for it."""

    source: str
    gpu: str
    columns: Mapping[str, str]
    run: Run
    execution: Execution
    published: float
    file: str

    @property
    def found(self) -> Estimate:
        """What the run takes, as predicted."""
        device = hardware(GPUS[self.gpu])
        node = int(self.columns.get("node", device.node))
        return estimate(self.run, replace(device, node=node), execution=self.execution)

    @property
    def error(self) -> float:
        """Relative, of the predicted throughput."""
        return self.found.tokens_per_second_per_gpu / self.published - 1

    @property
    def name(self) -> str:
        """The run in a few words."""
        column = self.columns
        more = " ".join(word for word in (column.get("recompute", "none"), column.get("extras", "")) if word)
        layout = column.get("layout") or (layout_words(self.run) if "tp" in column else "fsdp")
        where = f"{column['gpus']} x {self.gpu}, {layout}"
        return f"{column['model']}, {where}, s = {self.run.seq}, b = {self.run.micro_batch}, {more}"


def mpt(name: str, seq: int) -> ModelSpec:
    """A model of llm-foundry's benchmarks, with as many positions as a sequence has tokens."""
    return gpt2(name, *MPT[name], vocabulary=50368, positions=seq)


def gpt2(name: str, hidden: int, layers: int, heads: int, *, vocabulary: int, positions: int) -> ModelSpec:
    """A GPT of any size, without dropout unless a run asks for it."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, "n_positions": positions}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_function": "gelu"}
    return parse_config({"model_type": "gpt2", **sizes, **off}, name=name)


def _llama_13b() -> ModelSpec:
    """KempnerForge's: a third of 8 h, times 1.3, rounded up to a multiple of 256 (``kempnerforge/config/model.py``)."""
    sizes = {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17920, "vocab_size": 128256}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8}
    return parse_config({"model_type": "llama", **sizes, **heads}, name="llama3-13b")


def _layout(text: str, gpus: int) -> dict[str, int]:
    """The words of a layout column, such as fsdp4-tp2, as fields of a request."""
    found = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", text)}
    if text == "fsdp":
        found["fsdp"] = gpus
    sharded = "fsdp" in found
    found["dp"] = found.pop("fsdp", found.get("dp", 1))
    return found | ({"zero": 3} if sharded else {})


# one rule for each source ---------------------------------------------------------------------------------------------


def _torchtitan(row: Mapping[str, str]) -> tuple[Run, Execution]:
    """FSDP2, fp32 weights cast for each use, per-op checkpointing that recomputes every second product, norms written
    out op by op, keys and values copied for each head (``pytorch-2.8``; pull request 2570 is of 2026). Without a batch,
    the default of its recipe. Async TP is `--tp-comm-overlap`."""
    recompute = {"selective-op": "selective-op-alternate"}.get(row["recompute"], row["recompute"])
    request = RunRequest(
        seq=int(row["sequence"] or 8192),
        micro_batch=int(row["micro_batch"] or 1),
        recompute=recompute,
        precision="fp8" if re.search("float8(?!-)", row["extras"]) else "bf16-autocast",
        fp8_recipe="rowwise" if re.search("float8[- ]rowwise", row["extras"]) else None,
        tp_comm_overlap="async-tp" in row["extras"],
        kernels="pytorch" if row["source"].endswith("PR 2570") else "pytorch-2.8",
        optimizer="adamw-foreach" if row["source"] in FOREACH else "adamw",
        **_layout(row["layout"], int(row["gpus"])),
    )
    run = resolve(preset(row["model"]), request).run
    how = execution_of(run)
    return run, how.compiled() if "compile" in row["extras"] else how


def _foundry(row: Mapping[str, str]) -> tuple[Run, Execution]:
    """FSDP with mixed precision; the Triton kernel of the first FlashAttention, which its successor outruns 1.3 to 2
    times (arXiv 2307.08691 §4.1); an AdamW of single operations. Extras: "pure" reduces gradients in bf16, "kept"
    weights are not resharded after a forward (``SHARD_GRAD_OP``), "fp8" products are TransformerEngine's, each of which
    casts what it is given by itself: no kernel before it does (``fc_type: te``)."""
    seq, extras = int(row["sequence"]), row.get("extras", "").split()
    times = int(row["micro_batches"]) if "micro_batches" in row else ACCUMULATED[row["model"], seq]
    request = RunRequest(
        seq=seq,
        micro_batch=int(row["micro_batch"]),
        micro_batches=times,
        precision="fp8" if "fp8" in extras else "bf16-autocast",
        recompute=row["recompute"],
        dp=int(row["gpus"]),
        zero=3,
        reshard_after_forward="never" if "kept" in extras else None,
        attention="flash",
        kernels="pytorch",
    )
    run = resolve(mpt(row["model"], seq), request).run
    if "pure" in extras:
        run = replace(run, precision=replace(run.precision, gradient=run.precision.compute))
    return run, replace(execution_of(run), attention=0.55, fused_optimizer=False)


def _forge(row: Mapping[str, str]) -> tuple[Run, Execution]:
    """FSDP2 and sequence parallelism of PyTorch, bf16 with reductions in fp32, every layer a checkpoint, norms and loss
    op by op where nothing is compiled (``kempnerforge/distributed``; ``benchmarks/mfu_scaling/mfu_bench.sh``)."""
    layout = _layout(row["layout"], int(row["gpus"]))
    request = RunRequest(
        seq=int(row["sequence"]),
        micro_batch=int(row["micro_batch"]),
        micro_batches=int(row["micro_batches"]),
        recompute=row["recompute"],
        precision="bf16-autocast",
        **layout | {"sp": layout.get("tp", 1) > 1},
    )
    model = _llama_13b() if row["model"] == "llama3-13b" else preset(row["model"])
    run = resolve(model, request).run
    run = replace(run, kernels=replace(run.kernels, fused_norm=False))
    how = execution_of(run)
    return run, how.compiled() if "compile" in row["extras"] else how


def _nanotron(row: Mapping[str, str]) -> tuple[Run, Execution]:
    """bf16 with fp32 gradients added up beside it, a million tokens a step. Its pipeline gives the stage of the head
    fewer layers, ours does not."""
    layout = _layout(row["layout"], int(row["gpus"]))
    seq, micro_batch = int(row["sequence"]), int(row["micro_batch"])
    request = RunRequest(
        seq=seq,
        micro_batch=micro_batch,
        micro_batches=NANOTRON_TOKENS // (seq * micro_batch * layout["dp"]),
        precision="bf16-grad32",
        recompute=row["recompute"],
        **layout | ({"zero": 1} if row["extras"] == "zero1" else {}),
    )
    run = resolve(preset(row["model"]), request).run
    return run, execution_of(run)


def _nemo(row: Mapping[str, str]) -> tuple[Run, Execution]:
    """Megatron-Core with Transformer Engine, ZeRO 1, bf16 gradients and sends that hide, dropout 0.1 in GPT-3 and none
    in the others: what the files of launcher and scripts say. Their attention and fp8 products are those of before
    25.09."""
    tp, pp, cp, gpus = (int(row[name]) for name in ("tp", "pp", "cp", "gpus"))
    seq, micro_batch, dp = int(row["sequence"]), int(row["micro_batch"]), gpus // (tp * pp * cp)
    sequences = int(row["global_batch"] or NEMO_TOKENS // seq)
    gpt = row["model"].startswith("gpt3")
    request = RunRequest(
        seq=seq,
        micro_batch=micro_batch,
        micro_batches=sequences // (micro_batch * dp),
        tp=tp,
        sp=tp > 1,
        pp=pp,
        cp=cp,
        ep=int(row["ep"]),
        virtual_stages=int(row["virtual_stages"]),
        dp=dp,
        zero=1 if dp > 1 else 0,
        precision=row.get("precision") or "fp8",
        attention="flash",
        kernels="megatron",
        recompute=row.get("recompute"),
        dropout=0.1 if gpt else 0.0,
        tp_comm_overlap=row["tp_comm_overlap"] == "yes",
        stack="nemo-24.12" if row["gpu"].startswith("H100") and row["source"] >= "NeMo 24.12" else "base",
    )
    if row["model"] in NEMO_GPT:
        model = gpt2(row["model"], *NEMO_GPT[row["model"]], vocabulary=51200, positions=seq)
    elif row["model"] in NEMOTRON_4:
        model = nemotron_4(row["model"])
    else:
        model = preset(row["model"].replace("gpt3", "gpt"))
        model = replace(model, layers=model.layers[: int(row.get("layers") or model.depth)])
    run = resolve(model, request).run
    return run, replace(execution_of(run), hides_stages=True, delayed_scaling=row["scaling"] == "delayed")


def nemotron_4(name: str) -> ModelSpec:
    """arXiv 2402.16819 and 2406.11704, as NVIDIA's recipes have them: 4096 positions, half of a head rotated."""
    hidden, layers, heads = NEMOTRON_4[name]
    config = {
        "model_type": "nemotron",
        "vocab_size": 256000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "intermediate_size": 4 * hidden,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
    }
    return parse_config(config, name=name)


RULES: Mapping[str, Callable[[Mapping[str, str]], tuple[Run, Execution]]] = MappingProxyType(
    {
        "torchtitan": _torchtitan,
        "pytorch": _torchtitan,
        "torchao": _torchtitan,
        "llm-foundry": _foundry,
        "ultrascale": _nanotron,
        "NeMo": _nemo,
        "KempnerForge": _forge,
    }
)
"""By the first word of a source. PyTorch's pull request and torchao's tutorial ran torchtitan."""
LISTED, FOUNDRY, NEMO = "published_runs.csv", "llm_foundry_throughput.csv", "nemo_throughput.csv"
TITAN, MORE, FORGE = ("torchtitan_2025_throughput.csv", "llm_foundry_more.csv", "kempnerforge_2026_throughput.csv")
CLOUD = "dgxc_throughput.csv"
"""Seconds a step of NVIDIA/dgxc-benchmarking, tags v25.02.02 and v25.05.05; ``seen``: read before it was predicted."""
ROUNDS = {
    NEMO: "NVIDIA on Blackwell, early 2025",
    TITAN: "torchtitan, June 2025",
    MORE: "the rest of llm-foundry's page",
    FORGE: "KempnerForge, 2026",
    CLOUD: "NVIDIA's recipes of early 2025",
}
"""Files whose first answers were put down."""


def rows() -> list[Timed]:
    """Every published throughput of a described run on a known GPU: those listed first, then llm-foundry's others, then
    NVIDIA's, then those of torchtitan of 2025, the rest of llm-foundry's page, KempnerForge's, and those of NVIDIA's
    benchmarking recipes."""
    return [row for name in (LISTED, FOUNDRY, NEMO, TITAN, MORE, FORGE, CLOUD) for row in _read(name)]


def _read(name: str) -> Iterator[Timed]:
    with (FACTS / name).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            source = row.get("source", "llm-foundry benchmarking")
            known = row["gpu"] in GPUS and "first step" not in row.get("extras", "")
            if known and (row["tokens_per_second_per_gpu"] or row.get("teraflops_per_gpu")):
                run, execution = RULES[source.split()[0]](row)
                published = float(row["tokens_per_second_per_gpu"] or 0) or _tokens(run, row["teraflops_per_gpu"])
                yield Timed(
                    source=source,
                    gpu=row["gpu"],
                    columns=row,
                    run=run,
                    execution=execution,
                    published=published,
                    file=name,
                )


def _tokens(run: Run, teraflops: str) -> float:
    """Tokens a second of so many model TFLOP/s, masked scores counted: NVIDIA's pages count as the ledger does."""
    return float(teraflops) * 1e12 / token_flops(run)


def token_flops(run: Run) -> float:
    """Model FLOPs of a token."""
    return model_flops(run) / tokens(run)


def layout_words(run: Run) -> str:
    """A run's layout as a layout column has it."""
    layout = run.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "v": layout.virtual_stages, "cp": layout.cp, "ep": layout.ep}
    sizes |= {"dp": layout.dp}
    return "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)


def before() -> dict[str, float]:
    """Errors of the rows on Blackwell by the first files of these devices, by name."""
    with BEFORE.open(encoding="utf-8") as file:
        return {row["name"]: float(row["error"]) for row in csv.DictReader(file)}


# the paper -----------------------------------------------------------------------------------------------------------


def paper_runs() -> Iterator[tuple[str, Run, float]]:
    """Table 5 of arXiv 2205.05198: a name, the run, and the published seconds of an iteration."""
    with (FACTS / "korthikanti2022_configs.csv").open(encoding="utf-8") as file:
        configs = list(csv.DictReader(file))
    with (FACTS / "korthikanti2022_table5.csv").open(encoding="utf-8") as file:
        seconds = {row["model"]: row for row in csv.DictReader(file)}
    for row in configs:
        published = seconds[row["model"]]
        for recompute, sp, column in (
            ("full", False, "iteration_full_s"),
            ("selective", True, "iteration_selective_sp_s"),
        ):
            run = paper_run(row, recompute=recompute, sp=sp)
            yield f"{row['model']}, {recompute}{' + sp' if sp else ''}", run, float(published[column])


def paper_run(config: Mapping[str, str], *, recompute: str, sp: bool) -> Run:
    """A GPT of the paper's Table 3 in its layout."""
    micro_batch = int(config["micro_batch"])
    request = RunRequest(
        seq=2048,
        micro_batch=micro_batch,
        micro_batches=int(config["global_batch"]) // micro_batch,
        sp=sp,
        tp=int(config["tensor_parallel"]),
        pp=int(config["pipeline_parallel"]),
        virtual_stages=int(config["virtual_stages"]),
        recompute=recompute,
    )
    return resolve(preset(f"gpt-{config['model'].lower()}"), request).run


APPENDIX_C = {"175B": 0.7, "530B": 0.4}
"""Points of MFU that keeping some micro-batches whole gained (arXiv 2205.05198, Appendix C)."""


def appendix_c_gain(model: str, limit_bytes: int | None) -> float:
    """The same as predicted, where tensors may take so much on a device; None: all that there is for them."""
    with (FACTS / "korthikanti2022_configs.csv").open(encoding="utf-8") as file:
        config = next(row for row in csv.DictReader(file) if row["model"] == model)
    run, device = paper_run(config, recompute="selective", sp=True), hardware("a100-80gb")
    kept = estimate(most_whole(run, limit_bytes or available_bytes(device, run)), device)
    return 100 * (kept.mfu - estimate(run, device).mfu)
