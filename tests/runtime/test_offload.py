"""Policies that move what is saved to the host, by the rules of the engine: one test, or more, for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import HostBudgetExceeded, UsageError
from jettison.core.units import Bytes
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.ledger.program import Program
from jettison.runtime import offload
from jettison.runtime.device import device_for
from jettison.runtime.offload import Group, HostPool, OffloadEngine
from jettison.solve.checkpoint_policy import Full, KeepAll, Offload, can_move
from jettison.verify.differences import compare_gradients, independent_copy
from support.offloading import (
    ALL,
    INPUTS,
    ROWS,
    TENSOR_BYTES,
    WIDTH,
    Line,
    Pair,
    Scale,
    Shuffled,
    directions,
    pair,
    run,
    scales,
    seeded,
)
from support.recorder import Earliest, Latest, Recorder
from support.stacks import rows, stack
from support.toys import Mlp
from support.training import adamw, assert_same, train
from support.transfers import Direction, transfers_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_shared() -> Iterator[None]:
    """Engines of functions do not outlive a test."""
    yield
    offload.shared_engine.cache_clear()


# by the public words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["offload", "full-offload"])
def test_words_of_apply(word: str) -> None:
    """Blocks of 128 rows and 64 columns save tensors above the smallest size that is worth a copy."""
    torch.manual_seed(0)
    model = Line([Mlp(64, 256) for _ in range(4)], 64)
    plain = independent_copy(model)
    batches = [seeded(128, 64, seed=n) for n in range(3)]
    with jettison.apply(model, word, batch=batches[0]) as handle:
        planned = train(model, batches, optimizer=adamw(model.parameters()))
        reports = {r.name: r for r in handle.report()}
    assert_same(planned, train(plain, batches, optimizer=adamw(plain.parameters())))
    tensor, wide = 128 * 64 * 4, 128 * 256 * 4
    first = reports["layers.0"]
    assert first.word == word
    if word == "offload":  # the input, what goes into GELU, what comes out
        assert (first.slots_offloaded, first.slots_dropped, first.host_bytes) == (3, 0, tensor + 2 * wide)
    else:
        assert (first.slots_offloaded, first.slots_dropped, first.host_bytes) == (1, 2, tensor)
    assert first.kept_bytes == 0
    assert handle.offload is not None
    assert handle.offload.pool.peak_bytes == 3 * first.host_bytes  # the last block's stay
    assert handle.offload.pool.live_bytes == 0


def test_one_layer_by_name_and_a_function() -> None:
    torch.manual_seed(0)
    model = Line([Mlp(64, 256) for _ in range(3)], 64)
    plain = independent_copy(model)
    x = seeded(128, 64)
    with jettison.apply(model, {"layers.1": "offload"}, batch=x) as handle:
        run(model, x)
        run(plain, x)
        offloaded = {r.name: r.slots_offloaded for r in handle.report()}
    assert compare_gradients(model, plain).identical
    assert offloaded == {"layers.0": 0, "layers.1": 3, "layers.2": 0, "": 0}

    block = Mlp(64, 256)
    other = independent_copy(block)
    for _ in range(2):
        jettison.checkpoint(block, x, policy="offload").square().mean().backward()
        other(x).square().mean().backward()
    assert compare_gradients(block, other).identical


def test_small_tensors_stay() -> None:
    found = pair(Mlp(WIDTH, 16), Mlp(WIDTH, 16), policy=Offload(smallest_bytes=ROWS * 16 * 4))
    sizes = [slot.nbytes for r in found.handle.report() for slot in r.slots if slot.action == "offload"]
    assert sizes and set(sizes) == {ROWS * 16 * 4}
    assert not found.step()


def test_a_device_without_streams_is_refused() -> None:
    with pytest.raises(UsageError, match="got tensors on meta to move to the host; expected an accelerator"):
        device_for(torch.device("meta"))


# the host budget ------------------------------------------------------------------------------------------------------


def test_the_slab_is_what_the_step_takes() -> None:
    found = scales(5)
    assert not found.step()
    pool = found.engine.pool
    assert pool.peak_bytes == 4 * TENSOR_BYTES
    assert pool.real_bytes == found.recorder.rounded(4 * 512)  # places are whole multiples of 512 bytes
    assert len(pool._rooms) == 1


def test_a_host_budget_that_cannot_be_met_is_refused_and_leaves_nothing() -> None:
    torch.manual_seed(0)
    model, x = Line([Mlp(64, 256) for _ in range(4)], 64), seeded(128, 64)
    forwards = {name: vars(m).get("forward") for name, m in model.named_modules()}
    with pytest.raises(HostBudgetExceeded, match=r"the host budget is 100\.00 KiB"):
        jettison.apply(model, "offload", batch=x, host_budget=Bytes(102400))
    assert {name: vars(m).get("forward") for name, m in model.named_modules()} == forwards
    needed = 3 * (128 * 64 + 2 * 128 * 256) * 4
    jettison.apply(model, "offload", batch=x, host_budget=Bytes(needed)).remove()
    with pytest.raises(UsageError, match="unit"):
        jettison.apply(model, "offload", batch=x, host_budget="12")
    with pytest.raises(UsageError, match="not at least one byte"):
        jettison.apply(model, "offload", batch=x, host_budget=Bytes(-1))


def test_more_forwards_than_were_planned_for_stop_at_the_budget() -> None:
    """The second forward before a backward has no room; what the first one moved is still right."""
    found = scales(4, host_budget=Bytes(4096))
    found.engine.pool.device.rounded = lambda nbytes: nbytes  # type: ignore[method-assign]
    kept = [found.model(found.batch) for _ in range(2)]
    with pytest.raises(HostBudgetExceeded, match="tensors that move to the host need"):
        kept += [found.model(found.batch) for _ in range(20)]
    kept[0].backward()
    run(found.plain, found.batch)
    assert not found.wrong()


def test_an_engine_remembers_no_copy_whose_bytes_are_gone() -> None:
    """Sources have other addresses in each step, so that entries by address would add up."""
    found = scales(3)
    for _ in range(3):
        assert not found.step()
    assert not found.engine._moving


# what moves, and what does not ----------------------------------------------------------------------------------------


def test_the_last_block_stays_and_so_do_parameters_and_the_batch() -> None:
    found = scales(3)
    assert not found.step()
    assert directions(found) == "oobb"
    direct = nn.Sequential(*(Scale(WIDTH) for _ in range(3)))
    model = nn.Sequential(direct, nn.Linear(WIDTH, 1))
    x = seeded(ROWS, WIDTH)
    with jettison.apply(model, ALL, batch=x, loss_fn=lambda y: y.sum(), regions=[f"0.{i}" for i in range(3)]) as handle:
        model(x).sum().backward()
        assert handle.offload is not None
        assert [t.nbytes for t in transfers_of(handle.offload)] == [TENSOR_BYTES] * 2  # the first block saves the batch


def test_only_the_last_call_of_a_shared_block_stays() -> None:
    """One block three times: two calls move, also in a second forward before the backward."""

    class Again(Line):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for _ in range(3):
                x = self.layers[0](x)
            return x.square().mean()

    torch.manual_seed(0)
    found = Pair(Again([Scale(WIDTH)]), seeded(ROWS, WIDTH), ALL, {"regions": ["layers.0"]})
    assert not found.step()
    assert directions(found) == "oobb"
    assert not found.step()
    for model in (found.model, found.plain):
        (model(found.batch) + model(2 * found.batch)).backward()
    assert not found.wrong()
    assert directions(found).count("o") == 8


class Aliased(nn.Module):
    """Saves one storage as itself, transposed, and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        return (h.t() @ h.sin()).sum() * h[1:].square().sum() * h.cos() + x


def test_a_storage_moves_once_however_often_it_is_seen() -> None:
    found = pair(*(Aliased() for _ in range(3)))
    assert not found.step()
    storages = [len({slot.nbytes for slot in r.slots}) for r in found.handle.report()]
    assert storages
    region = found.handle.regions[0]
    (prepared,) = region.recordings.prepared.values()
    assert prepared.recipe is not None
    slots = [slot.ref.buffer for slot in prepared.recipe.slots if slot.kind == "offload"]
    assert len(slots) > len(set(slots)), "no storage has two slots: nothing is tested"
    assert directions(found).count("o") == 2 * len(prepared.recipe.moved)


def test_two_regions_that_save_one_storage_move_it_once() -> None:
    """A block's result, saved by its own tanh and by the next block."""

    class Tanh(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale)

    found = pair(*(Tanh(WIDTH) for _ in range(4)))
    assert not found.step()
    # the embedding's result and three tanhs; the third is the last block's input, which stays, but layers.2 saves it
    assert directions(found).count("o") == 4


class Part(nn.Module):
    """Of a wide product only the last third is saved, or every fourth column."""

    def __init__(self, columns: bool) -> None:
        super().__init__()
        self.columns = columns
        self.wide = nn.Parameter(torch.ones(WIDTH, 12 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.wide
        part = h[:, ::12] if self.columns else h.view(12 * ROWS, WIDTH)[-ROWS:]
        return part * torch.sin(part) + x


@pytest.mark.parametrize("columns", [False, True])
def test_a_part_of_a_storage_goes_alone(columns: bool) -> None:
    """Rows go as they lie; columns are gathered first, and come back with their strides."""
    found = pair(*(Part(columns) for _ in range(3)))
    for order in (Latest(), Earliest(), Shuffled(3)):
        assert not found.step(order)
    (prepared,) = found.handle.regions[0].recordings.prepared.values()
    assert prepared.recipe is not None
    moves = list(prepared.recipe.moved.values())
    assert any((move.gathered is not None) is columns and move.host_bytes == TENSOR_BYTES for move in moves)
    assert all(move.host_bytes <= TENSOR_BYTES for move in moves)


def test_memory_that_is_used_again_is_another_tensor() -> None:
    """huggingface/trl#6241: addresses come back, and what lies there is somebody else's."""
    found = scales(6)
    for _ in range(3):
        assert not found.step()
    assert directions(found) == "ooooobbbbb" * 3


# streams --------------------------------------------------------------------------------------------------------------


def test_the_current_stream_is_read_at_every_pack_and_unpack() -> None:
    """Each block in a stream of its own, as pipelines and FSDP2 have it; forward and backward of a step in others."""
    found = scales(4)
    recorder = found.recorder
    for name in ("first", "second"):
        before, stream = recorder.current_stream(), recorder.stream(name)
        recorder.wait(stream, recorder.record(before))
        with recorder.on(stream):
            assert not found.step(Latest())
        recorder.wait(before, recorder.record(stream))


def test_sources_go_when_the_next_block_has_ended() -> None:
    """By the bytes that are held after each block: what the block before had sent is gone."""
    found = scales(6)
    held: list[int] = []
    counter = AllocationCounter(static_tensors(found.model, found.batch))
    for layer in found.model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: held.append(counter.live_bytes))
    run(found.model, found.batch)  # the first run is checked, op by op
    held.clear()
    with counter:
        start = counter.live_bytes
        found.model(found.batch)
    steps = [(nbytes - start) // TENSOR_BYTES for nbytes in held]
    assert steps == [2] * 6, held  # its input, which is under way, and its result


def test_a_backward_that_asks_at_once_is_not_sent_for() -> None:
    """What is still there is used as it is."""
    recorder = Recorder()
    engine = OffloadEngine(recorder, HostPool(recorder, left=None), torch.device("cpu"))
    source, group = torch.arange(100, dtype=torch.uint8), Group(engine)
    moved = engine.send(source, group)
    group.end()
    assert moved.open() is source
    Group(engine).end()
    found = moved.open()
    assert found is not source and torch.equal(found, source)
    assert [t.direction for t in transfers_of(engine)] == [Direction.OUT, Direction.BACK]


def test_the_group_before_comes_when_backward_asks_the_one_after() -> None:
    """One group ahead, and no more; asked a second time in a row, nothing happens; what is there is not sent for."""
    recorder = Recorder()
    engine = OffloadEngine(recorder, HostPool(recorder, left=None), torch.device("cpu"))
    groups = [Group(engine) for _ in range(4)]
    moved = []
    for n, group in enumerate(groups):
        moved.append(engine.send(torch.full((64 * (n + 1),), n, dtype=torch.uint8), group))
        group.end()
    transfers_of(engine).clear()
    for _ in range(2):
        groups[3].asked()
    assert [t.nbytes for t in transfers_of(engine)] == [64 * 3]
    for n in (3, 2, 1, 0):
        groups[n].asked()
        assert bool((moved[n].open() == n).all())
    assert [t.nbytes for t in transfers_of(engine)] == [64 * 3, 64 * 2, 64]  # the last one's source was still there


# decisions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixed:
    """A policy of the user's own: of each block one tensor is kept, one moves, the rest is computed again."""

    word: str = "per-tensor"

    def kept(self, program: Program) -> frozenset[int]:
        wide = [b for b in sorted(KeepAll().kept(program)) if program.buffers[b].producer is not None]
        return Full().kept(program) | frozenset(wide[:2])

    def offloaded(self, program: Program) -> frozenset[int]:
        found = [b for b in sorted(self.kept(program)) if can_move(program, b)]
        return frozenset(found[::2])


def test_keep_recompute_and_offload_in_one_block() -> None:
    class Deep(Mlp):
        def inner(self, h: Tensor) -> Tensor:
            return torch.tanh(torch.sin(super().inner(h)) * h)

    found = pair(*(Deep(WIDTH, 16) for _ in range(4)), policy=Mixed())
    for seed in range(5):
        assert not found.step(Shuffled(seed))
    report = found.handle.report()[0]
    assert report.slots_kept and report.slots_dropped and report.slots_offloaded


def test_a_policy_that_moves_nothing_makes_no_engine() -> None:
    model = stack()
    with jettison.apply(model, Offload(smallest_bytes=1 << 30), batch=rows()) as handle:
        run(model, rows())
        assert handle.offload is None


def test_the_report_names_what_moves() -> None:
    found = scales(3)
    actions = [[slot.action for slot in region.slots] for region in found.handle.report()]
    assert actions[0].count("offload") == 1 and actions[0].count("parameter") == 1
    assert found.handle.report()[0].host_bytes == TENSOR_BYTES
    assert sum(live.nbytes for live in found.handle.live().values()) == 0


def test_inputs_alone_move_where_the_rest_is_computed_again() -> None:
    found = pair(*(Mlp(WIDTH, 16) for _ in range(4)), policy=INPUTS)
    for seed in range(5):
        assert not found.step(Shuffled(seed))
    assert directions(found) == "ooobbb" * 5


def test_what_the_model_returns_lives_anyway() -> None:
    """A model that hands out the results of two blocks: those do not move, and the report says so."""

    class Returns(Line):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            results = [self.embed(x)]
            for layer in self.layers:
                results.append(layer(results[-1]))
            return results[-1].square().mean(), results[1], results[3]

    torch.manual_seed(0)
    model = Returns([Scale(WIDTH) for _ in range(5)])
    plain = independent_copy(model)
    x, regions = seeded(ROWS, WIDTH), [f"layers.{i}" for i in range(5)]

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return output[0] + output[1].sum() + output[2].sin().sum()

    with jettison.apply(model, ALL, batch=x, loss_fn=loss, regions=regions) as handle:
        for each in (model, plain):
            loss(each(x)).backward()
        assert handle.offload is not None
        assert [t.nbytes for t in transfers_of(handle.offload)] == [TENSOR_BYTES] * 4
        moved = {r.name: r.slots_offloaded for r in handle.report()}
    assert compare_gradients(model, plain).identical
    # each saves its argument; those of layers.1 and layers.3 are returned, and layers.4 is the last
    assert moved == {"layers.0": 1, "layers.1": 0, "layers.2": 1, "layers.3": 0, "layers.4": 0, "": 0}
