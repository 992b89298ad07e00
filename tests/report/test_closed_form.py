"""The closed form as data equals the ordinary walk, at sizes that divide and at sizes that do not; and the published
equations come out of it as polynomials, for all sizes at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.families.presets import preset
from jettison.formula.named_sizes import Choices, resized
from jettison.formula.sums import SizeGuards, Sum, constant, positive, sum_of, symbol
from jettison.report.explorer_closed_form import closed_form_document, form_of, sizes_of, table_of
from jettison.report.explorer_fit import SizeGrid
from jettison.spec.model import Moe
from jettison.spec.recompute import UNIFORM_MODES
from support.closed_form import MODELS, Reader, choices, walked

s, b, h, a, f, d = (symbol(name) for name in "sbhafd")
PAPER = preset("gpt-175b")


def times(number: int, *factors: Sum) -> Sum:
    product = constant(number)
    for factor in factors:
        product = product * factor
    return product


def paper_table(*, parallel: bool = False, sp: bool = False, gathered: bool = False):
    choice = Choices(
        kernels="megatron",
        attention="eager",
        precision="bf16",
        dropout=True,
        parallel=parallel,
        sp=sp,
        gathered_inputs=gathered,
    )
    layer = PAPER.kinds[0]
    return table_of(PAPER, layer, choice, sizes_of(PAPER, layer, s=2048, b=1, t=8))


def test_equation_1_as_a_polynomial() -> None:
    """sbh(34 + 5as/h) with h = ad, k = a, f = 4h: here with each size by its own name, and the norms' statistics."""
    table = paper_table()
    k = symbol("k")
    core = times(5, a, b, s, s)
    linear = times(10, s, b, h) + times(4, s, b, a, d) + times(4, s, b, k, d) + times(4, s, b, f)
    statistics = times(16, s, b)
    assert table.held[UNIFORM_MODES.index("none")] == core + linear + statistics
    assert table.held[UNIFORM_MODES.index("selective")] == linear + statistics
    assert table.held[UNIFORM_MODES.index("full")] == times(2, s, b, h)


def test_equations_2_and_4_as_polynomials() -> None:
    """What t ranks share is rounded up; the rest is 10sbh on each of them, or 10sbh/t with sequence parallelism."""
    t = symbol("t")

    def shared(total: Sum) -> Sum:
        return total.divided(t, up=True)

    inside = (
        times(5, shared(a), b, s, s)
        + times(2, s, b, shared(a * d + times(2, d, symbol("k"))))
        + times(2, s, b, shared(a * d))
        + times(4, s, b, shared(f))
    )
    assert paper_table(parallel=True).held[UNIFORM_MODES.index("none")] == inside + times(10, s, b, h) + times(16, s, b)
    rows = shared(s)
    expected = inside + times(10, rows, b, h) + times(16, rows, b)
    assert paper_table(parallel=True, sp=True).held[UNIFORM_MODES.index("none")] == expected
    stock = inside + times(4, s, b, h) + times(6, rows, b, h) + times(16, rows, b)
    assert paper_table(parallel=True, sp=True, gathered=True).held[UNIFORM_MODES.index("none")] == stock


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; Megatron's saved shards cost one more gathering each."""

    def sent(**layout: bool) -> Sum:
        return sum((t.wire for t in paper_table(parallel=True, **layout).transfers), Sum(()))

    assert sent(sp=True, gathered=True) == sent()
    one = times(2, s, b, h).divided(symbol("t"), up=True) * (symbol("t") - constant(1))
    assert sent(sp=True) == sent() + one + one


def test_parts_of_a_layer_and_who_has_what() -> None:
    table = paper_table(parallel=True, sp=True)
    outside = "dropout, residual sum"
    assert table.parts == ("attention norm", "attention", f"{outside}, mlp norm", "mlp", outside)
    assert {e.split for e in table.entries if "dropout mask" in e.role and e.part in (2, 4)} == {"sequence"}
    assert {e.split for e in table.entries if e.role == "softmax output"} == {"heads"}
    assert {e.split for e in paper_table(parallel=True).entries if e.part in (0, 2, 4)} == {"copy"}


def random_sizes(draw, model, layer) -> dict[str, int]:
    """Odd ones: what a walk can take and no layout would allow."""
    sizes = sizes_of(model, layer, s=draw(st.integers(1, 70)), b=draw(st.integers(1, 3)), t=draw(st.integers(2, 9)))
    small = st.integers(1, 40)
    for name in set(sizes) & {"h", "d", "f", "rq", "rkv", "dn", "dv", "g", "w"}:
        sizes[name] = draw(small)
    if "k" in sizes:
        sizes["k"] = draw(st.integers(1, 7))
        sizes["a"] = sizes["k"] * draw(st.integers(1, 4))
    else:
        sizes["a"] = draw(st.integers(1, 12))
    if "r" in sizes:
        sizes["r"] = sizes["d"] if "d" in sizes and draw(st.booleans()) else draw(st.integers(1, sizes.get("d", 9)))
    if "e" in sizes:
        sizes["e"] = draw(st.integers(1, 9))
        sizes["c"] = draw(st.integers(1, sizes["e"]))
    return sizes


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_document_equals_the_ordinary_walk(data) -> None:
    """A table is made at one point and read at others for which its guards hold, to the byte and the FLOP."""
    model = preset(data.draw(st.sampled_from(MODELS)))
    layer = data.draw(st.sampled_from(model.kinds))
    choice = data.draw(st.sampled_from(choices(data.draw(st.sampled_from(["bf16", "fp32", "fp8"])))))
    points = [random_sizes(data.draw, model, layer) for _ in range(4)]
    ranks = data.draw(st.sampled_from([{}, {"cp": 2}, {"cp": 3}]))
    if isinstance(layer.mlp, Moe) and not ranks:
        ranks = data.draw(st.sampled_from([{}, {"ep": 2}]))
    points = [point | ranks | ({} if choice.parallel else {"t": 1}) for point in points]
    form = form_of(model, layer, [choice], points[:2])
    document = json.loads(json.dumps(closed_form_document([form])))
    for point in points:
        reader = Reader(document, point)
        if not any(table.holds(point) for table in form[choice.key]):  # another walk: nothing is said about it
            assert not any(reader.holds(table) for table in document["tables"])
            continue
        assert reader.figures(0, choice.key) == walked(model, layer, choice, point)


def test_a_guard_keeps_a_table_from_sizes_at_which_the_walk_goes_another_way() -> None:
    layer = PAPER.kinds[0]
    choice = Choices(kernels="pytorch", attention="eager", precision="bf16", dropout=False, parallel=False)
    one = sizes_of(PAPER, layer, s=64, b=1)
    table = table_of(PAPER, layer, choice, one)
    assert table.holds(one | {"s": 77})
    assert not table.holds(one | {"b": 2}), "two sequences are copied into one batch of matrices"
    form = form_of(PAPER, layer, [choice], [one, one | {"b": 2}, one | {"b": 3}])
    assert len(form[choice.key]) == 2


def test_a_traced_size_refuses_what_a_sum_cannot_say() -> None:
    size = SizeGuards().size("s", 12)
    assert sum_of(-(-size // 5)) == symbol("s").divided(constant(5), up=True)
    assert sum_of(size * 3 // size) == constant(3)
    assert sum_of(size % 5).value({"s": 13}) == 3
    with pytest.raises(TypeError, match="sums, products and divisions"):
        size / 2
    with pytest.raises(TypeError, match="pow"):
        size**2


def test_what_is_above_zero_is_no_guard() -> None:
    book = SizeGuards()
    size, rows = book.size("s", 12), book.size("b", 30)
    above, below = positive(size - rows), positive(rows - size)
    assert (int(above), int(below)) == (0, 18)
    assert [sum_of(above + size).value({"s": n, "b": 30}) for n in (12, 40)] == [12, 50]
    assert sum_of(positive(size + 1)) == sum_of(size + 1)
    assert sum_of(positive(-size)) == Sum(())
    assert not book.guards
    assert positive(-3) == 0


def test_the_highest_of_several_sums_at_some_position() -> None:
    book = SizeGuards()
    size, rows = book.size("s", 12), book.size("b", 30)
    levels = [size + rows, 2 * size, size, 3 * rows, positive(size - rows) - -(-size // 7), 0]
    positions = SizeGrid([{"s": n, "b": 30} for n in (12, 90, 1)])
    for level in levels[:-1]:
        assert list(positions.value(sum_of(level))) == [sum_of(level).value({"s": n, "b": 30}) for n in (12, 90, 1)]
    assert {one.text for one in positions.highest(levels)} == {"2*s", "3*b"}
    assert positions.highest([]) == []
    assert not book.guards


def test_what_no_size_can_change_is_no_guard() -> None:
    book = SizeGuards()
    size, ranks = book.size("s", 12), book.size("t", 1)
    assert size > 0
    assert not size * 2 < 1
    assert size + ranks != 1
    assert not book.guards
    assert not ranks > 1
    assert [str(guard) for guard in book.guards] == ["1*t + -1 <= 0"]


def test_sums_that_are_equal_polynomials_are_equal() -> None:
    assert (s + b) * (s - b) == s * s - b * b
    assert times(6, s, b).divided(times(2, b), up=False) == times(3, s)
    assert (-s).divided(constant(4), up=False) == -s.divided(constant(4), up=True)
    assert (s * b - b * s) == Sum(())
    other, changed = resized(PAPER, PAPER.kinds[0], {"h": 24, "a": 3, "k": 3, "d": 8, "f": 96})
    assert (other.hidden, changed.attention.heads) == (24, 3)
