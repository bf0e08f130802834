# One model behind HTTP: ONNX Runtime and tasks/jobs/serve.py, without torch, Prefect and MLflow.
#
#   docker build -f docker/endpoint.Dockerfile -t headway/endpoint:0.2.0 .
#   docker run --rm --network host --read-only --tmpfs /run/headway:uid=10001,mode=0700 \
#     --mount type=bind,src=MODEL_FOLDER,dst=/model,readonly --env MODEL_REF=model/tiny headway/endpoint:0.2.0
#
# It listens on loopback only, unless it asks who asks: HOST=0.0.0.0 needs a mounted KEYS file (headway endpoint key), or ENTRA; or
# OPEN=true, where something before it keeps others out, as a managed endpoint of Azure Machine Learning does.
#
# With vLLM behind it, on GPUs: build on vLLM's own image, --build-arg BASE=vllm/vllm-openai:v0.32.0@sha256:..., and give VLLM, the
# settings of deployment.vllm as JSON.
ARG BASE=python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3
FROM ${BASE} AS base

FROM base AS build
WORKDIR /src
COPY pyproject.toml LICENSE constraints.txt ./
# What we stand on, without us and packages' own tests: a layer that stays when our code changes.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    touch README.md && \
    python -m venv /opt/headway && \
    /opt/headway/bin/pip install --no-cache-dir --constraint constraints.txt ".[serve]" && \
    find /opt/headway -type d -name tests -prune -exec rm -rf {} +
COPY README.md ./
COPY tasks ./tasks
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/headway/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM base
LABEL org.opencontainers.image.title="headway endpoint" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 headway && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /run/headway --shell /usr/sbin/nologin headway && \
    install --directory --owner headway --group headway --mode 0700 /run/headway
COPY --from=build /opt/headway /opt/headway
# Without deployments/ the command `headway` has nothing to call.
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    /opt/headway/bin/pip install --no-cache-dir --no-index --no-deps --force-reinstall /wheel/*.whl && \
    rm /opt/headway/bin/headway
COPY --chmod=0555 docker/endpoint.sh /usr/local/bin/serve
ENV PATH=/opt/headway/bin:$PATH \
    HOME=/run/headway \
    PYTHONUNBUFFERED=1 \
    HEADWAY_SERVE=/run/headway \
    MODEL_REF=model/mounted \
    HOST=127.0.0.1 \
    OPEN=false \
    DEGRADE=true \
    KEYS=/run/keys/keys.json \
    PORT=8080 \
    THREADS=1
USER 10001:10001
WORKDIR /run/headway
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/readyz', timeout=4)"]
ENTRYPOINT ["/usr/local/bin/serve"]
CMD ["python", "-m", "tasks.jobs.serve"]
