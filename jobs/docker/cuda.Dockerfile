# docker build -f jobs/docker/cuda.Dockerfile -t upweight:cuda .
# docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" upweight:cuda train my.yaml
# The image has nvcc, which Triton and DeepSpeed compile with; torch brings its own CUDA libraries.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/upweight
ENV PATH=/opt/upweight/bin:$PATH
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
COPY docs ./docs
RUN pip install --no-cache-dir -c constraints.txt torch \
 && pip install --no-cache-dir -c constraints.txt ".[math,gguf,quant]"

# The image of Ubuntu has a user 1000 already.
RUN mkdir /work && chown 1000:1000 /work
USER 1000:1000
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["upweight"]
CMD ["--help"]
