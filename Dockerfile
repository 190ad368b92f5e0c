# An image for the two commands of the README. By default it trains a GPT through the interleaved pipeline, on the CPU.
#
#   docker build -t megatron-pp .
#   docker run --rm megatron-pp                   trains
#   docker run --rm megatron-pp scripts/test.sh   runs the tests
#
# For GPUs, build on an image whose Python has torch with CUDA, such as NVIDIA's:
#
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:25.09-py3 --build-arg MEGATRON_PP_PYTHON=python3 -t megatron-pp .
#   docker run --rm --gpus all --shm-size 8g megatron-pp
ARG BASE=python:3.12-slim
FROM ${BASE}

RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /megatron_pp
COPY . .

# Empty: make an environment with the versions of scripts/constraints.txt. A program: use that Python, and install only
# the extras that do not need torch.
ARG MEGATRON_PP_PYTHON=
ENV MEGATRON_PP_PYTHON=${MEGATRON_PP_PYTHON}
RUN if [ -n "$MEGATRON_PP_PYTHON" ]; \
    then "$MEGATRON_PP_PYTHON" -m pip install --no-cache-dir numpy "tyro>=1.0" tqdm matplotlib tensorboard "rich>=13" \
    && "$MEGATRON_PP_PYTHON" -m pip install --no-cache-dir --no-deps .; \
    else PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup_env.sh train viz megatron test; fi

CMD ["scripts/train.sh"]
