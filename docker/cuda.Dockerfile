# vLLM with vllm-dllm on NVIDIA GPUs. From the top folder of a clone:
#
#     docker build -f docker/cuda.Dockerfile -t vllm-dllm:cuda .
#     docker run --rm --gpus all --ipc host -p 8000:8000 \
#         -v ~/.cache/huggingface:/root/.cache/huggingface \
#         vllm-dllm:cuda google/diffusiongemma-26B-A4B-it
#
# Checked by hadolint and by tests/unit/packaging; nobody has built it yet.
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# vLLM's own image: its entry point is `vllm serve`, which loads the extension.
FROM vllm/vllm-openai:v0.32.0
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/vllm_dllm-*.whl
EXPOSE 8000
