"""The paper's transformer layer, to the byte: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198), equations 1 and 2, §5 for selective recomputation.

s sequence · b micro-batch · h hidden · a heads. In 16-bit with a one-byte dropout mask a layer holds
sbh(34 + 5as/h) bytes; the equation leaves out the statistics that two LayerNorms keep (mean and reciprocal
deviation, 2sb bytes each in bf16).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.tracer import trace_region
from jettison.verify.differences import compare_gradients, independent_copy

s, b, h, a = 256, 2, 128, 8
STATISTICS_BYTES = 4 * 2 * s * b
LAYER_BYTES = s * b * (34 * h + 5 * a * s)
CORE_BYTES = 5 * a * s * s * b
STATE_BYTES = 5056  # of the CPU's random generator
P = 0.1


def test_the_numbers_of_the_equation() -> None:
    assert LAYER_BYTES == 7_471_104
    assert LAYER_BYTES + STATISTICS_BYTES == 7_475_200


class PaperLayer(nn.Module):
    """Figure 2 and 3 of the paper: pre-norm, explicit scores and softmax, three dropouts, GeLU MLP of 4h."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x_sbh: Tensor) -> Tensor:
        x_sbh = x_sbh + dropout(self.out(self.attention(self.first_norm(x_sbh))))
        return x_sbh + dropout(self.down(nn.functional.gelu(self.up(self.second_norm(x_sbh)))))

    def attention(self, x_sbh: Tensor) -> Tensor:
        parts = self.qkv(x_sbh).view(s, b, a, 3 * h // a).chunk(3, dim=-1)
        q, k, v = (part.view(s, b * a, h // a).transpose(0, 1) for part in parts)
        unused = torch.empty(b * a, s, s, dtype=x_sbh.dtype)  # as Megatron: beta=0 never reads it
        scores = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0.0, alpha=(h // a) ** -0.5)
        probabilities = dropout(scores.softmax(dim=-1))
        return torch.bmm(probabilities, v).transpose(0, 1).reshape(s, b, h)


def dropout(x: Tensor) -> Tensor:
    """With a mask of one byte an element, as CUDA has it."""
    return torch.native_dropout(x, P, True)[0]


class Two(nn.Module):
    """Two layers, so that the second one's input is nobody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PaperLayer() for _ in range(2))

    def forward(self, x_sbh: Tensor) -> Tensor:
        for layer in self.layers:
            x_sbh = layer(x_sbh)
        return x_sbh.sum()


@pytest.fixture
def model() -> Iterator[Two]:
    torch.manual_seed(0)
    yield Two().to(torch.bfloat16)


def batch() -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(s, b, h, generator=generator).to(torch.bfloat16).requires_grad_(),)


def observed_bytes(layer: nn.Module) -> int:
    """What autograd really saves, by hooks of this test alone: distinct storages that are no parameter's."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(*batch())
    parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
    assert output.requires_grad
    return sum(storage.nbytes() for key, storage in storages.items() if key not in parameters and storage.nbytes() > 8)


def test_traced_and_observed_bytes_are_the_equations(model: Two) -> None:
    traced = trace_region(model.layers[0], batch(), {})
    by_program = traced.program.kept_bytes(traced.program.saved_buffers())
    scalars = sum(buffer.nbytes for buffer in traced.program.buffers if buffer.source == "outer")
    assert scalars <= 8 * 4
    assert by_program - scalars == LAYER_BYTES + STATISTICS_BYTES
    assert observed_bytes(model.layers[0]) == LAYER_BYTES + STATISTICS_BYTES


@pytest.mark.parametrize(
    ("policy", "kept_bytes"),
    [
        ("none", LAYER_BYTES + STATISTICS_BYTES),
        # §5: the attention core goes. To draw its dropout again, the state of the generator at the layer's start stays.
        ("selective", LAYER_BYTES + STATISTICS_BYTES - CORE_BYTES + STATE_BYTES),
        # only the input stays, 2sbh, and the state of the generator, out of which all three masks are drawn again
        ("full", 2 * s * b * h + STATE_BYTES),
    ],
)
def test_policies_keep_what_the_paper_says(model: Two, policy: str, kept_bytes: int) -> None:
    twin = independent_copy(model)
    torch.manual_seed(2)
    twin(*batch()).backward()
    with jettison.apply(model, policy, batch=batch()) as handle:
        torch.manual_seed(2)
        loss = model(*batch())
        reports = {report.name: report for report in handle.report()}
        loss.backward()
    assert compare_gradients(model, twin).identical
    assert reports["layers.1"].kept_bytes == kept_bytes
    assert not reports["layers.1"].fallback
