# CPU:  docker build -t contaccum .
# GPU:  docker build -t contaccum --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 --build-arg FAISS=faiss-gpu-cu12 .
# Use:  docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" -v contaccum-cache:/cache contaccum doctor
#       (GPU: add --gpus all --ipc host)
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG FAISS=faiss-cpu
# The newest versions that the index has for the chosen device.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch && pip install --no-cache-dir "$FAISS"

COPY pyproject.toml setup.py README.md LICENSE /source/
COPY contaccum /source/contaccum
RUN pip install --no-cache-dir "/source[study,tensorboard]" && rm -r /source

# Any user may write to the folders, because `--user` can be any id.
RUN useradd --create-home --uid 1000 contaccum && mkdir /work /cache && chown contaccum /work /cache && chmod 1777 /work /cache
USER 1000
WORKDIR /work
ENV HOME=/cache CONTACCUM_CACHE=/cache/contaccum HF_HOME=/cache/huggingface
ENTRYPOINT ["contaccum"]
CMD ["--help"]
