# Two targets from one environment (the set has to fit together, and the pipeline proves its models
# with the same vLLM that serves them):
#   docker build --target pipeline -t tuneserve-pipeline .   a Prefect worker and the flow's jobs
#   docker build --target serve    -t tuneserve-serve .      the gateway and the vLLM servers
# For a machine without a GPU: --build-arg ACCEL=cpu.
# Not built where it was written (no Docker there): linted, and every path and version it names is
# tested to exist (tests/unit/test_deploy_files.py).

FROM python:3.11.14-slim-bookworm AS build
ARG ACCEL=cuda
# Some packages of the lock come as source.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tuneserve
# What decides the environment comes first: a change of our code does not install it again.
COPY requirements/ requirements/
COPY deploy/venv.sh deploy/venv.sh
COPY pyproject.toml README.md LICENSE ./
COPY src/tuneserve/__init__.py src/tuneserve/__init__.py
RUN deploy/venv.sh "$ACCEL" && rm -rf /root/.cache

FROM python:3.11.14-slim-bookworm AS runtime
# Triton and torch.compile need a C compiler when a server starts.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home tuneserve \
 && install -d -o tuneserve -g tuneserve /var/lib/tuneserve \
 # Locks of the cards: a volume mounted here takes this mode over, so that every user can lock.
 && install -d -m 1777 /tmp/tuneserve-gpus
WORKDIR /opt/tuneserve
COPY --from=build /opt/tuneserve/.venv .venv
COPY pyproject.toml README.md LICENSE ./
COPY src/ src/
COPY flows/ flows/
COPY tasks/ tasks/
COPY deploy/ deploy/
COPY data_templates/ data_templates/
ENV PATH=/opt/tuneserve/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TUNESERVE_ROOT=/opt/tuneserve \
    TUNESERVE_HOME=/var/lib/tuneserve \
    XDG_CACHE_HOME=/var/lib/tuneserve/cache \
    HF_HOME=/var/lib/tuneserve/cache/huggingface \
    PREFECT_HOME=/home/tuneserve/.prefect \
    DO_NOT_TRACK=1 \
    VLLM_NO_USAGE_STATS=1
USER 10001
# A child that a killed stage left behind is reaped; secrets come as files and are named as variables.
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/tuneserve/deploy/with-secrets.sh"]

FROM runtime AS pipeline
CMD ["prefect", "worker", "start", "--pool", "local"]

FROM runtime AS serve
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s \
  CMD ["tuneserve", "status", "--json"]
CMD ["tuneserve", "keep"]
