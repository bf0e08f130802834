# What orders the stages: Prefect, MLflow with its server, and the `headway` command. No torch, unless EXTRAS asks for it.
#
#   docker build -f docker/orchestrator.Dockerfile -t headway/orchestrator:0.2.0 .
#
# compose.yaml starts the Prefect server and the MLflow server from it, and `headway up` from the same file with EXTRAS=local.
# A file of pip's settings (a mirror, other wheels of torch) is handed in as the build secret `pip`, and leaves no trace.
ARG BASE=python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3
FROM ${BASE} AS base

# pip is beside the environment and not in it. README.md is copied in later: a change of words installs no package again.
FROM base AS build
WORKDIR /src
COPY pyproject.toml LICENSE constraints.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m venv /opt/pip && \
    python -m venv --without-pip /opt/headway && \
    touch README.md && \
    /opt/pip/bin/pip --python /opt/headway/bin/python install --no-cache-dir --constraint constraints.txt \
        ".[orchestrator,tracking,report,azure]" && \
    find /opt/headway \( -type d -name tests -o -path '*/onnx/backend/test' -o -path '*/pyarrow/include' \) \
        -prune -exec rm -rf {} +

# What EXTRAS asks for beyond that: a layer of its own, so that both images share the one above. No packages' tests, no headers.
FROM build AS more
ARG EXTRAS=orchestrator
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    mkdir /more && \
    /opt/pip/bin/pip --python /opt/headway/bin/python install --no-cache-dir --constraint constraints.txt \
        --prefix /more ".[${EXTRAS}]" && \
    find /more \( -type d -name tests -o -path '*/torch/test' -o -path '*/torch/include' -o \
        -path '*/torch/bin/*' -type f ! -name torch_shm_manager \) -prune -exec rm -rf {} +
COPY README.md ./
COPY flows ./flows
COPY tasks ./tasks
COPY deployments ./deployments
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/pip/bin/pip --python /opt/headway/bin/python install --no-cache-dir --no-deps --ignore-installed --prefix /ours .

FROM base
LABEL org.opencontainers.image.title="headway orchestrator" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# ps shows which processes stand below a job; tini collects the ones that outlived their parents.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends bubblewrap procps tini && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 headway && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headway && \
    install --directory --owner headway --group headway --mode 0700 /var/lib/headway
COPY --from=build /opt/headway /opt/headway
COPY --from=more /more /opt/headway
COPY --from=more /ours /opt/headway
# Caches of libraries lie in /tmp, so that everything else may be read-only. Vendors are told nothing.
ENV PATH=/opt/headway/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    HEADWAY_HOME=/var/lib/headway \
    PREFECT_HOME=/var/lib/headway/prefect \
    PREFECT_SERVER_UI_STATIC_DIRECTORY=/tmp/prefect-ui \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_RESULTS_DEFAULT_SERIALIZER=json \
    MLFLOW_DISABLE_TELEMETRY=true \
    GX_ANALYTICS_ENABLED=false \
    DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /var/lib/headway
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, pathlib, sys; from deployments.services.parts import bridge, watch, worker; home = pathlib.Path(os.environ['HEADWAY_HOME']); sys.exit(not (worker.status(home) and watch.status(home) and bridge.status(home)))"]
ENTRYPOINT ["tini", "--"]
CMD ["headway", "up"]
