"""Published runs that were all predicted before an answer was looked into: fourteen rounds.

`tests/facts/blind_runs.csv` (fourteen projects), `blind_2026_11.csv` (seventeen), `blind_posts.csv` (issues, posts
and READMEs), `blind_memory.csv` (memory in examples and documents), `blind_devices.csv` (examples of one project),
`blind_logs.csv` (memory in logs, notebooks and issues), `blind_reports.csv` (memory in reports and notes),
`blind_benchmarks.csv` (memory in benchmarks and logs),
`blind_speeds.csv` (throughput of READMEs), `blind_throughput.csv` (throughput of benchmarks and issues),
`blind_trainers.csv` (throughput of trainers and of one file on thirteen GPUs), `blind_machines.csv` (throughput of
twelve more publishers), `blind_stacks.csv` (throughput of eleven projects) and `blind_notes.csv` (all figures of
fifteen publishers' notes, reports and logs): each row was written down with its source and the command that somebody
would type from it, then all were asked in one go (``blind``).
``mended`` is the command since then, where it is another, and ``looked`` a key of `WHY`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jettison.cli.main import run as command_line
from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import flag_of, model_spec, resolve
from jettison.spec.run import Run

ROOT = Path(__file__).parent.parent
FACTS = ROOT / "tests" / "facts" / "blind_runs.csv"
UNITS = {"GiB": GIB, "GB": 10**9, "MiB": MIB, "tokens/s": 1}
REFUSED = "refused"
WHY = {
    "lengths": "samples differ in length: a micro-batch has so many tokens at most",
    "nanotron": "attention, loss and gradients are now those of nanotron's code; under tensor parallelism its code of "
    "July 2024 keeps all-gathered inputs (--gathered-inputs)",
    "slow": "its authors fixed what made it slow: nanotron's software in October 2024 (bench_cluster f55b5e5; "
    "times in one log differ by up to ten times), Jean Zay's PCI Express and NUMA on 25 February 2022",
    "asked-why-slow": "whoever published it asked there why it is so slow, and nobody found out",
    "loss-alone": "the last of 16 stages has the loss alone, which cannot be described",
    "titan-reserved": "reserved memory by torchtitan's rule is nearer (benchmarks/published.py); runs before 28 July "
    "2025 need --fsdp-wrap-layers-only, those of August 2025 --loss compiled; every second layer is interval:2, "
    "not every:2",
    "a800": "an A800's NVLink has 200 GB/s in each direction, an A100's 300",
    "titan-2.8": "torchtitan to 2025 writes norms out, copies keys and values for each head (--kernels pytorch-2.8); "
    "to February 2025 its optimizer is not fused (--optimizer adamw-foreach)",
    "titan-card": "the H100 has 500 W and 96 GB (h100-96gb), which the tables do not say",
    "titan-rocm": "ROCm of August 2025: its kernels were not read; MI300X's rates are guesses from a data sheet",
    "power": "the devices are power limited; how far is not said",
    "unsaid": "neither the figure nor the tool is named; InternEvo has an optimizer of its own",
    "occupied": "memory in use on the device, in whole GB",
    "weights-host": "weights are offloaded to CPU (--offload-optimizer); the unit is GiB and the figure nvidia-smi's",
    "deepspeed": "DeepSpeed's step copies gradients; a bf16 master is --precision bf16-master16; live parameters and "
    "the gradient bucket are --zero-buckets",
    "host-bound": "the host is the limit: ZeRO's hooks at 512 tokens a step, which nothing prices, and unnamed CPUs",
    "misread": "the program sets attn_implementation where transformers does not read it: it runs sdpa",
    "impossible": "70B bf16 parameters, unsharded under ZeRO 2, are more than the device has",
    "own-mixtures": "was refused: Liger's kernels do not patch experts; AutoModel's own run on TransformerEngine",
    "packed": "documents are packed and attention stays within them; their lengths are not said, one was assumed",
    "network": "two nodes, whose network is not said; experts of 768 over eight ranks",
    "gpus-unsaid": "the number of GPUs is not said; 64 were assumed",
    "liger": "Liger's loss has chunks about as large as its input, gradients of a gated MLP are written over its "
    "activations, and axolotl's kernels over Liger's were refused",
    "expert-tp": "was refused: 94 layers over 96 stages need --stage-layers, experts over tensor ranks --expert-tp",
    "cache": "the kept output has the cache of keys and values as well (use_cache=True)",
    "bf16-states": "states are in bf16: in fp32 those of 30B-A3B alone are more than was published; "
    "times are of cuDNN's attention, which torch 2.11 prefers",
    "another-batch": "memory grows with accumulation alone: the micro-batch is another",
    "atorch": "atorch's mixed precision was not read: 17 to 19 GiB more in each run, whatever the number of GPUs",
    "fp16": "was refused: no precision has that name, and bytes and rates are those of bf16-autocast; AutoGPTQ's "
    "dequantization was not read",
    "batch-unsaid": "the global batch, which decides how much of the time stages wait, is not said",
    "own-trainer": "a trainer in C++ with kernels of its own, which was described as compiled layers",
    "peak": "the published rate is above the peak of the GPU that is named",
    "litgpt-norm": "before 0.4.6 litgpt's norms save 16 bits for their weight: --kernels litgpt-0.4.5",
    "chunked-gradient": "chunks of a list of logits have a gradient in 16 bits, and the head's weight a second one; "
    "counted were two chunks in fp32, and --loss upcast without the file's loss",
    "kbit": "LLaMA-Factory casts no norms to fp32, as peft's preparation does: --kbit-upcast none",
    "mxfp4": "was refused: MXFP4 weights that axolotl dequantizes; its FSDP2 casts none to fp32, and accelerate before "
    "1.11 reduces gradients in each micro-batch (--gradient-sync each)",
    "recorded": "refused: Apertus has no closed form, and a traced model runs no flash-attn",
    "logits": "not explained: about as much as logits take, which a fused loss does not have",
    "autocast": "was refused: fp16 under autocast is --precision fp16-autocast",
    "old-version": "of 2023 or April 2024, in a version that is not said; not explained",
    "math-16": "one head of keys takes SDPA's math kernel, which in torch 2.0 keeps 16 bits: --attention eager",
    "recipe-name": "was refused: torchao's recipe has no prefix",
    "te-elsewhere": "refused: TransformerEngine's recipe on layers that are not its own",
    "loss-inside": "the file pads its vocabulary to 50304 and compiles its loss with the model (--loss compiled): the "
    "command had neither",
    "no-option": "was refused: GPUs a node is no option, and nodes of four GH200 had no file (gh200x4-96gb)",
    "te-of-2024": "on Hopper TransformerEngine 1.2 to 1.13 runs cuDNN's attention of then: --stack megatron-2024; no "
    "script of the 8B asks for checkpoints",
    "code-unsaid": "the code is Megatron-DeepSpeed, whose reductions are exposed: --stack megatron-deepspeed",
    "dpo": "Megatron's DPO under tensor parallelism is not described",
    "swift-buffers": "Megatron-SWIFT 4.0 to 4.3 hands no accumulate_allreduce_grads_in_fp32 to DDP (mended by its pull "
    "request 9590): --precision bf16-reduce16",
    "delta-shards": "refused: sharding of a gated delta rule is not modelled",
    "not-offloaded": "states are on the GPU, as one GPU's bytes say to 0.1 %; the source says that they are offloaded",
    "peft-0.9": "PEFT casts no adapters to fp32 before 0.12, the loop is no Trainer's, its targets are the seven of "
    "train.py (05ed9f2): --kernels, not --like",
    "gpu-unsaid": "the GPU is not named, an H100 was assumed; AdamW has fused=True (docs/examples/te_llama/utils.py)",
    "waits": "a hook offloads activations and waits for each copy (offload_wrapper of 3.test_cases/pytorch/FSDP)",
    "overlap": "its file has overlap_comm and reduce_bucket_size (ds_config.json, 41c63b3): --zero-buckets",
    "foreach": "transformers 4.35 (its requirements.txt) has an AdamW that is not fused: --optimizer adamw-foreach",
    "watts": "its GPUs drew 265 W: the host is the limit",
    "bert-targets": "was refused: query and value were no names of targets",
    "liger-experts": "was refused: Liger's kernels of mixtures were not described",
    "grpo": "refused: a step of GRPO is not described",
    "galore": "refused: GaLore's optimizer is not described",
    "eager-2023": "transformers 4.30 has no attention but its own: --attention eager",
    "math-rocm": "in fp32 SDPA of torch 2.1 on ROCm has its math kernel alone: --attention eager",
    "trl-tiles": "TRL 1.12 keeps all logits: --loss upcast",
    "plain-loss": "its models (src/models/llama3.py) drop logits of last positions; their loss is in the same dtype: "
    "--like huggingface-4.48 --loss uncast",
    "held-output": "the loop's variable `out` references logits, cast to fp32, through backward (sft/train.py and "
    "model.py, a1271501): --kernels huggingface-4.45 --keep-logits",
    "first-step": "printed after the first step, before which there are no moments",
    "script-dtype": "the script gives no dtype, so that what is not quantized is fp32, and TRL of October 2025 keeps "
    "all logits: --loss upcast",
    "titan-2026": "not explained: a sample takes 11 GiB with Qwen3's experts and 3.5 with gpt-oss's, 5.6 and 5.4 here",
    "data-set": "the longest sample of its data set, by ms-swift's table of data sets (docs at 3602360, d2b45ec and "
    "9dc41ab), where that is below the maximum in the command",
    "unsloth-2024": "before 17 November 2024 (fa8e59eb) Unsloth returns logits: --loss in-place; the longest sample of "
    "Alpaca has 1,028 tokens by ms-swift's table",
    "evaluated": "micro-batches of evaluation are not described",
    "liger-loss": "its Liger has cross_entropy without fused_linear_cross_entropy by default, which was refused in "
    "files: --loss in-forward",
    "experts-unsaid": "was refused: its configuration, written for the round, did not say that there are no experts",
    "cards-64gb": "its GPUs have 64 GB, as it states: a100-64gb and h100-64gb, which were no presets",
    "one-unit": "FSDPStrategy without an auto-wrap policy is one unit: --fsdp-one-unit",
    "less-than-loss": "not explained: it is less than weights and what logits take, fused as TransformerEngine does it",
    "scan-cp": "refused: context parallelism of state-space layers is not modelled",
    "compiled-experts": "refused: compiled experts have no closed form of their bytes",
    "unexplained": "not explained: neither which memory it is nor the dtype of its states is said",
}


class Row:
    """One published figure."""

    def __init__(self, facts: dict[str, str]) -> None:
        self.facts = facts
        self.unit = UNITS[facts["unit"]]
        self.published = float(facts["published"])
        self.of_time = facts["kind"] == "time"

    @property
    def blind(self) -> float | None:
        """The first answer; None: the run was refused."""
        return None if self.facts["blind"] == REFUSED else float(self.facts["blind"])

    @cached_property
    def now(self) -> float | None:
        """Today's answer to today's command."""
        command = self.facts["mended"] or self.facts["command"]
        if self.of_time:
            return answered("estimate", command)
        try:
            return forecast(described(command)).peak_bytes / self.unit
        except UsageError:
            return None

    def error(self, answer: float | None) -> float | None:
        """Relative, of an answer."""
        return None if answer is None else answer / self.published - 1


def described(command: str) -> Run:
    """The run of a command for the ledger, without the command line: a third of the time."""
    model, *words = command.split()
    given: dict[str, Any] = {}
    names = {flag_of(name): f for f in fields(RunRequest) for name in (f.name, f.metadata.get("former", f.name))}
    compiled = False
    while words:
        word = words.pop(0)
        if word == "--compile":
            compiled = True
        elif word == "--gpu":  # bytes are the same on any
            words.pop(0)
        elif word not in names:
            given[names["--" + word.removeprefix("--no-")].name] = False
        elif "bool" in str(names[word].type):
            given[names[word].name] = True
        else:
            given[names[word].name] = _typed(words.pop(0))
    run = resolve(model_spec(_found(model)), RunRequest(**given)).run
    return replace(run, compiled=True) if compiled else run


def _typed(word: str) -> int | float | str:
    if word.isdecimal():
        return int(word)
    return float(word) if word.replace(".", "", 1).isdecimal() else word


def answered(verb: str, command: str) -> float | None:
    """Return the command line's answer for a row; None: it refuses."""
    model, *words = command.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = command_line([verb, _found(model), *words, "--format", "json"])
    if code:
        return None
    found = json.loads(printed.getvalue())
    return float(found["peak_bytes"] if verb == "ledger" else found["tokens_per_second_per_gpu"])


def _found(model: str) -> str:
    return str(ROOT / model) if model.endswith(".json") else model


def rows(facts: Path = FACTS) -> list[Row]:
    """All of them, in the order of the file."""
    with facts.open(encoding="utf-8") as file:
        return [Row(row) for row in csv.DictReader(file)]
