"""Ask the live endpoint, as an application would: with the official OpenAI client."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from tuneserve.errors import InputError, ServerError

if TYPE_CHECKING:
    import openai


def ask_endpoint(
    question: str, *, name: str | None = None, max_tokens: int = 256
) -> dict[str, Any]:
    """One question, one answer, at temperature 0.

    Raises:
        InputError: Nothing serves under that name, or the server refuses the request as asked.
        ServerError: The endpoint did not answer, or is starting.
    """
    if not question.strip():
        raise InputError(
            "the question is empty",
            expected="a question",
            hint="`tuneserve ask 'How long is the warranty?'`",
        )
    import openai

    from tuneserve.release.control import status
    from tuneserve.release.keys import read_keys
    from tuneserve.release.layout import layout

    found = status()
    name = name or found["default"]
    serving = sorted(n for n, entry in found["names"].items() if entry["state"] == "serving")
    entry = found["names"].get(name, {})
    if entry.get("state") == "down" and entry["release"]:
        raise InputError(
            f"served name {name!r} is down",
            expected="a name that serves",
            hint="`tuneserve up` starts it",
        )
    if entry.get("state") == "restarting":
        raise ServerError(
            f"the server of {name!r} is starting",
            expected="a server that is up",
            hint="ask again in a minute; `tuneserve logs` shows how far it is, or why it ended",
        )
    if name not in serving:
        raise InputError(
            f"served name {name!r} does not serve" if name else "nothing is serving",
            expected=f"one of {', '.join(serving)}" if serving else "a released model",
            hint="`tuneserve status` shows what serves; `tuneserve run RUN.yaml` starts it",
        )
    endpoint = found["endpoint"]
    if endpoint is None and found["gateway"] == "unseen":
        raise ServerError(
            "the gateway's state cannot be seen from here",
            expected="the PID and network namespaces of the servers",
            hint="ask in the serving container, or send the request to the gateway's address",
        )
    if endpoint is None:  # the client would take another one's, and our key with it
        raise ServerError(
            "the gateway does not answer",
            expected="a gateway that listens where the state says",
            hint="`tuneserve up` starts it, or says why it does not",
        )
    if name != found["default"]:
        endpoint = f"{endpoint.removesuffix('/v1')}/{name}/v1"
    # On this machine the key file is ours to read: no need to type a key here.
    known = read_keys(layout().keys)
    trusted = found.get("tls_root")
    client = openai.OpenAI(
        base_url=endpoint,
        api_key=next(iter(known.values()), "none"),
        max_retries=0,
        timeout=300,
        http_client=openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=trusted))
        if trusted
        else None,
    )
    try:
        reply = client.chat.completions.create(
            model=str(name),
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
        )
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        raise InputError(
            f"{endpoint} refuses the request: {_said(error)}",
            expected="a question and a length that fit into what the model serves",
            hint="ask something shorter, or with a smaller --max-tokens",
        ) from error
    except openai.AuthenticationError as error:
        raise InputError(
            f"{endpoint} asks for an API key, and {'no key is left' if not known else 'not ours'}",
            expected="a key of this TUNESERVE_HOME",
            hint="`tuneserve keys add NAME` makes one, which works at once",
        ) from error
    except openai.OpenAIError as error:
        raise ServerError(
            f"{endpoint} did not answer: {error}",
            expected="an endpoint that serves a model",
            hint="see `tuneserve logs`",
        ) from error
    choice = reply.choices[0]
    return {
        "question": question,
        "answer": choice.message.content,
        "finish_reason": choice.finish_reason,
        "tokens": reply.usage.completion_tokens if reply.usage else None,
        "model": name,
        "endpoint": endpoint,
    }


def _said(error: openai.APIStatusError) -> str:
    """The server's own words, without the envelope."""
    body = error.body
    return str(body["message"]) if isinstance(body, dict) and "message" in body else str(error)
