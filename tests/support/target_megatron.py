"""Megatron-Core on what was exported: its configuration, its argument parser, and its own block on a CPU.

The block has local layers, no bias and no dropout. It asks a GPU for random states, and Transformer Engine for contexts
of fp8 in the checkpoints that give their results back: here there are neither, and stand-ins say so.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from support.target_process import prepare

prepare()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.training import arguments  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args  # noqa: E402

from jettison.dryrun.counter import AllocationCounter  # noqa: E402


def configured(fields: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says of these fields, or why it does not take them."""
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    try:
        made = kind(**fields)
    except (ValueError, AssertionError, TypeError) as error:
        return {"refused": str(error)}
    return {name: getattr(made, name) for name in fields}


def parsed(flags: list[str]) -> dict[str, Any]:
    """What the argument parser of Megatron's programs makes of these flags."""
    before, sys.argv = sys.argv, ["pretrain_gpt.py", *flags]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return {name: value for name, value in vars(parse_args()).items() if _plain(value)}
    except SystemExit:
        return {"refused": said.getvalue().strip().splitlines()[-1]}
    finally:
        sys.argv = before


def validated(flags: list[str], world: int) -> dict[str, Any]:
    """What Megatron's programs make of these flags once they have checked them, and their model's configuration."""
    before, sys.argv = sys.argv, ["pretrain_gpt.py", *flags]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": str(world),
        "NVTE_CPU_OFFLOAD_V1": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    arguments.get_device_arch_version = lambda: 9  # a Hopper
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = validate_args(parse_args())
            config = core_transformer_config_from_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        return {"refused": str(error)}
    finally:
        sys.argv = before
    found = {name: value for name, value in vars(args).items() if _plain(value)}
    return found | {"config": {name: value for name, value in vars(config).items() if _plain(value)}}


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | type(None))


def without_gpu() -> None:
    """Stand-ins: there is no random state of a GPU to put back, and no fp8."""
    nothing = torch.empty(0, dtype=torch.uint8)
    megatron_random._get_cuda_rng_state = lambda *_, **__: nothing
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    megatron_random.get_cuda_rng_tracker().states_["model-parallel-rng"] = nothing
    megatron_random.FP8GlobalStateManager = type("NoFP8", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    megatron_random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    megatron_random.fp8_autocast = lambda **_: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def steps(sizes: dict[str, int], policies: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of a step under each policy, bytes that were held for its backward, and whether its gradients are the first's."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    without_gpu()
    torch.set_num_threads(1)
    seq, rows, hidden = sizes["seq"], sizes["micro_batch"], sizes["hidden"]
    torch.manual_seed(1)
    given = torch.randn(seq, rows, hidden)
    mask = torch.triu(torch.ones(seq, seq), 1).bool()[None, None]
    first: list[torch.Tensor] = []
    for policy in policies:
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=sizes["layers"],
            hidden_size=hidden,
            num_attention_heads=sizes["heads"],
            attention_dropout=0.0,
            hidden_dropout=0.0,
            add_bias_linear=False,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            **policy,
        )
        block = TransformerBlock(config, get_gpt_layer_local_spec(), post_layer_norm=False).train()
        block(given, attention_mask=mask)  # buffers that it keeps from call to call are there from now on
        x = given.clone().requires_grad_()
        with AllocationCounter([*block.parameters(), *block.buffers(), x, mask]) as counter:
            before = counter.live_bytes
            output = block(x, attention_mask=mask)
            held = counter.live_bytes - before
        output.square().mean().backward()
        gradients = [*(p.grad for p in block.parameters()), x.grad]
        first = first or gradients
        yield {"held": held, "same": all(map(torch.equal, gradients, first))}


def main() -> None:
    job = json.load(sys.stdin)
    print(
        json.dumps(
            {
                "configs": [configured(fields) for fields in job.get("configs", ())],
                "flags": [parsed(flags) for flags in job.get("flags", ())],
                "validated": [validated(one["flags"], one["world"]) for one in job.get("validated", ())],
                "steps": list(steps(job["sizes"], job["policies"])) if "policies" in job else [],
            }
        )
    )


if __name__ == "__main__":
    main()
