# An image that serves one network over HTTP, without the linker. After that of compile.Dockerfile:
#
#   docker build -f examples/docker/serve.Dockerfile --build-arg MODEL=examples/digits/digits.onnx -t digits .
#   docker run --rm --read-only --tmpfs /tmp:exec -p 8080:8080 digits
# hadolint ignore=DL3006
FROM bnncc AS compile
ARG MODEL
ARG TARGET=x86-64-v3
COPY ${MODEL} /model/
RUN bnncc compile /model/* --target "${TARGET}" -o /tmp/model.bnncc
# Running needs TVM's runtime only, which is a fiftieth of its compiler.
USER 0:0
RUN find /opt/bnncc -name libtvm_compiler.so -delete
USER 1000:1000

FROM python:3.12-slim
COPY --from=compile /opt/bnncc /opt/bnncc
COPY --from=compile /tmp/model.bnncc /srv/model.bnncc
COPY examples/docker/serve.py /srv/serve.py
ENV PATH=/opt/bnncc/bin:$PATH TVM_USE_RUNTIME_LIB=1
USER 1000:1000
EXPOSE 8080
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
CMD ["python", "/srv/serve.py", "/srv/model.bnncc", "8080"]
