#!/bin/bash
# Qwen3-235B-A22B on 256 GPUs: TP 4, PP 16 with 2 chunks a rank, CP 2, EP 8, DP 2. Embedding and loss count as layers.
# Sizes: the model's config.json.
#
#   megatron-pp check --gpus 256 --gpu h100 examples/recipes/qwen3_235b_a22b.sh
#   srun --nodes 32 --ntasks-per-node 1 examples/recipes/qwen3_235b_a22b.sh   in a checkout of Megatron-LM; MASTER is the first node
set -u

FLAGS=(
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --seq-length 4096 --max-position-embeddings 40960
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --vocab-size 151935 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 16
    --num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split --context-parallel-size 2 --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 512 --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --lr 3e-4 --train-iters 100000 --mock-data
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 32 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$MASTER:29500" \
    -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py "${FLAGS[@]}" "$@"
