"""No secret in a run file: addresses that carry one are refused, and variables are named alone.

Run files lie in repositories, Prefect keeps them as parameters, and every manifest holds a copy.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic_core import PydanticCustomError

from tuneserve.data.files import is_data_file

REFUSED = "address_with_a_secret"
NO_VARIABLE = "no_name_of_a_variable"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names of query fields that sign a request or stand for a login: presigned URLs of S3
# (X-Amz-Signature), Google (X-Goog-Signature), Azure (sig), and access tokens. Whole words at the
# end: max_tokens and tokenizer say nothing secret.
_SECRET_FIELD = re.compile(
    r"(^|[-_.])(signature|credential|secret|password|passwd"
    r"|(access|auth|session|refresh|id)?[-_]?token|(access|api|secret|private|account)[-_]?key)$"
    r"|^(sig|key|auth|pwd)$",
    re.I,
)
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>|;`]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def without_secret(address: str) -> str:
    """The address as it is. A path or a hub id is never refused.

    Raises:
        PydanticCustomError: It carries a login or a signature; its text does not repeat them.
    """
    for part in address.split("::"):  # fsspec chains addresses so
        if "://" not in part:
            continue
        if found := _secret_in(part):
            raise PydanticCustomError(
                REFUSED,
                "the address carries {found}, and run files are stored and shown; write it without "
                "and give the credentials in the environment, as the service's own tools read them "
                "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...)",
                {"found": found},
            )
    return address


def word_without_secret(word: str) -> str:
    """A word of a command as it is: an address, an option with one, or a shell's script.

    Raises:
        PydanticCustomError: An address in it carries a login or a signature, and no variable.
    """
    for address in _ADDRESS.findall(word):
        if "$" not in address:
            without_secret(address)
    return word


def folder_here(path: str) -> str:
    """A path of this machine as it is.

    Raises:
        PydanticCustomError: It is an address with a secret.
        ValueError: It is another address; nothing of it is repeated.
    """
    if "://" in without_secret(path):
        raise ValueError(
            "takes a folder of this machine, not an address; store.remote takes one, to which "
            "every artifact is copied"
        )
    return path


def variable_name(value: Any) -> Any:
    """The name of an environment variable as it is, and None.

    Raises:
        PydanticCustomError: It is none: perhaps the secret itself, also where that is a number, so
            its text does not repeat it.
    """
    text = str(value)
    if value is not None and not (isinstance(value, str) and _VARIABLE.fullmatch(value)):
        raise PydanticCustomError(
            NO_VARIABLE,
            "holds {count} characters that are no name of an environment variable; write the name "
            "of the variable, such as TUNESERVE_KEY, and give the secret in the environment",
            {"count": len(text)},
        )
    return value


def _secret_in(address: str) -> str:
    """What the address should not carry, in words; empty when there is nothing."""
    try:
        parts = urlsplit(address)
        login, at, _ = parts.netloc.rpartition("@")
    except ValueError:  # such as a broken IPv6 address: whoever opens it says so
        return ""
    if ":" in login:
        return "a password"
    if at and parts.scheme in ("http", "https"):  # elsewhere a name alone is a user or a container
        return "a login"
    for name, value in parse_qsl(parts.query):
        if "/" in name:  # the rest of a path, behind a glob's question mark
            continue
        if name.lower() == "key" and ("/" in value or is_data_file(value)):  # an object's name
            continue
        if value and _SECRET_FIELD.search(_CAMEL.sub("_", name)):
            return f"a signature or token ({name}=...)"
    return ""
