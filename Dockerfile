# docker build -t trireme . && docker run --rm --gpus all -v "$PWD:/work" trireme --demo
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,target=/source,rw pip install --no-cache-dir /source
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["trireme"]
