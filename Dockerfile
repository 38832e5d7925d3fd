# The api and the job runner, for Linux. Workers on Macs run natively: containers there have no Metal.
# `--target worker` makes an image that can run a worker, too, on MLX's CPU build: a slow one.
FROM python:3.12-slim AS build
WORKDIR /build
COPY requirements.lock ./
RUN pip wheel --no-cache-dir --no-deps --require-hashes --wheel-dir /wheels -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY api api
COPY mlx_model mlx_model
COPY ranks ranks
COPY worker worker
COPY trainer trainer
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# The lock holds the tools of development as well; of its checked wheels only what we need goes in.
RUN python -m venv /opt/parallm && /opt/parallm/bin/pip install --no-cache-dir --no-index --find-links /wheels 'mlx-parallm[cpu,traces]'

FROM python:3.12-slim AS base
COPY --from=build /opt/parallm /opt/parallm
RUN useradd --create-home --uid 1000 parallm && mkdir /data && chown parallm /data
WORKDIR /data
VOLUME /data
ENV PATH=/opt/parallm/bin:$PATH PARALLM_DATA_DIR=/data PARALLM_ADAPTER_CACHE_DIR=/data/adapters

FROM base AS worker
# MLX's CPU back end compiles kernels at run time.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
USER parallm
CMD ["mlx_parallm_worker"]

FROM base AS front
USER parallm
EXPOSE 8000
CMD ["mlx_parallm_serve", "--host", "0.0.0.0", "--port", "8000", "--workers", "0"]
