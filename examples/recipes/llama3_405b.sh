#!/bin/bash
# Llama 3.1 405B on 16,384 GPUs of 141 GB: TP 8, PP 16 with 8 chunks a rank, DP 128. Embedding and loss are chunks of their own.
# Sizes: arXiv 2407.21783, table 3. Layout: its section 3.3.2.
#
#   megatron-pp check --gpus 16384 --gpu h200 examples/recipes/llama3_405b.sh
#   srun --nodes 2048 --ntasks-per-node 1 examples/recipes/llama3_405b.sh   in a checkout of Megatron-LM; MASTER is the first node
set -u

FLAGS=(
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --vocab-size 128255 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'E|(t|)*126L' --micro-batch-size 1 --global-batch-size 2048 --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 8e-5 --train-iters 1000000
    --mock-data
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2048 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$MASTER:29500" \
    -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py "${FLAGS[@]}" "$@"
