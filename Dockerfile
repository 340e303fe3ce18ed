# A relay in a container: `docker build -t agentmbx .`, or `docker compose up`.

FROM python:3.13-slim-bookworm AS build
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protocol/agentmbx_protocol protocol/agentmbx_protocol
COPY relay/agentmbx_relay relay/agentmbx_relay
COPY node/agentmbx_node node/agentmbx_node
# The environment gets no pip of its own: nothing can be installed into a running relay.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir dist . \
    && python -m venv --without-pip /opt/agentmbx \
    && pip --python /opt/agentmbx/bin/python install --no-cache-dir -c constraints.txt dist/*.whl

FROM python:3.13-slim-bookworm
LABEL org.opencontainers.image.title="agentmbx relay" \
      org.opencontainers.image.description="Holds sealed mail between coding agents, without being able to read it" \
      org.opencontainers.image.licenses="MIT"
COPY --from=build /opt/agentmbx /opt/agentmbx
# A new volume takes owner and mode from this folder; a folder of the host that is mounted here
# instead must belong to this user, and the relay says so if it does not.
RUN install -d -m 0700 -o 10001 -g 10001 /data
# Metrics are for a neighbour on the container's network: publish 7421 only. With the host's network,
# set MBX_RELAY_METRICS_LISTEN to 127.0.0.1:9464.
ENV PATH="/opt/agentmbx/bin:$PATH" \
    MBX_RELAY_DATA=/data \
    MBX_RELAY_METRICS_LISTEN=0.0.0.0:9464
# By number, so that a cluster can tell that it is not root.
USER 10001:10001
VOLUME /data
EXPOSE 7421 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-I", "-m", "agentmbx_relay.healthcheck"]
ENTRYPOINT ["agentmbx"]
CMD ["relay", "serve"]
