# syntax=docker/dockerfile:1
# Two images from one build: `control-plane` (no torch) and `data-plane` (torch from the default package index, which may
# bring the large CUDA build; TORCH_INDEX_URL names another, for instance PyTorch's own index of CPU builds). Both run as user 10001 and need no write access but to /tmp and /dev/shm.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS control-plane
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/twinplane-*.whl
USER 10001:10001
EXPOSE 50051
ENTRYPOINT ["twinplane"]
CMD ["control-plane", "--host", "0.0.0.0"]

FROM control-plane AS data-plane
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL=
USER 0:0
# libgomp: torch's and our own OpenMP threads.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
RUN PIP_EXTRA_INDEX_URL="${TORCH_INDEX_URL}" pip install --no-cache-dir "torch==${TORCH_VERSION}"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "twinplane[data-plane] @ file://$(ls /wheels/twinplane-*.whl)"
USER 10001:10001
CMD ["data-plane"]
