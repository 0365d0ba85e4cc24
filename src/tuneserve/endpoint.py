"""The endpoint's section of the run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tuneserve.credentials import variable_name, without_secret
from tuneserve.section import Section


class ServeSection(Section):
    """The endpoint."""

    name: str = Field(
        "default", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="Served name; also /NAME/v1."
    )
    host: Annotated[str, AfterValidator(without_secret)] = Field(
        "127.0.0.1",
        description="Address the gateway listens on, or a host name of this machine; other than "
        "loopback needs a key.",
    )
    port: int = Field(8080, ge=1, le=65535, description="Port of the gateway.")
    api_key_env: Annotated[str | None, BeforeValidator(variable_name)] = Field(
        None,
        description="Environment variable that holds the API key clients must send; the "
        "key itself never here.",
    )
    tls: Literal["auto", "internal"] = Field(
        "auto",
        description="auto: HTTPS with a certificate from a public authority when host is a public "
        "host name; internal: HTTPS for any host, signed by an authority of the gateway's own.",
    )
    tls_certificate: Annotated[str, AfterValidator(without_secret)] | None = Field(
        None, description="HTTPS with this certificate (PEM file, chain included) instead."
    )
    tls_key: Annotated[str, AfterValidator(without_secret)] | None = Field(
        None, description="Private key of tls_certificate (PEM file)."
    )
    max_model_len: int | None = Field(
        None,
        ge=16,
        description="Longest prompt plus answer in tokens; unset: what the plan and model allow.",
    )
    rollout: Literal["blue_green", "hold"] = Field(
        "blue_green",
        description="Start the candidate beside the champion, or stop first while requests wait.",
    )
    keep_warm: bool = Field(
        False,
        description="Keep the replaced release running until the next candidate starts: a rollback "
        "is instant, and takes memory for both.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="GPUs of this machine that one server is spread over (vLLM's tensor "
        "parallelism); heads, KV heads and 4-bit groups must divide by it.",
    )
    while_training: Literal["share", "stop"] = Field(
        "share",
        description="What is served here while a run trains, evaluates and quantizes: share the "
        "card, or stop (downtime) and start again before the release and when the run fails.",
    )
    max_concurrent_chats: int = Field(
        8, ge=1, description="Chats of full length that the KV cache has room for."
    )
    ready_timeout_seconds: int = Field(
        900, ge=10, description="How long a server may take to become ready."
    )
    drain_timeout_seconds: int = Field(
        120, ge=0, description="How long running answers may take at a switch."
    )
    hold_seconds: int | None = Field(
        None,
        ge=1,
        description="How long the gateway holds a request while no server answers, as at a switch "
        "by hold; unset: drain_timeout_seconds and ready_timeout_seconds together.",
    )
    temperature: float | None = Field(
        None, ge=0, description="Default sampling temperature; unset: the model's own."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Default nucleus mass; unset: the model's own."
    )
    top_k: int | None = Field(
        None,
        ge=0,
        description="Default number of likeliest tokens to draw from, 0 for all; unset: the "
        "model's own.",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Default least probability of a token, as a share of the likeliest one's; "
        "unset: the model's own.",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        description="Default penalty of tokens that were there before, 1 for none; unset: the "
        "model's own.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest answer in tokens, also of requests that ask for more; unset: the "
        "model's own max_new_tokens, else what max_model_len leaves.",
    )
    tool_parser: str | None = Field(
        None, description="vLLM tool-call parser, needed when the data has tool calls."
    )

    @property
    def longest_hold_seconds(self) -> int:
        """`hold_seconds`, or what a switch by `hold` may take at most before it is given up."""
        return self.hold_seconds or self.drain_timeout_seconds + self.ready_timeout_seconds

    @model_validator(mode="after")
    def _fits_together(self) -> ServeSection:
        if self.keep_warm and self.rollout == "hold":
            raise ValueError("keep_warm needs rollout: blue_green; hold stops the champion first")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        return self
