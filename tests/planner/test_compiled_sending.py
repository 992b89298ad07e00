"""What compiled blocks save waits on the host: blocks of every kind, next to the same ones without a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.compiled_blocks import QUIET
from support.compiled_sending import Stack, send_all
from support.offloading import Shuffled
from support.recorder import Earliest, Latest

pytestmark = [pytest.mark.usefixtures("one_thread"), *QUIET]

ROWS, WIDTH = 64, 32
TENSOR = ROWS * WIDTH * 4


class Heads(nn.Module):
    """Queries, keys and values are views of what one product makes."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.made = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.given(x).view(ROWS, 3, 4, WIDTH // 4).permute(1, 2, 0, 3)
        q, k, v = parts[None].unbind(1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.made(seen.permute(0, 2, 1, 3).reshape(ROWS, WIDTH))


class Normed(nn.Module):
    """Its forward writes to buffers. All blocks get one more tensor, and it is the same. What it returns it has saved,
    and the next one saves it as its argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.made = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        return self.made(self.norm(x) * turn).tanh()


class InPlace(nn.Module):
    """Writes to what it has made, and to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        h = self.made(x.sin())
        h.add_(1).relu_()
        return h + x


def stack(block: Callable[[], nn.Module], **how: bool) -> Stack:
    torch.manual_seed(0)
    return Stack([block() for _ in range(4)], WIDTH, **how)


def rows() -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize(
    ("block", "a_block", "on_host"),
    [
        # queries, keys and values go as one
        pytest.param(Heads, [TENSOR, 3 * TENSOR, TENSOR], 15 * TENSOR, marks=pytest.mark.slow),
        (Normed, [TENSOR] * 3, 7 * TENSOR),  # what one returns is what the next one is given
        pytest.param(InPlace, [TENSOR] * 2, 6 * TENSOR, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_every_kind_send_all_they_can(block: type[nn.Module], a_block: list[int], on_host: int) -> None:
    found = send_all(stack(block, shared=block is Normed), rows(), [Earliest(), Latest(), Shuffled(1)])
    assert found.same and not found.races and not found.left_bytes
    assert [sorted(sent) for sent in found.sent.values()] == [sorted(a_block)] * 3 + [[]]
    assert found.host_bytes == found.dry.host_bytes == on_host
    assert found.transfers == found.dry_transfers  # each in its turn
    assert found.peak_bytes <= found.dry.peak_bytes < found.plain_peak_bytes


def test_what_the_model_returns_stays() -> None:
    """Each block's argument is another one's result; queries, keys and values go, and what attention made."""
    found = send_all(stack(Heads, returns=True), rows(), [Latest()])
    assert found.same and not found.races
    assert [sorted(sent) for sent in found.sent.values()] == [[TENSOR, 3 * TENSOR]] * 3 + [[]]
    assert found.host_bytes == found.dry.host_bytes == 12 * TENSOR
