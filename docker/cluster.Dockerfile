# What runs on the nodes of a cluster: our jobs, torch, DeepSpeed, Megatron-LM and nccl-tests. No Prefect, no MLflow.
#
#   docker build -f docker/cluster.Dockerfile -t headway/cluster:0.1.0 .
#
# From the Azure Container for PyTorch come the system, InfiniBand and what Azure's nodes need. Its own Python (3.10, torch 2.8,
# CUDA 12.6) is too old for Headway and for Megatron-LM, so Headway has an environment of its own: Python 3.12, and torch with the
# CUDA 13 of its wheels. The compiler of the same CUDA is beside it, for nccl-tests here and for DeepSpeed's operators later.
# A node needs a driver for CUDA 13. For an older one, hand in the build secret `pip` with another index of torch.
FROM mcr.microsoft.com/aifx/acpt/stable-ubuntu2204-cu126-py310-torch280:biweekly.202607.1@sha256:2c139ba03468a302ef9c11507dfd064ecd7ee4bd993cb64670bbe72db69b10ff AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

FROM base AS build
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ libopenmpi-dev make && \
    rm -rf /var/lib/apt/lists/* && \
    conda create --yes --quiet --prefix /opt/headway --override-channels --channel conda-forge python=3.12.12
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY tasks ./tasks
# Without deployments/ the command `headway` has nothing to call. What links against CUDA looks for names without a number.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/headway/bin/python -m pip install --no-cache-dir --constraint constraints.txt \
        ".[data,export,measure]" deepspeed==0.19.8 "cuda-toolkit[nvcc,cccl,cudart]==13.0.3.0" && \
    rm /opt/headway/bin/headway && \
    ln -s /opt/headway/lib/python3.12/site-packages/nvidia /opt/headway/nvidia && \
    ln -s lib /opt/headway/nvidia/cu13/lib64 && \
    ln -s libcudart.so.13 /opt/headway/nvidia/cu13/lib/libcudart.so && \
    ln -s libnccl.so.2 /opt/headway/nvidia/nccl/lib/libnccl.so
# The wheel alone lacks pretrain_gpt.py, so the sources stay, less a folder `tasks`: beside that script it would hide ours.
# The helpers for data sets are optional to Megatron-LM's installation, and not to us.
ADD https://github.com/NVIDIA/Megatron-LM.git#d98e8a64ddf34856e74b24714e3bedb2f5a39553 /opt/megatron-lm
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    NO_VCS_VERSION=1 /opt/headway/bin/python -m pip install --no-cache-dir --no-deps /opt/megatron-lm && \
    /opt/headway/bin/python -c "import megatron.core.datasets.helpers_cpp" && \
    rm -rf /opt/megatron-lm/tasks /opt/megatron-lm/build /opt/megatron-lm/docs /opt/megatron-lm/images
# v2.19.6, for A100, H100 and GB200, against the very NCCL that torch uses.
ADD https://github.com/NVIDIA/nccl-tests.git#a0b82b2260cf5152b9f8c061bbf7eaf0ba096432 /src/nccl-tests
RUN export NVCC_APPEND_FLAGS="-Xlinker -rpath=/opt/headway/nvidia/nccl/lib:/opt/headway/nvidia/cu13/lib" && \
    make --directory /src/nccl-tests --jobs 4 \
        MPI=1 MPI_HOME=/usr/lib/x86_64-linux-gnu/openmpi \
        CUDA_HOME=/opt/headway/nvidia/cu13 NCCL_HOME=/opt/headway/nvidia/nccl \
        NVCC_GENCODE="-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_100,code=sm_100" && \
    install --directory /opt/nccl-tests && \
    install /src/nccl-tests/build/*_perf /opt/nccl-tests/

FROM base
LABEL org.opencontainers.image.title="headway cluster" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update && \
    apt-get install --yes --no-install-recommends bubblewrap g++ libopenmpi3 openmpi-bin openssh-client procps && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 headway && \
    useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash headway
COPY --from=build /opt/headway /opt/headway
COPY --from=build /opt/megatron-lm /opt/megatron-lm
COPY --from=build /opt/nccl-tests /opt/nccl-tests
ENV PATH=/opt/headway/bin:/opt/nccl-tests:/opt/headway/nvidia/cu13/bin:$PATH \
    CUDA_HOME=/opt/headway/nvidia/cu13 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /home/headway
# A node's image serves nothing: healthy is one whose jobs can be imported.
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import tasks.jobs.node.runtime"]
CMD ["python", "-m", "torch.utils.collect_env"]
