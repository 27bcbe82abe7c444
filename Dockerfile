# Three images: `recorder` (the proxy alone), `bridle` (proxy, worker, trainer, embedded engine) and
# `vllm` (the same program beside a GPU build of vLLM). Each runs as a user of its own, who owns
# /data, /keys and /sessions and nothing else. The packages are one layer, Bridle's own code another.

FROM python:3.11-slim AS base
RUN useradd --uid 10001 --create-home bridle \
 && install --directory --owner=bridle --group=bridle /data /keys /sessions /app
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/home/bridle \
    MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=1048576
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./

FROM base AS recorder
RUN python3 requirements.py postgres harmony >requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps . && rm -rf /src/*
WORKDIR /app
USER bridle
CMD ["bridle", "proxy", "--help"]

FROM base AS bridle
# An index with PyTorch's builds without CUDA; without one, the default index's build is taken.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch
# What the example agents import; leave it empty for an image of your own agent.
ARG AGENT_PACKAGES="langchain langchain-openai"
RUN python3 requirements.py train postgres harmony >requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt ${AGENT_PACKAGES}
COPY . .
RUN pip install --no-cache-dir --no-deps . && cp -r examples deploy/init.sh /app && rm -rf /src/*
WORKDIR /app
USER bridle
CMD ["bridle", "--help"]

FROM vllm/vllm-openai:v0.32.0 AS vllm
# Bridle keeps to an environment of its own: vLLM's must stay as its makers tested it.
RUN useradd --uid 10001 --create-home bridle \
 && install --directory --owner=bridle --group=bridle /data /app \
 && python3 -m venv /opt/bridle
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python3 requirements.py >requirements.txt \
 && /opt/bridle/bin/pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY . .
RUN /opt/bridle/bin/pip install --no-cache-dir --no-deps . && rm -rf /src/*
WORKDIR /app
USER bridle
ENV PATH=/opt/bridle/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/bridle
ENTRYPOINT []
CMD ["bridle", "engine", "vllm", "--help"]
