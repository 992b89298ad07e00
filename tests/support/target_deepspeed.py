"""DeepSpeed's own reading of its configuration."""

from __future__ import annotations

import json
import os
import sys

from support.target_process import prepare

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
prepare()

from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402

if __name__ == "__main__":
    found = []
    for settings in json.load(sys.stdin):
        try:
            read = DeepSpeedConfig(settings)
        except (ValueError, AssertionError) as error:
            found.append({"refused": str(error)})
            continue
        found.append(
            {
                "activation_checkpointing": vars(read.activation_checkpointing_config),
                "stage": read.zero_optimization_stage,
                "micro_batch": read.train_micro_batch_size_per_gpu,
                "bf16": read.bfloat16_config.enabled,
            }
        )
    print(json.dumps(found))
