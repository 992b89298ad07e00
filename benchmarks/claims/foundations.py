"""A chapter on the memory of training on one GPU, and its correction."""

from __future__ import annotations

from .claim import Ask, Claim, Verdict

XL = "jettison ledger gpt2-xl --seq 1024 --micro-batch 4"
FP32 = f"{XL} --precision fp32"
ENGINE = "python -m examples.numpy_engine block --s 2048 --h 12288 --heads 96"
STATIC = ("stages[0].parameter_bytes", "stages[0].gradient_bytes", "stages[0].optimizer_bytes", "parameters")
AT_ONCE = "contradictions.md#gradients-are-allocated-at-once-or-one-by-one"


def _static(words: str, command: str, each: float, verdict: Verdict, why: str) -> Claim:
    return Claim(
        words=words,
        theirs=(each,),
        unit="N",
        asks=tuple(Ask(command=command, key=key) for key in STATIC),
        value=lambda parameters, gradients, optimizer, n: (parameters + gradients + optimizer) / n,
        verdict=verdict,
        why=why,
        tolerance=0.01,
    )


STATE = (
    Claim(
        words="A GPT has hv + L(12h² + 13h) + 2h parameters (GPT-3 175B)",
        theirs=(12288 * 51200 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288,),
        unit="",
        asks=(Ask(command="jettison ledger gpt-175b", key="parameters"),),
        verdict=Verdict.RIGHT,
        why="But for 2048 learned positions, which it leaves out and says so.",
        tolerance=2e-4,
    ),
    _static("Parameters, gradients and Adam in fp32", FP32, 16, Verdict.RIGHT, ""),
    _static("bf16 weights with an fp32 copy, gradients and Adam", f"{XL} --precision bf16", 16, Verdict.RIGHT, ""),
    _static(
        "bf16 weights with an fp32 copy, gradients summed in fp32, Adam",
        f"{XL} --precision bf16-grad32",
        20,
        Verdict.RIGHT,
        "With bf16 gradients and fp32 sums. With the sums alone (`--precision bf16-main32`) it is 18N.",
    ),
    Claim(
        words="16N for 70B parameters",
        theirs=(1120e9,),
        unit="GB",
        asks=tuple(Ask(command="jettison ledger llama3-70b", key=key) for key in STATIC[:3]),
        value=lambda parameters, gradients, optimizer: parameters + gradients + optimizer,
        verdict=Verdict.RIGHT,
        why="70.55 billion.",
    ),
    Claim(
        words="20N for 70B parameters",
        theirs=(1400e9,),
        unit="GB",
        asks=tuple(Ask(command="jettison ledger llama3-70b --precision bf16-grad32", key=key) for key in STATIC[:3]),
        value=lambda parameters, gradients, optimizer: parameters + gradients + optimizer,
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="20N for 405B parameters",
        theirs=(8100e9,),
        unit="GB",
        asks=tuple(Ask(command="jettison ledger llama3-405b --precision bf16-grad32", key=key) for key in STATIC[:3]),
        value=lambda parameters, gradients, optimizer: parameters + gradients + optimizer,
        verdict=Verdict.RIGHT,
        why="",
    ),
    Claim(
        words="16N for 405B parameters",
        theirs=(6480e9,),
        unit="GB",
        asks=tuple(Ask(command="jettison ledger llama3-405b", key=key) for key in STATIC[:3]),
        value=lambda parameters, gradients, optimizer: parameters + gradients + optimizer,
        verdict=Verdict.RIGHT,
        why="",
    ),
)

ACTIVATIONS = (
    Claim(
        words="All layers of GPT-3 keep L sbh(34 + 5as/h)",
        theirs=(96 * (34 * 2048 * 12288 + 5 * 96 * 2048**2),),
        unit="GB",
        asks=(Ask(command="jettison ledger gpt-175b --micro-batch 1", key="stages[0].activation_bytes"),),
        verdict=Verdict.RIGHT,
        why="Embedding and head are 0.2 % more.",
    ),
    Claim(
        words="Its table lists the attention scores alone, bytes for each score",
        theirs=(2,),
        unit="",
        asks=(Ask(command=ENGINE, key="bytes"), Ask(command=ENGINE, key="the core's share of bytes")),
        value=lambda whole, share: whole * share / (96 * 2048**2),
        verdict=Verdict.WRONG,
        why="Softmax output, dropout mask and dropout output: 2 + 1 + 2, as in its equation.",
    ),
    Claim(
        words="The rest of its table, bytes for each element of the input",
        theirs=(24,),
        unit="",
        asks=(Ask(command="python -m examples.numpy_engine block --attention fused", key="bytes / sbh"),),
        verdict=Verdict.WRONG,
        why="34, as in its equation: the outputs of both norms and a second tensor of 4h are missing.",
    ),
    Claim(
        words="In fp32 all activation bytes double",
        theirs=(2,),
        unit="x",
        asks=(Ask(command=f"{ENGINE} --dtype float32", key="bytes"), Ask(command=ENGINE, key="bytes")),
        value=lambda wide, narrow: wide / narrow,
        verdict=Verdict.WRONG,
        why="Dropout masks do not: 66 + 9as/h.",
    ),
    Claim(
        words="Activations grow with the square of the sequence: Llama 3 8B at twice the tokens",
        theirs=(4,),
        unit="x",
        asks=(
            Ask(command="jettison ledger llama3-8b --seq 65536", key="layers[layer=layers.0].bytes"),
            Ask(command="jettison ledger llama3-8b --seq 32768", key="layers[layer=layers.0].bytes"),
        ),
        value=lambda long, short: long / short,
        verdict=Verdict.WRONG,
        why="With fused attention, which the chapter itself calls the default, they grow with the sequence.",
    ),
    Claim(
        words="Steps that accumulate 8 micro-batches keep as much as steps of one",
        theirs=(1,),
        unit="x",
        asks=(
            Ask(command=f"{FP32} --micro-batches 8", key="stages[0].activation_bytes"),
            Ask(command=FP32, key="stages[0].activation_bytes"),
        ),
        value=lambda eight, one: eight / one,
        verdict=Verdict.RIGHT,
        why="",
        tolerance=0,
    ),
    Claim(
        words="With full recomputation HFU is above MFU, by a forward",
        theirs=(4 / 3,),
        unit="x",
        asks=(
            Ask(command="jettison estimate gpt-175b --tp 8 --recompute full --gpu a100-80gb", key="hfu"),
            Ask(command="jettison estimate gpt-175b --tp 8 --recompute full --gpu a100-80gb", key="mfu"),
        ),
        value=lambda hardware, model: hardware / model,
        verdict=Verdict.RIGHT,
        why="",
    ),
)

STEP = (
    Claim(
        words="Before the first forward there are the parameters",
        theirs=(4,),
        unit="N",
        asks=(Ask(command=FP32, key="phases[0].first_step_peak_bytes"), Ask(command=FP32, key="parameters")),
        value=lambda found, n: found / n,
        verdict=Verdict.RIGHT,
        why="",
        tolerance=0.01,
    ),
    Claim(
        words="Before every later one Adam's moments as well",
        theirs=(12,),
        unit="N",
        asks=(Ask(command=FP32, key="phases[0].peak_bytes"), Ask(command=FP32, key="parameters")),
        value=lambda found, n: found / n,
        verdict=Verdict.RIGHT,
        why="So that what fits in step 0 may not fit in step 1.",
        tolerance=0.01,
    ),
    Claim(
        words="The optimizer's step needs",
        theirs=(16,),
        unit="N",
        asks=(Ask(command=FP32, key="phases[phase=optimizer].peak_bytes"), Ask(command=FP32, key="parameters")),
        value=lambda found, n: found / n,
        verdict=Verdict.PARTLY,
        why="Plus the temporaries of PyTorch's multi-tensor kernels.",
    ),
    Claim(
        words="The peak of a step is 16N and all activations (GPT-2 XL, b = 4)",
        theirs=(63.3e9,),
        unit="GB",
        asks=(Ask(command=f"{FP32} --gradients one-by-one", key="peak_bytes"),),
        verdict=Verdict.WRONG,
        why=f"[Gradients allocated one by one in backward: 4N are not there yet at the peak]({AT_ONCE}).",
    ),
    Claim(
        words="The peak of a step, gradients in buffers of the framework",
        theirs=(63.3e9,),
        unit="GB",
        asks=(Ask(command=f"{FP32} --gradients upfront", key="peak_bytes"),),
        verdict=Verdict.RIGHT,
        why="",
    ),
)

CLAIMS = (*STATE, *ACTIVATIONS, *STEP)
