"""Published peaks within their tolerances, the pages that show them, and the figures that settle contradictions."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from benchmarks import contradictions, offload
from benchmarks.published import (
    CLAIMED,
    FACTS,
    Framework,
    Row,
    described,
    predicted_bytes,
    prediction,
    room_left_by_logits,
    rows,
)

from jettison.cli.main import run
from jettison.core.units import GIB
from jettison.formula.region import layer_region
from jettison.memory.span import Phase
from jettison.predict.forecast import forecast
from jettison.solve.checkpoint_policy import SelectiveOp, policy_named

ROWS = rows()
ALTERNATE = "selective-op-alternate"
NO_CONFIGURATION = {"accelerate issue 4175"}


# published peaks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prediction_is_as_near_as_its_row_says(row: Row) -> None:
    assert predicted_bytes(row) / GIB == pytest.approx(row.gib, rel=row.within)
    assert bool(row.why) == (row.within > CLAIMED), "what lies outside the claim has a reason"


def test_every_published_memory_figure_has_a_row() -> None:
    with FACTS.open(encoding="utf-8") as file:
        stated = [fact for fact in csv.DictReader(file) if fact["memory_gib"]]
    published = sorted(float(fact["memory_gib"]) for fact in stated if fact["source"] not in NO_CONFIGURATION)
    assert published == sorted(row.gib for row in ROWS if row.facts == FACTS)


@pytest.mark.parametrize("module", [contradictions, offload])
def test_pages_are_what_their_generators_write(module) -> None:
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), f"run python -m {module.__name__}"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_command_beside_a_row_repeats_it(capsys: pytest.CaptureFixture[str], *, compiled: bool) -> None:
    row = next(row for row in ROWS if row.framework is Framework.FSDP2 and row.run.compiled is compiled)
    assert row.shown.startswith("jettison ledger ")
    assert run([*row.shown.split()[1:], "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == prediction(row).peak_bytes


def test_rows_of_one_framework_differ_by_sharded_state_alone() -> None:
    """8 and 128 GPUs: 12 bytes a parameter that exist at the peak, and nothing else."""
    near, far = (
        forecast(described("llama3-8b", seq=8192, dp=dp, zero=3, precision="bf16-autocast")[0]) for dp in (8, 128)
    )
    assert near.peak_bytes - far.peak_bytes == pytest.approx(12 * near.parameters * (1 / 8 - 1 / 128), rel=1e-4)


# what an allocator reserves -------------------------------------------------------------------------------------------


class Allocator:
    """One expandable segment: best fit, neighbours that are free join, growth at the end."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, str]] = []  # size, owner; "" is free
        self.live = self.most_live = 0

    def take(self, owner: str, size: int) -> None:
        self.live += size
        self.most_live = max(self.most_live, self.live)
        fitting = [i for i, (room, held) in enumerate(self.blocks) if not held and room >= size]
        if not fitting:
            self.blocks.append((size, owner))
            return
        i = min(fitting, key=lambda i: self.blocks[i][0])
        rest = self.blocks[i][0] - size
        self.blocks[i : i + 1] = [(size, owner), (rest, "")] if rest else [(size, owner)]

    def free(self, owner: str) -> None:
        i = next(i for i, (_, held) in enumerate(self.blocks) if held == owner)
        self.live -= self.blocks[i][0]
        self.blocks[i] = (self.blocks[i][0], "")
        joined: list[tuple[int, str]] = []
        for size, held in self.blocks:
            if joined and not held and not joined[-1][1]:
                joined[-1] = (joined[-1][0] + size, "")
            else:
                joined.append((size, held))
        self.blocks = joined

    @property
    def reserved(self) -> int:
        return sum(size for size, _ in self.blocks)


def test_the_loss_leaves_room_for_16_bit_logits_that_nothing_fits() -> None:
    """The order of allocations of cross_entropy(logits.float()), with the caller letting go of the logits."""
    row = next(row for row in ROWS if row.framework is Framework.FSDP2)
    logits = 2 * row.run.micro_batch * row.run.seq * row.run.model.vocab
    pool = Allocator()
    for owner, size in (("logits", logits), ("wide", 2 * logits), ("log-softmax", 2 * logits)):
        pool.take(owner, size)
    pool.free("wide")
    pool.free("logits")
    pool.take("gradient of log-softmax", 2 * logits)
    pool.take("gradient of wide", 2 * logits)
    assert pool.most_live == 6 * logits
    assert pool.reserved - pool.most_live == logits == room_left_by_logits(row.run)


# what was changed for it ----------------------------------------------------------------------------------------------


def test_every_second_product_goes_and_torch_caches_what_nobody_reads() -> None:
    """A block of Llama 3 8B, bytes a token: input, query, value, attention and its log-sum-exp, gate; and down."""
    run_, _ = described("llama3-8b", seq=1024, recompute=ALTERNATE)
    program = layer_region(run_.signature, run_.model.layers[0]).program
    policy = policy_named(ALTERNATE)
    assert isinstance(policy, SelectiveOp)
    kept = policy.kept(program)
    expected = 2 * (4096 + 4096 + 1024 + 4096 + 14336) + 4 * 32
    assert program.kept_bytes(kept) == 1024 * expected
    assert program.kept_bytes(kept | policy.named(program)) == 1024 * (expected + 2 * 4096)
    everything = SelectiveOp()
    assert program.kept_bytes(everything.kept(program)) == 1024 * (expected + 2 * (1024 + 4096 + 14336))
    assert everything.named(program) > policy.named(program)


def test_reduce_scatters_are_not_repeated() -> None:
    run_, _ = described("llama3-8b", seq=1024, tp=2, recompute=ALTERNATE)
    program = layer_region(run_.signature, run_.model.layers[0]).program
    scattered = {b for op in program.ops if "reduce_scatter" in op.name for b in op.outputs}
    assert len(scattered) == 2 and scattered <= policy_named(ALTERNATE).named(program)  # type: ignore[attr-defined]
    assert len(scattered & policy_named(ALTERNATE).kept(program)) == 1, "nobody reads the second"


def test_no_gradients_wait_to_be_sharded_when_backward_begins() -> None:
    """ZeRO 2 adds to ZeRO 1 what the region after it has not yet reduced; after the head there is none."""
    one, two = (forecast(described("llama3-8b", seq=1024, dp=8, zero=zero)[0]).worst for zero in (1, 2))

    def backward(stage, where: str) -> int:
        return next(m.nbytes for m in stage.timeline() if m.phase is Phase.BACKWARD and m.where == where)

    assert backward(one, "head") == backward(two, "head")
    of_head = next(part for part in two.parts[0] if part.name == "head").static
    # the head's gradient is whole under both; under ZeRO 2 its shard is there beside it
    assert backward(two, "layers.31") - backward(one, "layers.31") == of_head.gradients


def test_the_tools_estimates_say_which_sequence_was_measured() -> None:
    """Megatron-LM PR 482 prints 68.8, 55.5, 49.5 and 28.6 beside its measurements; its equations, in bytes."""

    def estimate(s: int, b: int, d: int, p: int, t: int) -> float:
        h, layers, f, vocab = 4096, 32 // p, 10880, -(-50257 // (128 * t)) * 128 * t
        n = vocab * h / t + s * h + (7 * h + (4 * h * h + 3 * f * h) / t + 2 * f) * layers
        stored = p * (layers * ((5 * s * h * b + 4 * s * b * f) / t + 5 * s * h * b) + 1.5 * s * b * h)
        loss = 5 * s * b * vocab / t if p == 1 else 0
        return round(2 * (n * (3 + 6 / d) + stored + loss) / GIB, 1)

    shapes = ((2, 8, 1, 1), (4, 4, 1, 2), (2, 4, 2, 1), (4, 1, 1, 8))
    assert [estimate(2048, *shape) for shape in shapes] == [69.0, 55.5, 49.5, 28.6]
    assert estimate(4096, 2, 8, 1, 1) == 91.6


# contradictions -------------------------------------------------------------------------------------------------------

TOKENS, H, F, V, L = 4 * 8192, 8192, 28672, 128256, 80
RESIDUAL = 2 * TOKENS * H
LAYER = TOKENS * (6 * 2 * H + 2 * 2 * 8 * 128 + 4 * 64 + 2 * 4 + 4 * 2 * F)
"""Of Llama 3 70B: six of the residual stream's size, keys and values, log-sum-exp, two norms' statistics, four of F."""
FORWARD = 2 * (2 * H * H + 2 * H * 1024 + 3 * H * F) + 4 * 8192 * H
STEP = 3 * (L * FORWARD + 2 * H * V)
CORE_175, CORE_530 = 2048 / (6 * 12288 + 2048), 2048 / (6 * 20480 + 2048)
S, B, HEADS, WIDTH = 2048, 4, 64, 6144
IN_LAYERS_22B = 48 * (34 * S * B * WIDTH + 5 * HEADS * S * S * B)
BESIDE_22B = 5 * S * B * WIDTH + 4 * S * B * 51200

EXACT = {
    "70b none, 80 layers": L * LAYER,
    "70b none, layer": LAYER,
    "70b full, 80 layers": L * RESIDUAL,
    "70b q, k and v": RESIDUAL * (64 + 8 + 8) // 64,
    **{f"70b every:{k}, 80 layers": L // k * RESIDUAL for k in (2, 4, 8, 80)},
    "70b pytorch s=8192, layer": LAYER // 4,
    "70b pytorch s=131072, layer": 4 * LAYER,
    "70b pytorch s=8192, 80 layers": L * LAYER // 4,
    "70b pytorch s=131072, 80 layers": L * 4 * LAYER,
    "70b megatron s=8192, layer": LAYER // 4 - 8192 * 2 * F,
    "70b megatron s=131072, layer": 4 * LAYER - 131072 * 2 * F,
    "70b megatron s=8192, 80 layers": L * (LAYER // 4 - 8192 * 2 * F),
    "70b megatron s=131072, 80 layers": L * (4 * LAYER - 131072 * 2 * F),
    "70b pp=4 1f1b m=8, second last stage": 2 * L // 4 * RESIDUAL,
    "70b pp=8 1f1b m=8, second last stage": 2 * L // 8 * RESIDUAL,
    "70b pp=4 gpipe m=8, second last stage": 8 * L // 4 * RESIDUAL,
    "70b pp=4 1f1b m=1, second last stage": L // 4 * RESIDUAL,
    "gpt2-xl gradients": 4 * 1_557_611_200,
    "gpt-530b outputs, sp=False": 2 * 2048 * 20480 * 35,
    "gpt-530b outputs, sp=True": 2 * 2048 * 20480 * 35 // 8,
}
NEAR = {  # positions, token ids and norm statistics are left out of the closed forms
    "70b full, share of step": (L * (FORWARD - 2 * H * F)) / STEP,
    **{f"70b every:{k}, share of step": (L * FORWARD - L // k * 2 * H * F) / STEP for k in (2, 4, 8, 80)},
    "70b pp=4 1f1b m=8, first stage": L * RESIDUAL,
    "70b pp=8 1f1b m=8, first stage": L * RESIDUAL,
    "70b pp=4 gpipe m=8, first stage": 8 * L // 4 * RESIDUAL,
    "70b pp=4 1f1b m=1, first stage": L // 4 * RESIDUAL,
    "gpt-22b layers": IN_LAYERS_22B / 8,
    "gpt-22b outside the layers": BESIDE_22B / 8,
    "gpt-175b core, share of forward": CORE_175,
    "gpt-530b core, share of forward": CORE_530,
    "gpt-175b core, share of step": CORE_175 / 3,
    "gpt-530b core, share of step": CORE_530 / 3,
    "gpt-175b recomputed, share of step": CORE_175 / 6,
    "gpt-530b recomputed, share of step": CORE_530 / 6,
}
FOUND = contradictions.numbers()
PEAKS = {name for name in FOUND if name.startswith("gpt2-xl") and name.endswith("peak")}


@pytest.mark.parametrize("name", EXACT)
def test_figure_of_the_ledger_to_the_byte(name: str) -> None:
    assert FOUND[name] == EXACT[name]


@pytest.mark.parametrize("name", NEAR)
def test_figure_of_the_ledger(name: str) -> None:
    assert FOUND[name] == pytest.approx(NEAR[name], rel=0.005)


def test_every_figure_on_the_page_has_a_closed_form() -> None:
    assert FOUND.keys() == EXACT.keys() | NEAR.keys() | PEAKS


def test_buffers_of_gradients_cost_4n_with_one_micro_batch_and_nothing_with_two() -> None:
    peak = {name.removeprefix("gpt2-xl ").removesuffix(", peak"): FOUND[name] for name in PEAKS}
    assert peak["upfront m=1"] - peak["one-by-one m=1"] == EXACT["gpt2-xl gradients"]
    assert peak["upfront m=1"] == peak["upfront m=2"] == peak["one-by-one m=2"]


def facts(name: str, **columns: str) -> dict[str, str]:
    with (Path(FACTS).parent / name).open(encoding="utf-8") as file:
        return next(row for row in csv.DictReader(file) if all(row[k] == v for k, v in columns.items()))


def test_figures_in_the_words_of_the_page() -> None:
    page = contradictions.PAGE.read_text(encoding="utf-8")
    assert f"{L * RESIDUAL:,} bytes" in page and f"{RESIDUAL / 1e6:.0f} MB" in page
    assert f"{3 * RESIDUAL / 1e9:.1f} GB" == "1.6 GB" and f"{2 * TOKENS * 2 * F / 1e9:.2f} GB" == "3.76 GB"
    held = {k: L // k * RESIDUAL + k * LAYER for k in (1, 2, 4, 8, 80)}
    assert min(held, key=held.__getitem__) == 2 and held[4] > held[1], "N = 4 needs as much as N = 1"
    assert round((80 - 1) / 2) == 40
    assert f"{12 * 8192 * 8192 / 1e6:.0f} MB" == "805 MB"
    assert f"{BESIDE_22B / IN_LAYERS_22B:.2%}" == "0.57%"
    assert 4 * 8192 * V > 32 * 2 * 8192 * 4096, "logits of Llama 3 8B beside 32 checkpointed layers"
    gpt_3 = facts("korthikanti2022_table5.csv", model="175B")
    assert f"{float(gpt_3['hfu_percent']) / float(gpt_3['mfu_percent']):.3f}" == "1.027"
    assert f"{1 + CORE_175:.3f}" == "1.027", "12BLs²h of 72BLsh² + 12BLs²h"
    times = (
        facts("korthikanti2022_table4_layer_22B_ms.csv", case=case)
        for case in ("selective+sequence_parallel", "selective")
    )
    assert [row["overhead_percent"] for row in times] == ["4", "7"]
