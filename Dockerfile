# The router, without engines: docker build -t deltaserve . && docker run -v ./router.toml:/etc/deltaserve/router.toml deltaserve
FROM rust:1.95-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Versions of Debian's packages follow the pinned base image.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential cmake pkg-config python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/deltaserve \
 && /opt/deltaserve/bin/python -m pip install --no-cache-dir --require-hashes -r requirements.lock \
 && /opt/deltaserve/bin/python -m pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/deltaserve /opt/deltaserve
# The environment was made by Debian's Python; this image has its own at another path.
RUN ln -sf /usr/local/bin/python3.11 /opt/deltaserve/bin/python3 \
 && useradd --system --no-create-home --uid 10001 deltaserve
ENV PATH=/opt/deltaserve/bin:$PATH
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["deltaserve", "route"]
CMD ["--config", "/etc/deltaserve/router.toml", "--host", "0.0.0.0", "--port", "8000"]
