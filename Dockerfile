# syntax=docker/dockerfile:1
# Two images, neither of which runs as root:
#   docker build -t mmcache .                       encodes on CPUs
#   docker build -t mmcache:gpu --target gpu \
#     --build-arg EXTRAS=server,cli,redis,gpu --build-arg TORCH_INDEX=https://pypi.org/simple .
FROM python:3.11-slim-bookworm AS build

ARG EXTRAS=server,cli,redis
# Torch for CPUs is a tenth of the size of that for CUDA, which is the default elsewhere.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/mmcache \
    && /opt/mmcache/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" 'torch>=2.11'
COPY pyproject.toml README.md LICENSE ./
COPY mmcache mmcache
COPY encoder encoder
COPY ipc ipc
RUN /opt/mmcache/bin/pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]" \
    && /opt/mmcache/bin/pip uninstall --yes pip


FROM python:3.11-slim-bookworm AS base

# Engines in other containers have to be this user, or be let in by the settings: docs/containers.md.
RUN groupadd --gid 10001 mmcache \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin mmcache \
    && install --directory --owner=mmcache --group=mmcache --mode=0700 /run/mmcache /var/lib/mmcache
COPY --from=build /opt/mmcache /opt/mmcache
ENV PATH=/opt/mmcache/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MMCACHE_SOCKET=/run/mmcache/mmcache.sock \
    MMCACHE_STATE=/var/lib/mmcache \
    MMCACHE_HTTP=0.0.0.0:9464 \
    MMCACHE_LOG_FORMAT=json
EXPOSE 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=2s \
    CMD ["python", "-c", "import urllib.request as request; request.urlopen('http://127.0.0.1:9464/readyz', timeout=4)"]


FROM base AS gpu

# Kernels are compiled when a rank first needs them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENTRYPOINT ["mmcache"]
CMD ["serve", "--device=cuda"]


FROM base AS cpu

USER 10001:10001
ENTRYPOINT ["mmcache"]
CMD ["serve", "--device=cpu"]
