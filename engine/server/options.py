"""What a user may set of the server, beside the engine's own arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError


@dataclass(kw_only=True)
class ServerOptions:
    """Arguments of `lawful serve`; names are vLLM's where it has them.

    host, port: where to listen; port 0 takes a free one.
    api_keys: keys of which one must be given as `Authorization: Bearer KEY`; none for an open server.
    served_model_names: the names that requests may use; default the model's own.  The first one is shown in answers.
    chat_template: a Jinja template used instead of the model's.
    trust_request_chat_template: let requests bring a template.  A template is a program: it may run for ever.
    max_queued_requests: requests that may wait for their first step before newcomers get 429.
    max_body_bytes: larger request bodies get 413.
    drain_timeout: seconds that SIGTERM gives unfinished requests.
    stall_timeout: seconds without a finished step, while there is work, until /health says 503.
    max_failed_steps: failed steps in a row after which the server gives up and exits with status 1.
    write_timeout: seconds after which a reader that takes nothing is cut off.
    enable_debug, enable_ui: GET /debug/scheduler; the page /ui, which needs the former.
    dump_dir: where the state is written when a step fails; None for nowhere.
    otlp_traces_endpoint: where OpenTelemetry spans go; None for no spans.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    max_queued_requests: int = 1024
    max_body_bytes: int = 8 << 20
    drain_timeout: float = 30.0
    stall_timeout: float = 60.0
    max_failed_steps: int = 5
    write_timeout: float = 120.0
    enable_debug: bool = False
    enable_ui: bool = False
    dump_dir: Path | None = field(default_factory=lambda: Path(".lawful"))
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("port", 0),
            ("max_queued_requests", 1),
            ("max_body_bytes", 1),
            ("drain_timeout", 0),
            ("stall_timeout", 0.01),
            ("max_failed_steps", 1),
            ("write_timeout", 0.01),
        ):
            value = getattr(self, name)
            if not low <= value < float("inf"):
                raise ConfigError(f"{name} is {value!r}; it must be a number of at least {low}")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; it must be at most 65535")
        if any(not key for key in self.api_keys):
            raise ConfigError("an api_key is empty; give one or leave it out")
        self.enable_debug = self.enable_debug or self.enable_ui
