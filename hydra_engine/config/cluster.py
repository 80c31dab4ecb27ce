"""The configuration of several instances together: where requests go, how blocks move, when an instance is lost."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.config.fields import check_choices, opt, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Routing, leases and timeouts of several instances. Durations are in seconds."""

    router: str = opt(
        "least-loaded",
        "least-loaded: done soonest; affinity: the instance that has seen the prompt or picture, unless it is much "
        "busier; round-robin",
        choices=("least-loaded", "affinity", "round-robin"),
    )
    lease_s: float = opt(10.0, "blocks offered to another instance are withdrawn if it is silent for this long")
    suspect_s: float = opt(2.0, "an instance that is silent for this long gets no work; its requests move to others")
    fence_s: float = opt(10.0, "an instance that is silent for this long is killed and restarted")
    recovery_s: float = opt(5.0, "how long a request waits for an instance that can continue it before it fails")
    max_attempts: int = opt(3, "most attempts of a request whose instance dies")
    steal_decodes: bool = opt(
        True, "instances that encode and decode take over decodes of busy ones while they have nothing to encode"
    )
    prefetch_features: bool = opt(
        True, "an instance that prefills fetches features of pictures while their requests still wait for their turn"
    )
    early_kv: bool = opt(
        True, "KV leaves for the instance that decodes behind each chunk of a prefill, and not when all is computed"
    )
    transport: str = opt(
        "auto",
        "how blocks move between instances. auto: they are read where they are, or through pinned host memory where "
        "devices cannot map each other's memory; host: always through host memory",
        choices=("auto", "host"),
    )
    check_transfers: bool = opt(False, "compare checksums of all blocks that move between instances (slow)")

    def __post_init__(self) -> None:
        check_choices(self)
        positive(self, "lease_s", "suspect_s", "fence_s", "recovery_s", "max_attempts")
