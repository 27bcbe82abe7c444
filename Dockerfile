# Two images: `bridle` (proxy, worker, trainer, embedded engine) and `vllm` (the same program beside
# a GPU build of vLLM). Both run as a user of their own, who owns /data and /sessions and nothing
# else. The policy is mounted at /policy.

FROM python:3.11-slim AS bridle
ARG EXTRAS=train,postgres
# What the example agent imports; leave it empty for an image of your own agent.
ARG AGENT_PACKAGES="langchain langchain-openai"
RUN useradd --uid 10001 --create-home bridle \
 && install --directory --owner=bridle --group=bridle /data /sessions /app
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" ${AGENT_PACKAGES} \
 && mv examples /app/examples && rm -rf /src
WORKDIR /app
USER bridle
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/home/bridle \
    MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=1048576
CMD ["bridle", "--help"]

FROM vllm/vllm-openai:v0.32.0 AS vllm
# Bridle keeps to an environment of its own: vLLM's must stay as its makers tested it.
RUN useradd --uid 10001 --create-home bridle \
 && install --directory --owner=bridle --group=bridle /data /app \
 && python3 -m venv /opt/bridle
WORKDIR /src
COPY . .
RUN /opt/bridle/bin/pip install --no-cache-dir --constraint constraints.txt . && rm -rf /src
WORKDIR /app
USER bridle
ENV PATH=/opt/bridle/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/bridle
ENTRYPOINT []
CMD ["bridle", "engine", "vllm", "--help"]
