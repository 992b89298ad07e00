"""The allocation counter: against arithmetic, and against the CPU allocator, to the byte."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.fake_copies import StepFakeMode, fake_batch, fake_copy, fake_mode
from jettison.dryrun.counter import AllocationCounter, measured_peak, static_tensors, unique_bytes

KIB = 1024


def step(model, batch, optimizer=None):
    model(batch).square().sum().backward()
    if optimizer is not None:
        optimizer.step()


def mlp(width=64, layers=4):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def test_counts_births_deaths_and_views():
    with AllocationCounter(record_events=True) as counter:
        a = torch.empty(KIB, dtype=torch.uint8)
        view = a[10:20].view(2, 5)
        assert counter.live_bytes == KIB
        b = torch.empty(2 * KIB, dtype=torch.uint8)
        del a
        assert counter.live_bytes == 3 * KIB, "a view keeps the whole storage alive"
        del view, b
        assert counter.live_bytes == 0
    assert counter.peak_bytes == 3 * KIB
    assert [event.delta_bytes for event in counter.events] == [KIB, 2 * KIB, -KIB, -2 * KIB]


def test_saved_tensors_held_only_by_the_graph_live_until_backward():
    x = torch.randn(256, requires_grad=True)
    with AllocationCounter([x]) as counter:
        y = x.exp().sin().sum()  # exp saves its output, sin its input: the same kibibyte
        assert counter.live_bytes == 2 * KIB + 4
        y.backward()
        del y
        assert counter.live_bytes == 2 * KIB, "x and its gradient"
        x.grad = None
        assert counter.live_bytes == KIB


@pytest.mark.parametrize(("number", "nbytes"), [(0.5, 8), (3, 8), (True, 1), (2 + 1j, 16)])
def test_a_factor_stays_until_its_node_has_run(number, nbytes):
    """Autograd keeps it as a tensor, which no operator makes."""
    x = torch.randn(4, requires_grad=True)
    with AllocationCounter([x]) as counter:
        y = (x * number).mul_(number).div_(number)
        assert counter.live_bytes == 16 + y.nbytes + 3 * nbytes
        y.abs().sum().backward()
        del y
        _ = x + x
        assert counter.live_bytes == 32 + 16, "x, its gradient and the sum"


def test_numbers_beside_tensors_are_what_the_profiler_sees():
    x = torch.randn(4, requires_grad=True)

    def scaled():
        y = x * 0.5
        (y / 2 + 1).abs().sum().backward()

    with AllocationCounter([x]) as counter:
        scaled()
    x.grad = None
    assert counter.peak_bytes == measured_peak(scaled, static_tensors=[x]).peak_bytes


def test_a_reset_peak_begins_at_the_live_bytes():
    counter = AllocationCounter()
    with counter:
        big = torch.empty(8 * KIB, dtype=torch.uint8)
        del big
        small = torch.empty(KIB, dtype=torch.uint8)
    assert (counter.live_bytes, counter.peak_bytes) == (KIB, 8 * KIB)
    counter.reset_peak()
    assert counter.peak_bytes == KIB
    del small


def test_workspace_raises_the_peak_and_not_the_live_bytes():
    with AllocationCounter(workspace=lambda func, args, kwargs: 100 if "mm" in str(func) else 0) as counter:
        x = torch.zeros(16, 16)
        y = x @ x
    assert counter.live_bytes == 2 * KIB
    assert counter.peak_bytes == 2 * KIB + 100
    del y


def test_resized_storage_is_counted_at_its_new_size():
    with AllocationCounter() as counter:
        x = torch.empty(KIB, dtype=torch.uint8)
        x.resize_(4 * KIB)
        assert counter.live_bytes == 4 * KIB


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.AdamW])
def test_real_step_equals_the_allocator_to_the_byte(optimizer):
    model, batch = mlp(), torch.randn(128, 64)
    make = (lambda: optimizer(model.parameters())) if optimizer else (lambda: None)
    tuned = make()
    report = measured_peak(lambda: step(model, batch, tuned), static_tensors=static_tensors(model, batch, tuned))
    model.zero_grad()
    tuned = make()
    with AllocationCounter(static_tensors(model, batch, tuned)) as counter:
        step(model, batch, tuned)
    scalars = 64 if optimizer else 0  # optimizers wrap Python numbers in C++, out of any mode's sight
    assert 0 <= report.peak_bytes - counter.peak_bytes <= scalars
    assert report.static_bytes == unique_bytes([*model.parameters(), batch])


def test_branches_accumulate_in_place_as_without_the_counter():
    """The peak lies where three branches' gradients meet; see NOTE [ Accumulating in place ]"""
    x = torch.randn(1 << 16, requires_grad=True)

    def branches():
        root = x * 1.0
        (root.neg() + root.neg() + root.neg()).sum().backward()

    report = measured_peak(branches, static_tensors=[x])
    x.grad = None
    with AllocationCounter([x]) as counter:
        branches()
    assert abs(report.peak_bytes - counter.peak_bytes) <= 16


def test_to_a_view_the_engine_never_adds_in_place():
    """A weight that is used again and again gets its gradients through a transpose: recurrent layers live by it."""
    layer, x = nn.Linear(128, 128), torch.randn(4, 128)

    def unrolled():
        y = x
        for _ in range(6):
            y = layer(y).tanh()
        y.sum().backward()

    report = measured_peak(unrolled, static_tensors=static_tensors(layer, x))
    layer.zero_grad()
    with AllocationCounter(static_tensors(layer, x)) as counter:
        unrolled()
    assert abs(report.peak_bytes - counter.peak_bytes) <= 16


def test_accumulating_into_a_held_gradient_is_not_in_place():
    x = torch.randn(1 << 16, requires_grad=True)
    held = []

    def branches():
        root = x * 1.0
        left = root.neg()
        left.register_hook(lambda gradient: held.append(gradient))
        (left + root.neg()).sum().backward()
        held.clear()

    report = measured_peak(branches, static_tensors=[x])
    x.grad = None
    with AllocationCounter([x]) as counter:
        branches()
    assert abs(report.peak_bytes - counter.peak_bytes) <= 16


def test_fake_step_counts_what_the_real_one_does():
    model, batch = mlp(), torch.randn(128, 64)
    with AllocationCounter(static_tensors(model, batch)) as real:
        step(model, batch)
    mode = fake_mode()
    twin, fake = fake_copy(model, mode), fake_batch(batch, mode)
    with mode, AllocationCounter(static_tensors(twin, fake)) as counted:
        step(twin, fake)
    assert counted.peak_bytes == real.peak_bytes
    assert counted.live_bytes == real.live_bytes


def test_repeated_steps_return_to_the_same_live_bytes():
    model, batch = mlp(), torch.randn(8, 64)
    with AllocationCounter(static_tensors(model, batch)) as counter:
        live = []
        for _ in range(5):
            step(model, batch)
            model.zero_grad()
            live.append(counter.live_bytes)
    assert len(set(live)) == 1


class Odd(nn.Module):
    """Tied parameters, two parameters on one storage, a buffer, a plain tensor and a list of tensors."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight
        flat = torch.zeros(128)
        self.c = nn.Parameter(flat[:64].view(8, 8))
        self.d = nn.Parameter(flat[64:].view(8, 8).t())
        self.register_buffer("e", torch.ones(8))
        self.plain = torch.ones(8)
        self.listed = [torch.ones(8), {"x": torch.ones(8)}]

    def forward(self, x):
        return self.b(self.a(x)) @ self.c @ self.d + self.e + self.plain + self.listed[0] + self.listed[1]["x"]


@pytest.mark.parametrize("meta", [False, True])
def test_fake_twin_keeps_structure_and_allocates_nothing(meta):
    model = Odd()
    if meta:
        model = fake_meta(model)
    mode = fake_mode()
    report = measured_peak(lambda: fake_copy(model, mode, "cpu"), static_tensors=[])
    twin = fake_copy(model, mode, "cpu")
    assert report.peak_bytes == 0
    assert twin.a.weight is twin.b.weight
    assert isinstance(twin.c, nn.Parameter)
    assert twin.d.stride() == (1, 8)
    assert twin.c.untyped_storage()._cdata == twin.d.untyped_storage()._cdata
    assert unique_bytes(twin.parameters()) == unique_bytes(model.parameters())
    with mode:
        out = twin(torch.empty(2, 8))
    assert (out.shape, out.device.type) == ((2, 8), "cpu")
    for tensor in (*twin.parameters(), *twin.buffers(), twin.plain, twin.listed[0]):
        assert tensor.fake_mode is mode


def fake_meta(model):
    with torch.device("meta"):
        twin = type(model)()
    twin.load_state_dict({}, strict=False)
    return twin


def test_fake_grouped_matmul_in_float32_like_the_real_one():
    a, b, offs = torch.randn(8, 8), torch.randn(2, 8, 12), torch.tensor([3, 8], dtype=torch.int32)
    real = torch.ops.aten._grouped_mm(a, b, offs)
    mode = fake_mode()
    assert isinstance(mode, FakeTensorMode)
    fake_a, fake_b, fake_offs = fake_batch((a, b, offs), mode)
    fake = torch.ops.aten._grouped_mm(fake_a, fake_b, fake_offs)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    gc.collect()


@pytest.mark.parametrize("sizes", [(16, 4, 32, 32), (5, 3, 7, 11), (1, 1, 1, 1)])
def test_a_fake_lstm_keeps_what_the_real_one_keeps(sizes):
    length, rows, inputs, hidden = sizes
    layer, x = nn.LSTM(inputs, hidden), torch.randn(length, rows, inputs)
    found = {}

    def kept(layer, x):
        with AllocationCounter(static_tensors(layer, x)) as counter:
            output = layer(x)[0]
            held = counter.live_bytes
            output.sum().backward()
            return held, counter.live_bytes

    found["real"] = kept(layer, x)
    mode = fake_mode()
    layer.zero_grad()
    twin, fake = fake_copy(layer, mode), fake_batch(x, mode)
    with mode:
        found["fake"] = kept(twin, fake)
    assert found["fake"] == found["real"]


def test_a_fake_fold_lies_on_a_storage_like_the_real_ones():
    columns = torch.randn(2, 3 * 9, 24)
    fake = fake_batch(columns, mode := fake_mode())
    real = nn.functional.fold(columns, (24, 1), (9, 1), padding=(4, 0))
    with mode:
        found = nn.functional.fold(fake, (24, 1), (9, 1), padding=(4, 0))
    assert (found.shape, found.stride()) == (real.shape, real.stride())
    assert found.untyped_storage().nbytes() == real.untyped_storage().nbytes() > real.numel() * 4


def test_a_real_mask_chooses_as_many_rows_of_a_fake_tensor():
    values, mask = torch.randn(6, 3), torch.tensor([True, False, True, True, False, False])
    with (mode := fake_mode(allow_non_fake_inputs=True)):
        found = fake_batch(values, mode)[mask]
    assert found.shape == values[mask].shape == (3, 3)


def test_a_generators_state_is_counted_where_it_is_held():
    layers, x = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), torch.randn(8, 16)

    def step():  # each checkpoint holds the state that its forward began with
        y = x
        for layer in layers:
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()

    step()
    layers.zero_grad()
    with AllocationCounter(static_tensors(layers, (x,))) as counter:
        step()
    layers.zero_grad()
    assert counter.peak_bytes == measured_peak(step, static_tensors=static_tensors(layers, (x,))).peak_bytes
    assert counter.peak_bytes > 4 * torch.get_rng_state().nbytes


@pytest.mark.parametrize(
    "select",
    [
        lambda y, at: y.gather(1, at),
        lambda y, at: y[at[0], at[1]],
        lambda y, at: y.max(1)[0],
        lambda y, at: y.index_select(0, at[0]),
        lambda y, at: y.take(at),
    ],
)
def test_what_a_formula_puts_into_its_own_zeros_is_there_once(select):
    """Without a mode autograd's formulas write in place: NOTE [ Accumulating in place ]"""
    x, at = nn.Parameter(torch.randn(64, 64)), torch.arange(4096).remainder(64).view(64, 64)

    def step():
        y = x * 2
        found = select(y, at).sum()
        del y
        found.backward()

    real = measured_peak(step, static_tensors=[x, at]).peak_bytes
    x.grad = None
    with AllocationCounter([x, at]) as counter:
        step()
    assert counter.peak_bytes == pytest.approx(real, abs=64)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11
def test_sparse_tensors_have_no_storage_of_their_own():
    values = torch.ones(2)
    with AllocationCounter([values]) as counter:
        made = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2), check_invariants=False).detach()
        assert counter.live_bytes >= values.nbytes + 32  # places
    assert made.layout is torch.sparse_coo


class Seeing(TorchDispatchMode):
    """Counts what it hands on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def faked(mode):
    """A model and its batch."""
    return fake_copy(mlp(), mode), fake_batch(torch.empty(8, 64), mode)


def fake_step(mode, model, batch, between=None):
    """The peak of a step on fake tensors."""
    with mode, between or contextlib.nullcontext(), AllocationCounter(static_tensors(model, batch)) as counter:
        step(model, batch)
    model.zero_grad()
    return counter.peak_bytes


def test_ops_that_were_answered_before_do_not_reach_the_fake_mode(monkeypatch):
    mode = fake_mode()
    model, batch = faked(mode)
    dispatch, reached = StepFakeMode.dispatch, []
    monkeypatch.setattr(StepFakeMode, "dispatch", lambda *a, **k: reached.append(a[1]) or dispatch(*a, **k))
    first = fake_step(mode, model, batch)
    asked = len(reached)
    reached.clear()
    assert fake_step(mode, model, batch) == first
    assert len(reached) < asked / 10, "but for what makes tensors of numbers"


def test_a_mode_in_between_sees_every_op():
    mode = fake_mode()
    model, batch = faked(mode)
    first = fake_step(mode, model, batch)
    seeing = [Seeing(), Seeing()]
    assert [fake_step(mode, model, batch, one) for one in seeing] == [first, first]
    assert seeing[0].calls == seeing[1].calls > 50


def test_memory_whose_place_had_another_size_counts_with_its_own() -> None:
    """The profiler goes by the size of what was last allocated there under one."""
    held: list[torch.Tensor | None] = [None]

    def make() -> None:
        held[0] = torch.empty(3 * KIB, dtype=torch.uint8)

    def replace() -> None:
        held[0] = None
        held[0] = torch.empty(5 * KIB, dtype=torch.uint8)

    measured_peak(make, static_tensors=())
    assert held[0] is not None
    place = held[0].data_ptr()
    held[0] = None
    others = [torch.empty(2 * KIB, dtype=torch.uint8) for _ in range(200)]
    held[0] = next((one for one in others if one.data_ptr() == place), others[0])
    others.clear()
    report = measured_peak(replace, static_tensors=iter(list(held)))
    assert report.static_bytes == 2 * KIB
    assert report.peak_bytes == 5 * KIB


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("holds", [False, True])
def test_memory_from_before_counts_until_it_is_freed(holds: bool, known: bool) -> None:
    """The profiler has sizes of what was allocated under one alone, in this step or in a step before."""
    held = []

    def make() -> None:
        held[:] = [torch.empty(2 * KIB, dtype=torch.uint8), torch.empty(KIB, dtype=torch.uint8)]

    def replace() -> None:
        held[0] = None
        held[0] = torch.empty(5 * KIB, dtype=torch.uint8)

    if known:
        assert measured_peak(make, static_tensors=()).peak_bytes == 3 * KIB
    else:
        make()
    others = list(held) if holds else []
    report = measured_peak(replace, static_tensors=iter(list(held)))
    del others
    assert report.static_bytes == 3 * KIB
    assert report.peak_bytes == report.after_bytes == (8 if holds else 6) * KIB
