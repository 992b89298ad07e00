"""A lesson that builds checkpointing in NumPy."""

from __future__ import annotations

from .claim import Ask, Claim, Verdict

ENGINE = "python -m examples.numpy_engine"
FUSED = f"{ENGINE} block --attention fused"
GPT3 = f"{ENGINE} block --s 2048 --h 12288 --heads 96"
POLICIES = f"{ENGINE} policies --attention fused"
EAGER = f"{ENGINE} policies"
CHAIN = f"{ENGINE} sweep --network chain --layers 64 --s 16 --h 64"
SWEEP = f"{ENGINE} sweep --layers 64 --attention fused"
LADDER = "jettison ledger gpt-175b --tp 8 --no-sp"
LAYER = "layers[layer=layers.0].bytes"

BYTES = (
    Claim(
        words="A layer keeps about 12 values for each element of its input",
        theirs=(12,),
        unit="",
        asks=(Ask(command=FUSED, key="bytes / sbh"),),
        value=lambda bytes_each: bytes_each / 2,
        verdict=Verdict.WRONG,
        why="17 with dropout and attention in one kernel. [Of Llama's layers](contradictions.md"
        "#12bld-floats-a-layer-or-34sbh-bytes).",
    ),
    Claim(
        words="A layer's 12 values, at 8192 tokens and a width of 8192, in BF16",
        theirs=(800e6,),
        unit="MB",
        asks=(Ask(command=FUSED, key="bytes"),),
        verdict=Verdict.WRONG,
        why="12 values of two bytes would be 1,611 MB; 800 MB are 12 values of one byte.",
    ),
    Claim(
        words="64 such layers keep",
        theirs=(51e9,),
        unit="GB",
        asks=(Ask(command=FUSED, key="bytes"),),
        value=lambda one: 64 * one,
        verdict=Verdict.WRONG,
        why="The lesson's own estimator, its step 5, prints 103 GB.",
    ),
    Claim(
        words="A 70B model at 128K tokens keeps 3 TB on a rank",
        theirs=(3e12,),
        unit="TB",
        asks=(Ask(command="jettison ledger llama3-70b --seq 131072 --kernels megatron --micro-batch 1", key=LAYER),),
        value=lambda one: 80 * one,
        verdict=Verdict.RIGHT,
        why="Without any parallel layout. It is 34sbhL and not what the lesson's 12 values give, 2.06 TB.",
    ),
    Claim(
        words="The feed-forward part's hidden activation has 4 times the size of a layer's input",
        theirs=(4,),
        unit="x",
        asks=(Ask(command=FUSED, key="rows[tensor=act].bytes"), Ask(command=FUSED, key="rows[tensor=x0].bytes")),
        value=lambda wide, one: wide / one,
        verdict=Verdict.RIGHT,
        why="And there are two of it: before the GELU and after it.",
        tolerance=0,
    ),
    Claim(
        words="A layer's input is a tenth of what the layer keeps",
        theirs=(0.1,),
        unit="%",
        asks=(Ask(command=POLICIES, key="rows[plan=full].of none"),),
        verdict=Verdict.WRONG,
        why="A seventeenth; with eager attention at these sizes one part in 177.",
    ),
    Claim(
        words="With fused attention, checkpointing adds little: kept bytes fall by",
        theirs=(1, 1.5),
        unit="x",
        asks=(Ask(command=POLICIES, key="rows[plan=full].of none"),),
        value=lambda left: 1 / left,
        verdict=Verdict.WRONG,
        why="The kernel removes the quadratic term. 34sbh are left, of which full recomputation keeps 2.",
    ),
    Claim(
        words="Selective recomputation saves five times the memory (GPT-3, t = 8)",
        theirs=(5,),
        unit="x",
        asks=(Ask(command=LADDER, key=LAYER), Ask(command=f"{LADDER} --recompute selective", key=LAYER)),
        value=lambda none, selective: none / selective,
        verdict=Verdict.WRONG,
        why="Five times takes sequence parallelism and selective recomputation together.",
    ),
)

WORK = (
    Claim(
        words="Checkpointing every layer adds a third to the FLOPs of a step",
        theirs=(1 / 3,),
        unit="%",
        asks=(Ask(command=f"{EAGER} --to-the-end", key="rows[plan=full].overhead"),),
        verdict=Verdict.RIGHT,
        why="If each layer runs to its very output.",
        tolerance=1e-9,
    ),
    Claim(
        words="Checkpointing every layer, with early stop as in PyTorch, adds to the FLOPs of a step",
        theirs=(1 / 3,),
        unit="%",
        asks=(Ask(command=EAGER, key="rows[plan=full].overhead"),),
        verdict=Verdict.WRONG,
        why="The second GEMM of the MLP is not recomputed. [For Llama 3 70B 25.1 %](contradictions.md"
        "#every-nth-layer-19--29--33--or-33--whatever-n).",
    ),
    Claim(
        words="Checkpointing every layer adds 33 % *forward* FLOPs",
        theirs=(1 / 3,),
        unit="%",
        asks=(Ask(command=f"{EAGER} --to-the-end", key="rows[plan=full].overhead"),),
        value=lambda step_fraction: 3 * step_fraction,
        verdict=Verdict.WRONG,
        why="The forward runs twice. It is a third of the step, which is three forwards.",
    ),
    Claim(
        words="Attention is 15 % of a layer's FLOPs (s = h = 8192)",
        theirs=(0.15,),
        unit="%",
        asks=(Ask(command=f"{ENGINE} block", key="the core's share of FLOPs"),),
        verdict=Verdict.RIGHT,
        why="s / (6h + s), the two GEMMs of the core.",
    ),
    Claim(
        words="Attention is 15 % of a layer's FLOPs (GPT-3, 2048 tokens)",
        theirs=(0.15,),
        unit="%",
        asks=(Ask(command=GPT3, key="the core's share of FLOPs"),),
        verdict=Verdict.WRONG,
        why="The share grows with s / h.",
    ),
    Claim(
        words="So selective recomputation adds 5 % to a step (s = h = 8192)",
        theirs=(0.05,),
        unit="%",
        asks=(Ask(command=f"{EAGER} --to-the-end", key="rows[plan=selective].overhead"),),
        verdict=Verdict.RIGHT,
        why="If the core runs to its end.",
    ),
    Claim(
        words="Recomputing the attention core with early stop adds 5 % to a step",
        theirs=(0.05,),
        unit="%",
        asks=(Ask(command=EAGER, key="rows[plan=selective].overhead"),),
        verdict=Verdict.WRONG,
        why="Backward needs the probabilities, not the GEMM with the values.",
    ),
    Claim(
        words="Its toy network, checkpointed every 4 layers, does a third more than without",
        theirs=(1 / 3,),
        unit="%",
        asks=(Ask(command=f"{ENGINE} toy", key="overhead of its own baseline"),),
        verdict=Verdict.WRONG,
        why="Without checkpoints the toy keeps layers' inputs and recomputes the ReLU's: it is checkpointed already.",
    ),
    Claim(
        words="Its toy network, checkpointed every 4 layers, does a third more than a step needs",
        theirs=(1 / 3,),
        unit="%",
        asks=(Ask(command=f"{ENGINE} toy", key="rows[method=called checkpointed].of needed"),),
        value=lambda of_needed: of_needed - 1,
        verdict=Verdict.WRONG,
        why="A segment is recomputed to its end, and the first GEMM of each layer a third time.",
    ),
)

SEGMENTS = (
    Claim(
        words="Of 64 layers of one GEMM each, the best segment length is sqrt(64)",
        theirs=(8,),
        unit="",
        asks=(Ask(command=CHAIN, key="smallest peak from k"), Ask(command=CHAIN, key="to k")),
        value=lambda low, high: min(high, max(low, 8)),
        verdict=Verdict.RIGHT,
        why="8 is among the best: from 6 to 11 the least is the same.",
        tolerance=0,
    ),
    Claim(
        words="They need 2 sqrt(n) - 1 inputs",
        theirs=(15,),
        unit="",
        asks=(Ask(command=CHAIN, key="smallest peak"),),
        verdict=Verdict.RIGHT,
        why="The lesson says n/k + k; one of them is counted twice, since a segment's first input is its checkpoint.",
        tolerance=0,
    ),
    Claim(
        words="Of 64 transformer layers, the best segment length is sqrt(64)",
        theirs=(8,),
        unit="",
        asks=(Ask(command=SWEEP, key="smallest peak from k"),),
        verdict=Verdict.WRONG,
        why="Layers of the open segment hold 17 inputs each: the minimum is at sqrt(64 / 17).",
    ),
    Claim(
        words="every:8 of 64 layers needs (64/8 + 8) inputs",
        theirs=(16 * 134217728,),
        unit="MB",
        asks=(Ask(command=SWEEP, key="rows[k=8].peak bytes"),),
        verdict=Verdict.WRONG,
        why="The open segment's 8 layers hold 17 inputs each. It is more than k = 1 needs.",
    ),
    Claim(
        words="At k = sqrt(64), sqrt(64) layers are recomputed",
        theirs=(8,),
        unit="",
        asks=(Ask(command=f"{CHAIN} --to-the-end", key="rows[k=8].overhead"),),
        value=lambda overhead: 3 * 64 * overhead,
        verdict=Verdict.WRONG,
        why="Each layer is recomputed once, whatever k: 64. Memory scales with the root, work does not.",
    ),
    Claim(
        words="Of 32 layers in 32 segments 32 inputs are held",
        theirs=(32,),
        unit="",
        asks=(Ask(command=POLICIES, key="rows[plan=full].held GB"),),
        value=lambda held: held * 1e9 / 134217728,
        verdict=Verdict.RIGHT,
        why="",
        tolerance=0,
    ),
)

SAME = (
    Claim(
        words="Gradients are identical to machine precision: plans whose gradients differ",
        theirs=(0,),
        unit="",
        asks=(Ask(command=f"{ENGINE} gradients", key="rows"),),
        value=lambda rows: sum(not row["gradients identical"] for row in rows),
        verdict=Verdict.RIGHT,
        why="Identical to the bit: the same ops on the same inputs.",
    ),
    Claim(
        words="FP8: if a recomputed layer takes the first run's scale, steps (of 12) whose gradients differ",
        theirs=(0,),
        unit="",
        asks=(Ask(command=f"{ENGINE} fp8", key="wrong steps"),),
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="FP8: if a recomputed layer takes the current scale, steps (of 12) whose gradients differ",
        theirs=(1, 12),
        unit="",
        asks=(Ask(command=f"{ENGINE} fp8 --scale current", key="wrong steps"),),
        verdict=Verdict.RIGHT,
        why="Its history has gone on by then, and goes on twice in each step.",
    ),
)

CLAIMS = (*BYTES, *WORK, *SEGMENTS, *SAME)
