"""Bytes and transfers of the reference layer on real ranks, beside the ledger's: writes docs/parallel.md.

    python -m benchmarks.parallel_layer

Starts 2 and then 4 gloo ranks and counts on them; what stands for 8 ranks is the ledger's.
`tests/parallel/test_parallel_layer.py` makes the same measurements and compares them with the ledger, to the byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.page_command import page_command
from jettison.formula.region import Region, layer_region
from jettison.predict.forecast import forecast
from jettison.spec.kernels import Device
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.layout import Layout
from jettison.spec.model import Activation, Attention, DropoutSites, Layer, Mlp, ModelSpec, Norm, NormKind
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parallel.md"
TEMPLATE = Path(__file__).parent / "pages" / "parallel.md"
S, B, H, A = 256, 2, 128, 8
"""s, b, h and a of what is measured, in bf16."""
LAYERS = 2
"""Measured together, so that each layer's output is the next one's input."""
WHOLE = 2 * S * B * H
"""Bytes of an activation that is not sharded."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout and a policy."""

    name: str
    equation: str
    sp: bool
    recompute: str = "none"
    stock: bool = False

    def run(self, t: int) -> Run:
        """As the ledger knows it."""
        norm = Norm(kind=NormKind.LAYER, bias=True)
        attention = Attention(heads=A, kv_heads=A, head_dim=H // A, qkv_bias=True, out_bias=True, fused_qkv=True)
        layer = Layer(attention=attention, mlp=Mlp(ffn=4 * H, activation=Activation.GELU, bias=True), norm=norm)
        model = ModelSpec(
            name="reference",
            family="reference",
            hidden=H,
            vocab=1024,
            layers=(layer,),
            final_norm=norm,
            max_positions=S,
            learned_positions=True,
            tied_embeddings=True,
            dropout_sites=DropoutSites(embedding=True, attention=True, residual=True),
        )
        kernels = replace(
            kernel_set("megatron").with_attention("eager"), device=Device.CPU
        )  # statistics in bf16; masks of bytes
        return Run(
            model=model,
            seq=S,
            micro_batch=B,
            layout=Layout(tp=t, sp=self.sp, gathered_inputs=self.stock),
            kernels=kernels,
            dropout=0.1,
            recompute=Recompute.parse(self.recompute, layers=1),
        )

    def ledger_bytes(self, t: int) -> int:
        """Of one layer on one rank."""
        return dict(forecast(self.run(t)).layer_bytes())["layers.0"]

    def region(self, t: int) -> Region:
        """The layer written out."""
        run = self.run(t)
        return layer_region(run.signature, run.model.layers[0])


ROWS = {
    "tp": Row(name="TP", equation="10 + 24/t + 5as/(ht)", sp=False),
    "tp_sp": Row(name="TP + SP", equation="34/t + 5as/(ht)", sp=True),
    "selective": Row(name="TP + SP, selective", equation="34/t", sp=True, recompute="selective"),
    "full": Row(name="TP + SP, full", equation="2/t", sp=True, recompute="full"),
    "tp_full": Row(name="TP, full (torch.utils.checkpoint)", equation="2", sp=False, recompute="full"),
    "stock": Row(name="DTensor's own TP + SP", equation="4 + 30/t + 5as/(ht)", sp=True, stock=True),
}


# on the ranks ---------------------------------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """On every rank: what a layer holds and sends, for each row that this many ranks can have."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    return {key: _measure_row(row, mesh) for key, row in ROWS.items() if mesh.size() > 1 or not row.stock}


def _measure_row(row: Row, mesh: Any) -> dict[str, Any]:
    import torch

    from jettison.models.reference import causal_mask
    from support.collective_counts import CollectiveBytes, held_bytes, saved_bytes

    model = _parallel(row, mesh)
    mask_ss = causal_mask(S, torch.empty(0, dtype=torch.bfloat16))
    leaf = torch.randn(S // (mesh.size() if row.sp else 1), B, H, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        return model(leaf * 1, mask_ss)

    saved = saved_bytes(forward, parameters=model.parameters())
    applied = _recomputing(row, model, leaf, mask_ss)
    held = held_bytes(forward, apart=[*model.parameters(), leaf, mask_ss])
    with CollectiveBytes() as sent:
        forward().backward()
    applied()
    assert saved % LAYERS == held % LAYERS == 0
    return {
        "saved": saved // LAYERS,
        "held": held // LAYERS,
        "sent": {f"{t.kind} {'backward' if t.backward else 'forward'}": n // LAYERS for t, n in sent.nbytes.items()},
    }


def _parallel(row: Row, mesh: Any) -> Any:
    import torch
    from torch import nn
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    from jettison.models.reference import GptConfig, GptLayer
    from jettison.parallel import apply_tensor_parallel

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = GptConfig(layers=LAYERS, hidden=H, heads=A, vocab=8, positions=8, dropout=0.1)
            self.layers = nn.ModuleList(GptLayer(config) for _ in range(LAYERS))

        def forward(self, x_sbh: torch.Tensor, mask_ss: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x_sbh = layer(x_sbh, mask_ss)
            return x_sbh.sum()

    torch.manual_seed(0)
    model = Stack().to(torch.bfloat16)
    if not row.stock:
        apply_tensor_parallel(model.layers, mesh, sequence_parallel=row.sp)
        return model
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "attention.qkv": ColwiseParallel(input_layouts=Shard(0)),
            "attention.out": RowwiseParallel(output_layouts=Shard(0)),
            "mlp_norm": SequenceParallel(sequence_dim=0),
            "mlp.up": ColwiseParallel(input_layouts=Shard(0)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(layer, mesh, plan)
    return model


def _recomputing(row: Row, model: Any, leaf: Any, mask_ss: Any) -> Callable[[], None]:
    """Put the row's policy to work; what comes back undoes it."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    import jettison

    if row.recompute == "none":
        return lambda: None
    if row.sp:
        batch = (leaf.detach().requires_grad_(), mask_ss)
        return jettison.apply(model, row.recompute, batch=batch, check="off").remove  # the equations know no witnesses
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return lambda: None


# the page -------------------------------------------------------------------------------------------------------------


def on_ranks(count: int) -> list[dict[str, Any]]:
    """`measure` on so many gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            str(count),
            "-m",
            "benchmarks.parallel_layer",
            folder,
        ]
        subprocess.run(
            command,
            check=True,
            timeout=300,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests:{ROOT}"},
        )
        return [json.loads((Path(folder) / f"{rank}.json").read_text("utf-8")) for rank in range(count)]


def page(measured: dict[int, list[dict[str, Any]]]) -> str:
    """The text, with the numbers of these measurements (by number of ranks, then by rank)."""
    for ranks in measured.values():
        assert all(found == ranks[0] for found in ranks), "ranks differ"
    values = {t: {key: row["held"] for key, row in ranks[0].items()} for t, ranks in measured.items()}
    values[8] = {key: row.ledger_bytes(8) for key, row in ROWS.items()}
    lines = ["| one layer, one rank | /sbh | " + " | ".join(f"t = {t} | of stock" for t in values) + " |"]
    lines.append("| --- " * (2 + 2 * len(values)) + "|")
    for key, row in ROWS.items():
        cells = [f"{values[t][key]:,} | {100 * values[t][key] / values[t]['stock']:.1f} %" for t in values]
        lines.append(f"| {row.name} | {row.equation} | " + " | ".join(cells) + " |")
    sent = ["| one layer, t = 4 | pass | all-reduce | all-gather | reduce-scatter |", "| --- | --- | --- | --- | --- |"]
    for key, row in ROWS.items():
        for direction in ("forward", "backward"):
            found = measured[4][0][key]["sent"]
            kinds = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
            cells = [f"{found.get(f'{kind} {direction}', 0) / WHOLE:g}" for kind in kinds]
            sent.append(f"| {row.name} | {direction} | " + " | ".join(cells) + " |")
    without_core = replace(ROWS["stock"], recompute="selective")
    shares = [f"{100 * values[t]['selective'] / without_core.ledger_bytes(t):.1f} % at t = {t}" for t in values]
    text = Template(TEMPLATE.read_text("utf-8"))
    return text.substitute(bytes="\n".join(lines), sent="\n".join(sent), shares=", ".join(shares), s=S, b=B, h=H, a=A)


def write_page() -> str:
    """Measure, and write it; what was written."""
    PAGE.write_text(page({t: on_ranks(t) for t in (2, 4)}), encoding="utf-8")
    return PAGE.name


def main(arguments: list[str]) -> None:
    """Without arguments: measure and write the page. With a folder: this is a rank, and leaves its numbers there."""
    if not arguments or arguments[0].startswith("-"):
        page_command("benchmarks.parallel_layer", __doc__, write_page, arguments)
        return
    from torch import distributed

    distributed.init_process_group("gloo")
    found = measure()
    (Path(arguments[0]) / f"{distributed.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # as tests/support/ranks.py does, and why


if __name__ == "__main__":
    main(sys.argv[1:])
