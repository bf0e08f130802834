# What runs on the nodes of a cluster: our jobs, torch and DeepSpeed; with GPUs Megatron-LM and nccl-tests too. No Prefect, no MLflow.
#
#   docker build -f docker/cluster.Dockerfile -t headway/cluster:0.2.0 .
#   docker build -f docker/cluster.Dockerfile --target cpu --build-arg BASE=python:3.11.15-slim-bookworm --build-arg PYTHON=python3 \
#     -t headway/cluster-cpu:0.2.0 .
#
# From the Azure Container for PyTorch come the system, InfiniBand and what Azure's nodes need. Its own Python (3.10, torch 2.8,
# CUDA 12.6) is too old for Headway and for Megatron-LM, so Headway has an environment of its own: Python 3.12, and torch with the
# CUDA 13 of its wheels. The compiler of the same CUDA is beside it, for nccl-tests here and for DeepSpeed's operators later.
# A node needs a driver for CUDA 13. For an older one, hand in the build secret `pip` with another index of torch.
ARG BASE=mcr.microsoft.com/aifx/acpt/stable-ubuntu2204-cu126-py310-torch280:biweekly.202607.1@sha256:2c139ba03468a302ef9c11507dfd064ecd7ee4bd993cb64670bbe72db69b10ff
FROM ${BASE} AS base
LABEL org.opencontainers.image.title="headway cluster" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update && \
    apt-get install --yes --no-install-recommends bubblewrap g++ libopenmpi3 openmpi-bin openssh-client procps && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 headway && \
    useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash headway

FROM base AS build
# A version of Python comes from conda-forge; a command is an interpreter of the base, 3.11 or newer.
ARG PYTHON=3.12.12
RUN case "${PYTHON}" in \
      [0-9]*) conda create --yes --quiet --prefix /opt/headway --override-channels --channel conda-forge "python=${PYTHON}" ;; \
      *) "${PYTHON}" -m venv /opt/headway ;; \
    esac
ARG EXTRAS=data,export,measure,deepspeed,ray
WORKDIR /src
COPY pyproject.toml LICENSE constraints.txt ./
# What we stand on, without us, packages' own tests and Ray's Java: a layer that stays when our code changes.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    touch README.md && \
    /opt/headway/bin/python -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" && \
    find /opt/headway \( -type d -name tests -o -path '*/onnx/backend/test' -o -path '*/torch/test' -o \
        -path '*/torch/bin/*' -type f ! -name torch_shm_manager -o -path '*/ray/jars' \) -prune -exec rm -rf {} +
COPY README.md ./
COPY tasks ./tasks
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/headway/bin/python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM base AS common
COPY --from=build /opt/headway /opt/headway
# Without deployments/ the command `headway` has nothing to call.
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    /opt/headway/bin/python -m pip install --no-cache-dir --no-index --no-deps --force-reinstall /wheel/*.whl && \
    rm /opt/headway/bin/headway
ENV PATH=/opt/headway/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    DO_NOT_TRACK=1
# Azure ML may run a job as root, or as a user of its own that the image does not know: any may write to the home of ours.
RUN chmod 1777 /home/headway
ENV HOME=/home/headway \
    USER=headway
WORKDIR /home/headway
# A node's image serves nothing: healthy is one whose jobs can be imported.
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import tasks.jobs.node.runtime"]
CMD ["python", "-m", "torch.utils.collect_env"]

FROM common AS cpu
USER 10001:10001

# What only GPUs need, on top of the same: the compiler of torch's own CUDA, Megatron-LM, nccl-tests. What links against CUDA looks for
# names without a number.
FROM common AS toolkit
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip install --no-cache-dir "cuda-toolkit[nvcc,cccl,cudart]==13.0.3.0" && \
    ln -s "$(python -c 'import nvidia; print(nvidia.__path__[0])')" /opt/headway/nvidia && \
    ln -s lib /opt/headway/nvidia/cu13/lib64 && \
    ln -s libcudart.so.13 /opt/headway/nvidia/cu13/lib/libcudart.so && \
    ln -s libnccl.so.2 /opt/headway/nvidia/nccl/lib/libnccl.so

FROM toolkit AS gpu-programs
RUN apt-get update && \
    apt-get install --yes --no-install-recommends libopenmpi-dev make && \
    rm -rf /var/lib/apt/lists/*
# The wheel alone lacks pretrain_gpt.py, so the sources stay, less a folder `tasks`: beside that script it would hide ours.
# The helpers for data sets are optional to Megatron-LM's installation, and not to us.
ARG MEGATRON_LM=https://github.com/NVIDIA/Megatron-LM.git#d98e8a64ddf34856e74b24714e3bedb2f5a39553
# hadolint ignore=DL3020
ADD ${MEGATRON_LM} /opt/megatron-lm
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    NO_VCS_VERSION=1 python -m pip install --no-cache-dir --no-deps --prefix /opt/megatron /opt/megatron-lm && \
    rm -rf /opt/megatron-lm/tasks /opt/megatron-lm/build /opt/megatron-lm/docs /opt/megatron-lm/images
# v2.19.6, for A100, H100 and GB200, against the very NCCL that torch uses.
ARG NCCL_TESTS=https://github.com/NVIDIA/nccl-tests.git#a0b82b2260cf5152b9f8c061bbf7eaf0ba096432
# hadolint ignore=DL3020
ADD ${NCCL_TESTS} /src/nccl-tests
RUN export NVCC_APPEND_FLAGS="-Xlinker -rpath=/opt/headway/nvidia/nccl/lib:/opt/headway/nvidia/cu13/lib" && \
    make --directory /src/nccl-tests --jobs 4 \
        MPI=1 MPI_HOME=/usr/lib/x86_64-linux-gnu/openmpi \
        CUDA_HOME=/opt/headway/nvidia/cu13 NCCL_HOME=/opt/headway/nvidia/nccl \
        NVCC_GENCODE="-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_100,code=sm_100" && \
    install --directory /opt/nccl-tests && \
    install /src/nccl-tests/build/*_perf /opt/nccl-tests/

FROM toolkit
COPY --from=gpu-programs /opt/megatron /opt/headway
COPY --from=gpu-programs /opt/megatron-lm /opt/megatron-lm
COPY --from=gpu-programs /opt/nccl-tests /opt/nccl-tests
RUN python -c "import megatron.core.datasets.helpers_cpp"
ENV PATH=/opt/nccl-tests:/opt/headway/nvidia/cu13/bin:$PATH \
    CUDA_HOME=/opt/headway/nvidia/cu13
USER 10001:10001
