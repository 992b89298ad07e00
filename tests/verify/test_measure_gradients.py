"""Bitwise comparison: it notices one bit, knows NaN and signed zero, and compares no model with itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jettison.verify.differences import buffer_digest, compare_gradients, independent_copy, rng_digest, tensor_bytes


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch), batch)


def run_steps(model, batches):
    """Losses' bits of steps with SGD. Gradients of the last one remain."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(tensor_bytes(loss).hex())
    return losses


def pair():
    torch.manual_seed(0)
    model = Tied()
    twin = independent_copy(model)
    batches = [torch.arange(8) % 16] * 3
    losses = [run_steps(each, batches) for each in (model, twin)]
    return model, twin, losses


def test_equal_runs_are_identical():
    model, twin, (losses, twin_losses) = pair()
    report = compare_gradients(model, twin)
    assert report.identical
    assert report.compared == 3
    assert losses == twin_losses
    assert len(set(losses)) == 3
    assert buffer_digest(model) == buffer_digest(twin)
    assert twin.head.weight is twin.embed.weight


def test_one_flipped_bit_is_found_and_named():
    model, twin, _ = pair()
    twin.norm.weight.grad.view(torch.int32)[3] ^= 1
    report = compare_gradients(model, twin)
    assert not report.identical
    (difference,) = report.differences
    assert (difference.name, difference.differing_elements) == ("norm.weight", 1)


@pytest.mark.parametrize(("value", "identical"), [(float("nan"), True), (-0.0, False)])
def test_special_values_are_compared_by_their_bits(value, identical):
    model, twin, _ = pair()
    model.norm.bias.grad[0] = value
    twin.norm.bias.grad[0] = value if identical else 0.0
    assert compare_gradients(model, twin).identical is identical


def test_a_model_is_not_compared_with_itself():
    model, twin, _ = pair()
    with pytest.raises(ValueError, match="proves nothing"):
        compare_gradients(model, model)
    twin.norm.weight.grad = model.norm.weight.grad
    with pytest.raises(ValueError, match=r"norm\.weight"):
        compare_gradients(model, twin)


def test_a_missing_gradient_is_a_difference_and_none_at_all_is_no_proof():
    model, twin, _ = pair()
    twin.norm.bias.grad = None
    assert "second model has no gradient" in compare_gradients(model, twin).differences[0].reason
    model.zero_grad()
    twin.zero_grad()
    report = compare_gradients(model, twin)
    assert not report.identical
    assert report.compared == 0


def test_other_parameters_are_refused():
    with pytest.raises(ValueError, match="different parameters"):
        compare_gradients(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))


def test_copy_leaves_the_gradients_of_the_original():
    model, _, _ = pair()
    before = model.norm.weight.grad
    twin = independent_copy(model)
    assert model.norm.weight.grad is before
    assert twin.norm.weight.grad is None


def test_digests_follow_streams_and_buffers():
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    first = rng_digest({"own": generator})
    torch.rand(1, generator=generator)
    second = rng_digest({"own": generator})
    torch.rand(1)
    assert len({first, second, rng_digest({"own": generator})}) == 3
    model = Tied()
    before = buffer_digest(model)
    model.norm.num_batches_tracked += 1
    assert buffer_digest(model) != before
