#!/bin/bash
# DeepSeek-V3 on 1,024 GPUs: TP 2, PP 16 with 2 chunks a rank, EP 64, DP 32. The layer for multi-token prediction and the loss have a stage each.
# Sizes: arXiv 2412.19437, section 4.2.
#
#   megatron-pp check --gpus 1024 --gpu h100 examples/recipes/deepseek_v3.sh
#   srun --nodes 128 --ntasks-per-node 1 examples/recipes/deepseek_v3.sh   in a checkout of Megatron-LM; MASTER is the first node
set -u

FLAGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 129279 --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)'
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --tensor-model-parallel-size 2
    --sequence-parallel --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 4096
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective --recompute-modules mla_up_proj mlp moe_act layernorm --lr 2.2e-4 --train-iters 100000
    --mock-data
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 128 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$MASTER:29500" \
    -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py "${FLAGS[@]}" "$@"
