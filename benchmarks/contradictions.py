"""Claims that contradict each other, settled by the ledger: writes docs/contradictions.md.

    python -m benchmarks.contradictions

Every number of the ledger on the page is computed here; `tests/predict/test_published.py` compares them with closed
forms worked out by hand, and the page with what this writes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.page_command import page_command
from benchmarks.published import command
from jettison.core.units import GIB
from jettison.cost.flops import PASSES
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.stages import passes_of
from jettison.report.explain import explain, recomputed_flops
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve

PAGE = Path(__file__).parent.parent / "docs" / "contradictions.md"
TEMPLATE = Path(__file__).parent / "pages" / "contradictions.md"
GB, TB = 10**9, 10**12
FORWARDS_OF_A_STEP = 3
"""A backward is two forwards."""
_LLAMA = {"seq": 8192, "micro_batch": 4}
"""Of Llama 3 70B, wherever nothing else is said."""


@cache
def _answer(model: str, words: tuple[tuple[str, Any], ...]) -> Forecast:
    return forecast(resolve(model_spec(model), RunRequest(**dict(words))).run)


def answer(model: str, **request: Any) -> Forecast:
    """A forecast, from the flags of `jettison ledger`."""
    return _answer(model, tuple(sorted(request.items())))


def shown(model: str, **request: Any) -> str:
    """The command for it, as code."""
    return f"`{command(model, RunRequest(**request))}`"


def layer_bytes(found: Forecast) -> int:
    """Saved by the layer that saves most."""
    return max(saved for part, (_, saved) in zip(found.parts, found.layer_bytes(), strict=True) if part.is_layer)


def all_layers_bytes(found: Forecast) -> int:
    """Saved by all layers."""
    return sum(saved for part, (_, saved) in zip(found.parts, found.layer_bytes(), strict=True) if part.is_layer)


def recomputed_share(found: Forecast) -> float:
    """FLOPs that run again, of a step's: a forward and a backward of two."""
    forward = sum(part.region.flops for part in found.parts)
    return sum(recomputed_flops(found)) / (PASSES * forward)


def role_bytes(found: Forecast, layer: str, roles: tuple[str, ...]) -> int:
    """Of a layer's entries with these roles, each storage once."""
    entries = [e for e in found.ledger().entries if e.layer == layer and e.role in roles]
    return sum({e.storage: e.storage_bytes for e in entries}.values())


def numbers() -> dict[str, float]:
    """The ledger's figures, by what they are; bytes unless the name says otherwise."""
    plain, full = (answer("llama3-70b", recompute=word, **_LLAMA) for word in ("none", "full"))
    found: dict[str, float] = {
        "70b none, 80 layers": all_layers_bytes(plain),
        "70b none, layer": layer_bytes(plain),
        "70b full, 80 layers": all_layers_bytes(full),
        "70b full, share of step": recomputed_share(full),
        "70b q, k and v": role_bytes(plain, "layers.0", ("attention query", "attention key", "attention value")),
    }
    for k in (2, 4, 8, 80):
        segments = answer("llama3-70b", recompute=f"every:{k}", **_LLAMA)
        found[f"70b every:{k}, 80 layers"] = all_layers_bytes(segments)
        found[f"70b every:{k}, share of step"] = recomputed_share(segments)
    for kernels in ("pytorch", "megatron"):
        for seq in (8192, 131072):
            run = answer("llama3-70b", seq=seq, micro_batch=1, kernels=kernels)
            found[f"70b {kernels} s={seq}, layer"] = layer_bytes(run)
            found[f"70b {kernels} s={seq}, 80 layers"] = all_layers_bytes(run)
    for pp, schedule, micro_batches in ((4, "1f1b", 8), (8, "1f1b", 8), (4, "gpipe", 8), (4, "1f1b", 1)):
        stages = pipeline(pp, schedule, micro_batches).stages
        found[f"70b pp={pp} {schedule} m={micro_batches}, first stage"] = stages[0].activation_bytes
        found[f"70b pp={pp} {schedule} m={micro_batches}, second last stage"] = stages[-2].activation_bytes
    for gradients in ("one-by-one", "upfront"):
        for m in (1, 2):
            found[f"gpt2-xl {gradients} m={m}, peak"] = gradients_answer(gradients, m).peak_bytes
    found["gpt2-xl gradients"] = gradients_answer("upfront", 1).worst.static.gradients
    outside = dict(answer("gpt-22b", tp=8, micro_batch=4).layer_bytes())
    found["gpt-22b outside the layers"] = outside["embedding"] + outside["head"]
    found["gpt-22b layers"] = all_layers_bytes(answer("gpt-22b", tp=8, micro_batch=4))
    for sp in (False, True):
        kept, freed = (outputs_answer(sp, keep).stages[0].activation_bytes for keep in (True, False))
        found[f"gpt-530b outputs, sp={sp}"] = kept - freed
    for model in ("gpt-175b", "gpt-530b"):
        core = explain(answer(model, recompute="selective")).core
        found[f"{model} core, share of forward"] = core.flops / core.layer_flops
        found[f"{model} core, share of step"] = core.flops / (PASSES * core.layer_flops)
        region = next(part.region for part in answer(model, recompute="selective").parts if part.is_layer)
        one = answer(model, recompute="selective")
        part = next(part for part in one.parts if part.is_layer)
        again = passes_of(part, one.run.gradient_rule).recompute_flops
        found[f"{model} recomputed, share of step"] = again / (PASSES * region.flops)
    return found


def pipeline(pp: int, schedule: str, micro_batches: int) -> Forecast:
    """Llama 3 70B in stages, layers checkpointed."""
    return answer("llama3-70b", pp=pp, schedule=schedule, micro_batches=micro_batches, recompute="full", **_LLAMA)


def gradients_answer(gradients: str, micro_batches: int) -> Forecast:
    """GPT-2 XL in fp32."""
    return answer(
        "gpt2-xl", seq=1024, micro_batch=4, micro_batches=micro_batches, precision="fp32", gradients=gradients
    )


def outputs_answer(sp: bool, keep: bool) -> Forecast:
    """The 530B model of the paper."""
    return answer("gpt-530b", tp=8, sp=sp, pp=35, micro_batches=280, recompute="selective", keep_stage_outputs=keep)


def page() -> str:
    """The whole page."""
    return TEMPLATE.read_text(encoding="utf-8").format_map(_words(numbers()))


def _words(n: dict[str, float]) -> dict[str, str]:
    """Numbers as the page has them."""
    gb = {name: f"{value / GB:.1f} GB" for name, value in n.items()}
    percent = {name: f"{100 * value:.1f} %" for name, value in n.items()}
    fine = {name: f"{100 * value:.2f} %" for name, value in n.items()}
    tb = {name: f"{value / TB:.2f} TB" for name, value in n.items()}
    sbh = 8192 * 8192
    core = {name: fine[name].replace("0.90", "0.9") for name in n if "core" in name}
    return {
        "none": gb["70b none, 80 layers"],
        "none_layer": gb["70b none, layer"],
        "full": gb["70b full, 80 layers"],
        "full_exact": f"{int(n['70b full, 80 layers']):,}",
        "full_share": percent["70b full, share of step"],
        "qkv": f"{n['70b q, k and v'] / 10**6:.0f} MB",
        **{f"every{k}": gb[f"70b every:{k}, 80 layers"] for k in (2, 4, 8, 80)},
        **{f"every{k}_share": percent[f"70b every:{k}, share of step"] for k in (2, 4, 8, 80)},
        **{f"segment{k}": f"{k * n['70b none, layer'] / GB:.1f} GB" for k in (1, 2, 4, 8, 80)},
        "plain_8k": f"{n['70b pytorch s=8192, layer'] / GB:.2f} GB",
        "plain_sbh": f"{n['70b pytorch s=8192, layer'] / sbh:.1f}",
        "fused_8k": f"{n['70b megatron s=8192, layer'] / GB:.2f} GB",
        "fused_sbh": f"{n['70b megatron s=8192, layer'] / sbh:.1f}",
        "plain_128k": tb["70b pytorch s=131072, 80 layers"],
        "fused_128k": tb["70b megatron s=131072, 80 layers"],
        "twelve_8k": f"{12 * 8192 * 8192 * 2 / GB:.2f} GB",
        "twelve_128k": f"{80 * 12 * 131072 * 8192 * 2 / TB:.2f} TB",
        "thirty_four_128k": f"{80 * 34 * 131072 * 8192 / TB:.2f} TB",
        "pp4_first": gb["70b pp=4 1f1b m=8, first stage"],
        "pp4_late": gb["70b pp=4 1f1b m=8, second last stage"],
        "pp8_first": gb["70b pp=8 1f1b m=8, first stage"],
        "pp8_late": gb["70b pp=8 1f1b m=8, second last stage"],
        "gpipe_first": gb["70b pp=4 gpipe m=8, first stage"],
        "gpipe_late": gb["70b pp=4 gpipe m=8, second last stage"],
        "single_first": gb["70b pp=4 1f1b m=1, first stage"],
        "single_late": gb["70b pp=4 1f1b m=1, second last stage"],
        "one_1": gb["gpt2-xl one-by-one m=1, peak"],
        "one_2": gb["gpt2-xl one-by-one m=2, peak"],
        "up_1": gb["gpt2-xl upfront m=1, peak"],
        "up_2": gb["gpt2-xl upfront m=2, peak"],
        "four_n": gb["gpt2-xl gradients"],
        "terms": f"{100 * n['gpt-22b outside the layers'] / n['gpt-22b layers']:.2f} %",
        "outputs": f"{n['gpt-530b outputs, sp=False'] / GIB:.2f} GiB",
        "outputs_sp": f"{n['gpt-530b outputs, sp=True'] / GIB:.2f} GiB",
        "core_175": percent["gpt-175b core, share of forward"],
        "core_530": percent["gpt-530b core, share of forward"],
        "core_step_175": core["gpt-175b core, share of step"],
        "core_step_530": core["gpt-530b core, share of step"],
        "again_175": fine["gpt-175b recomputed, share of step"],
        "again_530": fine["gpt-530b recomputed, share of step"],
        "show_full": shown("llama3-70b", recompute="full", **_LLAMA),
        "show_none": shown("llama3-70b", recompute="none", **_LLAMA),
        "show_every": shown("llama3-70b", recompute="every:4", **_LLAMA),
        "show_12": shown("llama3-70b", seq=8192, micro_batch=1, kernels="megatron"),
        "show_pp": shown("llama3-70b", pp=4, micro_batches=8, recompute="full", **_LLAMA),
        "show_gradients": shown("gpt2-xl", seq=1024, micro_batch=4, precision="fp32", gradients="upfront"),
        "show_22b": shown("gpt-22b", tp=8, micro_batch=4),
        "show_530b": shown(
            "gpt-530b", tp=8, sp=False, pp=35, micro_batches=280, recompute="selective", keep_stage_outputs=True
        ),
        "show_175b": shown("gpt-175b", recompute="selective"),
    }


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(numbers())} numbers"


if __name__ == "__main__":
    page_command("benchmarks.contradictions", __doc__, write_page)
