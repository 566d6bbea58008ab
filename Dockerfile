# syntax=docker/dockerfile:1
# Three images: `gateway` (the default), `engine` (vLLM with Mooncake, for NVIDIA GPUs) and
# `master` (the pool's master).
#   docker build --target gateway -t mooncake-gateway .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG MOONCAKE_VERSION=0.3.13.post1

FROM ${PYTHON_IMAGE} AS master
ARG MOONCAKE_VERSION
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    libcurl4 libibverbs1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
# The master needs no GPU; it must be of the engines' version.
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps \
    mooncake-transfer-engine-non-cuda==${MOONCAKE_VERSION} \
 && chmod a+x "$(python -c 'import mooncake; print(*mooncake.__path__)')/mooncake_master"
RUN useradd --system --uid 10001 mooncake
USER mooncake
EXPOSE 50051 9003
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9003/health', timeout=2)"]
ENTRYPOINT ["mooncake_master"]

FROM ${VLLM_IMAGE} AS engine
ARG MOONCAKE_VERSION
# vLLM's images are of CUDA 13; with one of CUDA 12 (tags that end in -cu129) build with
# --build-arg MOONCAKE_PACKAGE=mooncake-transfer-engine. Without dependencies: what it needs is
# vLLM's already, and must stay as vLLM has it.
ARG MOONCAKE_PACKAGE=mooncake-transfer-engine-cuda13
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    libcurl4 libibverbs1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
    ${MOONCAKE_PACKAGE}==${MOONCAKE_VERSION}
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /opt/gateway
COPY pyproject.toml README.md LICENSE ./
COPY requirements/gateway.lock requirements/gateway.lock
COPY gateway gateway
COPY policies policies
COPY connector connector
COPY loadtest loadtest
# The lock holds the development tools too; as constraints it pins what the gateway needs.
RUN /opt/gateway/bin/pip install --no-cache-dir --disable-pip-version-check \
    --constraint requirements/gateway.lock .

FROM ${PYTHON_IMAGE} AS gateway
RUN useradd --system --uid 10001 gateway
COPY --from=build /opt/gateway /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH PYTHONUNBUFFERED=1
USER gateway
# The data plane, and the admin listener, which has no authentication: publish it with care.
EXPOSE 8000 9100
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["mooncake-gateway"]
CMD ["serve", "-c", "/etc/mooncake-gateway/gateway.yaml"]
