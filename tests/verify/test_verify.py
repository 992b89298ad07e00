"""`verify`: what it shows of a plan that holds, and that it notices one that does not."""

from __future__ import annotations

import json
import random
import sys
import warnings

import pytest
import torch
import transformers
from torch import nn

import jettison
from jettison.capture.ledger_entries import OUTSIDE_LAYER, ROOT_LAYER
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.core.units import Bytes
from jettison.report.proof import LayerProof, Proof
from jettison.runtime.saved_tensor_hooks import Frame
from jettison.verify.verify import observed_saved_bytes

S, B, H, V = 64, 2, 64, 128


def llama():
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=S,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, V, (B, S))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def check(proof):
    assert proof.passed, proof.failures()
    assert proof.saved_bytes_agree, proof.layers
    assert Proof.from_json(proof.to_json()) == proof


def test_the_copy_is_made_after_planning_which_counts_what_else_is_on_the_device():
    model, batch = llama()
    said: list[str] = []
    check(jettison.verify(model, batch, budget="100MiB", steps=1, rounds=1, progress=said.append))
    assert said[said.index("training side by side") - 1] == "copying the model" != said[0]


def test_a_model_that_planning_changed_is_no_reference(monkeypatch):
    """The copy is made after planning, so that it would have the change as well."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def plan(*args, **more):
        with torch.no_grad():
            model[0].weight[0, 0] += 1
        return jettison.auto_checkpoint(*args, **more)

    monkeypatch.setattr(sys.modules[observed_saved_bytes.__module__], "auto_checkpoint", plan)
    with pytest.raises(UnsupportedModule, match="planning changed parameters"):
        jettison.verify(model, (torch.randn(4, 8),), budget="1MiB", loss_fn=torch.sum)


def test_a_budget_is_planned_proven_and_taken_off_again():
    model, batch = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with jettison.apply(model, "none", batch=batch) as handle:
        plain = jettison.verify(model, batch, handle=handle, optimizer=optimizer, rounds=1)
    budget = plain.baseline_peak_bytes * 4 // 5
    proof = jettison.verify(model, batch, budget=Bytes(budget), optimizer=optimizer, rounds=2)
    check(plain)
    check(proof)
    assert proof.measured_peak_bytes <= proof.budget_bytes == budget < proof.baseline_peak_bytes
    assert abs(proof.prediction_error) < 0.02
    assert proof.gradients_compared == len(list(model.parameters()))
    assert all(entry.predicted_bytes == entry.baseline_bytes for entry in plain.layers), "everything is kept"
    assert sum(e.observed_bytes for e in proof.layers) < sum(e.observed_bytes for e in plain.layers)
    assert "forward" not in vars(model.model.layers[0])
    predicted, measured, plainly = proof.predicted_levels, proof.measured_levels, proof.baseline_levels
    assert measured.peak_bytes == proof.measured_peak_bytes
    assert plainly.peak_bytes == proof.baseline_peak_bytes
    assert predicted.peak_bytes == proof.predicted_peak_bytes
    assert [phase.phase for phase in measured.phases] == ["forward", "backward", "optimizer"]
    for phase in ("forward", "backward"):
        assert abs(predicted.peak_of(phase) - measured.peak_of(phase)) < 0.02 * measured.peak_of(phase)
    shown = {tensor.digest for tensor in proof.tensors}
    assert {entry.digest for entry in proof.layers if entry.layer != OUTSIDE_LAYER} == shown
    assert proof.environment["torch"] == proof.torch_version


@pytest.mark.parametrize("policy", ["full", "selective-op", "every:2"])
def test_policies_hold_what_the_ledger_says(policy):
    model, batch = llama()
    with jettison.apply(model, policy, batch=batch) as handle:
        proof = jettison.verify(model, batch, handle=handle, rounds=1, steps=1)
    check(proof)
    assert (proof.budget_bytes, proof.predicted_peak_bytes, proof.prediction_error) == (None, None, None)
    if policy == "full":
        assert {e.observed_bytes for e in proof.layers if e.layer != ROOT_LAYER} == {B * S * H * 4}
    if policy == "every:2":
        held = [e.observed_bytes for e in proof.layers if e.layer != ROOT_LAYER]
        assert held == [B * S * H * 4, 0, B * S * H * 4, 0], "within a segment only the first layer holds its input"


def test_dropout_buffers_and_a_loss_outside_of_the_model():
    blocks = [
        nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.BatchNorm1d(64), nn.Linear(64, 32)) for _ in range(3)
    ]
    model, batch = nn.Sequential(*blocks), (torch.randn(16, 32),)
    with jettison.apply(model, "none", batch=batch, loss_fn=lambda out: out.square().mean()) as handle:
        proof = jettison.verify(model, batch, handle=handle, loss_fn=lambda out: out.square().mean(), rounds=1)
    check(proof)
    assert len({entry.observed_bytes for entry in proof.layers[1:-1]}) == 1, "running statistics are no layer's"
    assert proof.layers[-1].layer == OUTSIDE_LAYER
    assert proof.layers[-1].observed_bytes == 16 * 32 * 4


def test_what_is_counted_without_a_backward_leaves_no_graph():
    """A loss whose op saves its own result: nothing of the forward that is counted stays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    batch, labels = (torch.randn(4, 8),), torch.randint(0, 4, (4,))
    with jettison.apply(model, "none", batch=batch, loss_fn=(loss := _loss_of(labels))) as handle:
        observed_saved_bytes(model, batch, loss_fn=loss)
        assert [len(region.frames) for region in handle.regions] == [0] * len(handle.regions)


def _loss_of(labels):
    return lambda output: nn.functional.cross_entropy(output, labels)


def test_wrong_gradients_are_noticed(monkeypatch):
    model, batch = llama()
    recompute = Frame.recompute

    def wrong(frame, handle):
        tensor = recompute(frame, handle)
        return tensor + 1e-3 if tensor.is_floating_point() else tensor

    with jettison.apply(model, "full", batch=batch) as handle:
        monkeypatch.setattr(Frame, "recompute", wrong)
        proof = jettison.verify(model, batch, handle=handle, rounds=1, steps=1)
    assert not proof.passed
    assert not proof.gradients_identical
    assert proof.losses_identical, "only backward was wrong"
    assert "gradient of" in proof.differences[0]
    assert "the gradients differ" in proof.failures()[0]


def test_bytes_that_are_held_beside_the_plan_are_noticed(monkeypatch):
    model, batch = llama()
    with jettison.apply(model, "full", batch=batch) as handle:
        region = handle.regions[1]
        monkeypatch.setattr(type(region.plan.policy), "kept", lambda _self, program: program.saved_buffers())
        proof = jettison.verify(model, batch, handle=handle, rounds=1, steps=1)
    assert not proof.saved_bytes_agree, "predicted all of it, held only the inputs"


def test_exactly_one_of_budget_plan_and_handle():
    model, batch = llama()
    with pytest.raises(UsageError, match="exactly one"):
        jettison.verify(model, batch)
    with pytest.raises(UsageError, match="exactly one"):
        jettison.verify(model, batch, budget="1GiB", handle=object())


def proof_of(**changes):
    values = {
        "gradients_identical": True,
        "losses_identical": True,
        "random_state_identical": True,
        "buffers_identical": True,
        "parameters_identical": True,
        "gradients_compared": 3,
        "differences": (),
        "steps": 2,
        "budget_bytes": 100,
        "predicted_peak_bytes": 90,
        "measured_peak_bytes": 90,
        "baseline_peak_bytes": 200,
        "step_time_ratio": 1.1,
        "step_time_ratio_low": 1.0,
        "step_time_ratio_high": 1.2,
        "baseline_step_seconds": 0.5,
        "rounds": 4,
        "plan_hash": "ab",
        "device": "cpu",
        "torch_version": "2",
        "layers": (LayerProof(layer="a", policy="full", baseline_bytes=9, predicted_bytes=3, observed_bytes=3),),
    }
    return Proof(**values | changes)


def test_the_document():
    proof = proof_of()
    document = proof.document()
    assert document["schema"] == "jettison.proof/1"
    assert {
        "gradients_identical",
        "budget_bytes",
        "predicted_peak_bytes",
        "measured_peak_bytes",
        "baseline_peak_bytes",
        "step_time_ratio",
        "layers",
        "device",
        "torch_version",
        "passed",
    } <= set(document)
    assert document["saved"] == {"baseline_bytes": 9, "plain_bytes": 9, "predicted_bytes": 3, "observed_bytes": 3}
    del document["layers"][0]["baseline_bytes"]  # of an older file
    assert Proof.from_json(json.dumps(document)) == proof
    assert proof_of(measured_peak_bytes=101).failures() == (
        "the measured peak, 101 B (101B), is above the budget of 100 B (100B)",
    )
    assert not proof_of(random_state_identical=False).passed
    for text in ("", "[]", '{"schema": "jettison.plan/1"}', '{"schema": "jettison.proof/1"}'):
        with pytest.raises(UsageError, match=r"not a jettison\.proof/1 document"):
            Proof.from_json(text)


STEPPED = {"steps": 0, "rows": []}


class Drawing(nn.Module):
    """A block that cannot be recorded: it draws from a generator of its own, drops, and writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)
        self.numbers = random.Random(3)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x + self.down(self.drop(self.up(x).relu())) * (1 + 0.1 * self.numbers.random())


def test_blocks_that_cannot_be_recorded_are_proven():
    model = nn.Sequential(*(Drawing() for _ in range(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proof = jettison.verify(model, torch.randn(8, 16), budget="1GiB", loss_fn=lambda y: y.square().mean(), rounds=1)
    assert proof.passed and {layer.layer for layer in proof.layers} >= {"0", "1", "2"}


class Counting(nn.Module):
    """Leaves state in every kind of place: buffers, attributes, globals, a queue of tensors, random streams."""

    def __init__(self, queue):
        super().__init__()
        self.up, self.down, self.norm, self.drop = (
            nn.Linear(32, 128),
            nn.Linear(128, 32),
            nn.BatchNorm1d(32),
            nn.Dropout(),
        )
        self.queue, self.calls = queue, 0
        self.register_buffer("mean", torch.zeros(2048))

    def forward(self, x):
        self.calls += 1
        STEPPED["steps"] += 1
        STEPPED["rows"].append(len(x))
        self.mean.lerp_(x.detach().mean() + self.mean, 0.1)
        self.queue[0].mul_(0.5).add_(x.detach().mean())
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def state_of(model, optimizer, queue):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), *queue]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    counts = [block.calls for block in model]
    return [t.clone() for t in tensors], counts, STEPPED["steps"], list(STEPPED["rows"]), torch.get_rng_state()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["budget", "handle"])
def test_what_steps_change_is_put_back(given):
    torch.manual_seed(0)
    queue = [torch.zeros(2048)]
    model, batch = nn.Sequential(*(Counting(queue) for _ in range(3))), (torch.randn(16, 32),)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda output: output.square().mean()  # noqa: E731
    loss(model(*batch)).backward()
    optimizer.step()
    how = {"budget": "1GiB"}
    if given == "handle":
        how = {"handle": jettison.apply(model, "full", batch=batch, loss_fn=loss)}
        loss(model(*batch)).backward()
    tensors, *before = state_of(model, optimizer, queue)
    jettison.verify(model, batch, **how, loss_fn=loss, optimizer=optimizer, rounds=1, steps=1)
    after, *now = state_of(model, optimizer, queue)
    assert [torch.equal(a, b) for a, b in zip(tensors, after, strict=True)] == [True] * len(tensors)
    assert now[:3] == before[:3]
    assert torch.equal(now[3], before[3])
    loss(model(*batch)).backward()
    if given == "handle":
        assert [region.calls > 0 for region in how["handle"].regions] == [True] * 4
        how["handle"].remove()
