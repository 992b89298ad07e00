"""What is rotated in place, in bytes."""

from __future__ import annotations

from dataclasses import replace

from jettison.cost.execution import execution_of
from jettison.cost.kernel import Kernel
from jettison.cost.region_kernels import work
from jettison.families.presets import preset
from jettison.formula.region import Region, layer_region
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.run import Run

TOKENS, HEADS = 4096, 128
NAMES = ("rotary", "aten.cat.default", "aten.clone.default")


def deepseek() -> Run:
    return resolve(preset("deepseek-v3"), RunRequest(kernels="megatron", attention="flash", seq=TOKENS, dp=8, ep=8)).run


def moved(region: Region, kernels: tuple[Kernel, ...]) -> int:
    """By rotations, and by what joins and copies heads before attention."""
    steps = region.tape.steps
    chosen = (k for k in kernels if steps[k.steps[0]].name in NAMES and "attention" in steps[k.steps[0]].path)
    return sum(k.nbytes for k in chosen)


def test_latent_attention_rotated_in_place() -> None:
    """Of the query the rotated quarter, in place; keys and values out of their joint product, in one kernel: what is
    read and written by ``_mla_rope_fwd_inplace_kernel`` and ``_mla_rope_fwd_kv_split_kernel``, and back the same."""
    run = deepseek()
    region = layer_region(run.signature, run.model.layers[-1])
    listed = work(region, replace(execution_of(run), rotates_in_place=True), "bfloat16", None)
    query = 2 * 64 * HEADS
    joint, rotated, keys, values = 256 * HEADS, 64, 192 * HEADS, 128 * HEADS
    forward = 2 * TOKENS * (query + joint + rotated + keys + values)
    lone = 4 * TOKENS * rotated  # a key's rotation is priced by itself in backward, a thousandth of all
    assert 0 <= moved(region, listed.forward) - forward <= lone
    assert 0 <= moved(region, listed.backward) - forward <= 2 * lone


def test_without_parts_are_rotated_joined_and_added_up() -> None:
    run = deepseek()
    region = layer_region(run.signature, run.model.layers[-1])
    apart, in_place = (
        work(region, replace(execution_of(run), rotates_in_place=flag), "bfloat16", None) for flag in (False, True)
    )
    assert moved(region, apart.forward) > 1.5 * moved(region, in_place.forward)
    assert moved(region, apart.backward) > 2 * moved(region, in_place.backward)


def test_other_attention_is_untouched() -> None:
    run = resolve(preset("llama3-8b"), RunRequest(kernels="megatron", attention="flash", seq=TOKENS)).run
    region = layer_region(run.signature, run.model.layers[-1])
    one, other = (
        work(region, replace(execution_of(run), rotates_in_place=flag), "bfloat16", None) for flag in (False, True)
    )
    assert one == other
