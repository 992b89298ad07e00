"""`--kernels torchtune` beside torchtune 0.4's own layer."""

from __future__ import annotations

import pytest

from jettison.families.config import parse_config
from jettison.formula.region import layer_region
from jettison.spec.kernels import kernels
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run
from support.target_packages import answered, fetched

SIZES = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2, "seq": 32}
MEASURED = [148_992, 157_184]
"""By 0.4.0's `TransformerSelfAttentionLayer`, which the slow test asks again: without and with packed documents."""


def saved(packed: int) -> int:
    model = parse_config(
        {
            "model_type": "llama",
            "hidden_size": SIZES["hidden"],
            "intermediate_size": SIZES["ffn"],
            "num_hidden_layers": 1,
            "num_attention_heads": SIZES["heads"],
            "num_key_value_heads": SIZES["kv_heads"],
            "head_dim": SIZES["head_dim"],
            "vocab_size": 128,
            "max_position_embeddings": SIZES["seq"],
        },
        name="tiny",
    )
    run = Run(
        model=model,
        seq=SIZES["seq"],
        micro_batch=SIZES["batch"],
        kernels=kernels("torchtune").on_cpu(),
        precision=PRECISIONS["bf16-pure"],
        packed=packed,
    )
    return layer_region(run.signature, model.layers[0]).saved_bytes


def test_a_layer_saves_what_torchtunes_does() -> None:
    assert [saved(0), saved(8)] == MEASURED


@pytest.mark.slow
def test_torchtune_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = fetched(tmp_path_factory.mktemp("torchtune"), "torchtune==0.4.0")
    assert answered("support.target_torchtune", {"folder": str(folder), "sizes": SIZES}, folder) == MEASURED
