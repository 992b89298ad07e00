"""An explainer of arXiv 2205.05198, in six figures."""

from __future__ import annotations

from .claim import Ask, Claim, Verdict

GPT3 = "jettison ledger gpt-175b --micro-batch 1"
LADDER = "jettison ledger gpt-175b --tp 8"
LAYER = "layers[layer=layers.0].bytes"
CORE = f"{GPT3} --recompute selective --explain"
CORE_530B = "jettison ledger gpt-530b --micro-batch 1 --recompute selective --explain"
A100 = "--gpu a100-80gb"
RUNS = {
    "22B": "jettison estimate gpt-22b --tp 8 --micro-batch 4",
    "175B": "jettison estimate gpt-175b --tp 8 --pp 8 --virtual-stages 3 --micro-batches 64",
    "530B": "jettison estimate gpt-530b --tp 8 --pp 35 --virtual-stages 3 --micro-batches 280",
    "1T": "jettison estimate gpt-1t --tp 8 --pp 64 --micro-batches 512",
}
FULL, SELECTIVE = "--no-sp --recompute full", "--sp --recompute selective"


def step(run: str, way: str, key: str = "step_seconds") -> Ask:
    return Ask(command=f"{RUNS[run]} {way} {A100}", key=key)


def layer(ways: str, model: str = "gpt-175b") -> Ask:
    return Ask(command=f"jettison ledger {model} --tp 8 {ways}", key=LAYER)


def _gain(run: str) -> Claim:
    return Claim(
        words=f"{run}: selective recomputation with sequence parallelism is quicker than full recomputation by",
        theirs=(0.29, 0.32),
        unit="%",
        asks=(step(run, FULL), step(run, SELECTIVE)),
        value=lambda full, selective: full / selective - 1,
        verdict=Verdict.RIGHT,
        why="Predicted from data sheets and the schedule; [measured times](accuracy.md).",
        tolerance=0.1,
    )


BYTES = (
    Claim(
        words="A layer of GPT-3 keeps nearly three gigabytes for one sample, sbh(34 + 5as/h)",
        theirs=(2048 * 12288 * 34 + 5 * 96 * 2048**2,),
        unit="B",
        asks=(Ask(command=GPT3, key=LAYER),),
        verdict=Verdict.RIGHT,
        why="With the statistics of two norms, 32,768 bytes that the equation leaves out.",
        tolerance=2e-5,
    ),
    Claim(
        words="The attention part outweighs the rest from sequences of about",
        theirs=(870,),
        unit="",
        asks=(Ask(command=CORE, key="explain.core.crossover"),),
        verdict=Verdict.RIGHT,
        why="34h / 5a = 870.4. With fused attention there is no such part.",
    ),
    Claim(
        words="At 2048 tokens the attention part is, of a layer of GPT-3",
        theirs=(0.70,),
        unit="%",
        asks=(Ask(command=CORE, key="explain.core.saved_bytes"), Ask(command=CORE, key="explain.core.layer_bytes")),
        value=lambda core, whole: core / whole,
        verdict=Verdict.RIGHT,
        why="On one rank, or with sequence parallelism.",
    ),
    Claim(
        words="At 2048 tokens the attention part is, of a layer of the 530B model",
        theirs=(0.65,),
        unit="%",
        asks=(
            Ask(command=CORE_530B, key="explain.core.saved_bytes"),
            Ask(command=CORE_530B, key="explain.core.layer_bytes"),
        ),
        value=lambda core, whole: core / whole,
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="Recomputing the attention core adds to the FLOPs of a step of GPT-3",
        theirs=(0.027,),
        unit="%",
        asks=(Ask(command=CORE, key="explain.recompute[change=--recompute selective].step_fraction"),),
        verdict=Verdict.WRONG,
        why="2.7 % is the core's share of a *forward*. [How 0.45 % follows](contradictions.md"
        "#selective-recomputation-27--5--09--or-045-).",
    ),
    Claim(
        words="The core's share of a forward, if that is what the line above meant",
        theirs=(0.027,),
        unit="%",
        asks=(Ask(command=CORE, key="explain.core.flops"), Ask(command=CORE, key="explain.core.layer_flops")),
        value=lambda core, whole: core / whole,
        verdict=Verdict.RIGHT,
        why="s / (6h + s), which is close to s / 6h.",
    ),
    Claim(
        words="Recomputing it adds to the FLOPs of a step of the 530B model",
        theirs=(0.016,),
        unit="%",
        asks=(Ask(command=CORE_530B, key="explain.recompute[change=--recompute selective].step_fraction"),),
        verdict=Verdict.WRONG,
        why="As above.",
    ),
)

RANKS = (
    Claim(
        words="What tensor parallelism does not divide: 10sbh",
        theirs=(10 * 2048 * 12288,),
        unit="B",
        asks=(layer("--no-sp"), layer("--sp")),
        value=lambda copied, shared: (copied - shared) * 8 / 7,
        verdict=Verdict.RIGHT,
        why="Read off two layouts: copies on 8 ranks differ from shards by 7/8. The statistics of norms are in it.",
        tolerance=2e-4,
    ),
    Claim(
        words="At t = 8, what tensor parallelism does not divide is most of a layer's bytes on a rank",
        theirs=(0.5, 1.0),
        unit="%",
        asks=(layer("--no-sp"), layer("--sp")),
        value=lambda copied, shared: (copied - shared) * 8 / 7 / copied,
        verdict=Verdict.WRONG,
        why="10 of 23 in units of sbh; the attention core has another 10. Without the core it is 10 of 13.",
    ),
    Claim(
        words="With sequence parallelism a layer is divided by t = 8",
        theirs=(8,),
        unit="",
        asks=(Ask(command=GPT3, key=LAYER), layer("--sp")),
        value=lambda whole, shared: whole / shared,
        verdict=Verdict.RIGHT,
        why="In Megatron. Stock DTensor keeps two gathered inputs, `--gathered-inputs`.",
        tolerance=1e-6,
    ),
    Claim(
        words="Sequence parallelism moves no more bytes than tensor parallelism: ratio of exposed communication",
        theirs=(1,),
        unit="x",
        asks=(
            Ask(
                command="jettison estimate gpt-175b --tp 8 --sp --gpu a100-80gb", key="breakdown.communication_seconds"
            ),
            Ask(
                command="jettison estimate gpt-175b --tp 8 --no-sp --gpu a100-80gb",
                key="breakdown.communication_seconds",
            ),
        ),
        value=lambda sequence, tensor: sequence / tensor,
        verdict=Verdict.WRONG,
        why="They move the same bytes. But all-gathers of gradients are exposed, while the all-reduce overlaps "
        "with GEMMs; and two saved shards are all-gathered again, [1.25 times the bytes]"
        "(explore.md#one-layer-across-t-ranks).",
    ),
    Claim(
        words="The first stage of a pipeline holds L layers' worth, whatever p: ratio to one stage, p = 8",
        theirs=(1,),
        unit="x",
        asks=(
            Ask(
                command="jettison ledger gpt-175b --tp 8 --pp 8 --micro-batches 64 --explain",
                key="stages[0].activation_bytes",
            ),
            layer("--sp"),
        ),
        value=lambda first, one: first / (96 * one),
        verdict=Verdict.RIGHT,
        why="[Of the first stage, once there are p micro-batches](contradictions.md"
        "#pipeline-stages-divide-activation-memory-by-p-or-they-buy-nothing).",
    ),
    Claim(
        words="With selective recomputation 34sbhL/t are left",
        theirs=(34 * 2048 * 12288 * 96 / 8,),
        unit="GB",
        asks=(layer("--recompute selective"),),
        value=lambda one: 96 * one,
        verdict=Verdict.RIGHT,
        why="",
        tolerance=1e-3,
    ),
)

LADDER_STEPS = (
    Claim(
        words="Sequence parallelism leaves about half of the tensor-parallel layer's bytes",
        theirs=(0.5,),
        unit="%",
        asks=(layer("--sp"), layer("--no-sp")),
        value=lambda way, base: way / base,
        verdict=Verdict.WRONG,
        why="The paper's own figure: 62 % for GPT-3, 58 to 67 % for the others.",
    ),
    Claim(
        words="Selective recomputation leaves about half of the tensor-parallel layer's bytes",
        theirs=(0.5,),
        unit="%",
        asks=(layer("--no-sp --recompute selective"), layer("--no-sp")),
        value=lambda way, base: way / base,
        verdict=Verdict.WRONG,
        why="49 % for 22B, 62 % for 530B and 1T.",
    ),
    Claim(
        words="Both together leave under 20 %, a fifth",
        theirs=(0.18, 0.20),
        unit="%",
        asks=(layer("--sp --recompute selective"), layer("--no-sp")),
        value=lambda way, base: way / base,
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="Both together leave under 20 % at every scale: the 1T model",
        theirs=(0.18, 0.20),
        unit="%",
        asks=(layer("--sp --recompute selective", "gpt-1t"), layer("--no-sp", "gpt-1t")),
        value=lambda way, base: way / base,
        verdict=Verdict.WRONG,
        why="0.2 points more: its layers are wider for their number of heads.",
        tolerance=0.005,
    ),
    Claim(
        words="Full recomputation leaves about 10 %",
        theirs=(0.09, 0.10),
        unit="%",
        asks=(layer("--no-sp --recompute full"), layer("--no-sp")),
        value=lambda way, base: way / base,
        verdict=Verdict.RIGHT,
        why="7.6 to 9.5 % over the four models; with sequence parallelism about 1 %.",
    ),
    Claim(
        words="Both together take about twice what full recomputation takes",
        theirs=(2,),
        unit="x",
        asks=(layer("--sp --recompute selective"), layer("--no-sp --recompute full")),
        value=lambda both, full: both / full,
        verdict=Verdict.RIGHT,
        why="",
        tolerance=0.1,
    ),
)

TIMES = (
    Claim(
        words="Full recomputation costs 30 to 40 % of a step's time (22B)",
        theirs=(0.30, 0.40),
        unit="%",
        asks=(step("22B", FULL), step("22B", "--no-sp --recompute none")),
        value=lambda full, none: full / none - 1,
        verdict=Verdict.RIGHT,
        why="Of a step, optimizer included; the paper's 39 % are of one layer.",
    ),
    Claim(
        words="The two techniques together get back more than, of that time (22B)",
        theirs=(0.9, 1.0),
        unit="%",
        asks=(step("22B", FULL), step("22B", SELECTIVE), step("22B", "--no-sp --recompute none")),
        value=lambda full, both, none: (full - both) / (full - none),
        verdict=Verdict.RIGHT,
        why="Sequence parallelism makes norms and dropout quicker, which counts towards it.",
        tolerance=0.1,
    ),
    *(_gain(run) for run in RUNS),
    Claim(
        words="22B: a step takes, of one with full recomputation",
        theirs=(0.77,),
        unit="%",
        asks=(step("22B", FULL), step("22B", SELECTIVE)),
        value=lambda full, selective: selective / full,
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="The 1T model reaches an MFU of 56.3 %",
        theirs=(0.563,),
        unit="%",
        asks=(step("1T", SELECTIVE, "mfu"),),
        verdict=Verdict.RIGHT,
        why="Ours is 4 points too low: 512 GPUs that wait for the slowest lose more in other publishers' runs.",
        tolerance=0.08,
    ),
    Claim(
        words="530B on 2240 GPUs: 42.1 % MFU with full recomputation",
        theirs=(0.421,),
        unit="%",
        asks=(step("530B", f"--dp 8 {FULL}", "mfu"),),
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="530B on 2240 GPUs: 54.2 % MFU with the two techniques",
        theirs=(0.542,),
        unit="%",
        asks=(step("530B", f"--dp 8 {SELECTIVE}", "mfu"),),
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="530B on 2240 GPUs: quicker by 29 %",
        theirs=(0.29,),
        unit="%",
        asks=(step("530B", f"--dp 8 {FULL}"), step("530B", f"--dp 8 {SELECTIVE}")),
        value=lambda full, both: full / both - 1,
        verdict=Verdict.RIGHT,
        why="54.2 / 42.1 is 1.287.",
        tolerance=0.15,
    ),
)

CLAIMS = (*BYTES, *RANKS, *LADDER_STEPS, *TIMES)
