"""Where the services of a pod find their files, and where other pods reach them. Pure."""

from __future__ import annotations

from prfaas.config.host import NodeTimeouts
from prfaas.launch.kubernetes.options import RenderOptions
from prfaas.launch.services.builders import HostFile
from prfaas.launch.services.hosts import EngineSpec, Host
from prfaas.launch.services.places import HostPlace, credentials_in
from prfaas.security.tls import SERVICE_NAME

NAMESPACE = "prfaas"
CONFIG, SECRETS, RUN, MODELS = "/etc/prfaas/config", "/etc/prfaas/secrets", "/run/prfaas", "/models"
SSD, TMP = "/var/lib/prfaas/ssd", "/tmp"
DATA_PORT, KVD_PORT, NODE_PORT, GATEWAY_PORT = 7400, 7401, 8000, 8080
# Secrets that Kubernetes has replaced arrive in a pod after about a minute.
CREDENTIALS_POLL_S = 5.0
KVD_WAIT_S = 120.0  # the containers of a pod start together
CREDENTIALS = credentials_in(f"{SECRETS}/", SERVICE_NAME)
# Kubernetes replaces $(NAME) in a command line by the variable of the container.
POD_NAME, POD_ADDRESS = "$(POD_NAME)", "$(POD_ADDRESS)"
HOST_FILE = HostFile(
    f"{CONFIG}/host.toml",
    options=("kvd.node", "kvd.advertise", "node.advertise", "node.kvd_url"),
    heading="# The kvd and the node of every pod of the StatefulSet. The options of the commands\n"
    "# give the pod's name and address. docs/configuration.md has every key.\n\n",
)
LEAVING_FILE = f"{RUN}/leaving"  # a vLLM server that is about to stop says so
_MIDDLEWARE = "prfaas.integrations.vllm.member_access.MemberAccess"
_VLLM_ENVIRONMENT = {
    "PRFAAS_MEMBER_KEY_FILE": CREDENTIALS.member_key,
    "PRFAAS_METRICS_KEY_FILE": CREDENTIALS.metrics_key,
    "PRFAAS_LEAVING_FILE": LEAVING_FILE,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
MEMBERS_SERVICE = "gateway-members"  # also leads to gateways that are not ready yet


def pod_place(host: Host, engines: EngineSpec, options: RenderOptions) -> HostPlace:
    """Nodes take the time of a poll to leave, and requests the time of the default to finish."""
    return HostPlace(
        name=POD_NAME,
        socket=f"{RUN}/kvd.sock",
        events=f"{RUN}/vllm.events",
        kvd_listen=f"0.0.0.0:{DATA_PORT}",
        kvd_http=f"0.0.0.0:{KVD_PORT}",
        advertise=POD_ADDRESS,
        kvd_url=f"https://{POD_ADDRESS}:{KVD_PORT}",
        node_host="0.0.0.0",
        node_port=NODE_PORT,
        node_url=f"https://{POD_ADDRESS}:{NODE_PORT}",
        advertise_node=True,
        ssd=SSD,
        gateways=tuple(gateway_urls(host.cluster, options).values()),
        credentials=CREDENTIALS,
        credentials_poll_s=CREDENTIALS_POLL_S,
        node_timeouts=NodeTimeouts(kvd_wait_s=KVD_WAIT_S),
        engine_options=_vllm_options(host) if engines.kind == "vllm" else (),
        engine_environment=_VLLM_ENVIRONMENT if engines.kind == "vllm" else {},
    )


def gateway_urls(cluster: str, options: RenderOptions) -> dict[str, str]:
    """The gateways that the kvds of a cluster register with, by PD cluster. That of the own cluster
    is reached without leaving it."""
    own = f"https://{MEMBERS_SERVICE}.{NAMESPACE}.svc.cluster.local:{GATEWAY_PORT}"
    return {
        home: own if home == cluster else f"https://{address}"
        for home, address in options.gateway_addresses.items()
    }


def _vllm_options(host: Host) -> tuple[str, ...]:
    """Keys and certificates that can be replaced while the server runs."""
    parallel = ("--tensor-parallel-size", str(host.gpus)) if host.gpus > 1 else ()
    return ("--middleware", _MIDDLEWARE, "--enable-ssl-refresh", *parallel)
