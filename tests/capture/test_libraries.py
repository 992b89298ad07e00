"""A walk through Python's state ends at libraries whose globals no model sets."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from jettison.capture.python_state import Reach


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what transformers has renamed
def test_adapters_do_not_lead_into_libraries() -> None:
    """Without an end at PEFT and what it imports there are 20,000 values more, which each dry run would copy."""
    peft = pytest.importorskip("peft")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
    plain = len(Reach([model])._seen)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj"]))
    assert len(Reach([adapted])._seen) < plain + 1000
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    state = Reach([adapted])
    layer.scaling["default"] = 7.0  # what an adapter has itself is looked at
    state.restore()
    assert layer.scaling["default"] != 7.0
