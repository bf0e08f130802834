# What orders the stages: Prefect, MLflow with its server, and the `headway` command. No torch, unless EXTRAS asks for it.
#
#   docker build -f docker/orchestrator.Dockerfile -t headway/orchestrator:0.1.0 .
#
# compose.yaml starts the Prefect server and the MLflow server from it, and `headway up` from the same file with EXTRAS=local.
# A file of pip's settings (a mirror, other wheels of torch) is handed in as the build secret `pip`, and leaves no trace.
ARG BASE=python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3
FROM ${BASE} AS base

FROM base AS build
ARG EXTRAS=orchestrator,tracking,report,azure
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
# What we stand on, without us and packages' own tests: a layer that stays when our code changes.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m venv /opt/headway && \
    /opt/headway/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" && \
    find /opt/headway \( -type d -name tests -o -path '*/onnx/backend/test' -o -path '*/torch/test' -o \
        -path '*/torch/bin/*' -type f ! -name torch_shm_manager \) -prune -exec rm -rf {} +
COPY flows ./flows
COPY tasks ./tasks
COPY deployments ./deployments
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/headway/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM base
LABEL org.opencontainers.image.title="headway orchestrator" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# ps shows which processes stand below a job; tini collects the ones that outlived their parents.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends bubblewrap procps tini && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 headway && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headway && \
    install --directory --owner headway --group headway --mode 0700 /var/lib/headway
COPY --from=build /opt/headway /opt/headway
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    /opt/headway/bin/pip install --no-cache-dir --no-index --no-deps --force-reinstall /wheel/*.whl
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
