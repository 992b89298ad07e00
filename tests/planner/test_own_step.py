"""Steps as people write them: several forwards, several models, accumulation, autocast, scalers, under one budget."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import jettison
from jettison.capture.fake_copies import fake_mode
from jettison.core.errors import Infeasible, TraceError, UnsupportedModule, UsageError
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.dryrun.user_step import UserStep, observe
from jettison.parallel.recompute_agreement import summary
from jettison.planner.step_description import copies_of
from support.toys import Mlp, Words

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, WORDS, ROWS, LENGTH, BLOCKS = 32, 100, 8, 32, 6


def words() -> Words:
    return Words(WORDS, WIDTH, BLOCKS, 0.1)


def next_word(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def accumulated(model: Any, ids: Tensor) -> None:
    for part in ids.split(ROWS // 4):
        (next_word(model(part), part) / 4).backward()


def contrastive(model: Any, ids: Tensor) -> Tensor:
    a, b = model(ids[: ROWS // 2]).mean(1), model(ids[ROWS // 2 :]).mean(1)
    loss = functional.cross_entropy(a @ b.T, torch.arange(ROWS // 2))
    loss.backward()
    return loss.detach()


def of_two_lengths(model: Any, ids: Tensor) -> None:
    (next_word(model(ids), ids) + next_word(model(ids[:, : LENGTH // 2]), ids[:, : LENGTH // 2])).backward()


def asked_in_parts(model: Any, ids: Tensor) -> None:
    """A part of the gradients, then all of them, of one graph and within autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_word(model(ids).float(), ids)
        torch.autograd.grad(loss, list(model.head.parameters()), retain_graph=True)
        loss.backward()


def under_autocast(model: Any, ids: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_word(model(ids, scale=0.5).float(), ids)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


def preferred(policy: Any, reference: Any, ids: Tensor) -> Tensor:
    """Direct preference optimisation (arXiv 2305.18290, equation 7)."""

    def log_probability(model: Any, rows: Tensor) -> Tensor:
        return -functional.cross_entropy(model(rows)[:, :-1].mT, rows[:, 1:], reduction="none").sum(1)

    good, bad = ids[: ROWS // 2], ids[ROWS // 2 :]
    chosen, rejected = log_probability(policy, good), log_probability(policy, bad)
    with torch.no_grad():
        margin = log_probability(reference, good) - log_probability(reference, bad)
    loss = -functional.logsigmoid(0.1 * (chosen - rejected - margin)).mean()
    loss.backward()
    return loss.detach()


def both_train(first: Any, second: Any, ids: Tensor) -> None:
    """Deep mutual learning: each is taught by the other."""
    a, b = first(ids), second(ids)
    (functional.kl_div(a.log_softmax(-1), b.detach().softmax(-1), reduction="batchmean") + next_word(a, ids)).backward()
    (functional.kl_div(b.log_softmax(-1), a.detach().softmax(-1), reduction="batchmean") + next_word(b, ids)).backward()


class Scaled:
    """A loop with a gradient scaler, and a list of losses that grows."""

    def __init__(self) -> None:
        self.scaler, self.losses = torch.amp.GradScaler("cpu"), [0.0]

    def __call__(self, model: Any, ids: Tensor) -> None:
        loss = next_word(model(ids), ids)
        self.scaler.scale(loss).backward()
        self.losses.append(float(loss.detach()))


Loop = tuple[list[nn.Module], torch.optim.Optimizer, Callable[..., Any]]


def loop(step: Callable[..., Any], frozen: bool) -> Loop:
    torch.manual_seed(0)
    models: list[nn.Module] = [words(), words()] if step in (preferred, both_train) else [words()]
    for other in models[1:] if frozen else []:
        other.requires_grad_(False)
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    return models, torch.optim.AdamW(parameters, 1e-3), step


def batch() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def train(own: Loop, ids: Tensor, steps: int = 3) -> list[list[Tensor]]:
    """By step the gradients, and the parameters at last."""
    models, optimizer, step = own
    torch.manual_seed(5)
    found = []
    for _ in range(steps):
        step(*models, ids)
        found.append([p.grad.clone() for model in models for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [p.detach().clone() for model in models for p in model.parameters()]]


def peak(own: Loop, ids: Tensor) -> int:
    models, optimizer, step = own

    def once() -> None:
        result = step(*models, ids)
        optimizer.step()
        del result
        optimizer.zero_grad()

    once()
    alive = [t for model in models for t in static_tensors(model)] + list(static_tensors(models[0], ids, optimizer))
    return measured_peak(once, static_tensors=alive).peak_bytes


def same(found: Sequence[list[Tensor]], expected: Sequence[list[Tensor]]) -> bool:
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("step", "in_flight", "share"),
    [
        (accumulated, (1,), 0.75),
        pytest.param(contrastive, (2,), 0.6, marks=pytest.mark.slow),
        pytest.param(of_two_lengths, (2,), 0.7, marks=pytest.mark.slow),
        (under_autocast, (1,), 0.75),
        pytest.param(asked_in_parts, (1,), 0.8, marks=pytest.mark.slow),
        (preferred, (2, 0), 0.65),
        pytest.param(both_train, (1, 1), 0.65, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_ones_own_fits_and_trains_the_same(
    step: Callable[..., Any], in_flight: tuple[int, ...], share: float
) -> None:
    ids, frozen = batch(), step is preferred
    expected, plain = train(loop(step, frozen), ids), peak(loop(step, frozen), ids)
    own = loop(step, frozen)
    models, optimizer, _ = own
    mode = fake_mode(allow_non_fake_inputs=True)
    uses = observe(step, copies_of(models, mode), [ids], mode).uses
    assert tuple(use.in_flight for use in uses) == in_flight
    budget = int(plain * share)
    several = models if len(models) > 1 else ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = jettison.auto_checkpoint(models[0], ids, Bytes(budget), optimizer=optimizer, step=step, models=several)
        assert len(handle.plans) == sum(n > 0 for n in in_flight)
        assert len(summary(handle.regions).digests) == len(handle.regions)  # ranks compare each region of each model
        assert same(train(own, ids), expected)
        measured = peak(own, ids)
    assert handle.plan is not None
    assert measured <= budget
    assert measured == pytest.approx(handle.plan.predicted.peak_bytes, abs=256)
    handle.remove()
    assert not any("forward" in vars(module) for model in models for module in model.modules())


def test_a_budget_holds_for_all_shapes_of_a_run() -> None:
    """The largest batch is none of the longest rows."""
    shapes = [(ROWS, LENGTH), (ROWS // 2, LENGTH + 16), (3, LENGTH // 2)]
    batches = [batch()[:1, :1].expand(rows, length).contiguous() for rows, length in shapes]

    def once(model: Any, ids: Tensor) -> None:
        next_word(model(ids), ids).backward()

    budget = int(0.7 * peak(loop(once, frozen=False), batches[0]))
    others = [batches[0], batches[1].to("meta")]
    for ids in batches:
        expected = train(loop(once, frozen=False), ids, 1)
        models, optimizer, _ = own = loop(once, frozen=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle = jettison.auto_checkpoint(
                models[0], batches[2], Bytes(budget), optimizer=optimizer, step=once, shapes=others
            )
            assert same(train(own, ids, 1), expected)
            assert peak(own, ids) <= budget
            assert [region.recordings for region in handle.report()] == [0] * len(handle.regions)


def test_planning_a_step_leaves_nothing_behind() -> None:
    own = loop(Scaled(), frozen=False)
    (model,), optimizer, step = own
    assert isinstance(step, Scaled)
    ids = batch()
    state = torch.get_rng_state()
    budget = int(0.75 * peak(loop(Scaled(), frozen=False), ids))
    torch.set_rng_state(state)
    jettison.auto_checkpoint(model, ids, Bytes(budget), optimizer=optimizer, step=step)
    assert torch.equal(torch.get_rng_state(), state)
    assert step.losses == [0.0]
    assert step.scaler._scale is None
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert same(train(own, ids), train(loop(Scaled(), frozen=False), ids))
    assert len(step.losses) == 4


class Expert(nn.Module):
    """Rows go where their values send them: a block without a program."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Mlp(WIDTH, 4 * WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (shares.argmax(-1) == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, number : number + 1])
        return x + out


class Mixture(nn.Module):
    """Experts in a row; the loss is the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Expert() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def test_blocks_without_a_program_are_treated_as_the_plan_says() -> None:
    def once(model: Any, x: Tensor) -> None:
        model(x).square().mean().backward()

    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(256, WIDTH)
    plain = measured_peak(lambda: once(model, x), static_tensors=static_tensors(model, (x,))).peak_bytes
    model.zero_grad()
    with pytest.warns(UserWarning, match="cannot be recorded") as said:
        handle = jettison.auto_checkpoint(model, x, Bytes(int(0.85 * plain)), step=once)
        once(model, x)
    assert not [w for w in said if "runs other ops" in str(w.message)]
    assert handle.plan is not None
    planned = {entry.layer: entry.option for entry in handle.plan.layers}
    assert set(planned.values()) == {"none", "full"}
    assert {region.name: region.plan.policy.word for region in handle.regions[:-1]} == planned


def test_a_budget_that_cannot_be_met_names_one_that_can() -> None:
    models, optimizer, _ = loop(contrastive, frozen=False)
    with pytest.raises(Infeasible) as error:
        jettison.auto_checkpoint(models[0], batch(), Bytes(100_000), optimizer=optimizer, step=contrastive)
    handle = jettison.auto_checkpoint(
        models[0], batch(), error.value.minimum_budget_bytes, optimizer=optimizer, step=contrastive
    )
    assert handle.plan is not None
    assert peak((models, optimizer, contrastive), batch()) <= error.value.minimum_budget_bytes


def test_more_forwards_than_the_step_has_are_said() -> None:
    models, _, _ = loop(contrastive, frozen=False)
    jettison.auto_checkpoint(models[0], batch(), "20MiB", step=contrastive)
    with pytest.warns(UserWarning, match="a forward begins while 2 earlier ones still wait"):
        losses = [models[0](batch()[:4]).square().mean() for _ in range(3)]
    torch.stack(losses).sum().backward()


def with_its_optimizer(model: Any, ids: Tensor) -> None:
    next_word(model(ids), ids).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def freeing(model: Any, ids: Tensor) -> None:
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    next_word(model(ids), ids).backward()


def in_numpy(model: Any, ids: Tensor) -> Any:
    loss = next_word(model(ids), ids)
    loss.backward()
    return loss.detach().numpy()


def by_storage(model: Any, ids: Tensor) -> Any:
    loss = next_word(model(ids), ids)
    loss.backward()
    return bytes(loss.detach().untyped_storage())


def without_backward(model: Any, ids: Tensor) -> Any:
    return model(ids).sum()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": "contrastive"}, "expected a function step"),
        ({"step": without_backward}, "ran no backward"),
        ({"step": with_its_optimizer}, "runs the step of a SGD that optimizer= does not have; give it all"),
        ({"step": freeing}, r"calls zero_grad\(\) of a SGD that optimizer= does not have"),
        ({"step": contrastive, "shapes": 3}, "shapes= is a int; expected a list"),
        ({"step": preferred, "models": nn.Linear(2, 2)}, "models= is a Linear; expected a list"),
        ({"step": contrastive, "loss_fn": torch.sum}, "drop loss_fn="),
        ({"models": [words()]}, "models= without step="),
        ({"step": preferred, "models": [words(), words()]}, "leaves out the model itself"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        jettison.auto_checkpoint(words(), batch(), "20MiB", **arguments)


def test_a_step_that_looks_at_values_is_refused_in_words() -> None:
    jettison.auto_checkpoint(words(), batch(), "20MiB", step=in_numpy).remove()  # made up, as for item()
    with pytest.raises(TraceError, match=r"without values .NotImplementedError.*reads a tensor's memory"):
        jettison.auto_checkpoint(words(), batch(), "20MiB", step=by_storage)


def test_models_that_share_modules_are_refused() -> None:
    model = words()
    with pytest.raises(UsageError, match="Words, which shares modules with Words"):
        jettison.auto_checkpoint(model, batch(), "20MiB", step=both_train, models=(model, model))


def test_checks_of_numbers_and_prints_do_not_end_a_step() -> None:
    """What nobody knows before a step runs is taken to be finite."""
    printed: list[str] = []

    def careful(model: Any, ids: Tensor) -> None:
        loss = next_word(model(ids), ids)
        if torch.isnan(loss) or not torch.isfinite(loss).all():
            raise ValueError("the loss is not finite")
        loss.backward()
        printed.append(f"{loss.detach():.3f}")
        if any(bool(torch.isinf(p.grad).any()) for p in model.parameters()):
            raise ValueError("a gradient is not finite")

    model = words()
    jettison.auto_checkpoint(model, batch(), "20MiB", step=careful)
    assert printed == []
    careful(model, batch())
    assert len(printed) == 1


def test_a_step_that_takes_its_batches_itself_is_refused() -> None:
    rows = iter(torch.utils.data.DataLoader(batch(), batch_size=2))

    def taking(model: Any, _: Any) -> None:
        ids = next(rows)
        next_word(model(ids), ids).backward()

    with pytest.raises(UnsupportedModule, match="takes from a generator that outlives it"):
        jettison.auto_checkpoint(words(), batch()[:2], "20MiB", step=taking)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_step_with_workers_of_a_loader_is_refused(persistent: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Once they run, and before."""
    loader = torch.utils.data.DataLoader(batch(), batch_size=2, num_workers=1, persistent_workers=persistent)
    if persistent:
        next(iter(loader))

    def taking(model: Any, _: Any) -> None:
        for ids in loader:
            next_word(model(ids), ids).backward()

    with pytest.raises(UnsupportedModule, match="DataLoader"):
        jettison.auto_checkpoint(words(), batch()[:2], "20MiB", step=taking)
    assert len(multiprocessing.active_children()) == persistent
    assert capfd.readouterr().err == ""


def test_shapes_cost_nothing_that_is_not_there() -> None:
    def once(model: Any, x: Tensor) -> None:
        model(x).square().mean().backward()

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Mlp(WIDTH, WIDTH) for _ in range(3))), torch.randn(64, WIDTH)
    with pytest.raises(Infeasible) as alone:
        jettison.auto_checkpoint(model, x, Bytes(1000), step=once)
    with pytest.raises(Infeasible) as beside:
        jettison.auto_checkpoint(
            model, x, Bytes(1000), step=once, shapes=[torch.randn(rows, WIDTH) for rows in range(32, 64, 4)]
        )
    assert beside.value.minimum_budget_bytes == alone.value.minimum_budget_bytes


class Trainer:
    """Has a model, of which its step takes nothing from its argument."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.trained = model, list(model.parameters())

    def step(self, _model: Any, ids: Tensor) -> None:
        next_word(self.model(ids), ids).backward()
        for parameter in self.trained:
            parameter.grad *= 0.5


def halved_by_closure(model: nn.Module) -> Callable[..., Any]:
    def step(given: Any, ids: Tensor) -> None:
        (next_word(given(ids), ids) + model.head.weight.square().mean()).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5

    return step


def by_tables(model: nn.Module) -> Callable[..., Any]:
    held = {"model": model, "heads": [model.head]}

    def step(_model: Any, ids: Tensor) -> None:
        next_word(held["model"](ids), ids).backward()
        held["heads"][0].weight.grad.clamp_(-1e-4, 1e-4)

    return step


@pytest.mark.parametrize(
    "held",
    [
        lambda model: Trainer(model).step,
        *(pytest.param(held, marks=pytest.mark.slow) for held in (halved_by_closure, by_tables)),
    ],
)
def test_a_step_may_hold_the_model_itself(held: Callable[[nn.Module], Callable[..., Any]]) -> None:
    models, optimizer, _ = loop(accumulated, frozen=False)
    expected = train((models, optimizer, held(models[0])), batch())
    models, optimizer, _ = loop(accumulated, frozen=False)
    own = models, optimizer, held(models[0])
    before = [p.detach().clone() for p in models[0].parameters()]
    with pytest.raises(Infeasible) as error:
        jettison.auto_checkpoint(models[0], batch(), Bytes(1000), step=own[2], optimizer=optimizer)
    assert all(p.grad is None for p in models[0].parameters())
    assert all(map(torch.equal, models[0].parameters(), before))
    budget = Bytes(error.value.minimum_budget_bytes)
    handle = jettison.auto_checkpoint(models[0], batch(), budget, step=own[2], optimizer=optimizer)
    for got, wanted in zip(train(own, batch()), expected, strict=True):
        assert all(map(torch.equal, got, wanted))
    assert handle.plan is not None
    assert peak(own, batch()) == pytest.approx(handle.plan.predicted.peak_bytes, abs=256)


def test_a_step_that_never_runs_the_model_is_refused() -> None:
    other = words()
    with pytest.raises(UsageError, match="never ran the model"):
        jettison.auto_checkpoint(
            words(), batch(), "20MiB", step=lambda _model, ids: next_word(other(ids), ids).backward()
        )
    assert all(p.grad is None for p in other.parameters())


def test_the_state_of_an_optimizer_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    whole = UserStep.passes

    def counted(self: UserStep, counter: Any) -> Any:
        ran[-1] += 1
        return whole(self, counter)

    monkeypatch.setattr(UserStep, "passes", counted)
    predicted = []
    for made in (None, torch.optim.AdamW):
        torch.manual_seed(0)
        model = words()
        model.unused = nn.Linear(WIDTH, WIDTH)  # which no gradient reaches
        optimizer = made(model.parameters()) if made is not None else None
        ran.append(0)
        handle = jettison.auto_checkpoint(
            model, torch.randint(0, WORDS, (ROWS, LENGTH)), "1GiB", step=accumulated, optimizer=optimizer
        )
        predicted.append(handle.plan.predicted.peak_bytes)
        handle.remove()
    assert ran[0] == ran[1] <= 4  # without a plan, twice where ops have no price yet; under the smallest; under the one
    reached = [p for name, p in model.named_parameters() if "unused" not in name]
    assert predicted[1] - predicted[0] == sum(2 * p.nbytes + 4 for p in reached)  # two moments, and a count
