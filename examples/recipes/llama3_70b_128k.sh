#!/bin/bash
# Llama 3.1 70B with sequences of 131,072 tokens on 512 GPUs: TP 8, CP 8, PP 4 with 5 chunks a rank, DP 2. One of each chunk's four layers is recomputed.
# Sizes: arXiv 2407.21783, table 3.
#
#   megatron-pp check --gpus 512 --gpu h100 examples/recipes/llama3_70b_128k.sh
#   srun --nodes 64 --ntasks-per-node 1 examples/recipes/llama3_70b_128k.sh   in a checkout of Megatron-LM; MASTER is the first node
set -u

FLAGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
    --num-query-groups 8 --seq-length 131072 --max-position-embeddings 131072 --position-embedding-type rope
    --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --vocab-size 128255 --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 8
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1
    --global-batch-size 32 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method block --recompute-num-layers 1 --lr 8e-5
    --train-iters 2000 --mock-data
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 64 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$MASTER:29500" \
    -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py "${FLAGS[@]}" "$@"
