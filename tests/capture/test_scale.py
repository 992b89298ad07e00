"""A model that no test machine could hold is traced and bounded from its configuration alone."""

from __future__ import annotations

import json
import subprocess
import sys

from support.patience import PATIENCE

SCRIPT = """
import json, resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from jettison.capture.fake_copies import fake_mode
from jettison.capture.tracer import trace_model

config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                     num_key_value_heads=8, vocab_size=128256, use_cache=False)
mode = fake_mode(allow_non_fake_inputs=True)
torch.set_default_dtype(torch.bfloat16)
with mode:
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
ids = torch.zeros(1, 8192, dtype=torch.long)
trace = trace_model(model.train(), {"input_ids": ids, "labels": ids}, mode=mode)
print(json.dumps({
    "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "classes": len(trace.classes), "calls": len(trace.calls),
    "parameter_bytes": sum(p.nbytes for p in model.parameters()),
}))
"""


def test_a_70b_llama_from_its_configuration() -> None:
    """In 2 GiB. Ten seconds do, because one of its layers is run and not eighty."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameter_bytes"] == 141_107_412_992
    assert (found["classes"], found["calls"]) == (1, 80), "one recording stands for all 80 layers"
    assert found["rss_bytes"] < 2 * 2**30
