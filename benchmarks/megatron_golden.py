"""Megatron-LM's functional tests: what each of them allocated, and how it is described to the ledger.

`tests/facts/megatron_golden.csv` has the figures: of the last rank, hence the last stage, in GiB: the peak of the first
iteration, that of all, and what is allocated between steps. The arguments are those of each test's
``model_config.yaml`` and the defaults of ``megatron/training/arguments.py``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.megatron_others import BERT, PREFIXES, T5, bert, t5
from jettison.core.units import GIB, MIB
from jettison.frameworks.megatron.read import described
from jettison.memory.span import Phase
from jettison.predict.forecast import forecast
from jettison.spec.fp8 import fp8_recipe
from jettison.spec.kernels import WORKSPACES, AttentionKernel, Dispatcher, Loss, Workspaces
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.layout import Layout, stage_layers
from jettison.spec.model import ModelSpec
from jettison.spec.model_variants import with_mtp
from jettison.spec.precision import PRECISIONS, Accumulation, Gradients, Optimizer, Precision
from jettison.spec.recompute import Mode, Recompute, listed
from jettison.spec.run import Run

_FOLDER = Path(__file__).parent.parent / "tests" / "facts"
FACTS = _FOLDER / "megatron_golden.csv"
LATER = _FOLDER / "megatron_golden_7b.csv"
"""Read after every term had been written: of these two tests none was looked at before."""
MORE = _FOLDER / "megatron_golden_more.csv"
"""Found when everything else stood: predicted before any was looked at (``blind_*``)."""
HYBRIDS = _FOLDER / "megatron_hybrids.csv"
"""The same of models with scans, which could not be described before."""
DATES = _FOLDER / "megatron_golden_dates.csv"
"""When each file's figures were last changed in Megatron-LM's history."""
NEW_TORCH = "2026-05-07"
"""``docker/.ngc_version.dev`` became 26.04."""
KEPT = ("2026-05-21", "2026-07-08")
"""Between these batches were kept (`frameworks/megatron/buffers.toml`), which was Megatron's way."""
FURTHER = "mtp-num-layers"
PATTERN = "hybrid-layer-pattern"
"""M: Mamba 2, *: attention, -: feed-forward, E: experts; | between stages, / before each further token."""
Facts = Mapping[str, str]


ASIDE = {
    "bert_": "a BERT, whose pooler (18 MiB here) is not described",
    "t5_": "a T5, described as BART's two stacks with norms first; its masks are not described",
    "cross_entropy_loss_fusion": "the first iteration compiles the loss",
    "defer_embedding_wgrad": "the deferred head's gradient was described after these had been looked at",
    "fine_grained_offloading": "the first iteration offloads everything while it learns what comes last",
}
"""Parts of names of tests in `MORE` that count in no median, and why."""
ASIDE_NAMES = {
    "gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion": "the first iteration compiles the loss; on A100 its peak, 2.091 "
    "GiB, is never reached again",
    "gpt3_mcore_te_tp2_pp2_resume_torch_dist_defer_embedding_wgrad_compute": "described after the others "
    "(--wgrad-deferral-limit 2); 24 MiB low at its peaks, not explained; the A100's is of October 2025, when the "
    "head had no empty gradient",
    "gpt3_mcore_tp2_pp2_resume_torch_dist_te_2experts": "fp16 on a GPU that is not named; workspaces differ by GPU",
    "gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon": "distributed Muon, looked at while it was described; on GB200 "
    "the last rank's expert gets two thirds of an even share, as with Adam",
    "gpt3_weekly_mcore_tp4_cp2_current_scaling_native_fp8_tp_sp_cp_tp_overlap": "fp8, looked at while its copies were "
    "described; GB200's first peak is 126 MiB higher since February 2026, not explained",
}
"""Reasons for tests in `FACTS`, by name."""
ASIDE_HYBRIDS = {
    "lightning": "experts are routed by an untrained router, so ranks differ",
    "dgx_a100.json": "files for A100 are copies of H100's, or of a run whose arguments changed since",
}
"""Reasons for tests in `HYBRIDS`, by parts of names or of files."""


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One test on one kind of GPU. GiB as published."""

    name: str
    gpu: str
    run: Run
    first_gib: float
    later_gib: float
    between_gib: float

    @property
    def measured(self) -> tuple[float, float, float]:
        """First iteration, later ones, between steps."""
        return self.first_gib, self.later_gib, self.between_gib

    @property
    def errors(self) -> tuple[float, float, float]:
        """Relative, without their signs."""
        first, later, between = (abs(p / m - 1) for p, m in zip(self.predicted(), self.measured, strict=True))
        return first, later, between

    def predicted(self) -> tuple[float, float, float]:
        """The same, as the ledger has it for the last stage."""
        stage = forecast(self.run).stages[-1]
        after = next(m for m in stage.timeline() if m.phase is Phase.AFTER)
        return stage.first_step_peak.nbytes / GIB, stage.peak.nbytes / GIB, after.nbytes / GIB


NOT_DESCRIBED = {
    "use-megatron-fsdp": "Megatron's own FSDP",
    "spec": "hybrid layers",
    "export-kd-teacher-load": "a teacher beside it",
    "squared-relu": "squared ReLU",
}


def facts(path: Path = FACTS) -> list[Facts]:
    """All rows of a file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def _dates() -> dict[str, str]:
    return {row["source"]: row["recorded"] for row in facts(DATES)}


def recorded(row: Facts) -> str:
    """Year, month and day; empty where the file is not in the history."""
    return _dates().get(row["source"], "")


def name_of(row: Facts) -> str:
    """The test's."""
    return row["source"].split("/")[-2]


def extras(row: Facts) -> dict[str, str]:
    """Arguments beyond the columns."""
    pairs = (item.partition("=") for item in row["arch_extra"].split("; ") if item)
    return {key: value for key, _, value in pairs}


def why_not(row: Facts) -> str:
    """What the description lacks; empty where it is complete."""
    found = [why for key, why in NOT_DESCRIBED.items() if key in extras(row)]
    if row["vocab_padded"] in ("", "?") and not name_of(row).startswith(("t5_mcore", "t5_11b")):
        found.append("vocabulary not stated")
    if "world size not in" in row["notes"]:
        found.append("world size not stated")
    if name_of(row).endswith("dist_muon_1node"):
        found.append("a distributed Muon, of which the last rank has not the most")
    if int(row["gbs"] or 0) < int(row["mbs"] or 0) * int(row["dp"] or 1):
        found.append("world size not stated")
    if "param_layout" in name_of(row):
        found.append("four GPUs, where the list has eight")
    if "cudagraph" in name_of(row):
        found.append("CUDA graphs, which keep buffers of their own")
    return ", ".join(found)


def golden(row: Facts) -> Golden:
    """A row and its run."""
    found = re.search(r"first-iter peak ([\d.]+); allocated between steps ([\d.]+)", row["notes"])
    assert found is not None, row["notes"]
    return Golden(
        name=name_of(row),
        gpu=row["gpu"],
        run=run_of(row),
        first_gib=float(found[1]),
        later_gib=float(row["memory_gib"]),
        between_gib=float(found[2]),
    )


def model_of(row: Facts) -> ModelSpec:
    """A GPT as ``pretrain_gpt.py`` builds it, a BERT or a T5."""
    if name_of(row).startswith(BERT):
        return bert(row, name_of(row))
    if name_of(row).startswith(T5):
        return t5(row, extras(row), name_of(row))
    more = extras(row)
    model = described(arguments(row), name_of(row))
    further = int(more.get(FURTHER, more.get(PATTERN, "").count("/")))
    return with_mtp(model, further, kernel_set("megatron"), repeated="mtp-use-repeated-layer" in more)


def arguments(row: Facts) -> dict[str, str | bool]:
    """What of a test's arguments says its model and its ranks, by name."""
    found: dict[str, str | bool] = {
        "num-layers": row["layers"],
        "hidden-size": row["hidden"],
        "ffn-hidden-size": row["ffn"],
        "num-attention-heads": row["heads"],
        "group-query-attention": True,
        "num-query-groups": row["kv_heads"],
        "max-position-embeddings": row["seq"],
        "padded-vocab-size": row["vocab_padded"],
        "tensor-model-parallel-size": row["tp"],
        "pipeline-model-parallel-size": row["pp"],
    }
    more = {name: value == "True" or value for name, value in extras(row).items() if "dropout" not in name}
    if PATTERN in more:  # which no column has, and all of these tests with experts
        found |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
    return found | {"hidden-dropout": "0.1", "attention-dropout": "0.1"} | more


def run_of(row: Facts) -> Run:
    """The run of a row whose description is complete."""
    more, dp, cp = extras(row), int(row["dp"]), int(row["cp"] or 1)
    local = more.get("transformer-impl") == "local"
    eager = local or more.get("attention-backend") == "unfused"
    kernels = replace(
        kernel_set("megatron"),
        fused_softmax="no-masked-softmax-fusion" not in more,
        scores_float32="no-masked-softmax-fusion" in more,
        attention=AttentionKernel.EAGER if eager else AttentionKernel.FLASH,
        copied_attention=_uses_flash_attn(row["gpu"], deterministic="deterministic-mode" in more),
        dispatcher=Dispatcher(more.get("moe-token-dispatcher-type", "allgather")),
        deterministic="deterministic-mode" in more,
        sequential_experts="moe-grouped-gemm" not in more,
        loss=Loss.NATIVE if "cross-entropy-loss-fusion" in more else Loss.VOCAB_PARALLEL,
    )
    model, stages = model_of(row), int(row["pp"])
    cut = _cut(row)
    string = "|" in cut
    virtual = cut.replace("(tt|)*6", "tt|" * 6).count("|") // stages + 1 if string else int(row["vpp"] or 1)
    own = model.depth - model.mtp_num_layers
    again = row["recompute"].removeprefix("selective:").strip("[]") if row["recompute"].startswith("sel") else ""
    sent = row["offload"].strip("[]")
    return Run(
        model=model,
        seq=int(more.get("decoder-seq-length", row["seq"])),
        source_seq=int(more.get("encoder-seq-length", 0)),
        micro_batch=int(row["mbs"]),
        micro_batches=int(row["gbs"]) // (int(row["mbs"]) * dp),
        layout=Layout(
            tp=int(row["tp"]),
            sp=row["sp"] == "1",
            pp=stages,
            virtual_stages=virtual,
            micro_batch_group=int(more.get("microbatch-group-size-per-virtual-pipeline-stage", 0)),
            stage_layers=(
                stage_layers(cut, layers=own, chunks=stages * virtual, mtp=model.mtp_num_layers) if cut else ()
            ),
            mtp_num_layers=model.mtp_num_layers,
            wgrad_deferral_limit=2
            if "defer-embedding-wgrad-compute" in more
            else 0,  # its tests' --wgrad-deferral-limit
            cp=cp,
            ep=int(row["ep"] or 1),
            expert_tp=int(more.get("expert-tensor-parallel-size", 0)) if "num-experts" in more else 0,
            dp=dp,
            zero=int(row["zero"]),
            zero_replicas=int(more.get("num-distributed-optimizer-instances", 1)),
            keeps_received=True,
        ),
        recompute=Recompute(mode=Mode.FULL)
        if row["recompute"] == "full:uniform:1"
        else Recompute(
            mode=Mode.MODULES if again else Mode.NONE,
            modules=listed(again, "--recompute-modules") if again else (),
            sent=listed(sent, "--offload-modules") if sent else (),
        ),
        precision=_precision(row),
        optimizer=_optimizer(row),
        kernels=kernels,
        gradients=Gradients.UPFRONT,
        dropout=0.0 if _without_dropout(row) else 0.1,
        accumulation=_accumulation(more, local=local),
        workspaces=_workspaces(row["gpu"], more, local=local, on=recorded(row), stated="blind_first_gib" in row),
        tp_comm_overlap="tp-comm-overlap" in more,
        keep_batches=row["tp"] == "1" and KEPT[0] < recorded(row) <= KEPT[1],
        dataloader_attention_mask="no_create_attention_mask" not in name_of(row)
        and not name_of(row).startswith(PREFIXES),
    )


def _cut(row: Facts) -> str:
    """Layers of stages as ``--stage-layers`` takes them; empty where they are even."""
    more, chunks = extras(row), int(row["pp"]) * int(row["vpp"] or 1)
    if "|" in (own := more.get(PATTERN, "").partition("/")[0]):
        return ",".join(str(len(stage)) for stage in own.split("|"))
    if "account-for-embedding-in-pipeline-split" in more:  # and for the loss: a layer each
        each = (int(row["layers"]) + 2) // chunks
        return ",".join(map(str, (each - 1, *(each,) * (chunks - 2), each - 1)))
    first, last = (more.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    ends = ",".join(f"{name}:{count}" for name, count in (("first", first), ("last", last)) if count)
    return more.get("pipeline-model-parallel-layout", ends)


def _optimizer(row: Facts) -> Optimizer:
    """ "param_layout" in a test's name: without it ``--no-use-layer-wise-param-layout``."""
    if extras(row).get("optimizer") == "muon" and row["zero"] == "0":
        return Optimizer.MUON
    if "dist_muon" not in name_of(row):
        return Optimizer.ADAMW
    return Optimizer.DIST_MUON if "param_layout" in name_of(row) else Optimizer.DIST_MUON_PINGPONG


def _precision(row: Facts) -> Precision:
    """Tests with "native_fp8" in their name hold weights as bytes (``--fp8-param-gather``). Of gradients in bf16 the
    optimizer has fp32 copies from its step to the next (``distrib_optimizer.py``, ``_copy_model_grads_to_main_grads``).
    """
    found = PRECISIONS["fp16-main32" if row["precision"] == "fp16" else "bf16-main32"]
    if "grad-reduce-in-bf16" in extras(row):
        found = PRECISIONS["bf16-reduce16"]
    recipe = extras(row).get("fp8-recipe")
    if recipe is None:
        return found
    either_way = "-blackwell" if "B200" in row["gpu"] and recipe == "tensorwise" else ""
    return found.with_recipe(fp8_recipe(recipe + either_way, "megatron", parameters="native_fp8" in name_of(row)))


def _without_dropout(row: Facts) -> bool:
    """Dense tests with context parallelism set both probabilities to 0, and so do those with latent attention.

    The first files do not have these arguments; the last one has them.
    """
    if "blind_first_gib" in row:
        return float(extras(row).get("hidden-dropout", 0.1)) == 0
    if "weekly" in name_of(row):  # in fp8, with context parallelism, and neither argument in its file
        return False
    if "multi-latent-attention" in extras(row) or "nondeterministic" in name_of(row):
        return True
    return int(row["cp"] or 1) > 1 and "num-experts" not in extras(row)


def _uses_flash_attn(gpu: str, *, deterministic: bool) -> bool:
    """`Kernels.copied_attention`: before Hopper always, on Blackwell where a run has to be deterministic."""
    return gpu.startswith("A100") or (deterministic and "B200" in gpu)


def _accumulation(more: Facts, *, local: bool) -> Accumulation:
    if "no-gradient-accumulation-fusion" in more:
        return Accumulation.CAST
    return Accumulation.FUSED if local else Accumulation.DUMMY


def _workspaces(gpu: str, more: Facts, *, local: bool, on: str, stated: bool) -> Workspaces:
    """Tests that are to be deterministic run under ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, and all with experts do.

    What is stated in their variables goes before that. Until 7 May 2026 containers had a torch that sets aside less on
    Blackwell: NOTE [ Workspaces ].
    """
    kind = "ampere" if gpu.startswith("A100") else "hopper"
    if "B200" in gpu and "" < on < NEW_TORCH:
        kind = "blackwell"
    found = WORKSPACES[f"{'torch' if local else 'te'}-{kind}"]
    states = "deterministic-mode" in more or "num-experts" in more
    states = "CUBLAS_WORKSPACE_CONFIG" in more if stated else states
    return replace(found, torch_bytes=32 * MIB) if states else found


def aside(row: Facts) -> str:
    """Why a row counts in no median; empty where it does."""
    return next((why for part, why in ASIDE.items() if part in name_of(row)), "")


def first_answer(row: Facts) -> tuple[float, float, float] | None:
    """GiB predicted before any of these rows had been looked at, as `Golden.measured` has them."""
    found = [row.get(f"blind_{kind}_gib") for kind in ("first", "later", "between")]
    return (float(found[0]), float(found[1]), float(found[2])) if all(found) else None  # type: ignore[arg-type]


def errors(row: Facts, found: Golden) -> tuple[list[float], list[float]]:
    """Relative errors with their signs: of the first answer and of today's."""
    before = first_answer(row) or found.predicted()
    pairs = zip(before, found.predicted(), found.measured, strict=True)
    return tuple(map(list, zip(*((b / m - 1, p / m - 1) for b, p, m in pairs), strict=True)))  # type: ignore[return-value]


def rows(path: Path = FACTS) -> list[Golden]:
    """All that are described completely, but for those that predict further tokens."""
    return [golden(row) for row in facts(path) if not why_not(row) and _counts(row)]


def _counts(row: Facts) -> bool:
    return FURTHER not in extras(row) and not name_of(row).startswith(PREFIXES)


def further_rows() -> list[Golden]:
    """Those that do, all of them with latent attention and experts, some with lists of modules."""
    return [golden(row) for row in facts() if not why_not(row) and FURTHER in extras(row)]


if __name__ == "__main__":
    for row in [*rows(), *rows(LATER), *further_rows()]:
        errors = [100 * (p / m - 1) for p, m in zip(row.predicted(), row.measured, strict=True)]
        shown = "  ".join(
            f"{m:7.3f} {p:7.3f} {e:+6.1f} %" for m, p, e in zip(row.measured, row.predicted(), errors, strict=True)
        )
        print(f"{row.name[:62]:62} {row.gpu[:5]} {shown}")
