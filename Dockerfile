# Four images: `recorder` (the proxy alone), `bridle` (proxy, trainer, embedded engine and the agents),
# `sandboxes` (that with docker's command line, for sessions in containers) and `vllm` (the same program
# beside a GPU build of vLLM). Each runs as a user of its own, who owns
# /data, /keys, /hub and /sessions and nothing else. An image holds an environment at /opt/bridle, built in
# stages of its own: its packages are one layer, Bridle's own code another.

FROM python:3.11-slim AS requirements
# What pyproject.toml requires, as files: the packages are built again when one of these changes, and
# not at each edit of pyproject.toml or of a pin that is not theirs.
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/image/requirements.py ./
# Extras of pyproject.toml; with `ray` the image can be a node of a Ray cluster.
ARG EXTRAS="train postgres"
RUN python3 requirements.py postgres >recorder.txt \
 && python3 requirements.py ${EXTRAS} >bridle.txt \
 && python3 requirements.py >vllm.txt \
 && grep '^torch==' constraints.txt >torch.txt

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY deploy/image/strip deploy/image/
# Wheels put there are taken instead of the index's.
COPY deploy/wheels /wheels

FROM build AS recorder-packages
COPY --from=requirements /src/recorder.txt ./
COPY constraints.txt ./
RUN python3 -m venv /opt/bridle \
 && /opt/bridle/bin/pip install --find-links /wheels --constraint constraints.txt --requirement recorder.txt \
 && /opt/bridle/bin/pip uninstall --yes pip setuptools \
 && deploy/image/strip /opt/bridle \
 && /opt/bridle/bin/python -c "import fastapi, numpy.testing, psycopg, sqlalchemy, tokenizers, uvicorn, uvloop"

FROM build AS packages
# PyTorch alone comes from this index, whose builds have no CUDA; empty: from the default one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /src/torch.txt ./
RUN python3 -m venv /opt/bridle \
 && /opt/bridle/bin/pip install --no-deps --find-links /wheels ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} \
      --requirement torch.txt
# What the example agents import; leave it empty for an image of your own agent.
ARG AGENT_PACKAGES="langchain langchain-openai"
COPY --from=requirements /src/bridle.txt ./
COPY constraints.txt ./
RUN /opt/bridle/bin/pip install --find-links /wheels --constraint constraints.txt --requirement bridle.txt \
      ${AGENT_PACKAGES} \
 && deploy/image/strip /opt/bridle \
 && /opt/bridle/bin/python -c "import torch.testing, transformers.models.llama, peft, pyarrow.parquet, pyarrow.dataset, matplotlib.pyplot"

FROM build AS code
RUN python3 -m venv /opt/bridle && /opt/bridle/bin/pip install hatchling
COPY . .
RUN /opt/bridle/bin/pip install --no-deps --no-build-isolation --prefix /code .

FROM python:3.11-slim AS base
RUN useradd --uid 10001 --create-home bridle \
 && install --directory --owner=bridle --group=bridle /app \
 && install --directory --owner=bridle --group=bridle --mode=0711 /sessions \
 && install --directory --owner=bridle --group=bridle --mode=0700 /data /keys /hub
ENV PATH=/opt/bridle/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/home/bridle \
    MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=4194304 MALLOC_MMAP_THRESHOLD_=4194304
WORKDIR /app

FROM base AS recorder
COPY --from=recorder-packages /opt/bridle /opt/bridle
COPY --from=code /code /opt/bridle
COPY deploy/image/healthy.sh /app/
USER 10001
CMD ["bridle", "proxy", "--help"]

FROM base AS bridle
COPY --from=packages /opt/bridle /opt/bridle
COPY --from=code /code /opt/bridle
COPY examples /app/examples
COPY deploy/image/healthy.sh deploy/image/init.sh deploy/image/train.sh /app/
USER 10001
CMD ["bridle", "--help"]

FROM build AS docker-cli
RUN apt-get update \
 && { apt-get install -y --no-install-recommends docker-cli || apt-get install -y --no-install-recommends docker.io; } \
 && rm -rf /var/lib/apt/lists/*

FROM bridle AS sandboxes
COPY --from=docker-cli /usr/bin/docker /usr/bin/docker

FROM vllm/vllm-openai:v0.32.0 AS vllm
# Bridle keeps to an environment of its own: vLLM's must stay as its makers tested it.
RUN useradd --uid 10001 --create-home bridle \
 && install --directory --owner=bridle --group=bridle --mode=0700 /data /keys /hub \
 && python3 -m venv /opt/bridle
WORKDIR /src
COPY --from=requirements /src/vllm.txt ./
COPY constraints.txt ./
RUN /opt/bridle/bin/pip install --no-cache-dir --constraint constraints.txt --requirement vllm.txt
COPY . .
RUN /opt/bridle/bin/pip install --no-cache-dir --no-deps . && rm -rf /src/*
WORKDIR /app
COPY deploy/image/healthy.sh /app/
USER 10001
ENV PATH=/opt/bridle/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/bridle
ENTRYPOINT []
CMD ["bridle", "engine", "vllm", "--help"]
