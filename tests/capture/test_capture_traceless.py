"""Recording leaves no trace in the model, and a digest is of the program alone."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from jettison.capture.dispatch import CaptureMode
from jettison.capture.model_trace import loss_of
from jettison.capture.recorder import OpRecorder
from jettison.capture.tracer import trace_model, trace_region
from jettison.core.errors import TraceError
from jettison.dryrun.counter import allocation_deltas
from jettison.verify.differences import buffer_digest, parameter_digest, rng_digest

N = 6


# a trace leaves nothing behind ----------------------------------------------------------------------------------------


class Disturbing(nn.Module):
    """Draws, counts and normalises."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Linear(N, N), nn.BatchNorm1d(N), nn.Dropout(0.5)) for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(*modules) for modules in parts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum() + torch.rand(())


def test_random_streams_buffers_parameters_and_gradients_are_untouched() -> None:
    model, x = Disturbing(), torch.randn(4, N)
    before = rng_digest(), buffer_digest(model), parameter_digest(model)
    traced = trace_model(model, (x,))
    assert (rng_digest(), buffer_digest(model), parameter_digest(model)) == before
    assert traced.classes and all(cls.trace.draws for cls in traced.classes.values())
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in vars(m) and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_trace_allocates_no_model_memory() -> None:
    width, layers = 2048, 8
    with torch.device("meta"):
        parts = [(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(layers)]
        model = nn.Sequential(*(nn.Sequential(*modules) for modules in parts))
    x = torch.empty(64, width, device="meta")
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    deltas = allocation_deltas(lambda: trace_model(model, (x,), loss_fn=lambda out: out.sum(), values_known=False))
    assert sum(d for d in deltas if d > 0) < 64 * 1024 < parameter_bytes // 4000


def test_a_real_model_is_traced_without_its_activations() -> None:
    model, x = Disturbing(), torch.randn(4096, N)
    deltas = allocation_deltas(lambda: trace_model(model, (x,)))
    assert max(deltas) < x.nbytes // 4


def test_a_trace_that_goes_leaves_nothing_alive() -> None:
    model, x = Disturbing(), torch.randn(4, N)
    traced, alone = trace_model(model, (x,)), trace_region(model, (x,), {}, copy=False)
    gone = [weakref.ref(traced.fake_model), weakref.ref(traced.mode), weakref.ref(alone), weakref.ref(model)]
    del traced, alone, model
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_what_has_no_gradient_or_no_loss_is_refused() -> None:
    model, x = Disturbing(), torch.randn(4, N)
    with pytest.raises(TraceError, match="no scalar loss"):
        trace_model(model, (x,), loss_fn=lambda loss: loss.expand(2))
    with pytest.raises(TraceError, match=r"got tuple.*loss_fn=lambda output: output\[1\]"):
        loss_of((x, x.sum()))
    with pytest.raises(TraceError, match=r"does not require gradients.*trainable parameters$"):
        trace_model(model.requires_grad_(False), (x,))


class Skipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) if torch.rand(()) < 0.9 else x).sum()


def test_layers_that_a_draw_leaves_out_are_told_of() -> None:
    with pytest.raises(TraceError, match=r"Where draws decide which layers run, .* plan so that all layers run then"):
        trace_model(Skipped(), (torch.randn(4, N),))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(N, N), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.to(self.dtype)(x.to(self.dtype)).sum()


def test_a_forward_that_casts_its_weights_is_refused_where_that_changes_them_and_each_time_in_the_same_words() -> None:
    for _ in range(2):  # torch's cache of fake results, one for the process, decides whether it exchanges fake tensors
        assert trace_model(Cast(torch.float32), (torch.randn(4, N),)).root.slots
        with pytest.raises(TraceError, match=r"^its forward moves or casts its own parameters \(Module.to\)"):
            trace_model(Cast(torch.bfloat16), (torch.randn(4, N),))


# digests --------------------------------------------------------------------------------------------------------------

DIGEST_SCRIPT = """
import torch
from torch import nn
from jettison.capture.tracer import trace_region
block = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 6))
print(trace_region(block, (torch.randn(4, 6, requires_grad=True),), {}).program.digest())
"""


def mlp(width: int = 2 * N, rate: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(N, width), nn.GELU(), nn.Dropout(rate), nn.Linear(width, N))


def digest(module: nn.Module, rows: int = 4) -> str:
    return trace_region(module, (torch.randn(rows, N, requires_grad=True),), {}).program.digest()


def test_the_digest_is_of_the_program_alone() -> None:
    assert digest(mlp()) == digest(mlp())
    assert len({digest(mlp()), digest(mlp(3 * N)), digest(mlp(rate=0.0)), digest(mlp(), rows=5)}) == 4


def test_the_digest_is_the_same_in_another_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIGEST_SCRIPT], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.strip() == digest(mlp())


def test_a_recording_on_real_tensors_is_the_one_on_fake_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)
    recorder = OpRecorder(model, [x])
    with CaptureMode() as capture, capture.recording(recorder):
        output = model(x)
    assert recorder.finish(output).program == trace_region(model, (x,), {}).program
