# NOT BUILT by any test: it was only linted, for AMD's package server was not to be had. A worker for AMD GPUs with MIGraphX.
#   make dist && docker build --file deploy/images/rocm.Dockerfile --build-arg ROCM=7.1.1 --tag migraphx-farm/rocm:7.1.1 .
# Run it with the devices, and with the host's groups by number, since names mean other numbers here:
#   docker run --device /dev/kfd --device /dev/dri --group-add "$(getent group render | cut -d: -f3)" \
#     --group-add "$(getent group video | cut -d: -f3)" …
# MIGraphX's Python module is for the system's Python, so the base has to be a release for which AMD builds packages.
ARG BASE=ubuntu:24.04

FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG ROCM=7.1.1
ARG CODENAME=noble
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="migraphx-farm worker" \
    org.opencontainers.image.description="Worker of a compile farm, for AMD GPUs with ROCm ${ROCM} (this image was not tested)" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
# The packages of the base's own release move; those of ROCm are fixed by the release in the path.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates curl gpg python3 python3-venv \
    && curl --fail --silent --show-error https://repo.radeon.com/rocm/rocm.gpg.key | gpg --dearmor > /usr/share/keyrings/rocm.gpg \
    && echo "deb [signed-by=/usr/share/keyrings/rocm.gpg] https://repo.radeon.com/rocm/apt/${ROCM} ${CODENAME} main" \
        > /etc/apt/sources.list.d/rocm.list \
    && printf 'Package: *\nPin: release o=repo.radeon.com\nPin-Priority: 600\n' > /etc/apt/preferences.d/rocm \
    && apt-get update \
    && apt-get install --yes --no-install-recommends migraphx migraphx-dev miopen-hip rocminfo amd-smi-lib \
    && rm -rf /var/lib/apt/lists/*
COPY dist/ deploy/images/install.sh deploy/images/sbom.py /dist/
RUN /dist/install.sh worker \
    && rm -rf /dist \
    && groupadd --gid 10001 farm && useradd --uid 10001 --gid 10001 --home-dir /var/lib/farm --shell /usr/sbin/nologin farm \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/farm
ENV PATH=/opt/farm/bin:$PATH HOME=/var/lib/farm FARM_DATA_DIR=/var/lib/farm FARM_LOG_FORMAT=json PYTHONDONTWRITEBYTECODE=1 \
    FARM_HEALTH_PORT=8081 FARM_MIGRAPHX_PYTHON=/opt/farm/bin/python FARM_MIGRAPHX_PATH=/opt/rocm/lib
USER 10001:10001
WORKDIR /var/lib/farm
EXPOSE 8081
HEALTHCHECK --interval=10s --timeout=20s --start-period=120s \
    CMD ["/opt/farm/bin/python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8081/live', timeout=10)"]
ENTRYPOINT ["/opt/farm/bin/farm"]
CMD ["worker"]
