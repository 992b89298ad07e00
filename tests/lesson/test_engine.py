"""The lesson's NumPy engine: whole numbers for bytes and FLOPs, the same gradients under every plan, and right ones."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from examples.numpy_engine import studies
from examples.numpy_engine.clock import Machine
from examples.numpy_engine.fp8 import replay, rounded_to_e4m3
from examples.numpy_engine.meter import VALUES
from examples.numpy_engine.network import Network, chain, transformer
from examples.numpy_engine.policies import Plan, block, every, keep_all, offloaded, selective
from examples.numpy_engine.toy import Toy
from examples.numpy_engine.training import Outcome, _Run, dry_run, train_step

SIZES = {"layers": 4, "b": 2, "s": 6, "h": 8, "heads": 2}
NETWORKS = {
    "eager": transformer(**SIZES),
    "fused": transformer(**SIZES, attention="fused"),
    "no dropout": transformer(**SIZES, dropout=0.0),
    "chain": chain(layers=6, b=4, h=8),
}
SMALL = {
    "eager": transformer(**SIZES | {"layers": 2}),
    "fused": transformer(**SIZES | {"layers": 2}, attention="fused"),
    "chain": chain(layers=3, b=4, h=8),
}


def plans(network: Network) -> list[Plan]:
    found = [keep_all(network), every(network, 3, to_the_end=True), block(network, 2)]
    found += [every(network, k) for k in range(1, len(network.layers) + 1)]
    if network.core:
        found += [selective(network), selective(network, to_the_end=True)]
    return [*found, *(offloaded(network, plan) for plan in found)]


def identical(a: Outcome, b: Outcome) -> bool:
    same = all(np.array_equal(grad, b.gradients[name]) for name, grad in a.gradients.items())
    return same and np.array_equal(a.input_gradient, b.input_gradient) and a.gradients.keys() == b.gradients.keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_plan_gives_the_same_gradients_and_a_dry_run_its_numbers(name: str) -> None:
    network = NETWORKS[name]
    arrays = network.drawn()
    plain = train_step(network, keep_all(network), arrays)
    assert all(np.abs(grad).max() > 0 for grad in plain.gradients.values())
    for plan in plans(network):
        found, dry = train_step(network, plan, arrays), dry_run(network, plan)
        assert identical(plain, found), plan.name
        for number in (
            "held",
            "host_bytes",
            "peak_values_bytes",
            "peak_bytes",
            "again_flops",
            "seconds",
            "history_bytes",
        ):
            assert getattr(found, number) == getattr(dry, number), (plan.name, number)


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_slopes_of_the_loss(name: str) -> None:
    network = SMALL[name]
    arrays = network.drawn()
    plain = train_step(network, keep_all(network), arrays)
    assert studies._beside_differences(network, arrays, plain) < 1e-8
    parameters, x, target = arrays
    way = np.random.default_rng(3).standard_normal(x.shape)
    high, low = (train_step(network, keep_all(network), (parameters, x + e * way, target)).loss for e in (1e-6, -1e-6))
    assert (high - low) / 2e-6 == pytest.approx((plain.input_gradient * way).sum(), rel=1e-6)


def test_a_layer_of_the_paper_keeps_what_its_equation_says() -> None:
    """arXiv 2205.05198, equation 1: sbh(34 + 5as/h) bytes with two bytes a value."""
    b, s, h, a = 2, 16, 32, 4
    network = transformer(layers=1, b=b, s=s, h=h, heads=a, dtype="float16")
    assert dry_run(network, keep_all(network)).held_bytes == s * b * h * 34 + 5 * a * s * s * b
    assert dry_run(network, selective(network)).held_bytes == s * b * h * 34
    assert dry_run(network, every(network, 1)).held_bytes == s * b * h * 2
    single = transformer(layers=1, b=b, s=s, h=h, heads=a, dtype="float32")
    assert dry_run(single, keep_all(single)).held_bytes == s * b * h * 66 + 9 * a * s * s * b, "masks do not double"
    fused = transformer(layers=1, b=b, s=s, h=h, heads=a, dtype="float16", attention="fused")
    assert dry_run(fused, keep_all(fused)).held_bytes == s * b * h * 34


def test_flops_of_a_layer() -> None:
    """The same paper, §5: 24bsh² + 4bs²h for a forward."""
    b, s, h = 2, 16, 32
    network = transformer(layers=3, b=b, s=s, h=h, heads=4)
    forward, core = 24 * b * s * h * h + 4 * b * s * s * h, 4 * b * s * s * h
    plain = dry_run(network, keep_all(network))
    assert (plain.forward_flops, plain.backward_flops, plain.again_flops) == (3 * forward, 6 * forward, 0)
    assert dry_run(network, every(network, 1, to_the_end=True)).again_flops == 3 * forward
    assert dry_run(network, every(network, 1)).again_flops == 3 * (forward - 8 * b * s * h * h)
    assert dry_run(network, every(network, 3)).again_flops == 3 * forward - 8 * b * s * h * h
    assert dry_run(network, selective(network, to_the_end=True)).again_flops == 3 * core
    assert dry_run(network, selective(network)).again_flops == 3 * core // 2, "the scores alone"
    assert dry_run(network, block(network, 2, to_the_end=True)).again_flops == 2 * forward


@pytest.mark.parametrize("n", [16, 36, 64])
def test_of_matmuls_alone_the_knee_is_the_square_root(n: int) -> None:
    network = chain(layers=n, b=4, h=8)
    unit, root = 4 * 8 * 8, round(n**0.5)
    for k in (k for k in range(2, n + 1) if n % k == 0):
        found = dry_run(network, every(network, k))
        assert found.held_bytes == n // k * unit
        if (
            k < n
        ):  # the first layer of the last segment is its checkpoint; forward itself has one more value than it holds
            assert found.peak_values_bytes == max(n // k + k - 1, n // k + 2) * unit
    facts, _ = studies.sweep(network)
    assert facts["smallest peak from k"] <= root <= facts["to k"]
    assert facts["smallest peak"] == 2 * root - 1


def test_of_transformer_layers_the_knee_is_where_their_bytes_say() -> None:
    facts, rows = studies.sweep(transformer(layers=40, b=1, s=4, h=8, heads=2, attention="fused", dtype="float16"))
    assert facts["kept by a layer"] == 17
    assert (facts["smallest peak from k"], facts["to k"]) == (2, 2)
    assert round(facts["sqrt(n / kept by a layer)"]) == 2
    assert rows[5]["peak"] > 2 * rows[1]["peak"]
    assert rows[5]["peak"] > rows[0]["peak"], "the square root of 40 is worse than checkpointing every layer"


@pytest.mark.parametrize("pick", [keep_all, selective, lambda network: every(network, 2)])
def test_the_meter_sees_what_numpy_allocates(pick: object) -> None:
    """Between the passes, beside Python's own record of NumPy's data."""
    network = transformer(layers=4, b=2, s=32, h=64, heads=4)
    arrays = network.drawn()
    tracemalloc.start()
    try:
        run = _Run(network, pick(network), arrays, Machine())  # type: ignore[operator]
        _, grad = run.forward()
        record = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    finally:
        tracemalloc.stop()
    held = sum(run.held.values()) - run.held["x0"]  # which was there before
    assert sum(trace.size for trace in record.traces) == held + grad.nbytes
    assert run.meter.live[VALUES] == held + run.held["x0"]


def test_offload_lets_go_on_the_device_and_waits_for_the_link() -> None:
    network = NETWORKS["fused"]
    away = offloaded(network, keep_all(network))
    plain, sent = dry_run(network, keep_all(network)), dry_run(network, away)
    assert sent.host_bytes + sent.held_bytes == plain.held_bytes
    assert sent.host_bytes == 3 * plain.held_bytes // 4, "all but the last layer's"
    assert sent.peak_values_bytes < 0.6 * plain.peak_values_bytes
    seconds = [dry_run(network, away, Machine(link_bytes_per_second=link)) for link in (1e6, 1e9, 1e11, 1e15)]
    assert all(a.seconds >= b.seconds for a, b in pairwise(seconds))
    assert seconds[-1].seconds == pytest.approx(plain.seconds, rel=1e-3)
    assert seconds[0].waited_seconds == pytest.approx(2 * sent.host_bytes / 1e6, rel=1e-2), "nothing hides it"


def test_a_plan_that_forgets_a_value_is_refused() -> None:
    network = NETWORKS["chain"]
    with pytest.raises(ValueError, match="neither keeps nor makes"):
        dry_run(network, Plan(name="gap", keep=frozenset({"x0"}), units=(range(1, 6),)))
    with pytest.raises(ValueError, match="choose k from 1 to 6"):
        every(network, 7)
    with pytest.raises(ValueError, match="shows none"):
        selective(NETWORKS["fused"])


def test_a_second_run_takes_the_scale_of_the_first() -> None:
    assert all(row.gradients_identical and row.scale == row.again_scale for row in replay(snapshot=True))
    current = replay(snapshot=False)
    assert sum(not row.gradients_identical for row in current) == 10
    assert [row.step for row in current if row.scale != row.again_scale][:2] == [0, 1]
    small = [step for step, row in enumerate(current) if row.scale < 20]
    assert small == [0, 4, 5, 6, 7], "a spike stays for the length of the history"
    again = [row.step for row in current if row.again_scale < 20]
    assert again == [3, 4, 5], "and for half of it where each step is counted twice"


def test_a_toy_whose_plain_method_is_a_checkpoint() -> None:
    facts, rows = studies.toy(layers=16, k=4)
    assert [row["matmuls"] for row in rows] == [6 * 16, 7 * 16, 9 * 16]
    assert facts["overhead of its own baseline"] == pytest.approx(2 / 7)
    plain, segments = Toy(5), Toy(5)
    for a, b in zip(plain.step(), segments.step_by_segments(2), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_e4m3_by_its_table() -> None:
    values = np.array([0.0, 2.0**-9, 2.0**-10, 1.0625, 1.1875, 447.0, 500.0, -3.3, 2.0**-6])
    assert rounded_to_e4m3(values).tolist() == [0.0, 2.0**-9, 0.0, 1.0, 1.25, 448.0, 448.0, -3.25, 2.0**-6]
