# The api and the job runner, for Linux. Workers on Macs run natively: containers there have no Metal.
# With MLX's CPU build inside it can also run a worker, a slow one.
FROM python:3.12-slim

# MLX's CPU back end compiles kernels at run time.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY api api
COPY worker worker
COPY trainer trainer
RUN pip install --no-cache-dir --no-deps .
RUN useradd --create-home --uid 1000 parallm && mkdir /data && chown parallm /data
USER parallm
VOLUME /data
ENV PARALLM_DATA_DIR=/data PARALLM_ADAPTER_CACHE_DIR=/data/adapters
EXPOSE 8000
CMD ["mlx_parallm_serve", "--host", "0.0.0.0", "--port", "8000", "--workers", "0"]
