# docker build -f jobs/docker/cpu.Dockerfile -t upweight:cpu .
# docker run --rm -v "$PWD:/work" upweight:cpu train my.yaml
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
COPY docs ./docs
# torch first and alone, from its CPU index: whatever else depends on it then finds it in place.
RUN pip install --no-cache-dir -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-cache-dir -c constraints.txt ".[math,gguf]"

RUN useradd --create-home --uid 1000 upweight && mkdir /work && chown upweight /work
USER upweight
WORKDIR /work
ENTRYPOINT ["upweight"]
CMD ["--help"]
