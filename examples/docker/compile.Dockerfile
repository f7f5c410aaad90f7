# An image that compiles models, for every target that needs nothing but a linker. At the top of a checkout:
#
#   docker build -f examples/docker/compile.Dockerfile -t bnncc .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/models" bnncc compile model.onnx --target x86-64-v3
FROM python:3.12-slim AS install
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY bnncc bnncc
COPY schedules schedules
COPY targets targets
COPY topi_binary topi_binary
COPY tune_logs tune_logs
# Versions are those that pyproject.toml allows.
RUN python -m venv /opt/bnncc && /opt/bnncc/bin/pip install --no-cache-dir .

FROM python:3.12-slim
# Any version of the linker does.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends lld \
    && rm -rf /var/lib/apt/lists/*
COPY --from=install /opt/bnncc /opt/bnncc
# Any user may compile, also one without a home.
ENV PATH=/opt/bnncc/bin:$PATH XDG_CACHE_HOME=/tmp/cache
WORKDIR /models
USER 1000:1000
ENTRYPOINT ["bnncc"]
CMD ["--help"]
