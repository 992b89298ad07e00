"""Models, batches and optimizers that cannot be planned are refused in a line; those without values are planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.fake_copies import fake_mode
from jettison.core.errors import Infeasible, UnsupportedModule, UsageError
from jettison.core.units import Bytes
from jettison.models.huggingface import ConfigRequest, build, read_config

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Three residual blocks; the output is the loss."""

    def __init__(self, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(16, 64), nn.Tanh(), linear(64, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def lazy(inner: int, outer: int) -> nn.Module:
    return nn.LazyLinear(outer)


def batch() -> tuple[Tensor]:
    return (torch.randn(256, 16),)


def minimum(model: nn.Module, given: Any) -> int:
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, given, Bytes(1))
    return refused.value.minimum_budget_bytes


def test_a_lazy_module_is_planned_once_it_has_run() -> None:
    model = Net(lazy)
    for ask in (jettison.trace, lambda m, b: jettison.apply(m, "full", batch=b)):
        with pytest.raises(UsageError, match=r"layers\.0\.0\.weight has no size .* run one batch"):
            ask(model, batch())
    model(*batch())
    with jettison.apply(model, "full", batch=batch()) as handle:
        model(*batch()).backward()
        assert sum(report.slots_dropped for report in handle.report()) > 0


@pytest.mark.parametrize("on_meta", ["model", "batch", "both"])
def test_what_is_on_meta_is_planned_as_if_it_were_not(on_meta: str) -> None:
    model, given = Net(), batch()
    expected = minimum(model, given)
    if on_meta != "batch":
        model = model.to("meta")
    if on_meta != "model":
        given = (given[0].to("meta"),)
    assert minimum(model, given) == expected


class Deciding(Net):
    """Looks at its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if bool((x == 0).all()) else x)


@pytest.mark.parametrize("on_meta", ["batch", "both"])
def test_values_that_a_batch_on_meta_has_not_are_guessed_and_said(on_meta: str) -> None:
    model, given = Deciding(), (batch()[0].to("meta"),)
    traced = jettison.trace(model.to("meta") if on_meta == "both" else model, given)
    assert any("depends on values that are not known when it is planned" in text for text in traced.warnings)


def test_a_plan_made_on_meta_holds_for_the_weights_that_follow() -> None:
    given = batch()
    model = Net().to("meta")
    budget = minimum(model, given)
    handle = jettison.auto_checkpoint(model, given, Bytes(budget))
    plain = Net()
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    for m in (plain, model):
        m(*given).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert sum(report.slots_dropped for report in handle.report()) > 0
    assert not any(report.fallback for report in handle.report())


def test_a_model_half_on_meta_is_refused() -> None:
    model = Net()
    model.layers[1].to("meta")
    with pytest.raises(UsageError, match=r"layers\.1\.0\.weight is on meta and other parameters are not"):
        jettison.trace(model, batch())


@pytest.mark.parametrize("given", [None, torch.utils.data.DataLoader([torch.ones(2)])])
def test_what_is_no_batch_is_refused(given: object) -> None:
    """Torch's own error would name an op of the model."""
    with pytest.raises(UsageError, match=r"as a batch; expected the model's arguments, such as next\(iter\(loader\)\)"):
        jettison.auto_checkpoint(Net(), given, "1GiB")


def test_compiled_modules_are_refused() -> None:
    whole = torch.compile(Net(), backend="eager")
    part, in_place = Net(), Net()
    part.layers[1] = torch.compile(part.layers[1], backend="eager")
    in_place.layers[2].compile(backend="eager")
    for model, name in ((whole, "the model"), (part, r"layers\.1"), (in_place, r"layers\.2")):
        with pytest.raises(UnsupportedModule, match=rf"{name} is compiled"):
            jettison.auto_checkpoint(model, batch(), "1GiB")
        with pytest.raises(UnsupportedModule, match=rf"{name} is compiled"):
            jettison.apply(model, "full", batch=batch())


def test_optimizers_that_no_rehearsal_can_follow_are_refused() -> None:
    model = Net()
    cases: list[tuple[Any, str]] = [
        (torch.optim.LBFGS(model.parameters()), "LBFGS runs forward and backward from inside its step"),
        (torch.optim.SGD(Net().parameters(), 0.1), "SGD holds no parameter of this model"),
        ("adamw", "optimizer= is 'adamw'; expected a torch.optim.Optimizer"),
    ]
    for optimizer, message in cases:
        with pytest.raises(UsageError, match=message):
            jettison.auto_checkpoint(model, batch(), "1GiB", optimizer=optimizer)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ENCODER_DECODER = {
    "model_type": "encoder-decoder",
    "encoder": {**LLAMA, "model_type": "bert"},
    "decoder": {**LLAMA, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "nope"}, r"transformers cannot make a LlamaForCausalLM of this config: KeyError: 'nope'"),
        ({"pad_token_id": 500}, r"Padding_idx must be within num_embeddings"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "cannot make a LlamaForCausalLM"),
    ],
)
def test_a_config_that_transformers_cannot_build_is_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    config = read_config(written(tmp_path, LLAMA | change))
    with pytest.raises(UsageError, match=message) as refused:
        build(config, ConfigRequest(), fake_mode(allow_non_fake_inputs=True))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, r"hidden size \(32\) is not a multiple of the number of attention"),
        ({"hidden_size": -32}, r"got hidden_size -32; expected a whole number of 1 or more"),
    ],
)
def test_a_config_that_cannot_be_read_says_what_is_wrong_with_it(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=message) as refused:
        read_config(written(tmp_path, LLAMA | change))
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
def test_an_encoder_with_a_decoder_gets_the_token_that_its_labels_are_shifted_by(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = read_config(written(tmp_path, ENCODER_DECODER))
    model = build(config, ConfigRequest(), None)
    ids = torch.randint(96, (1, 8))
    assert model(input_ids=ids, labels=ids).loss.isfinite()


def test_the_replicate_that_cannot_be_copied_is_refused() -> None:
    replicate = pytest.importorskip("torch.distributed._composable.replicate").replicate
    with pytest.raises(UnsupportedModule, match=r"the model is under torch\.distributed\._composable\.replicate, of"):
        jettison.auto_checkpoint(replicate(Net()), batch(), "1GiB")


def test_an_optimizer_that_is_spread_over_ranks_is_refused() -> None:
    library = pytest.importorskip("torch.distributed.optim.zero_redundancy_optimizer")
    model = Net()
    spread = library.ZeroRedundancyOptimizer.__new__(library.ZeroRedundancyOptimizer)  # there is no process group
    with pytest.raises(UsageError, match="ZeroRedundancyOptimizer keeps other parameters' state on every rank"):
        jettison.auto_checkpoint(model, batch(), "1GiB", optimizer=spread)


def test_replicas_of_plain_parts_are_refused() -> None:
    """What `_pre_dp_module_transform` does, which takes no process group."""
    library = pytest.importorskip("torch.distributed.tensor.parallel.ddp")
    model = Net()
    library._pre_dp_module_transform(model)
    with pytest.raises(UnsupportedModule, match=r"the model is tensor parallel, and keeps plain parts"):
        jettison.auto_checkpoint(model, batch(), "1GiB")


def _ways(given: Any, x: Tensor) -> dict[str, Callable[[], object]]:
    """Functions that take a model."""
    return {
        "auto_checkpoint": lambda: jettison.auto_checkpoint(given, (x,), "1GiB"),
        "trace": lambda: jettison.trace(given, (x,)),
        "apply": lambda: jettison.apply(given, "full", batch=(x,)),
        "verify": lambda: jettison.verify(given, (x,), budget="1GiB"),
        "verify_given": lambda: jettison.verify_given(given, (x,)),
        "watch": lambda: jettison.watch(given).__enter__(),
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("gpt2", r"got the name 'gpt2' as a model; .*: build it first, .*from_pretrained\('gpt2'\)"),
        (nn.Linear, r"got a type as a model; expected a torch\.nn\.Module: make one of it, as in Linear\(\.\.\.\)"),
        ([nn.Linear(2, 2)], r"got a list as a model; expected a torch\.nn\.Module"),
    ],
)
@pytest.mark.parametrize("name", sorted(_ways(None, torch.zeros(1))))
def test_what_is_no_model_is_named(name: str, given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _ways(given, torch.randn(4, 2))[name]()


def test_a_model_is_no_trace_and_a_text_no_list_of_budgets() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    for call in (lambda: jettison.plan(model, "1GiB"), lambda: jettison.ledger_of(model)):
        with pytest.raises(UsageError, match=r"got a Sequential as a trace; .*jettison\.trace\(model, batch\)"):
            call()
    with pytest.raises(UsageError, match=r"expected a list, as in \['8GiB'\]"):
        jettison.sweep(jettison.trace(model, (torch.randn(4, 2),), loss_fn=torch.sum), "8GiB")
