"""Which modules are the repeated blocks of a model, and which of them are alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.blocks import find_blocks, structural_keys
from jettison.capture.model_trace import ModelTrace
from jettison.capture.tracer import trace_model
from jettison.core.errors import UsageError

N = 6


class Block(nn.Module):
    """Two linear layers; ``layer_idx`` is its number, ``scale`` a setting."""

    def __init__(self, layer_idx: int = 0, *, scale: int = 1, width: int = N) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.scale = scale
        self.up, self.down = nn.Linear(N, width), nn.Linear(width, N)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


class Other(Block):
    """The same parameters, another computation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, *blocks: nn.Module, container: type[nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.embed = nn.Linear(N, N)
        self.layers = container(blocks) if container is nn.ModuleList else container(*blocks)
        self.head = nn.Linear(N, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


def traced(model: nn.Module, regions: list[str] | None = None) -> ModelTrace:
    return trace_model(model, (torch.randn(4, N),), regions=regions)


def classes(trace: ModelTrace) -> list[int]:
    """For each block call the number of its class."""
    order = list(trace.classes)
    return [order.index(call.class_key) for call in trace.calls]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_blocks_of_a_container(container: type[nn.Module]) -> None:
    model = Stack(*(Block(i) for i in range(4)), container=container)
    assert find_blocks(model) == [f"layers.{i}" for i in range(4)]
    trace = traced(model)
    assert [call.name for call in trace.calls] == [f"layers.{i}" for i in range(4)]
    assert classes(trace) == [0, 0, 0, 0]


def test_a_sequential_model_is_its_own_container() -> None:
    model = nn.Sequential(nn.Linear(N, N), Block(), Block(), nn.Linear(N, 1))
    assert find_blocks(model) == ["1", "2"]


def test_each_call_knows_the_one_before_it_and_what_it_shares() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(i) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            table = x.cos()
            for layer in self.layers:
                x = layer(x * table) if layer is self.layers[1] else layer(x)
            return x.sum()

    assert [call.links for call in traced(Masked()).calls] == [(), (), ((0, 0),)]


def test_blocks_in_blocks_are_parts_of_the_outer_one() -> None:
    model = Stack(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    assert find_blocks(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_list_of_lists_holds_blocks_and_is_none() -> None:
    """Down- and upsampling levels of a U-Net are often bare lists of residual blocks, attention and a convolution."""
    model = Stack(*(nn.ModuleList([Block(), Block(), nn.Linear(N, N)]) for _ in range(2)))
    assert find_blocks(model) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_two_stacks_are_both_found() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(N, N)
            self.encoder = nn.ModuleList(Block(i) for i in range(2))
            self.decoder = nn.ModuleList(Other(i) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in (*self.encoder, *self.decoder):
                x = layer(x)
            return x.sum()

    trace = traced(Twice())
    assert [call.name for call in trace.calls] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]
    assert classes(trace) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(N, N), nn.Linear(N, 1)), Stack(Block()), Stack(Block(), nn.Bilinear(N, N, N)), Block()],
)
def test_a_model_without_repeated_blocks_has_none(model: nn.Module) -> None:
    assert find_blocks(model) == []


def test_a_model_without_blocks_is_all_root() -> None:
    trace = trace_model(Block(), (torch.randn(4, N),), loss_fn=lambda out: out.sum())
    assert trace.calls == [] and trace.classes == {}
    assert [op.name.split(".")[1] for op in trace.root.program.ops].count("addmm") == 2


# asked for ------------------------------------------------------------------------------------------------------------


def test_explicit_regions_win() -> None:
    model = Stack(*(Block(i) for i in range(3)))
    trace = traced(model, ["layers.1", "head"])
    assert [call.name for call in trace.calls] == ["layers.1", "head"]


def test_no_regions_at_all_can_be_asked_for() -> None:
    assert traced(Stack(*(Block(i) for i in range(3))), []).calls == []


def test_an_unknown_region_is_an_error_with_names() -> None:
    with pytest.raises(UsageError, match=r"region 'layers.7' is not a module of Stack; it has embed, layers"):
        find_blocks(Stack(Block(), Block()), ["layers.0", "layers.7"])


def test_nested_regions_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"'layers.0.up' lies inside region 'layers.0'"):
        find_blocks(Stack(Block(), Block()), ["layers.0.up", "layers.0"])


def test_a_name_that_only_starts_alike_is_not_nested() -> None:
    model = Stack(*(Block(i) for i in range(11)))
    assert find_blocks(model, ["layers.1", "layers.10"]) == ["layers.1", "layers.10"]
    assert find_blocks(model) == [f"layers.{i}" for i in range(11)]


def test_a_marked_class_is_a_region_wherever_it_stands() -> None:
    @jettison.checkpointable
    class Marked(Block):
        pass

    model = Stack(Block(), Block(), Block())
    model.extra = Marked()
    model.layers[1] = Marked()
    assert find_blocks(model) == ["layers.1", "extra"]
    assert find_blocks(model, ["layers.0"]) == ["layers.0"]


# alike ----------------------------------------------------------------------------------------------------------------


def test_alternating_layers_are_two_classes() -> None:
    model = Stack(*((Block, Other)[i % 2](i) for i in range(6)))
    trace = traced(model)
    assert classes(trace) == [0, 1, 0, 1, 0, 1]
    assert len({cls.trace.program.digest() for cls in trace.classes.values()}) == 2


def test_a_layers_number_is_no_difference_and_a_setting_is() -> None:
    assert classes(traced(Stack(*(Block(i) for i in range(5))))) == [0, 0, 0, 0, 0]
    scaled = Stack(*(Block(i, scale=1 + (i == 3)) for i in range(5)))
    assert classes(traced(scaled)) == [0, 0, 0, 1, 0]
    assert classes(traced(Stack(*(Block(i, scale=i) for i in range(2, 5))))) == [0, 1, 2], "not the position"


def test_width_mode_and_frozen_parameters_are_differences() -> None:
    model = Stack(*(Block(i, width=N + (i == 1)) for i in range(5)))
    model.layers[2].eval()
    model.layers[3].up.weight.requires_grad_(False)
    assert classes(traced(model)) == [0, 1, 0, 2, 0], "nothing in these blocks depends on train and eval"


def test_settings_in_functions_and_tuples_are_differences() -> None:
    layers = nn.ModuleList(Block(i) for i in range(4))
    layers[1].activation, layers[2].window = torch.relu, (2, 3)
    keys = structural_keys({f"layers.{i}": layer for i, layer in enumerate(layers)})
    assert len({keys[f"layers.{i}"] for i in range(3)}) == 3
    assert keys["layers.0"] == keys["layers.3"]


def test_a_setting_in_a_configuration_object_is_a_difference() -> None:
    class Configured(Block):
        def __init__(self, layer_idx: int, power: float) -> None:
            super().__init__(layer_idx)
            self.config = SimpleNamespace(power=power)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** self.config.power

    trace = traced(Stack(*(Configured(i, 2.0 + (i == 1)) for i in range(3))))
    assert classes(trace) == [0, 1, 0]
