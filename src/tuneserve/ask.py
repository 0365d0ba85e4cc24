"""Ask the live endpoint, as an application would: with the official OpenAI client."""

from __future__ import annotations

from typing import Any

from tuneserve.errors import InputError, ServerError


def ask_endpoint(
    question: str, *, name: str | None = None, max_tokens: int = 256
) -> dict[str, Any]:
    """One question, one answer, at temperature 0.

    Raises:
        InputError: Nothing serves, or several names do and none was chosen.
        ServerError: The endpoint did not answer.
    """
    import openai

    from tuneserve.release.control import client_settings, status

    names = status()["names"]
    serving = [n for n, entry in names.items() if entry["release"]]
    if name is None and len(serving) == 1:
        name = serving[0]
    if name not in serving:
        raise InputError(
            f"served name {name!r}: {'it does not serve' if name else 'say which'}",
            expected=f"one of {', '.join(serving) or '(nothing is serving)'}",
            hint="`tuneserve status` shows what serves; `tuneserve run RUN.yaml` starts it",
        )
    settings = client_settings(name)
    client = openai.OpenAI(**settings, max_retries=0, timeout=300)
    try:
        reply = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
        )
    except openai.OpenAIError as error:
        raise ServerError(
            f"{settings['base_url']} did not answer: {error}", hint="see `tuneserve logs`"
        ) from error
    choice = reply.choices[0]
    return {
        "question": question,
        "answer": choice.message.content,
        "finish_reason": choice.finish_reason,
        "model": name,
        "endpoint": settings["base_url"],
    }
