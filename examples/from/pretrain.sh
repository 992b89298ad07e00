#!/bin/bash
# Llama 3 8B on two nodes
GPUS_PER_NODE=8
NNODES=2
TP=2
PP=2
CHECKPOINT=/tmp/ckpt

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
GPT_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --sequence-parallel
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --swiglu --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 128
    --bf16 --use-distributed-optimizer --overlap-grad-reduce
    --recompute-granularity selective   # attention alone
    --transformer-impl transformer_engine --attention-backend fused
    --lr 3e-4 --train-iters 1000
)
DATA_ARGS="--tokenizer-type Llama3Tokenizer --vocab-size 128256 --data-path $DATA --split 99,1,0"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py ${GPT_ARGS[@]} $DATA_ARGS --save $CHECKPOINT
