"""An overview of checkpointing for Llama 3 70B."""

from __future__ import annotations

from .claim import Ask, Claim, Verdict

RUN = "jettison ledger llama3-70b --seq 8192 --micro-batch 4"
LAYER = "layers[layer=layers.0].bytes"
EXPLAIN = f"{RUN} --explain"
STEP_FRACTION = "explain.recompute[current=True].step_fraction"
HELD = "stages[0].activation_bytes"
TIME = "jettison estimate llama3-70b --seq 8192 --micro-batch 1 --tp 8 --gpu h100-80gb --explain"
NTH = "contradictions.md#every-nth-layer-19--29--33--or-33--whatever-n"
PIPELINE = "contradictions.md#pipeline-stages-divide-activation-memory-by-p-or-they-buy-nothing"
ALL_LAYERS = "contradictions.md#all-activations-of-the-80-layers-take-43-gb"


def _entry(role: str) -> Ask:
    return Ask(command=f"{RUN} --recompute none", key=f"entries[role={role}].storage_bytes")


def _segment(n: int, share: float, verdict: Verdict) -> Claim:
    return Claim(
        words=f"A checkpoint at every {n}th layer adds to a step",
        theirs=(share,),
        unit="%",
        asks=(Ask(command=f"{RUN} --recompute every:{n} --explain", key=STEP_FRACTION),),
        verdict=verdict,
        why=f"[Each layer runs once more, whatever N]({NTH}).",
    )


def _of_forward(n: int, share: float, verdict: Verdict) -> Claim:
    return Claim(
        words=f"A checkpoint at every {n}th layer adds to a forward",
        theirs=(share,),
        unit="%",
        asks=(Ask(command=f"{RUN} --recompute every:{n} --explain", key=STEP_FRACTION),),
        value=lambda step_fraction: 3 * step_fraction,
        verdict=verdict,
        why="Nearly a full forward: every layer, without the ops that backward does not need.",
    )


def _held(n: int, size: float) -> Claim:
    return Claim(
        words=f"A checkpoint at every {n}th layer leaves",
        theirs=(size,),
        unit="GB",
        asks=(Ask(command=f"{RUN} --recompute every:{n}", key="layers"),),
        value=lambda layers: sum(layer["bytes"] for layer in layers if layer["layer"].startswith("layers.")),
        verdict=Verdict.RIGHT,
        why=f"Between the passes. In backward the open segment's {n} layers of 10.9 GB come to it.",
    )


def _saved(n: int, share: float) -> Claim:
    return Claim(
        words=f"A checkpoint at every {n}th layer saves",
        theirs=(share,),
        unit="%",
        asks=(
            Ask(command=f"{RUN} --recompute none", key=LAYER),
            Ask(command=f"{RUN} --recompute every:{n}", key="layers"),
        ),
        value=lambda one, layers: (
            1 - sum(layer["bytes"] for layer in layers if layer["layer"].startswith("layers.")) / (80 * one)
        ),
        verdict=Verdict.WRONG,
        why=f"Of the bytes without checkpointing. Three quarters are [of 43 GB]({ALL_LAYERS}).",
    )


ALL = (
    Claim(
        words="Without checkpointing the 80 layers keep",
        theirs=(43e9,),
        unit="GB",
        asks=(Ask(command=f"{RUN} --recompute none", key=LAYER),),
        value=lambda one: 80 * one,
        verdict=Verdict.WRONG,
        why=f"[43 GB is what is left with full recomputation]({ALL_LAYERS}).",
    ),
    Claim(
        words="Weights take",
        theirs=(140e9,),
        unit="GB",
        asks=(Ask(command=RUN, key="stages[0].parameter_bytes"),),
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="Gradients take",
        theirs=(140e9,),
        unit="GB",
        asks=(Ask(command=RUN, key="stages[0].gradient_bytes"),),
        verdict=Verdict.RIGHT,
        why="In bf16.",
    ),
    Claim(
        words="Optimizer states take",
        theirs=(560e9,),
        unit="GB",
        asks=(Ask(command=RUN, key="stages[0].optimizer_bytes"),),
        verdict=Verdict.WRONG,
        why="560 GB are two fp32 moments. bf16 weights have fp32 main copies as well, 4 bytes each.",
    ),
    _segment(4, 0.19, Verdict.WRONG),
    _of_forward(4, 0.37, Verdict.WRONG),
    _held(4, 11e9),
    _saved(4, 0.75),
    _segment(8, 0.29, Verdict.WRONG),
    _of_forward(8, 0.87, Verdict.WRONG),
    _held(8, 5.4e9),
    _segment(80, 0.33, Verdict.RIGHT),
    _of_forward(80, 1.0, Verdict.RIGHT),
)

TABLE = (
    Claim(
        words="Attention input",
        theirs=(537e6,),
        unit="MB",
        asks=(Ask(command=f"{RUN} --recompute full", key=LAYER),),
        verdict=Verdict.RIGHT,
        why="4 x 8192 x 8192 elements of two bytes, as every tensor of that shape.",
    ),
    Claim(
        words="Q, K and V",
        theirs=(1.6e9,),
        unit="MB",
        asks=(_entry("attention query"), _entry("attention key"), _entry("attention value")),
        value=lambda q, k, v: q + k + v,
        verdict=Verdict.WRONG,
        why="[8 heads of keys and values, not 64](contradictions.md#q-k-and-v-take-16-gb).",
    ),
    Claim(
        words="Attention scores, after the softmax, where they are made",
        theirs=(34e9,),
        unit="GB",
        asks=(
            Ask(
                command=f"{RUN} --attention eager --kernels megatron", key="entries[role=softmax output].storage_bytes"
            ),
        ),
        verdict=Verdict.RIGHT,
        why="64 heads x 4 x 8192 x 8192 x 2 bytes. transformers' softmax is in fp32 and keeps twice that.",
    ),
    Claim(
        words="Outputs of gate and up",
        theirs=(3.75e9,),
        unit="GB",
        asks=(Ask(command="jettison ledger llama3-70b --seq 8192 --micro-batch 4 --recompute none", key="entries"),),
        value=lambda entries: 2 * max(e["storage_bytes"] for e in entries if e["layer"] == "layers.0"),
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="Output of SiLU",
        theirs=(1.88e9,),
        unit="GB",
        asks=(Ask(command="jettison ledger llama3-70b --seq 8192 --micro-batch 4 --recompute none", key="entries"),),
        value=lambda entries: max(e["storage_bytes"] for e in entries if e["layer"] == "layers.0"),
        verdict=Verdict.RIGHT,
        why="",
    ),
)

SELECTIVE = (
    Claim(
        words="Keeping the outputs of GEMMs and dropping the rest frees, of a layer",
        theirs=(0.60, 0.70),
        unit="%",
        asks=(
            Ask(command=f"{RUN} --recompute none", key=LAYER),
            Ask(command=f"{RUN} --recompute selective-op", key=LAYER),
        ),
        value=lambda none, kept: 1 - kept / none,
        verdict=Verdict.WRONG,
        why="Most bytes of a gated layer *are* outputs of GEMMs.",
    ),
    Claim(
        words="Keeping the outputs of GEMMs leaves, of a layer",
        theirs=(2e9, 3e9),
        unit="GB",
        asks=(Ask(command=f"{RUN} --recompute selective-op", key=LAYER),),
        verdict=Verdict.WRONG,
        why="The outputs of gate and up alone are 3.76 GB, by the overview's own table.",
    ),
    Claim(
        words="Keeping the outputs of GEMMs leaves, of 80 layers",
        theirs=(160e9, 240e9),
        unit="GB",
        asks=(Ask(command=f"{RUN} --recompute selective-op", key=LAYER),),
        value=lambda layer: 80 * layer,
        verdict=Verdict.WRONG,
        why="The overview itself states 43 GB for all layers *without* checkpointing.",
    ),
    Claim(
        words="Keeping the outputs of GEMMs costs, of a step's time",
        theirs=(0.10, 0.15),
        unit="%",
        asks=(
            Ask(command=TIME, key="options[recompute=none].step_seconds"),
            Ask(command=f"{TIME} --recompute selective-op", key="options[recompute=selective-op].step_seconds"),
        ),
        value=lambda none, kept: kept / none - 1,
        verdict=Verdict.WRONG,
        why="Only elementwise ops are recomputed, which take little time next to GEMMs.",
    ),
    Claim(
        words="Checkpointing every layer costs, of a step's time",
        theirs=(0.20, 0.35),
        unit="%",
        asks=(
            Ask(command=TIME, key="options[recompute=none].step_seconds"),
            Ask(command=TIME, key="options[recompute=full].step_seconds"),
        ),
        value=lambda none, full: full / none - 1,
        verdict=Verdict.RIGHT,
        why="t = 8 on H100.",
    ),
)

PLACES = (
    Claim(
        words="A pipeline of 4 stages divides a rank's activation memory by",
        theirs=(4,),
        unit="x",
        asks=(
            Ask(command=f"{RUN} --recompute none", key=LAYER),
            Ask(command=f"{RUN} --micro-batches 8 --pp 4 --recompute none", key=HELD),
        ),
        value=lambda one, first: 80 * one / first,
        verdict=Verdict.WRONG,
        why=f"[Not the first stage's]({PIPELINE}): it holds four micro-batches of a quarter of the layers.",
    ),
    Claim(
        words="4 stages with selective checkpointing need",
        theirs=(5e9, 10e9),
        unit="GB",
        asks=(Ask(command=f"{RUN} --micro-batches 8 --pp 4 --recompute selective-op", key=HELD),),
        verdict=Verdict.WRONG,
        why="On the first stage. The claim starts from 43 GB instead of 870 GB.",
    ),
    Claim(
        words="4 stages with selective checkpointing need less than no optimization by",
        theirs=(8, 10),
        unit="x",
        asks=(
            Ask(command=f"{RUN} --recompute none", key=LAYER),
            Ask(command=f"{RUN} --micro-batches 8 --pp 4 --recompute selective-op", key=HELD),
        ),
        value=lambda one, first: 80 * one / first,
        verdict=Verdict.WRONG,
        why="Selective checkpointing alone: the first stage holds as much as a single stage would.",
    ),
    Claim(
        words="Offloading 480 GB and prefetching them takes, over NVLink-C2C",
        theirs=(0.5,),
        unit="s",
        asks=(Ask(command=f"{TIME} --recompute none", key="links[name=NVLink-C2C (GH200)].bytes_per_second"),),
        value=lambda one_way: 240e9 / one_way * 2,
        verdict=Verdict.WRONG,
        why="900 GB/s are both directions together: 240 GB out and 240 GB back at 450 GB/s.",
    ),
)

CLAIMS = (*ALL, *TABLE, *SELECTIVE, *PLACES)
