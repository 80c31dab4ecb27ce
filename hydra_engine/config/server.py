"""The configuration of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hydra_engine.config.fields import LOG_FORMATS, not_negative, opt, positive
from hydra_engine.config.values import check_values
from hydra_engine.errors import ConfigError

MAX_PORT = (1 << 16) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = opt("127.0.0.1", "address to listen on; other machines can reach any address but loopback")
    port: int = opt(8000, "port to listen on; 0: a free one")
    served_model_name: str | None = opt(None, "model name that the API shows and accepts", unset="MODEL")
    api_key: tuple[str, ...] = opt(
        (),
        "accepted API keys (also HYDRA_API_KEY, several with commas); without any, no key is needed. "
        "Others on this machine can read a command line",
        secret=True,
    )
    api_key_file: str | None = opt(
        None,
        "file of API keys, KEY or NAME:KEY a line, # for comments; read again on SIGHUP (also HYDRA_API_KEY_FILE)",
        kind="file",
    )
    admin_key: str | None = opt(
        None,
        "the key of the /admin routes (also HYDRA_ADMIN_KEY), which API keys do not open",
        unset="no /admin",
        secret=True,
    )
    share_caches: bool = opt(False, "share cached prompts and pictures between API keys")
    max_requests_per_client: int = opt(
        0, "most unfinished answers of one API key (without keys: of one address); above it 429; 0: no limit"
    )
    requests_per_minute: int = opt(
        0, "most requests a minute of one API key (without keys: of one address); above it 429; 0: no limit"
    )
    shutdown_timeout_s: float = opt(
        30.0, "time that running requests have to finish after SIGTERM", flag="shutdown-timeout"
    )
    max_body_bytes: int = opt(64 << 20, "largest request body")
    max_inflight_body_bytes: int = opt(
        1 << 30,
        "most bytes of all request bodies in progress; one API key (without keys: one address) may hold as much as it "
        "leaves free; above it 503",
    )
    max_logprob_entries: int = opt(
        1 << 20,
        "most log probabilities in one answer: answers x tokens x (1 + candidates), and those of the prompt; above it "
        "400",
    )
    body_timeout_s: float = opt(
        30.0, "time to receive a request body; also refused if slower than 1024 bytes a second for a sixth of that time"
    )
    keepalive_s: float = opt(
        15.0,
        "interval of comment lines that keep idle streams open",
        flag="sse-keep-alive",
        aliases=("sse-keep-alive-interval",),
    )
    allow_origins: tuple[str, ...] = opt((), "CORS origins", unset="none", aliases=("allowed-origins",))
    enable_log_requests: bool = opt(False, "one log line per request")
    disable_log_stats: bool = opt(False, "do not log the load every ten seconds")
    access_log: str = opt(
        "off",
        "one line per HTTP request (except health probes) with sizes, times, counts and the client: text or "
        "json, at any log level",
        choices=("off", *LOG_FORMATS),
    )
    otlp_endpoint: str | None = opt(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP, such as http://127.0.0.1:4318): a trace per request with a "
        "span per stage; needs OpenTelemetry's packages (extra otel)",
    )
    record_workload: str | None = opt(
        None,
        "file that gets a line for each request that ended, with sizes and times and no contents; a file that is there "
        "is kept as FILE.old",
        kind="file",
    )
    server_timing: bool = opt(
        False, "a Server-Timing header on every answer that is not streamed; reveals the load to clients"
    )
    tool_parser: str = opt(
        "auto",
        "format of the model's tool calls: hermes (<tool_call> and JSON), qwen3_coder or qwen3_xml (<tool_call> and "
        "<function=NAME>), json (a bare object), none; auto: by the chat template",
        choices=("auto", "hermes", "qwen3_coder", "qwen3_xml", "json", "none"),
        aliases=("tool-call-parser",),
    )
    reasoning_parser: str = opt(
        "auto",
        "how the model marks its reasoning, which is given apart from the answer: qwen3 or deepseek_v3 (<think> and "
        "</think>), deepseek_r1 (the same; a text without marks is reasoning), none (it stays in the text); auto: by "
        "the chat template",
        choices=("auto", "qwen3", "deepseek_r1", "deepseek_v3", "none"),
    )
    ui: bool = opt(True, "the web page at /: chat, timelines and a live view of the instances")

    def __post_init__(self) -> None:
        check_values(self)
        if self.otlp_endpoint is not None:
            _check_endpoint(self.otlp_endpoint)
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port must be between 0, which takes a free one, and {MAX_PORT}", param="port")
        positive(self, "max_body_bytes", "body_timeout_s", "keepalive_s", "max_logprob_entries")
        not_negative(self, "max_requests_per_client", "requests_per_minute", "shutdown_timeout_s")
        if self.max_inflight_body_bytes < 2 * self.max_body_bytes:
            raise ConfigError(
                "max_inflight_body_bytes must be at least twice max_body_bytes: one client gets half of it",
                param="max_inflight_body_bytes",
            )


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # an invalid port or address
        valid = False
    if not valid:
        raise ConfigError("otlp_endpoint must be a URL such as http://127.0.0.1:4318", param="otlp_endpoint")
    if "@" in parts.netloc:
        raise ConfigError(
            "otlp_endpoint must not contain a password; use OTEL_EXPORTER_OTLP_HEADERS", param="otlp_endpoint"
        )
