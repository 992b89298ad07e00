"""What one described run is asked for, as given: loose text, which `run_request.resolve` makes a `Run` of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from jettison.core.objects import non_defaults
from jettison.core.parse_units import Tokens


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CommonRequest:
    """What one run and all candidates of a search are asked for alike; None is the default, NOTE [ Defaults ] there.

    Args:
        seq: Tokens in a sequence, such as 4096, 8k or 1M: as many as the model has positions, at most 4096.
        source_seq: Tokens that an encoder beside a decoder reads, as many as --seq if it can; samples of raw sound.
        attention: eager, flash, sdpa, flex or flash-attn (the library, which copies what --kernels megatron gives it).
        dropout: Probability, at every site that the architecture has: as the model says.
        precision: fp32, bf16, bf16-grad32, bf16-main32, bf16-reduce16 (Megatron's --grad-reduce-in-bf16), bf16-pure,
            bf16-master16, bf16-autocast, fp16-main32 or fp8.
        fp8_recipe: How products are narrow, beside a --precision in bf16: TransformerEngine's delayed[:N], tensorwise
            (either -blackwell), blockwise, mxfp8 or nvfp4; torchao's tensorwise, rowwise, rowwise_with_gw_hp or mxfp8.
        fp8_param_gather: Weights are held as bytes (Megatron), or gathered so (torchao's tensorwise).
        products: Products that --fp8-recipe does not have, as Megatron says it: last:14=bf16, first:1=bf16, mtp=bf16,
            attention.*=bf16, out_proj=mxfp8, separated by commas; of globs the first that fits counts.
        optimizer: adamw, which is fused; adamw-foreach, as torch has it by default; adamw-deepspeed, as ZeRO
            steps there; adamw-bf16, whose moments are narrow; sgd, sgd-momentum, adam8bit, adam4bit, adafactor, muon,
            dist-muon, dist-muon-pingpong or none.
        kernels: megatron, pytorch, pytorch-2.8 (or before: RMSNorm op by op), huggingface, huggingface-4.57, -4.48,
            -4.45 or -4.30 (of that version or before, until the next one named), torchtune, liger, foak,
            unsloth, axolotl, axolotl-liger (its kernels of adapters), llamafactory-v1 or nanotron: whose code runs.
        loss: upcast, outside (the loop's own, of logits that the model returned), rows, in-place, compiled, dtensor,
            vocab-parallel, sharded, native, te, fused, chunked, listed,
            tiled or dpo.
        capacity_factor: Rows that an expert takes, as a multiple of an even share; else no token is dropped.
        expert_imbalance: Rows at the busiest rank's experts, as a multiple of an even share: 1.
        dispatcher: How tokens reach their experts: alltoall, flex (DeepEP, HybridEP) or allgather.
        deterministic: Megatron's deterministic mode: what experts return is kept, too.
        sequential_experts: One expert after the other, instead of grouped products.
        tp_comm_overlap: Transfers of tensor parallelism run beside the products that they belong to: costs less time.
        ep_comm_overlap: Rows travel to experts and back beside the work of another micro-batch: costs less time.
        cuda_graphs: CUDA graphs replay the kernels of layers, so that the host does not hand them over; experts where
            it need not know their rows.
        stack: Whose software: base, megatron, megatron-deepspeed, nemo, nemo-24.12, nemo-26.06 or scaling; else what
            goes with --kernels.
        gathered_inputs: Save gathered inputs under sequence parallelism, as stock DTensor does.
        keep_stage_outputs: A pipeline stage holds on to outputs that it has sent.
        gradients: one-by-one, as backward makes them; upfront, in buffers; buckets, one by one beside those of
            DistributedDataParallel; added, to a wider buffer behind each backward (nanotron); in-backward, where the
            optimizer steps.
        accumulation: How a gradient is added to the one that is there: whole, cast, fused or fused-dummy.
        workspaces: Set aside for products: none, torch- or te-ampere, -hopper, or -blackwell (a torch before
            2026's pull request 175344).
        keep_received: Chunks of a pipeline hold the last input that they were sent, and its gradient.
        stage_buffers: Stages have a buffer for all that they are sent in a step, as torch.distributed.pipelining has.
        reshard_after_forward: With --zero 3, whose weights FSDP2 shards again after a forward: always, never,
            torchtitan (its default: all but those whose backward comes first, in a pipeline none), or over how many
            ranks until their backward.
        outer_ends: With --zero 3, embedding, final norm and head have no fully_shard of their own: the model's has
            them, whole through both passes.
        fsdp_version: With --zero 3, whose shards: 2, FSDP2's, or 1, flat parameters, whose outermost has the ends.
        reentrant: Checkpoints are reentrant (use_reentrant=True), and around what FSDP has wrapped, as transformers had
            them by default until 4.52.
        adapters: Dtype of adapters: fp32, as PEFT makes them by default (autocast_adapter_dtype); else as parameters.
        loader_masks: The batch comes with an s x s mask for each sequence, as Megatron's loader makes it.
        keep_batches: Batches of a step stay on the device until its end, as Megatron 0.18 has them.
        holds_output: The loop has a name for the model's output, and with it for the logits, until their backward is
            over.
        scans: How layers carry a state along the sequence: written, as transformers without further packages, or fused.
        context_exchange: How attention sees a sequence that --cp shards: ring, p2p, gather or a2a.
        packed: Tokens of a document: sequences are several of them, packed, which do not see each other.
        lora: Low-rank adapters beside frozen weights: r=16, or r=16,alpha=32,targets=qkv+mlp,dropout=0.05.
        base: How frozen matrices are held: plain, in the dtype of products; fp32, nf4, nf4-double (QLoRA), int8
            (LLM.int8) or gptq.
        kbit_upcast: What of a base in four bits is fp32 beside what is packed: all (PEFT's
            prepare_model_for_kbit_training), norms (TRL's SFTTrainer to 0.26) or none.
        input_gradients: The embedding's output has a gradient although it is frozen: where layers are computed again.
        reference: A second, frozen model that runs a forward, as DPO has it: same (a copy), base (the adapters switched
            off) or a model, and perhaps ,dtype=bf16,sharded=no,when=before.
        reward: A frozen model with one score for each token, before the policy's forward: same, or a model.
        states_on_host: The optimizer's states are in the host's memory, as deepspeed (ZeRO-Offload), torchao,
            torchao-gradients or bitsandbytes (paged) have them there; with deepspeed-parameters, fsdp2 and fsdp1
            (--fsdp-version 1) parameters as well.
        mtp_num_layers: Layers that predict further tokens, as Megatron has them: 0.
        mtp_use_repeated_layer: One such layer's weights serve all further tokens.
        recompute_modules: Megatron's list of what is computed again: core_attn,layernorm,mla_up_proj,mlp,moe_act,
            shared_experts,moe.
        offload_modules: Megatron's list of what waits on the host: attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm,
            expert_fc1,moe_act.
        family: The model_type whose architecture a config.json of an unknown type has, such as qwen2.
        like: As megatron-0.19, megatron-0.18, torchtitan, nanotron, huggingface (or of a version: huggingface-4.57,
            -4.52, -4.48, -4.45 or -4.30), unsloth, deepspeed or automodel does it; other flags go before it.
    """

    seq: Tokens | None = None
    source_seq: Tokens | None = None
    attention: str | None = None
    dropout: float | None = None
    precision: str | None = None
    fp8_recipe: str | None = None
    fp8_param_gather: bool | None = None
    products: str | None = None
    optimizer: str | None = None
    kernels: str | None = None
    loss: str | None = None
    capacity_factor: float | None = None
    expert_imbalance: float | None = None
    dispatcher: str | None = None
    sequential_experts: bool | None = None
    deterministic: bool | None = None
    tp_comm_overlap: bool | None = None
    ep_comm_overlap: bool | None = None
    cuda_graphs: bool | None = None
    stack: str | None = None
    gathered_inputs: bool | None = None
    keep_stage_outputs: bool | None = None
    gradients: str | None = None
    accumulation: str | None = None
    workspaces: str | None = None
    keep_received: bool | None = None
    stage_buffers: bool | None = None
    reshard_after_forward: str | None = None
    outer_ends: bool | None = None
    fsdp_version: int | None = None
    reentrant: bool | None = None
    adapters: str | None = None
    loader_masks: bool | None = None
    keep_batches: bool | None = None
    holds_output: bool | None = None
    scans: str | None = None
    context_exchange: str | None = None
    packed: Tokens | None = None
    lora: str | None = None
    base: str | None = None
    kbit_upcast: str | None = None
    input_gradients: bool | None = None
    reference: str | None = None
    reward: str | None = None
    states_on_host: str | None = None
    mtp_num_layers: int | None = None
    mtp_use_repeated_layer: bool | None = None
    recompute_modules: str | None = None
    offload_modules: str | None = None
    family: str | None = None
    like: str | None = None
    anchor: str | None = field(default=None, metadata={"local": True})

    def __repr__(self) -> str:
        return non_defaults(self)

    def given(self) -> tuple[str, ...]:
        """Names of the fields that were."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunRequest(CommonRequest):
    """How a model is to be trained, as given.

    Args:
        micro_batch: Sequences in a micro-batch on one data-parallel rank: 1; of --loss dpo 2, a pair.
        micro_batches: Micro-batches in a step on one data-parallel rank: one for each pipeline stage.
        tp: Ranks of tensor parallelism: 1.
        sp: Sequence parallelism beside it: on where --tp is above 1.
        pp: Pipeline stages: 1.
        virtual_stages: Virtual stages on each device of a pipeline (interleaved 1F1B): 1.
        micro_batch_group: Micro-batches that go through a virtual stage in turn, as Megatron's
            --microbatch-group-size-per-virtual-pipeline-stage: --pp.
        deferred_head: Micro-batches of which a pipeline's last stage keeps gradients of logits until the others wait,
            as Megatron's --defer-embedding-wgrad-compute has them (--wgrad-deferral-limit): 0.
        stage_layers: Layers of each stage: 5,4,4,3, first:3,last:5, Megatron's layout string, or nanotron; else evenly.
        schedule: Order of a pipeline: gpipe, 1f1b, zero-bubble or zero-bubble-v.
        cp: Ranks of context parallelism: 1.
        dp: Data-parallel replicas: 1.
        ep: Ranks of expert parallelism, out of dp x cp: 1.
        expert_tp: Ranks that share an expert's width, fewer than --tp; --ep then takes the others: as --tp.
        zero_replicas: Groups of ranks that each hold all of what ZeRO shards, as HSDP has them: 1.
        zero_whole: With --zero 1, each rank has the states of some parameters, whole, as torch's
            ZeroRedundancyOptimizer shares them out: else each has a part of every one.
        zero: 1 shards optimizer state, 2 gradients too, 3 parameters too: 0.
        recompute: none, selective, selective-op[-alternate], full, parts (attention, feed-forward block and norms, a
            checkpoint each), every:K (segments of K layers), block:N (the first N of a stage), interval:K (each K-th),
            sqrt or auto.
        offload: Send what stays of each layer to the host until its backward.
        whole_micro_batches: Of the micro-batches that a stage has in flight, so many keep everything, or most, which
            is as many as fit: 0.
        positions: Rows of learned positions, for sequences that are longer than the model was made for.
    """

    micro_batch: int | None = None
    micro_batches: int | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    virtual_stages: int | None = None
    micro_batch_group: int | None = None
    deferred_head: int | None = None
    stage_layers: str | None = None
    schedule: str | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    expert_tp: int | None = None
    zero: int | None = None
    zero_replicas: int | None = None
    zero_whole: bool | None = None
    recompute: str | None = None
    offload: bool | None = None
    whole_micro_batches: str | None = None
    positions: Tokens | None = None


NOTHING_ASKED = RunRequest()
DECIDED = ("recompute", "recompute_modules", "offload", "offload_modules", "whole_micro_batches")
"""Fields that a plan decides."""
