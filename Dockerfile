# A sidecar that encodes on the CPU. Build: docker build -t mmcache .
FROM python:3.11-slim

RUN useradd --uid 10001 --no-create-home mmcache \
    && install --directory --owner=mmcache --group=mmcache --mode=0700 /run/mmcache /var/lib/mmcache

WORKDIR /opt/mmcache
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY mmcache mmcache
COPY encoder encoder
COPY ipc ipc
RUN pip install --no-cache-dir --constraint constraints.txt '.[server,cli]'

USER mmcache
ENV MMCACHE_SOCKET=/run/mmcache/mmcache.sock \
    MMCACHE_STATE=/var/lib/mmcache
CMD ["mmcache", "serve"]
