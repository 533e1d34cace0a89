"""Defines the base class for sections, and setting types with plausible ranges."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=False, allow_inf_nan=False)


def refusal(reason: str) -> PydanticCustomError:
    """Return the error that a validator raises for `reason`."""
    return PydanticCustomError("refused", "{why}", {"why": reason})


def setting(default: Any, description: str, **limits: Any) -> Any:
    """Declare a setting with a default, a description for docs/settings.md, and value limits."""
    return Field(default, description=description, **limits)


def _a_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise refusal("must be a number, not true or false")
    return value


def _a_path(value: Any) -> Any:
    if isinstance(value, (str, Path)):
        text = os.fspath(value)
        if not text:
            raise refusal("is empty; name a file or directory, . for the working directory")
        if text.startswith("~") or "$" in text:
            raise refusal("~ and $NAME are not replaced in a config; write the whole path")
        if not text.isprintable():
            raise refusal("contains an unprintable character; rename the file")
        if len(text.encode()) > 4095 or any(len(part.encode()) > 255 for part in text.split("/")):
            raise refusal("is too long for a path (at most 4095 bytes, 255 between slashes); shorten it")
    return value


def _in_bytes(value: Any) -> Any:
    """Reject sizes in another unit, such as 8 and 8GB."""
    text = f"{value}GiB" if type(value) is int and 0 < value < 1024 else str(value)
    if match := re.fullmatch(r"([0-9]{1,4}) ?([KMGT])i?B", text):
        raise refusal(f"counts bytes; write {int(match[1]) << 10 * (1 + 'KMGT'.index(match[2]))} for {text}")
    return value


def _a_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        start = f"{parts.scheme}://{host_and_port(_a_host(parts.hostname or ''), parts.port)}".removesuffix(":None")
        valid = parts.scheme in ("http", "https") and parts.port != 0 and value.lower().startswith(start)
    except ValueError:  # urlsplit raises for an invalid port and half an IPv6 address
        valid = False
    if not valid:
        raise refusal("must be http://HOST:PORT, with a port of at most 65535 and without a user")
    if rest := value.rstrip("/")[len(start) :]:
        raise refusal(f"must be http://HOST:PORT; remove {rest}")
    return value.rstrip("/")


def _a_host(value: str) -> str:
    """Accept a name, an IPv4 or an IPv6 address; URLs have no form for an IPv6 address with a zone, fe80::1%eth0."""
    try:
        valid = re.fullmatch(r"\w(\.?[\w-])*\.?", value, re.ASCII) or not ipaddress.IPv6Address(value).scope_id
    except ValueError:
        valid = False
    if not valid:
        raise refusal("must be a host name or an IP address, without brackets, port and zone")
    return value


def host_and_port(host: str, port: int | None) -> str:
    """Return HOST:PORT for URLs, with an IPv6 address in brackets, e.g. [::1]:8000."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Int = Annotated[int, BeforeValidator(_a_number)]
Float = Annotated[float, BeforeValidator(_a_number)]
Count = Annotated[Int, Field(ge=1, le=10**9)]
CountFromZero = Annotated[Int, Field(ge=0, le=10**9)]  # 0 = none
Processes = Annotated[Int, Field(ge=1, le=100_000)]  # ranks, engines, nodes
ProcessesFromZero = Annotated[Int, Field(ge=0, le=100_000)]
Bytes = Annotated[Int, Field(ge=1, le=1 << 50), BeforeValidator(_in_bytes)]
BytesFromZero = Annotated[Int, Field(ge=0, le=1 << 50), BeforeValidator(_in_bytes)]
TokenId = Annotated[Int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[Float, Field(gt=0, le=10**7)]  # 10**7 s = 115 days
Positive = Annotated[Float, Field(gt=0, le=10**6)]
FilePath = Annotated[Path, BeforeValidator(_a_path)]
Url = Annotated[str, AfterValidator(_a_url)]
Host = Annotated[str, AfterValidator(_a_host)]
EnvironmentName = Annotated[str, Field(pattern=r"^[^=]+$")]
# Also accepts null, for which `Config` derives a value. Null remains only in a section outside a `Config`.
Derived = WrapValidator(lambda value, validate: None if value is None else validate(value))
