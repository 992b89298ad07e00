"""Reader of DeepSpeed's JSON: the stage of ZeRO, CPU offload, and the engine's precision."""

from __future__ import annotations

from jettison.frameworks.run_file import Keys
from jettison.frameworks.trainer_keys import offloads, pipeline, replicas, zero_buckets

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read(keys: Keys, prefix: str = "") -> None:
    """Read the file alone, or under a prefix with a Trainer's file, whose bf16 replaces "auto"."""
    zero = f"{prefix}zero_optimization."
    keys.give("like", "deepspeed")
    offloads(keys, f"{zero}offload_optimizer.device", f"{zero}offload_param.device")
    zero_buckets(keys, zero)
    if keys.has(f"{prefix}compile.backend") and not keys.on(f"{prefix}compile.disable"):
        keys.compiles(f"{prefix}compile.backend")
    if not prefix:
        if any(keys.text(f"{engine}.enabled") == "auto" for engine in ("bf16", "fp16")):
            keys.give("precision", "bf16")
            keys.note('its precision is "auto", set by a Trainer: bf16 is counted')
        elif keys.field("precision") is None:
            keys.give("precision", "fp32")
        whole, each, steps = (keys.whole(name) for name in _SIZES)
        if keys.gpus is None and whole and each and steps and not whole % (each * steps):
            keys.gpus = whole // (each * steps)
        pipeline(keys)
        if keys.field("recompute") is None:
            keys.note("a script has the checkpoints: give --recompute")
        replicas(keys)
        _batch(keys)


def _batch(keys: Keys) -> None:
    """Read the batch: of three sizes two imply the third (``runtime/config.py``, ``_set_batch_related_parameters``)."""
    whole, ranks = keys.whole("train_batch_size"), keys.field("dp", 1)
    if whole is None or keys.gpus == 0:
        return
    if keys.field("micro_batch") is None:
        keys.give("micro_batch", max(1, whole // ranks // keys.field("micro_batches", 1)), "train_batch_size")
    elif keys.field("micro_batches") is None:
        keys.give("micro_batches", max(1, whole // ranks // keys.field("micro_batch")), "train_batch_size")
    found = keys.field("micro_batch") * keys.field("micro_batches", 1) * ranks
    if found != whole and not {"micro_batch", "micro_batches", "tp", "pp", "cp", "dp"} & keys.asked.keys():
        raise keys.error(f"train_batch_size = {whole}, and its other sizes make {found} on {ranks} ranks")
