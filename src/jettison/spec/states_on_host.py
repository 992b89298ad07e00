"""Optimizer states that live in the host's memory: what each framework moves there, and what it leaves behind.

NOTE [ States on the host ]
DeepSpeed 0.17, ``offload_optimizer: cpu`` under ZeRO 2 and 3 (ZeRO-Offload, arXiv 2101.06840): fp32 parameters and both
moments lie on the host, and the step runs there. ``runtime/zero/stage_1_and_2.py``: gradients go to an fp32 buffer on
the host (``async_inplace_copy_grad_to_fp32_buffer_from_gpu``: cast to fp32 first, so 4 bytes over the link; then
``clear_grad_attribute``); before the last micro-batch in 16 bits (``async_accumulate_grad_in_cpu_via_gpu``, which
fetches what is there, adds, and sends it back); parameters come back in 16 bits from a buffer of their own
(``param_buffer_of_bit16_for_cpu_offload_groups``); on the device stays a buffer of the largest parameter
(``temp_grad_buffer_for_gpu_offload``). ``stage3.py``: ``grad_partitions_flat_buffer`` is on the host; gradients of each
micro-batch go there, come back (``partition_grads``: ``.to(grad_partition.device)``), and go once more in fp32 to
``fp32_partitioned_groups_flat[i].grad``; parameters are cast on the host.

torchao 0.13, ``optim/cpu_offload.py``, ``CPUOffloadOptimizer``: the host has a copy of each parameter of 4,096 numbers
or more, its gradient and its moments; a hook copies each gradient (``p_host.grad.copy_``) and with
``offload_gradients`` lets go of it; the step runs there, and parameters come back. It updates parameters themselves: no
master copies.

DeepSpeed's ``offload_param: cpu`` under ZeRO 3, beside the former: shards of 16-bit parameters lie on the host for good
(``stage3.py``, ``_create_param_groups_fp16_flat_cpu_memory``), each gather copies a group's to the device first
(``partition_parameters.py``, ``_all_gather_dtype``: ``p.ds_tensor.to(...)`` of all, then ``torch.cat`` into the buffer
that is gathered), and a step casts to them there. Those of 100,000 numbers or less, which DeepSpeed keeps whole on the
device (``ds_persist``), are counted on the host.

torch 2.13, FSDP2's ``CPUOffloadPolicy``: the same of parameters in their own dtype (``_fsdp_param.py``,
``all_gather_inputs``: ``.to(self.device)``, then a cast to the dtype of products; both are there until the buffer that
is gathered has them, ``_fsdp_collectives.py``, ``foreach_all_gather``), and a shard of gradients goes to the host as
soon as it is reduced, where others of it are added to (``foreach_reduce``: ``new_sharded_grad.to("cpu")``). The
optimizer is whatever steps on a CPU's parameters.

bitsandbytes 0.50, ``is_paged`` (``optim/optimizer.py``, ``get_state_buffer``): moments of parameters of 100,000 numbers
or more are in memory that CUDA moves as it is needed (``functional.py``, ``get_paged``: ``cget_managed_ptr``), outside
of torch's allocator; scales of 8-bit moments are plain tensors. The step runs on the device. Whether pages ever move is
the driver's matter: counted is the worst, all of them out of the way before a step, in and out once in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StatesOnHost(StrEnum):
    """Whose way. See NOTE [ States on the host ]."""

    NONE = "none"
    DEEPSPEED = "deepspeed"
    DEEPSPEED_PARAMETERS = "deepspeed-parameters"
    FSDP2 = "fsdp2"
    TORCHAO = "torchao"
    TORCHAO_GRADIENTS = "torchao-gradients"
    BITSANDBYTES = "bitsandbytes"

    @property
    def least_elements(self) -> int:
        """Of a parameter whose states move; smaller ones stay."""
        if self.is_deepspeed or self is StatesOnHost.FSDP2:
            return 1
        return 100_000 if self is StatesOnHost.BITSANDBYTES else 4096

    @property
    def is_deepspeed(self) -> bool:
        """ZeRO-Offload, with parameters or without?"""
        return self in (StatesOnHost.DEEPSPEED, StatesOnHost.DEEPSPEED_PARAMETERS)

    @property
    def zeros(self) -> tuple[int, ...]:
        """Stages of ZeRO that it is described for."""
        if self.moves_parameters:
            return (3,)
        if self.is_deepspeed:
            return (2, 3)
        return (0, 3) if self.steps_there else (0, 1, 2, 3)

    @property
    def steps_there(self) -> bool:
        """Does the host update the parameters?"""
        return self not in (StatesOnHost.NONE, StatesOnHost.BITSANDBYTES)

    @property
    def frees_gradients(self) -> bool:
        """Do gradients go as backward makes them?"""
        return self not in (StatesOnHost.NONE, StatesOnHost.TORCHAO, StatesOnHost.BITSANDBYTES)

    @property
    def moves_masters(self) -> bool:
        """Are the copies that the optimizer updates among what moves?"""
        return self.is_deepspeed

    @property
    def moves_parameters(self) -> bool:
        """Do a rank's shards of parameters wait there, too?"""
        return self in (StatesOnHost.DEEPSPEED_PARAMETERS, StatesOnHost.FSDP2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Of one number of a parameter whose states are on the host, beside these.

    Args:
        host: copies and gradients there, without parameters that wait for their gathers.
        sent_each, fetched_each: over the link, in every micro-batch.
        sent, fetched: the same, once a step.
    """

    host: int
    sent_each: int = 0
    fetched_each: int = 0
    sent: int = 0
    fetched: int = 0


def element_bytes(rule: StatesOnHost, *, zero: int, micro_batches: int, parameter: int, gradient: int) -> ElementBytes:
    """What a rule holds and moves beside states.

    Args:
        parameter, gradient: bytes of one number, as the device has them.
    """
    several = micro_batches > 1
    match rule:
        case StatesOnHost.FSDP2:
            return ElementBytes(host=gradient, sent_each=gradient)
        case StatesOnHost.DEEPSPEED_PARAMETERS:
            return ElementBytes(host=gradient + 4, sent_each=gradient + 4, fetched_each=gradient)
        case StatesOnHost.DEEPSPEED if zero == 3:
            return ElementBytes(host=gradient + 4, sent_each=gradient + 4, fetched_each=gradient, fetched=parameter)
        case StatesOnHost.DEEPSPEED:
            both = gradient if several else 0
            return ElementBytes(host=4 + parameter + both, sent_each=both, fetched_each=both, sent=4, fetched=parameter)
        case StatesOnHost.TORCHAO | StatesOnHost.TORCHAO_GRADIENTS:
            return ElementBytes(host=parameter + gradient, sent_each=gradient, fetched=parameter)
        case _:
            return ElementBytes(host=0)
