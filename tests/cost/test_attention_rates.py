"""Fused attention against cuDNN's own timings, and the section that states its rates."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from jettison.core.errors import UsageError
from jettison.cost.execution import execution_of
from jettison.cost.kernel import Half, Kernel, kernel_seconds
from jettison.cost.region_kernels import work
from jettison.families.presets import preset
from jettison.formula.region import Region, layer_region
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import AttentionRates, hardware
from jettison.spec.run import Run

TIMED = Path(__file__).parent.parent / "facts" / "cudnn_attention.csv"
FILES = {"gb200": "gb200-192gb", "gb300": "gb300-288gb", "h200": "h200-141gb"}


def run_of(model: str, **request: object) -> Run:
    return resolve(preset(model), RunRequest(kernels="megatron", attention="flash", **request)).run  # type: ignore[arg-type]


def region_of(run: Run) -> Region:
    return layer_region(run.signature, run.model.layers[-1])


def timed() -> list[tuple[dict[str, str], Half | None, float]]:
    """Rows of up to 16384 tokens with the errors of both passes."""
    found: list[tuple[dict[str, str], Half | None, float]] = []
    for row in csv.DictReader(TIMED.read_text(encoding="utf-8").splitlines()):
        seq, window = int(row["sequence"]), int(row["window"] or 0)
        if seq > 16384:
            continue
        query, value = int(row["query_width"]), int(row["value_width"])
        reach = window or seq
        visible = reach / seq - reach * (reach - 1) / (2 * seq * seq)
        flops = 2 * int(row["batch"]) * int(row["heads"]) * seq * seq * (query + value)
        back = flops * (3 * query + 2 * value) / (query + value)
        for half, work_, key in ((None, flops, "forward_ms"), (Half.INPUTS, back, "backward_ms")):
            kernel = Kernel(
                steps=(0,),
                nbytes=0,
                attention_flops=work_,
                half=half,
                head_dim=query,
                keys=seq,
                fp8_attention=row["dtype"] == "mxfp8",
            )
            device = hardware(FILES[row["device"]]).under("nemo")
            took = kernel_seconds(kernel, device, visible=visible, dtype="bfloat16")
            found.append((row, half, took * 1e3 / float(row[key]) - 1))
    return found


def test_timings_of_cudnn() -> None:
    """Windows of 128 and 1024, causal masks, heads of 64, 128 and 192 by 128, bf16 and MXFP8, from 2048 tokens on."""
    errors = timed()
    assert len(errors) == 150
    assert median(abs(error) for *_, error in errors) < 0.02
    assert max(abs(error) for *_, error in errors) < 0.17
    assert sum(abs(error) < 0.08 for *_, error in errors) >= 142


def test_a_backward_of_narrow_tensors_skips_nothing_that_a_window_masks() -> None:
    chosen = {
        half: [e for r, half_, e in timed() if r["window"] == "128" and half_ is half and r["dtype"] == "mxfp8"]
        for half in (None, Half.INPUTS)
    }
    assert all(abs(error) < 0.05 for errors in chosen.values() for error in errors)


def test_torch_prefers_cudnns_attention_on_hopper() -> None:
    """Only attention differs, and it is as fast as in NVIDIA's containers of the same cuDNN."""
    long = Kernel(steps=(0,), nbytes=0, attention_flops=1e15, half=Half.INPUTS, head_dim=128, keys=1 << 20)
    for gpu in ("h100-80gb", "h200-141gb"):
        device = hardware(gpu)
        base, torch, nemo = (
            kernel_seconds(long, device.under(stack), visible=0.5, dtype="bfloat16")
            for stack in ("base", "torch-2.11", "nemo")
        )
        assert torch == nemo < 0.6 * base
        under = device.under("torch-2.11")
        assert (under.reached, under.delays) == (device.reached, device.delays)


def test_timings_of_flash_attention() -> None:
    """Forwards under a causal mask, backwards without, from 512 to 16384 tokens: shorter sequences reach less."""
    errors = []
    for row in csv.DictReader((TIMED.parent / "flash_attention.csv").read_text(encoding="utf-8").splitlines()):
        device = hardware(row["device"]).under("nemo-24.12" if "cuDNN" in row["source"] else "base")
        visible = 0.5 if row["causal"] == "yes" else 1.0
        half = None if row["pass"] == "forward" else Half.INPUTS
        seq = int(row["sequence"])
        kernel = Kernel(steps=(0,), nbytes=0, attention_flops=1e15, half=half, head_dim=int(row["width"]), keys=seq)
        reached = visible * 1e3 / kernel_seconds(kernel, device, visible=visible, dtype="bfloat16")
        errors.append(reached / float(row["teraflops"]) - 1)
    assert len(errors) == 78
    assert median(map(abs, errors)) < 0.07
    assert max(map(abs, errors)) < 0.25


def test_pieces_of_a_ring_take_longer_than_a_whole_sequence() -> None:
    """As many tokens on each rank, of a sequence that 2, 8 and 32 ranks share: 1 MiB of scores' rows, ever shorter."""
    for gpu in ("a100-80gb", "h100-80gb"):
        for kernels in ("megatron", "pytorch"):
            seconds = []
            for cp in (1, 2, 8, 32):
                request = RunRequest(kernels=kernels, attention="flash", seq=8192, cp=cp, dp=32 // cp, micro_batch=cp)
                run = resolve(preset("llama3-8b"), request).run
                region = region_of(run)
                kernels_ = work(region, execution_of(run), "bfloat16", None)
                attention = {i for k in kernels_.forward if k.attention_flops for i in k.steps}
                seconds.append(
                    sum(
                        kernel_seconds(k, hardware(gpu), visible=0.5, dtype="bfloat16")
                        for k in (*kernels_.forward, *kernels_.backward)
                        if attention.intersection(k.steps)
                    )
                )
            assert seconds == sorted(seconds)
            assert seconds[2] > 1.3 * seconds[0]
            assert seconds[3] > 2.5 * seconds[0]


def test_joining_pieces_reads_both_and_writes_one() -> None:
    """TransformerEngine's: 3 passes over outputs of three quarters of the rows, for each piece but the first."""
    run = run_of("llama3-8b", cp=4, dp=1, seq=8192)
    forward = [k for k in work(region_of(run), execution_of(run), "bfloat16", None).forward if not k.gemm]
    at = next(i for i, k in enumerate(forward) if k.attention_flops)
    attention, join = forward[at : at + 2]
    assert (attention.pieces, attention.keys, attention.launches) == (4, 2048, 4)
    assert join.nbytes == 3 * (3 * 2 * 2048 * 4096) * 3 // 4
    assert join.launches == 6


def test_a_window_is_nearly_all_edge() -> None:
    device = hardware("gb200").under("nemo")
    kernel = Kernel(steps=(0,), nbytes=0, attention_flops=1e12, head_dim=64, keys=4096)
    window, causal = (kernel_seconds(kernel, device, visible=v, dtype="bfloat16") - 2e-6 for v in (1 / 32, 1 / 2))
    assert causal / window == pytest.approx((2048 + 700) / (128 + 700))


def test_pieces_that_come_round_have_edges_each() -> None:
    """Under context parallelism a call sees a rank's keys, unless heads are exchanged for whole sequences."""

    def keys(**more: object) -> set[int]:
        run = run_of("llama3-8b", cp=2, dp=1, seq=8192, **more)
        listed = work(region_of(run), execution_of(run), "bfloat16", None)
        return {k.keys for k in (*listed.forward, *listed.backward) if k.attention_flops}

    assert keys() == {4096}
    assert keys(cp_comm_type="a2a") == {8192}


def test_narrow_attention_quantises_what_it_reads_where_there_is_a_recipe() -> None:
    run = run_of("llama3-8b", dp=1, seq=4096, fp8_recipe="mxfp8")
    region = region_of(run)
    how = replace(execution_of(run), fp8_attention=True)
    plain, narrow = (
        work(region, one, "bfloat16", run.precision.gemm_inputs, recipe=run.precision.recipe)
        for one in (execution_of(run), how)
    )
    more = sum(k.nbytes for k in narrow.forward) - sum(k.nbytes for k in plain.forward)
    elements = 4096 * (32 + 8 + 8) * 128
    assert more == 2 * elements + 2 * (elements + elements // 32)  # read once, rows and columns written, with scales
    assert all(k.fp8_attention for k in (*narrow.forward, *narrow.backward) if k.attention_flops)
    without = work(region, how, "bfloat16", None)
    assert not any(k.fp8_attention for k in without.forward)


def test_shares_by_dtype_and_width() -> None:
    rates = AttentionRates(edge=700, shares=(("bf16", 64, 0.4, 0.5), ("bf16", 128, 0.7, 0.6)))
    assert rates.share("bf16", 32, backward=False) == 0.4
    assert rates.share("bf16", 65, backward=True) == 0.6
    assert rates.share("bf16", 256, backward=False) == 0.7  # the widest there is
    assert rates.share("mxfp8", 128, backward=False) is None


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("bf16_128 = [0.7, 0.6]", "got no edge; expected at least edge = 700"),
        ("edge = 700", "got no bf16_128"),
        ("edge = 700\nbf16_128 = 0.7", "got bf16_128 = 0.7; expected shares of a forward and a backward"),
        ("edge = 700\nbf16_128 = [0.7, 1.6]", "expected shares"),
        ("edge = 700\nbf16_96 = [0.7, 0.6]", "got the key 'bf16_96'"),
    ],
)
def test_a_section_is_read_with_care(tmp_path: Path, section: str, says: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(f'memory = "80GiB"\n[attention]\n{section}\n')
    with pytest.raises(UsageError, match=says):
        hardware(path)


def test_a_stack_has_its_own_section(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('memory = "80GiB"\n[stacks.new.attention]\nedge = 500\nbf16_128 = [0.7, 0.6]\n')
    device = hardware(path)
    assert device.attention is None
    assert device.under("new").attention == AttentionRates(edge=500, shares=(("bf16", 128, 0.7, 0.6),))


def test_kernels_that_are_told_a_window_skip_what_it_hides() -> None:
    """A mask that is a tensor skips nothing, not even what is causal; flash-attn takes the window as a number."""

    def seconds(model: str, attention: str) -> float:
        asked = RunRequest(seq=4096, kernels="huggingface", attention=attention)
        return estimate(resolve(preset(model), asked).run, hardware("a100-80gb")).step_seconds

    plain, windowed = ({a: seconds(m, a) for a in ("sdpa", "flash-attn")} for m in ("mistral-7b-v0.3", "mistral-7b"))
    assert windowed["sdpa"] > 1.05 * plain["sdpa"]
    assert windowed["flash-attn"] < 1.01 * plain["flash-attn"]
