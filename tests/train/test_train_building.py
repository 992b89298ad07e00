"""Models that are built without weights: what a rank allocates meanwhile; weights to the bit those of a whole build."""

from __future__ import annotations

import hashlib
import importlib
import io
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.core.progress import silent
from jettison.dryrun.counter import AllocationCounter, unique_bytes
from jettison.models.deferred_init import NotDeferrable, deferred
from jettison.spec.layout import Layout
from jettison.train.build_model import build
from jettison.train.engine import named_parameters
from jettison.train.rank_layout import Places
from jettison.train.ranks import World, joined
from jettison.train.recipe import BatchSection, CheckpointSection, LayoutSection, LogSection, ModelSection, TrainRecipe
from jettison.train.setup import Session, prepare
from support.ranks import run_ranks

GPT = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4)
LLAMA = replace(GPT, architecture="llama")
HUB_GPT = replace(GPT, code="huggingface")
HUB_LLAMA = replace(LLAMA, code="huggingface")
WIDE = replace(GPT, layers=8, hidden=128)
OWN = ModelSection(factory="support.train_models:tiny", build="sharded")

LAYOUTS = {
    "ddp": (GPT, LayoutSection()),
    "zero2": (GPT, LayoutSection(zero=2)),
    "zero3": (HUB_LLAMA, LayoutSection(zero=3)),
    "zero3 of a factory": (OWN, LayoutSection(zero=3)),
    "zero3, tied": (HUB_GPT, LayoutSection(zero=3)),
    "tp": (LLAMA, LayoutSection(tp=4)),
    "tp, three in one": (HUB_GPT, LayoutSection(tp=2, zero=3)),
    "tp under zero3": (GPT, LayoutSection(tp=2, zero=3)),
    "stages": (GPT, LayoutSection(pp=2, tp=2)),
    "stages under zero": (LLAMA, LayoutSection(pp=2, virtual_stages=2, zero=2)),
}
QUICK = ("zero3 of a factory", "tp, three in one", "stages under zero")
"""Those that `make test` runs."""

ONE = LayoutSection()


def recipe(folder: Path, model: ModelSection, layout: LayoutSection = ONE, **more: Any) -> TrainRecipe:
    return TrainRecipe(
        model=model,
        batch=BatchSection(global_batch=8, micro_batch=2, seq=16),
        steps=2,
        layout=layout,
        checkpoint=CheckpointSection(),
        log=LogSection(folder=str(folder), memory_steps=0),
        **more,
    )


@contextmanager
def ready(made: TrainRecipe) -> Iterator[Session]:
    """The run, before its first step."""
    with joined() as world, ExitStack() as held:
        yield prepare(made, world, held, must_resume=False, say=silent, warn=silent)


def digests(session: Session) -> dict[str, str]:
    """Of every parameter's whole values, wherever they are."""
    return {
        name: digest(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
        for name, parameter in named_parameters(session.engine)
    }


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class OfReal(AllocationCounter):
    """Without fake tensors, which say that they are on the CPU, and hold nothing; and without pickled messages between
    ranks, which a thread of gloo's lets go of when it comes to it."""

    def _count(self, tensor: Tensor, operator: str, node: int) -> None:
        if tensor.untyped_storage().device.type != "meta" and tensor.dtype != torch.uint8:
            super()._count(tensor, operator, node)


# on ranks -------------------------------------------------------------------------------------------------------------


def layouts_on_ranks(args: dict[str, Any]) -> dict[str, str]:
    """Digests of the parameters of each layout that is named."""
    found = {}
    with ExitStack() as open_until_all_are_read:  # torch keeps plans for groups of an equal mesh, which are gone then
        for name in args["layouts"]:
            made = recipe(Path(args["folder"]) / name, *LAYOUTS[name])
            found[name] = digests(open_until_all_are_read.enter_context(ready(made)))
    return found


def on_ranks(args: dict[str, Any]) -> dict[str, Any]:
    folder = Path(args["folder"])
    out: dict[str, Any] = {"digests": layouts_on_ranks(args)}
    for build_as in ("sharded", "whole"):
        counter = OfReal(device="cpu")
        with counter, ready(recipe(folder, replace(WIDE, build=build_as), LayoutSection(zero=3))) as session:
            held = [p.to_local() if isinstance(p, DTensor) else p for p in session.parameters]
            out[build_as] = [unique_bytes(held), counter.peak_bytes]
            out["largest"] = max(p.numel() * 4 for p in session.parameters)
            out["whole_bytes"] = sum(p.numel() * 4 for p in session.parameters)
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 4, {"folder": str(tmp_path_factory.mktemp("ranks")), "layouts": QUICK})


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [name for name in LAYOUTS if name not in QUICK]
    ranks = run_ranks(layouts_on_ranks, 4, {"folder": str(tmp_path_factory.mktemp("others")), "layouts": names})
    return [{"digests": rank} for rank in ranks]


@pytest.mark.parametrize("name", QUICK)
def test_ranks_have_the_weights_of_a_model_that_is_built_whole(
    found: list[dict[str, Any]], name: str, tmp_path: Path
) -> None:
    assert_weights(found, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in QUICK])
def test_ranks_of_other_layouts_have_the_weights_of_a_model_that_is_built_whole(
    others: list[dict[str, Any]], name: str, tmp_path: Path
) -> None:
    assert_weights(others, name, tmp_path)


def assert_weights(ranks: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    with ready(recipe(tmp_path, replace(LAYOUTS[name][0], build="whole"))) as session:
        expected = digests(session)
    together: dict[str, str] = {}
    for rank in ranks:
        for parameter, value in rank["digests"][name].items():
            assert value == expected[parameter], parameter
        together |= rank["digests"][name]
    assert together.keys() == expected.keys()


def test_a_rank_allocates_its_share_and_one_tensor(found: list[dict[str, Any]]) -> None:
    for rank in found:
        share, peak = rank["sharded"]
        assert share == rank["whole"][0]
        assert rank["whole_bytes"] / 4 <= share <= rank["whole_bytes"] / 4 + 4096
        assert share < peak <= share + rank["largest"] + 16384
        assert rank["whole"][1] >= rank["whole_bytes"]


def resident(args: dict[str, Any]) -> list[int]:
    """What building adds to the most that the process has ever had resident: the share, and all bytes of parameters."""
    model = replace(WIDE, hidden=1024, build=args["build"])
    with joined():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ready(recipe(Path(args["folder"]), model, LayoutSection(zero=3))) as session:
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return [(after - before) << 10, sum(p.numel() * 4 for p in session.parameters)]


@pytest.mark.slow
@pytest.mark.parametrize(("build_as", "least", "most"), [("sharded", 0.25, 0.6), ("whole", 1.0, 2.0)])
def test_what_the_system_says_of_a_rank(build_as: str, least: float, most: float, tmp_path: Path) -> None:
    for more, whole in run_ranks(resident, 4, {"folder": str(tmp_path), "build": build_as}):
        print(build_as, more, whole)
        assert least * whole < more < most * whole


# without ranks --------------------------------------------------------------------------------------------------------


def test_seventy_billion_parameters_on_sixty_four_ranks() -> None:
    """Built and cut in seconds, without a byte: what each of the ranks will hold is known before."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    layout = Layout(dp=8, zero=3, tp=8, sp=True)
    store: Any = fake.FakeStore()
    dist.init_process_group("fake", rank=13, world_size=64, store=store)
    try:
        world = World(store, rank=13, size=64, device=torch.device("cpu"), key="building")  # nobody is asked
        counter = OfReal(device="cpu")
        started = time.monotonic()
        with counter:
            built = build(ModelSection(preset="llama3-70b"), seq=8192, device=world.device)
            places = Places.of(layout, world, spread=(1, 8), mixed=True)
            places.split_layers(built.model)
            places.shard(built.model)
        seconds = time.monotonic() - started
        held = {name: p.to_local() for name, p in built.model.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert built.weights is not None
    assert sum(p.numel() for p in built.model.parameters()) == 70_553_706_496
    norms = 161 * 8192  # whole on each tensor-parallel rank
    assert sum(t.nbytes for t in held.values()) == 4 * ((70_553_706_496 - norms) // 64 + norms // 8)
    assert all(t.is_meta for t in held.values())
    assert counter.peak_bytes < 1 << 20
    print(f"{seconds:.1f} s")


class Plain(nn.Module):
    """Everything that constructors do to tensors, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(40, 30)
        nn.init.orthogonal_(self.a.weight)
        self.b = nn.Embedding(30, 20, padding_idx=3)
        with torch.no_grad():
            self.b.weight[5:7] *= 2
            self.b.weight.mul_(torch.linspace(1, 2, 30)[:, None])
        self.c = nn.Parameter(self.b.weight.detach().clone().t() + torch.randn(20, 30))
        self.d = nn.Parameter(torch.empty(4))  # never written to
        self.d.data.zero_()
        self.numpy = nn.Parameter(torch.from_numpy(np.arange(4.0)))
        self.e = nn.Bilinear(3, 4, 5, dtype=torch.float64)
        self.f = nn.ParameterList(torch.rand(n) for n in (1, 17))
        self.f.requires_grad_(False)
        self.shuffled = nn.Parameter(torch.randperm(64).float())
        self.rates = [float(x) for x in torch.linspace(0, 0.5, 4)]
        self.register_buffer("table", torch.outer(torch.arange(5.0), torch.tensor([1.0, 2.0])))
        self.kept = {"mask": torch.ones(3, 3).tril()}
        self.norm = nn.BatchNorm1d(4)


def test_whatever_a_constructor_does_is_done_again() -> None:
    torch.manual_seed(5)
    whole = Plain()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    later = deferred(Plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in later.model.parameters())
    assert later.model.rates == whole.rates
    assert torch.equal(later.model.kept["mask"], whole.kept["mask"])
    for expected, buffer in zip(whole.buffers(), later.model.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    names = {id(p): name for name, p in later.model.named_parameters()}
    values: dict[str, Tensor] = {}
    torch.rand(3)
    later.fill(dict(later.model.named_parameters()), lambda p, v: values.update({names[id(p)]: v.clone()}))
    assert torch.equal(torch.get_rng_state(), after)
    for name, parameter in whole.named_parameters():
        assert torch.equal(values[name], parameter) and values[name].stride() == parameter.stride(), name
        assert later.model.get_parameter(name).requires_grad == parameter.requires_grad
    some = {name: later.model.get_parameter(name) for name in ("shuffled", "e.weight")}
    values.clear()
    later.fill(some, lambda p, v: values.update({names[id(p)]: v.clone()}))
    assert values.keys() == some.keys()
    assert all(torch.equal(values[name], whole.get_parameter(name)) for name in values)


def looks() -> nn.Module:
    return nn.Linear(3, 3 if torch.rand(()) > 0.5 else 4)


def generator() -> nn.Module:
    made = nn.Linear(3, 3)
    nn.init.normal_(made.weight, generator=torch.Generator())
    return made


def seeds() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 3)


def truncated() -> nn.Module:
    """torch 2.13 draws again what lies outside, until nothing does."""
    made = nn.Linear(3, 3)
    nn.init.trunc_normal_(made.weight)
    return made


_SAVED = io.BytesIO()
torch.save(torch.ones(3, 3), _SAVED)


def from_file() -> nn.Module:
    made = nn.Linear(3, 3)
    _SAVED.seek(0)
    made.weight = nn.Parameter(torch.load(_SAVED))
    return made


def one_in_another() -> nn.Module:
    made = nn.Linear(3, 4)
    made.part = nn.Parameter(made.weight.detach()[:2])
    return made


_HELD: list[Tensor] = []


def held_elsewhere() -> nn.Module:
    made = nn.Linear(3, 4)
    _HELD.append(made.weight.detach())
    return made


since_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 draws once: it can be done again")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (looks, "looks at a random number"),
        pytest.param(truncated, "looks at a random number", marks=since_2_13),
        (generator, "generator of its own"),
        (seeds, "moves random streams"),
        (from_file, "it calls set_"),
        (one_in_another, "part is a part of another parameter"),
        (held_elsewhere, "a tensor of 48 bytes is referenced from outside"),
    ],
)
def test_what_cannot_be_done_again_is_said(make: Callable[[], nn.Module], says: str, tmp_path: Path) -> None:
    with pytest.raises(NotDeferrable, match=says):
        deferred(make)
    _HELD.clear()
    model = ModelSection(factory=f"test_train_building:{make.__name__}", build="sharded")
    with pytest.raises(UsageError, match=f'model.build: .*{says}.* expected build = "whole"'):
        train(recipe(tmp_path, model))
    _HELD.clear()
