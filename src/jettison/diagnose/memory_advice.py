"""Changes when memory ran out: by cause, device (`devices.py`) and trainer (`trainers.py`)."""

from __future__ import annotations

from typing import Final

from jettison.diagnose.devices import words_of
from jettison.diagnose.facts import CPU_ALLOCATOR, Failure, MemoryFacts, Phase
from jettison.diagnose.finding import Change
from jettison.diagnose.logits import speaks_of_logits
from jettison.diagnose.trainers import trainer_named
from jettison.units import GIB, MIB, format_gib

HEADROOM: Final = 0.9
"""Share of a device whose memory is exceeded: the rest is for the context, whose size the source does not tell."""
_TRITON: Final = ("cuda", "hip", "xpu")

_WATCH: Final = Change(line="with jettison.watch(model):", why="around the loop: it writes down what is needed to tell")
_LENGTHS: Final = Change(
    line="collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=512)",
    why="few different lengths leave few different pieces",
)
AGAINST_PRIVATE_POOLS: Final = (
    Change(
        line='model = torch.compile(model)    # not mode="reduce-overhead"',
        why="each recorded CUDA graph keeps a pool of its own",
    ),
    Change(
        line="torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True",
        why="no graph, and no pool, for each further shape",
    ),
)
_SMALLER_PARAMETERS: Final = (
    Change(line='state = torch.load(file, map_location="cpu", mmap=True)', why="what is read then has no second copy"),
    Change(line="model = model.to(torch.bfloat16)    # before .to(device)", why="half of the bytes of fp32"),
    Change(line="for block in model.layers: fully_shard(block)", why="each rank then holds its share of parameters"),
    Change(
        line="jettison ledger MODEL --dp 8 --zero 3", why="says what each rank would hold, before anything is built"
    ),
)
"""No step has begun: nothing of activations would help."""
_SMALLER_CHECKPOINT: Final = (
    Change(
        line='torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=FOLDER)',
        why="each rank writes its own shards: no parameter is all-gathered",
    ),
    Change(
        line="StateDictOptions(full_state_dict=True, cpu_offload=True)",
        why="for get_model_state_dict: a checkpoint in one file, whose parameters go to the CPU one by one",
    ),
)
"""Activations are freed by then: nothing of them would help."""


_NO_STEP: Final = {Phase.PARAMETERS: _SMALLER_PARAMETERS, Phase.SAVING: _SMALLER_CHECKPOINT}


def against_leak(facts: MemoryFacts) -> tuple[Change, ...]:
    """Let go of what a step makes."""
    first = facts.survivors[0] if facts.survivors else None
    where = first.module if first else "what a step adds to a list, a dictionary or an attribute"
    changes = []
    if first is None or first.role in ("forward", "unknown", "recompute"):
        changes.append(
            Change(
                line="total_loss += loss.item()    # not: total_loss += loss",
                why=f"a tensor of the forward keeps its whole graph alive; look at {where}",
            )
        )
    else:
        changes.append(
            Change(line=f"# {where}: let go of it when a step ends", why="each step makes it anew, and keeps it")
        )
    if first is None and not words_of(facts.device).allocated:
        changes.append(Change(line=_WATCH.line, why="on a GPU it writes a snapshot, which names lines"))
    return tuple(changes)


def record(facts: MemoryFacts) -> tuple[Change, ...]:
    """Record the next run, so that the cause can be told."""
    words = words_of(facts.device)
    if words.checkpoint:
        return ()
    if facts.failure in (Failure.KILLED, Failure.HOST) and facts.what != CPU_ALLOCATOR:
        used = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20"
        line = f'print(f"step {{step}}: resident {{{used}:.2f}} GiB")'
        return (Change(line=line, why="in each step: tells whether the process grows until it is killed"),)
    if not words.allocated:
        return (_WATCH,)
    line = f'print(f"step {{step}}: allocated {{{words.allocated} / 2**30:.2f}} GiB")'
    return (Change(line=line, why="in each step: from such a log this command tells a leak from a peak"),)


def against_fragmentation(facts: MemoryFacts) -> tuple[Change, ...]:
    """Let pieces join."""
    words = words_of(facts.device)
    if words.expandable and not facts.expandable:
        later = "; PYTORCH_ALLOC_CONF from torch 2.10 on" if facts.device == "cuda" else ""
        line, why = f"export {words.expandable}", f"segments then grow in place, so that pieces join{later}"
    else:
        line = words.empty_cache or "torch.accelerator.empty_cache()"
        why = "once, where shapes change (before an evaluation)"
    return (Change(line=line, why=why), _LENGTHS)


def against_others(facts: MemoryFacts) -> tuple[Change, ...]:
    """Find who holds the device, or take another."""
    words = words_of(facts.device)
    changes = []
    if words.processes:
        changes.append(Change(line=words.processes, why="says which they are"))
    if words.choose:
        changes.append(Change(line=f"{words.choose} python ...", why="takes another device"))
    most = (facts.allocated_bytes or 0) > (facts.total_bytes or 0) / 2 and facts.phase not in _NO_STEP
    return (*_rollout(facts), *changes, *(_plan(facts) if most and not facts.evaluating else ()), *of_trainer(facts))


def against_outside(facts: MemoryFacts) -> tuple[Change, ...]:
    """Lower what this process holds outside of PyTorch's allocator."""
    words = words_of(facts.device)
    changes = list(_rollout(facts))
    if facts.device == "mps":
        changes += _plan(facts)
        changes.append(
            Change(line=words.empty_cache, why="gives back what PyTorch holds unused; Metal's own buffers stay")
        )
    if words.communicators:
        why = "says how many communicators there are: each has buffers of its own, and few groups need few"
        changes.append(Change(line=f"{words.communicators} python ...", why=why))
    if facts.device in ("cuda", "hip"):
        line = "XLA_PYTHON_CLIENT_PREALLOCATE=false TF_FORCE_GPU_ALLOW_GROWTH=true python ..."
        changes.append(Change(line=line, why="JAX and TensorFlow take most of a device for themselves when they start"))
    return (*changes, *of_trainer(facts))


def against_size(facts: MemoryFacts) -> tuple[Change, ...]:
    """Look at shapes."""
    where = f" (at {facts.site})" if facts.site else ""
    why = (
        f"an index, a length or a broadcast is wrong before it{where}: look at shapes and at values that become shapes"
    )
    return (Change(line="print({name: value.shape for name, value in batch.items()})", why=why),)


def against_one_tensor(facts: MemoryFacts) -> tuple[Change, ...]:
    """One tensor that no device of this size holds: scores of attention, or logits."""
    if facts.logits:
        return _fused_loss(facts)
    return (
        Change(
            line="torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
            why="scores of attention grow with the square of the sequence; fused attention never makes them",
        ),
        *of_trainer(facts, recompute=False),
    )


def against_refusal(facts: MemoryFacts) -> tuple[Change, ...]:
    """A request that failed though enough memory was free."""
    words = words_of(facts.device)
    changes = []
    if words.processes:
        changes.append(Change(line=words.processes, why="says who else uses the device"))
    if words.empty_cache:
        changes.append(Change(line=words.empty_cache, why="gives back what is held unused, before the large request"))
    return (*changes, *of_trainer(facts))


_HOST_LIMITS: Final = (
    (("oom_kill", "oom-kill event", "OOM Killed", "memory limit"), "#SBATCH --mem=0", "takes all memory of the node"),
    (("OOMKilled",), "resources: {{limits: {{memory: {more}Gi}}}}", "the container's limit was reached"),
    (("Memory cgroup",), "docker run --memory={more}g ...", "a container's or a job's limit was reached"),
)
"""Words of a message, and the line that raises the limit; ``more`` is in GiB."""
_LESS_HOST: Final = (
    Change(
        line="DataLoader(..., num_workers=2, prefetch_factor=2)",
        why="each worker is a process with a copy of the dataset's Python objects, and batches that wait",
    ),
    Change(
        line='state = torch.load(file, map_location="cpu", mmap=True)',
        why="each rank on a machine otherwise reads a copy of its own",
    ),
)


def against_elsewhere(facts: MemoryFacts) -> tuple[Change, ...]:
    """The host, /dev/shm, a library, a server."""
    if facts.failure is Failure.SHARED:
        without = Change(
            line='torch.multiprocessing.set_sharing_strategy("file_system")', why="uses files in its place"
        )
        if facts.what == "NCCL":
            without = Change(line="NCCL_SHM_DISABLE=1 python ...", why="NCCL then goes by the network, which is slower")
        return (
            Change(line="docker run --shm-size=16g ...    # or --ipc=host", why="containers have 64 MiB of it"),
            without,
        )
    if facts.failure is Failure.SERVER:
        return (*(against_others(facts) if facts.unaccounted_bytes else ()), *_of_server(facts))
    if facts.failure is Failure.LIBRARY:
        return _room_for_libraries(facts)
    changes = []
    if facts.failure is Failure.KILLED:
        line = 'dmesg -T | grep -iE "out of memory|oom-kill"'
        changes.append(Change(line=line, why="says whether it was the kernel, what each process held, and the limit"))
        for words, limit, why in _HOST_LIMITS:
            if any(word in facts.what for word in words):
                more = 2 * -(-facts.total_bytes // GIB) if facts.total_bytes else "MORE"
                changes.append(Change(line=limit.format(more=more), why=why))
    elif facts.what == "pinned memory":
        line = "pin_memory=False    # of the DataLoader, and of what offloads to the CPU"
        why = "pinned memory cannot be swapped out; ulimit -l and the container limit it"
        changes.append(Change(line=line, why=why))
    return (*changes, *_LESS_HOST, *record(facts))


_OF_LIBRARIES: Final = {
    "NCCL": Change(
        line='torch.distributed.init_process_group(device_id=torch.device("cuda", local_rank))',
        why="communicators are then made before the model fills the device",
    ),
    "XLA (JAX)": Change(
        line="XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python ...", why="JAX takes 0.75 of the device for itself by default"
    ),
    "TensorFlow": Change(
        line="TF_FORCE_GPU_ALLOW_GROWTH=true python ...", why="TensorFlow then takes no more than its tensors need"
    ),
}


def _room_for_libraries(facts: MemoryFacts) -> tuple[Change, ...]:
    words = words_of(facts.device)
    own = _OF_LIBRARIES.get(facts.what)
    with_torch = own is None or facts.what == "NCCL"
    changes = []
    if words.fraction and with_torch:
        why = "PyTorch's cache then leaves room for libraries, and gives unused memory back before they need it"
        changes.append(Change(line=words.fraction, why=why))
    if own is not None:
        changes.append(own)
    if facts.what == "NCCL":
        changes.append(Change(line=f"{words.communicators} python ...", why="says which communicator wanted how much"))
    elif words.processes:
        changes.append(Change(line=words.processes, why="says who holds the device"))
    if words.checkpoint:
        changes.append(Change(line=words.checkpoint, why="recomputes a block in backward in place of keeping it"))
    if facts.device == "mps":
        changes.append(Change(line=words.empty_cache, why="gives back what PyTorch holds unused"))
    if with_torch and facts.what != "NCCL":
        changes += record(facts)
    return (*changes, *of_trainer(facts))


def _rollout(facts: MemoryFacts) -> tuple[Change, ...]:
    """Return a trainer's setting for the inference server that shares its device."""
    trainer = trainer_named(facts.trainer)
    if trainer is None or not trainer.rollout or not facts.colocated:
        return ()
    why = f"{trainer.name}: a smaller share of the device for the server, which it gives back between rollouts"
    return (Change(line=trainer.rollout, why=why),)


def _of_server(facts: MemoryFacts) -> tuple[Change, ...]:
    trainer = trainer_named(facts.trainer or "vLLM")
    line = trainer.smaller if trainer is not None and trainer.serves else "--gpu-memory-utilization 0.85"
    return (Change(line=line, why="fewer sequences and a shorter one need a smaller cache"),)


# a peak ---------------------------------------------------------------------------------------------------------------


def against_peak(facts: MemoryFacts, short: int | None, *, shape: bool) -> tuple[Change, ...]:
    """A smaller step, the cheapest change first.

    Args:
        shape: the batch is larger than those before.
    """
    if facts.phase in _NO_STEP:
        return _NO_STEP[facts.phase]
    trainer = trainer_named(facts.trainer)
    if trainer is not None and trainer.serves:
        return _of_server(facts)
    changes: list[Change] = []
    if facts.phase is Phase.OPTIMIZER:
        if not facts.own_optimizer:
            line = "torch.optim.AdamW(model.parameters(), foreach=False)    # clip_grad_norm_ takes it, too"
            changes.append(Change(line=line, why="its temporaries are then one parameter's, not all parameters'"))
        elif facts.device in _TRITON and (trainer is None or not trainer.optimizer):
            line = "bitsandbytes.optim.PagedAdamW8bit(model.parameters())"
            changes.append(Change(line=line, why="its state has a quarter of fp32's bytes, and pages to the host"))
        if trainer is not None and trainer.optimizer:
            changes.append(Change(line=trainer.optimizer, why=f"{trainer.name}: a smaller optimizer state"))
    names = (part.module for part in facts.parts[:2])
    if facts.logits or speaks_of_logits(facts.site, *names, *(part.site for part in facts.parts[:2])):
        changes += _fused_loss(facts)
    held = sum(part.nbytes for part in facts.parts if part.role in (Phase.FORWARD, Phase.RECOMPUTE))
    if short and held + (facts.asked_bytes or 0) > short and held:
        share = 1 - short / (held + (facts.asked_bytes or 0))
        line = f"micro_batch = {share:.2f} of this one; accumulate gradients over the rest"
        why = f"activations are {format_gib(held)} of it, and {format_gib(short)} are missing"
        changes.append(Change(line=line, why=why))
    if shape:
        fitted = max(facts.steps[1:-1], key=lambda step: (step.batch_elements or 0, step.peak_bytes or 0))
        line = f"batches of at most {fitted.batch}" if fitted.batch else "batches no longer than those before"
        changes.append(
            Change(line=line, why="those went through: if lengths differ, sort by them, or cut what is longer")
        )
    if facts.evaluating:
        return (*changes, *_smaller_evaluation(facts))
    if facts.phase is not Phase.OPTIMIZER:
        changes += [*_plan(facts), *of_trainer(facts)]
    return tuple(changes)


def budget_mib(facts: MemoryFacts) -> int | None:
    """Return the budget for tensors, never more than the device; None if it is not known.

    It is the sum of what they have and what is free, or a peak that went through before.
    """
    if facts.allocated_bytes is None or facts.free_bytes is None:
        return None
    went_through = max((step.peak_bytes or 0 for step in facts.steps[:-1]), default=0)
    budget = max(facts.allocated_bytes + facts.free_bytes, went_through)
    if facts.total_bytes is not None:
        most = int(facts.total_bytes * HEADROOM) if facts.shared_bytes else facts.total_bytes
        budget = min(budget, most)
    return budget // MIB


def _plan(facts: MemoryFacts) -> tuple[Change, ...]:
    budget = budget_mib(facts)
    if not budget:
        return ()
    trainer = trainer_named(facts.trainer)
    line = f'jettison.auto_checkpoint(model, batch, "{budget}MiB", optimizer=optimizer)'
    why = "plans each layer below what there is, and refuses, with the smallest budget, where that cannot be"
    if trainer is not None and trainer.plan:
        line = trainer.plan.format(budget=f"{budget}MiB")
        why = f"{why}; with the trainer's own checkpointing switched off"
    return (
        Change(line=line, why=why),
        Change(line=f"jettison plan MODEL --budget {budget}MiB", why="says beforehand what that costs in time"),
    )


def _fused_loss(facts: MemoryFacts) -> tuple[Change, ...]:
    trainer = trainer_named(facts.trainer)
    changes = []
    if trainer is not None and trainer.loss:
        changes.append(
            Change(line=trainer.loss, why=f"{trainer.name}: logits of the whole batch are never held at once")
        )
    elif facts.device in _TRITON:
        line = "loss = LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden.flatten(0, 1), labels.flatten())"
        changes.append(Change(line=line, why="liger-kernel: head and loss in one, so that logits are never held"))
    line = "for piece in hidden.split(1024, dim=1): loss = loss + head_and_loss(piece)"
    changes.append(Change(line=line, why="logits of a piece of the sequence at a time, under a checkpoint"))
    return tuple(changes)


def _smaller_evaluation(facts: MemoryFacts) -> tuple[Change, ...]:
    if _rollout(facts):
        return _rollout(facts)
    trainer = trainer_named(facts.trainer)
    changes = [
        Change(
            line="with torch.inference_mode(): ...", why="without it the graph of a backward that never runs is kept"
        )
    ]
    if trainer is not None and trainer.evaluate:
        changes.append(
            Change(line=trainer.evaluate, why=f"{trainer.name}: predictions then leave the device piece by piece")
        )
    return tuple(changes)


def of_trainer(facts: MemoryFacts, *, recompute: bool = True) -> tuple[Change, ...]:
    """The settings of the framework whose loop it is; none where it is the user's own."""
    trainer = trainer_named(facts.trainer)
    if trainer is None or facts.phase in _NO_STEP:
        return ()
    if trainer.serves:
        return _of_server(facts)
    if facts.evaluating:
        return _smaller_evaluation(facts)
    changes = []
    if trainer.recompute and recompute:
        why = f"{trainer.name}: recomputes activations; in place of a plan, not together with one"
        changes.append(Change(line=trainer.recompute, why=why))
    if trainer.smaller:
        changes.append(Change(line=trainer.smaller, why=f"{trainer.name}: a smaller micro-batch, with the same batch"))
    return tuple(changes)
