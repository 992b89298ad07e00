"""The record: aliases are counted once, documents round-trip, and two ledgers can be laid side by side."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.dtypes import DTYPE_BYTES, tensor_bytes
from jettison.core.errors import UsageError
from jettison.ledger.compare import Discrepancy, compare
from jettison.ledger.ledger import ENTRY_FIELDS, Ledger, Origin, Placement, SavedTensor
from jettison.ledger.program import Anchor


def entry(layer: str = "layers.0", storage: str = "s0", **changes: object) -> SavedTensor:
    """An entry of 64 bf16 elements unless told otherwise."""
    fields: dict[str, object] = {
        "layer": layer,
        "path": f"{layer}.mlp",
        "op": "gelu",
        "role": "gelu input",
        "shape": (8, 2, 4),
        "dtype": "bfloat16",
        "storage": storage,
        "storage_bytes": 128,
        "origin": Origin.TRACE,
    }
    return SavedTensor(**(fields | changes))  # type: ignore[arg-type]


# --- entries ------------------------------------------------------------------------------------------------------


def test_fields_are_normalised_and_the_entry_is_hashable() -> None:
    saved = entry(dtype="torch.bfloat16", shape=[8, 2, 4], placement={"tp": 2, "cp": 0}, anchor=Anchor.DISCRETE)
    assert saved.dtype == "bfloat16"
    assert saved.shape == (8, 2, 4)
    assert saved.placement == {"cp": 0, "tp": 2}
    assert type(saved.anchor) is str
    assert saved.nbytes == 128
    assert hash(saved) == hash(entry(placement=Placement({"cp": 0, "tp": 2}), anchor="discrete choice"))


def test_a_placement_cannot_be_changed() -> None:
    placement = entry(placement={"tp": 2}).placement
    assert isinstance(placement, Placement)
    with pytest.raises(TypeError):
        placement["tp"] = 0  # type: ignore[index]


def test_local_shape_and_bytes() -> None:
    saved = entry(placement={"tp": 0, "cp": 0, "dp": 1})
    assert saved.local_shape({"tp": 2, "cp": 2, "dp": 1}) == (2, 2, 4)
    assert saved.local_bytes({"tp": 2, "cp": 2, "dp": 2}) == 16
    assert entry(placement={"tp": 0}).local_shape({"tp": 3}) == (3, 2, 4)  # the rank that holds most
    assert entry().local_bytes({}) == 128


def test_a_view_of_a_larger_storage_shrinks_with_it() -> None:
    saved = entry(storage_bytes=384, placement={"tp": 2})  # one third of a fused projection
    local = saved.on_rank({"tp": 4})
    assert (local.shape, local.storage_bytes, dict(local.placement)) == ((8, 2, 1), 96, {})
    empty = entry(shape=(0, 4), storage_bytes=0, placement={"tp": 1})
    assert empty.on_rank({"tp": 2}).storage_bytes == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bf16"}, "got the dtype 'bf16'"),
        ({"storage_bytes": -1}, "storage_bytes=-1"),
        ({"recompute_flops": -1}, "recompute_flops=-1"),
        ({"shape": (2, -1)}, "sizes of 0 or more"),
        ({"storage": ""}, "names no storage"),
        ({"placement": {"tp": 3}}, "on dim 3"),
        ({"placement": {"tp": -1}}, "on dim -1"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        entry(**changes)


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sharded over axis 'tp'; got sizes for \['dp'\]"):
        entry(placement={"tp": 0}).local_shape({"dp": 2})


# --- accounting ---------------------------------------------------------------------------------------------------


def test_aliases_are_counted_once_at_the_largest_size() -> None:
    ledger = Ledger([entry(), entry(storage_bytes=384), entry(storage_bytes=256), entry(storage="s1")])
    assert ledger.total_bytes() == 384 + 128
    assert len(ledger) == 4


def test_a_storage_belongs_to_the_first_layer_that_saves_it() -> None:
    shared = [entry("layers.1", "x", storage_bytes=384), entry("layers.0", "x"), entry("layers.1", "y")]
    ledger = Ledger(shared, layers=("embedding", "layers.0", "layers.1"))
    assert ledger.by_layer() == {"embedding": 0, "layers.0": 384, "layers.1": 128}
    assert list(ledger.by_layer()) == ["embedding", "layers.0", "layers.1"]
    groups = ledger.group("layer")
    assert {layer: group.total_bytes() for layer, group in groups.items()} == {"layers.1": 512, "layers.0": 128}


def test_order_of_layers_is_that_of_entries_unless_stated() -> None:
    assert Ledger([entry("b"), entry("a"), entry("b")]).layers == ("b", "a")
    with pytest.raises(UsageError, match="lacks"):
        Ledger([entry("a")], layers=("b",))
    with pytest.raises(UsageError, match="twice"):
        Ledger([entry("a")], layers=("a", "a"))


def test_filter_and_group() -> None:
    ledger = Ledger(
        [entry("a", "s0", role="mask", dtype="bool", storage_bytes=64), entry("a", "s1"), entry("b", "s2", role="mask")]
    )
    assert ledger.filter(role="mask").layers == ("a", "b")
    assert ledger.filter(role="mask", dtype="bool").total_bytes() == 64
    assert ledger.filter(lambda saved: saved.storage_bytes > 64, layer="a").layers == ("a",)
    assert [len(group) for group in ledger.group("role").values()] == [2, 1]
    assert list(ledger.group(lambda saved: (saved.layer, saved.dtype))) == [
        ("a", "bool"),
        ("a", "bfloat16"),
        ("b", "bfloat16"),
    ]
    with pytest.raises(UsageError, match="no field 'rol'"):
        ledger.filter(rol="mask")
    with pytest.raises(UsageError, match="no field 'rol'"):
        ledger.group("rol")


def test_a_ledger_is_an_immutable_sequence() -> None:
    ledger = Ledger([entry(storage="s0"), entry("b", "s1")])
    assert ledger[0].storage == "s0"
    assert isinstance(ledger[1:], Ledger)
    assert ledger[1:].layers == ("b",)
    assert [saved.storage for saved in ledger] == ["s0", "s1"]
    assert hash(ledger) == hash(Ledger([entry(storage="s0"), entry("b", "s1")]))
    with pytest.raises(AttributeError):
        ledger.entries = ()  # type: ignore[misc]


def test_the_ledger_of_one_rank() -> None:
    ledger = Ledger([entry(storage="s0", placement={"tp": 0}), entry(storage="s1")])
    assert ledger.on_rank({"tp": 4}).total_bytes() == 128 // 4 + 128


# --- documents ----------------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
amounts = st.integers(min_value=0, max_value=2**62)


@st.composite
def entries(draw: st.DrawFn) -> SavedTensor:
    shape = draw(st.lists(st.integers(min_value=0, max_value=2**20), max_size=4))
    dims = st.integers(min_value=0, max_value=len(shape) - 1) if shape else st.nothing()
    return SavedTensor(
        layer=draw(st.sampled_from(["embedding", "layers.0", "layers.1", "head"])),
        path=draw(names),
        op=draw(names),
        role=draw(names),
        shape=tuple(shape),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        storage=draw(st.sampled_from(["s0", "s1", "s2", "s3"])),
        storage_bytes=draw(amounts),
        origin=draw(st.sampled_from(Origin)),
        placement=draw(st.dictionaries(st.sampled_from(["tp", "cp", "dp"]), dims)) if shape else {},
        recompute_flops=draw(amounts),
        recompute_bytes_moved=draw(amounts),
        inputs=tuple(draw(st.lists(names, max_size=3))),
        anchor=draw(st.none() | st.sampled_from(Anchor) | names),
        reference=draw(names),
    )


ledgers = st.lists(entries(), max_size=6).map(Ledger)


@given(ledgers)
def test_json_round_trip(ledger: Ledger) -> None:
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert hash(again) == hash(ledger)
    assert again.to_json() == ledger.to_json()


@given(ledgers)
def test_layers_sum_to_the_total_and_no_alias_adds_bytes(ledger: Ledger) -> None:
    assert sum(ledger.by_layer().values()) == ledger.total_bytes()
    assert Ledger(ledger.entries * 2).total_bytes() == ledger.total_bytes()
    assert ledger.total_bytes() <= sum(saved.storage_bytes for saved in ledger)


@given(ledgers)
def test_a_ledger_does_not_differ_from_itself(ledger: Ledger) -> None:
    assert compare(ledger, Ledger.from_json(ledger.to_json())) == []


@given(ledgers, ledgers)
def test_differences_account_for_every_byte(first: Ledger, second: Ledger) -> None:
    delta = sum(difference.delta_bytes for difference in compare(first, second))
    assert delta == second.total_bytes() - first.total_bytes()


def test_the_document_has_the_promised_keys() -> None:
    ledger = Ledger([entry("layers.0", placement={"tp": 2})], layers=("embedding", "layers.0"))
    document = json.loads(ledger.to_json())
    assert document["schema"] == "jettison.ledger/1"
    assert document["layers"] == [{"layer": "embedding", "bytes": 0}, {"layer": "layers.0", "bytes": 128}]
    assert tuple(document["entries"][0]) == ENTRY_FIELDS
    assert document["entries"][0]["placement"] == {"tp": 2}
    assert document["entries"][0]["origin"] == "trace"


def test_readers_ignore_keys_that_were_added_later() -> None:
    ledger = Ledger([entry()])
    document = json.loads(ledger.to_json()) | {"peak_bytes": 7}
    document["entries"][0]["colour"] = "blue"
    assert Ledger.from_json(json.dumps(document)) == ledger


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema": "jettison.ledger/2"}, "schema"), ({"entries": [{}]}, r"entries\.0"), ({"layers": 3}, "layers")],
)
def test_a_wrong_document_is_refused(change: dict[str, object], message: str) -> None:
    document = json.loads(Ledger([entry()]).to_json()) | change
    with pytest.raises(UsageError, match=message):
        Ledger.from_json(json.dumps(document))


@pytest.mark.parametrize("change", [{"dtype": "bf16"}, {"storage_bytes": -1}, {"storage_bytes": "128"}])
def test_a_wrong_entry_is_refused(change: dict[str, object]) -> None:
    document = json.loads(Ledger([entry()]).to_json())
    document["entries"][0] |= change
    with pytest.raises(UsageError, match=r"not a jettison\.ledger/1 document: entries\.0"):
        Ledger.from_json(json.dumps(document))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(UsageError, match="the document"):
        Ledger.from_json("{")


def test_csv_has_a_row_for_each_entry() -> None:
    ledger = Ledger([entry(placement={"tp": 2, "cp": 0}, inputs=("x", "w"), path="a,b"), entry(shape=())])
    rows = list(csv.DictReader(io.StringIO(ledger.to_csv())))
    assert tuple(rows[0]) == ENTRY_FIELDS
    assert (rows[0]["shape"], rows[0]["placement"], rows[0]["inputs"]) == ("8x2x4", "cp:0 tp:2", "x w")
    assert (rows[0]["path"], rows[0]["origin"], rows[0]["anchor"]) == ("a,b", "trace", "")
    assert rows[1]["shape"] == ""


# --- comparison ---------------------------------------------------------------------------------------------------


def test_names_may_differ_where_bytes_agree() -> None:
    formula = Ledger([entry(storage="formula.x", op="softmax", role="softmax output", origin="formula")])
    trace = Ledger([entry(storage="17", op="aten._softmax.default", role="", shape=(16, 4))])
    assert compare(formula, trace) == []


def test_missing_extra_and_differing_storages() -> None:
    expected = Ledger(
        [entry("a", "0", role="input"), entry("a", "1", role="mask", dtype="bool"), entry("b", "2", role="statistics")]
    )
    found = Ledger(
        [
            entry("a", "0", role="input", storage_bytes=256),
            entry("a", "1", role="mask", dtype="uint8"),
            entry("c", "2", role="copy", storage_bytes=16),
        ]
    )
    differences = compare(expected, found)
    assert [(d.layer, d.kind, d.delta_bytes) for d in differences] == [
        ("a", Discrepancy.BYTES, 128),
        ("a", Discrepancy.DTYPE, 0),
        ("b", Discrepancy.MISSING, -128),
        ("c", Discrepancy.EXTRA, 16),
    ]
    assert str(differences[2]) == ("b: missing: expected statistics 8x2x4 bfloat16 (128 B), found nothing (-128 B)")


def test_equal_storages_are_paired_one_to_one() -> None:
    differences = compare(Ledger([entry(storage="0"), entry(storage="1")]), Ledger([entry(storage="0")]))
    assert [(d.kind, d.delta_bytes) for d in differences] == [(Discrepancy.MISSING, -128)]


def test_aliases_are_no_difference() -> None:
    views = Ledger([entry(storage="0"), entry(storage="0", shape=(4, 16)), entry("b", "0")])
    assert compare(Ledger([entry(storage="x")]), views) == []


# --- the paper's layer, in its own letters ------------------------------------------------------------------------


def test_the_papers_layer_is_a_sum_of_entries() -> None:
    """sbh(34 + 5as/h) bytes and the statistics of two LayerNorms: no coefficient, only tensors (Korthikanti et al.)."""
    s, b, h, a = 256, 2, 128, 8
    bsh, bass = (s, b, h), (b, a, s, s)
    saved = {
        "attention norm input": (bsh, "bfloat16"),
        "qkv input": (bsh, "bfloat16"),
        "q": (bsh, "bfloat16"),
        "k": (bsh, "bfloat16"),
        "v": (bsh, "bfloat16"),
        "softmax output": (bass, "bfloat16"),
        "softmax dropout mask": (bass, "bool"),
        "softmax dropout output": (bass, "bfloat16"),
        "projection input": (bsh, "bfloat16"),
        "attention dropout mask": (bsh, "bool"),
        "mlp norm input": (bsh, "bfloat16"),
        "up projection input": (bsh, "bfloat16"),
        "gelu input": ((s, b, 4 * h), "bfloat16"),
        "down projection input": ((s, b, 4 * h), "bfloat16"),
        "mlp dropout mask": (bsh, "bool"),
    } | {f"norm statistics {i}": ((s, b), "bfloat16") for i in range(4)}
    ledger = Ledger(
        entry(role=role, storage=role, shape=shape, dtype=dtype, storage_bytes=tensor_bytes(shape, dtype))
        for role, (shape, dtype) in saved.items()
    )
    assert ledger.total_bytes() == s * b * h * (34 + 5 * a * s // h) + 4 * 2 * s * b == 7_475_200
