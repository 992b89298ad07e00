"""Steps of tiny models on real ranks in layouts by chance, every rank's peak beside its forecast.

    python -m benchmarks.random_ranks [--seed 0] [--cases 40] [--ranks 2 4] [--only tp cp | --experts] [--out FILE]

Ranks are gloo's, on this machine's processor; `tests/support/layout_steps.py` is what they do. A case is its seed: the
same number draws the same model and layout. Worst first is printed, and what a rank could not do, in its own words.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from jettison.core.errors import UsageError
from jettison.predict.forecast import Forecast, forecast
from jettison.spec.kernels import Combine, CpCommType, Loss
from jettison.spec.layout import Layout, Reshard, Schedule
from jettison.spec.precision import PRECISIONS, Gradients
from jettison.spec.recompute import Recompute
from support.formula_cases import run_of
from support.layout_steps import LayoutCase, peaks
from support.ranks import launch_ranks

DENSE = ("llama", "qwen3", "mistral", "qwen2", "gpt2")
AT_ONCE = 8


def drawn(seed: int, ranks: int, only: Sequence[str] = ()) -> LayoutCase:
    """The case of a seed on so many ranks.

    Args:
        only: axes that are used: tp, cp, dp, pp; by default any.
    """
    chance = random.Random(f"{seed} on {ranks} ranks")
    axes = dict.fromkeys(("tp", "cp", "dp", "pp"), 1)
    left = ranks
    while left > 1:
        axis = chance.choice(only or ("tp", "cp", "dp", "pp"))
        if axis == "pp" and axes["pp"] == 1 and axes["cp"] > 1:
            continue
        if axis == "cp" and axes["pp"] > 1:
            continue
        axes[axis] *= 2
        left //= 2
    heads = chance.choice((4, 8))
    layers = chance.choice((2, 3, 4))
    data = axes["dp"] * axes["cp"]
    code = chance.choice(("jettison", "torch")) if axes["tp"] > 1 and axes["cp"] == axes["pp"] == 1 else "jettison"
    without_windows = axes["cp"] > 1
    families = DENSE[:4] if (axes["pp"] > 1 and axes["tp"] > 1) or code == "torch" else DENSE
    averaging, zero = "mean", 0
    if data > 1:
        ways = ["mean", "zero 3", "zero 3"]
        if axes["tp"] == 1:
            ways += ["zero 1"]
        if axes["tp"] == axes["pp"] == 1:
            ways += ["ddp", "views"]
        way = chance.choice(ways)
        averaging, zero = ("zero", 3) if way == "zero 3" else ("mean", 1) if way == "zero 1" else (way, 0)
    stages: tuple[int, ...] = ()
    schedule = "1f1b"
    micro_batches = chance.choice((1, 1, 2, 3))
    if axes["pp"] > 1:
        schedule = chance.choice(("1f1b", "1f1b", "gpipe"))
        chunks = axes["pp"] * (2 if schedule == "1f1b" and chance.random() < 0.3 else 1)
        stages = tuple(chance.choice((1, 2, 2)) for _ in range(chunks))
        layers = sum(stages)
        micro_batches = axes["pp"] * chance.choice((1, 2, 3))
    return LayoutCase(
        family=chance.choice([name for name in families if name != "mistral" or not without_windows]),
        hidden=chance.choice((32, 64, 128)),
        heads=heads,
        kv_heads=max(axes["tp"], chance.choice((heads, heads // 2))),
        ffn=chance.choice((64, 96, 256)),
        vocabulary=chance.choice((64, 128, 512, 1024)),
        layers=layers,
        batch=chance.choice((1, 2, 4)),
        sequence=chance.choice((16, 32, 64, 128)),
        attention=chance.choice(("sdpa", "sdpa", "eager")) if axes["cp"] == 1 else "sdpa",
        code=code,
        tp=axes["tp"],
        cp=axes["cp"],
        dp=axes["dp"],
        pp=axes["pp"],
        sp=axes["tp"] > 1 and chance.random() < 0.6,
        averaging=averaging,
        zero=zero,
        stays=zero == 3 and (axes["pp"] > 1 or chance.random() < 0.4),
        mixed=chance.random() < 0.4 and zero in (0, 3),
        full=chance.random() < 0.3,
        micro_batches=micro_batches,
        schedule=schedule,
        stage_layers=stages,
    )


def drawn_experts(seed: int, ranks: int) -> LayoutCase:
    """The case of a seed whose experts are spread over ranks."""
    chance = random.Random(f"experts, {seed} on {ranks} ranks")
    pp = 2 if ranks > 2 and chance.random() < 0.3 else 1
    data = ranks // pp
    ep = chance.choice([size for size in (2, 4) if size <= data])
    ways = ["mean", "zero 3", "zero 3", "zero 1", *(("ddp",) if pp == 1 else ())]
    way = chance.choice(ways)
    averaging, zero = ("zero", 3) if way == "zero 3" else ("mean", 1) if way == "zero 1" else (way, 0)
    heads = chance.choice((4, 8))
    schedule = "1f1b"
    stages: tuple[int, ...] = ()
    layers, micro_batches = chance.choice((2, 3, 4)), chance.choice((1, 1, 2, 3))
    if pp > 1:
        schedule = chance.choice(("1f1b", "1f1b", "gpipe"))
        stages = tuple(chance.choice((1, 2, 2)) for _ in range(pp))
        layers, micro_batches = sum(stages), pp * chance.choice((1, 2))
    return LayoutCase(
        family=chance.choice(("mixtral", "qwen3_moe")),
        hidden=chance.choice((32, 64, 128)),
        heads=heads,
        kv_heads=chance.choice((heads, heads // 2)),
        ffn=chance.choice((32, 64, 96, 256)),
        vocabulary=chance.choice((64, 128, 512, 1024)),
        layers=layers,
        batch=chance.choice((1, 2, 4)),
        sequence=chance.choice((16, 32, 64, 128)),
        attention=chance.choice(("sdpa", "sdpa", "eager")),
        dp=data,
        pp=pp,
        averaging=averaging,
        zero=zero,
        stays=zero == 3 and (pp > 1 or chance.random() < 0.4),
        mixed=chance.random() < 0.4 and zero in (0, 3),
        full=chance.random() < 0.3,
        micro_batches=micro_batches,
        schedule=schedule,
        stage_layers=stages,
        experts=chance.choice((4, 8)),
        choices=chance.choice((1, 2, 4)),
        ep=ep,
        added=chance.random() < 0.5,
    )


def said(case: LayoutCase) -> Forecast:
    """What the ledger says of a case."""
    run = run_of(case.formula)
    layout = Layout(
        tp=case.tp,
        sp=case.sp,
        cp=case.cp,
        dp=case.dp,
        ep=case.ep,
        pp=case.pp,
        virtual_stages=len(case.stage_layers) // case.pp if case.pp > 1 else 1,
        zero=case.zero,
        zero_redundancy_optimizer=case.zero == 1,
        reshard=Reshard.NEVER if case.stays else Reshard.ALWAYS,
        gathered_inputs=case.code == "torch",
        stage_layers=case.stage_layers,
        stage_buffers=case.pp > 1,
        schedule=Schedule(case.schedule),
    )
    kernels, gradients = replace(run.kernels, loss=Loss.IN_LOOP), Gradients.ONE_BY_ONE
    if case.averaging in ("ddp", "views"):
        views = case.averaging == "views" and case.micro_batches == 1
        gradients = Gradients.UPFRONT if views else Gradients.BUCKETS
    if case.tp > 1 and case.code == "torch":
        kernels = replace(kernels, loss=Loss.DTENSOR)
    if case.added:
        kernels = replace(kernels, combine=Combine.ADDED)
    if case.cp > 1:
        kernels = replace(kernels, cp_comm_type=CpCommType.GATHER)
    return forecast(
        replace(
            run,
            layout=layout,
            kernels=kernels,
            micro_batches=case.micro_batches,
            recompute=Recompute.parse("full" if case.full else "none", layers=run.model.depth),
            precision=PRECISIONS["bf16-autocast" if case.mixed else "fp32"],
            gradients=gradients,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One rank's bytes beside its forecast's: between steps, and at the highest."""

    case: LayoutCase
    rank: int
    before: tuple[int, int]
    peak: tuple[int, int]

    @property
    def off(self) -> float:
        """Share of what was counted."""
        return self.peak[0] / self.peak[1] - 1


def rotary_bytes(case: LayoutCase) -> int:
    """Of ``inv_freq`` and its twin in each of a rank's stages, which no configuration tells."""
    if case.family == "gpt2":
        return 0
    dim = 24 if case.family.startswith("qwen3") else case.hidden // case.heads
    return 2 * 4 * (dim // 2) * (max(1, len(case.stage_layers) // case.pp))


def compared(cases: Sequence[LayoutCase]) -> Iterator[Beside | tuple[LayoutCase, str]]:
    """Every rank of every case, or why it came to nothing."""
    for begin in range(0, len(cases), AT_ONCE):
        some = cases[begin : begin + AT_ONCE]
        done = launch_ranks(peaks, some[0].ranks, {"cases": [case.told() for case in some]}, timeout=400)
        if done.returncode != 0 and len(some) > 1:
            for case in some:
                yield from compared([case])
            continue
        if done.returncode != 0:
            yield some[0], _reason(done.output)
            continue
        for number, case in enumerate(some):
            yield from _beside(case, [found[number] for found in done.results])


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if "Error" in line and "ChildFailed" not in line]
    return lines[0][:300] if lines else "no reason given"


def _beside(case: LayoutCase, found: Sequence[dict[str, list[int]]]) -> Iterator[Beside | tuple[LayoutCase, str]]:
    try:
        if "failed" in found[0]:
            yield case, str(found[0]["failed"])
            return
        stages = said(case).stages
    except UsageError as error:
        yield case, f"refused: {error}"
        return
    each = case.ranks // case.pp
    for rank, got in enumerate(found):
        beside = found[rank // each * each : (rank // each + 1) * each]
        if case.zero == 1 and got["peak"] < max(other["peak"] for other in beside):
            continue  # whole parameters go to ranks, and a forecast is the fullest one's
        stage, more = stages[rank // each], rotary_bytes(case)
        yield Beside(
            case=case,
            rank=rank,
            before=(stage.timeline()[0].nbytes + more, got["before"]),  # type: ignore[arg-type]
            peak=(stage.peak.nbytes + more, got["peak"]),  # type: ignore[arg-type]
        )


def main() -> None:
    """Print what was found, worst first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=[], choices=("tp", "cp", "dp", "pp"))
    parser.add_argument("--experts", action="store_true", help="mixtures whose experts are spread over ranks")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows: list[tuple[LayoutCase, Beside]] = []
    for ranks in asked.ranks:
        seeds = range(asked.seed, asked.seed + asked.cases)
        cases = [drawn_experts(seed, ranks) if asked.experts else drawn(seed, ranks, asked.only) for seed in seeds]
        worst: dict[LayoutCase, Beside] = {}
        for found in compared(cases):
            if isinstance(found, tuple):
                print(f"  — {found[0]}: {found[1]}", flush=True)
                continue
            known = worst.get(found.case)
            if known is None or abs(found.off) > abs(known.off):
                worst[found.case] = found
        rows += worst.items()
    rows.sort(key=lambda row: -abs(row[1].off))
    for case, one in rows:
        between = one.before[0] - one.before[1]
        print(
            f"{one.off:+8.2%} {one.peak[0] - one.peak[1]:+9d} of {one.peak[1]:9d}, "
            f"between {between:+7d}  r{one.rank} {case}"
        )
    offs = [abs(one.off) for _, one in rows]
    if offs:
        within = sum(off <= 0.01 for off in offs)
        print(f"{len(offs)} cases, {within} within 1 %, median {statistics.median(offs):.2%}, worst {max(offs):.2%}")
    if asked.out is not None:
        text = [{"case": case.told(), "rank": one.rank, "before": one.before, "peak": one.peak} for case, one in rows]
        asked.out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
