"""What lies behind a URL: the file system that fsspec has for it, and what is wrong when there is none.

Knows nothing of jobs, and imports fsspec and a store's client only when a URL is opened.
"""

import errno
import re
import sys
from dataclasses import dataclass
from typing import Any

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?(.*)")
_CLIENTS = {"s3": "s3fs is not installed; pip install s3fs"}


class Unreachable(Exception):
    """A store that cannot be used; the message says why and what to do, to be read after the URL's name."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file system; `path` is as its methods take it."""

    filesystem: Any
    protocol: str
    path: str

    def url(self, path: str) -> str:
        """What a user calls `path` in this file system."""
        return f"{self.protocol}://{path.removeprefix('/')}"


def is_url(text: str) -> bool:
    """Whether it names something behind a protocol; also with one slash, as a URL that went through a path has."""
    return _URL.fullmatch(text) is not None


def tidy(url: str) -> str:
    """The same URL with two slashes behind the protocol and none at the end."""
    found = _URL.fullmatch(url)
    assert found is not None, url
    return f"{found[1].lower()}://{found[2].strip('/')}"


def locate(url: str) -> Location:
    """Where `url` points to; asks nobody yet. Raises Unreachable: nothing that is installed reads such URLs."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        # What was listed a while ago decides nothing.
        filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise Unreachable(_CLIENTS.get(protocol, f"needs a package that is missing: {error}")) from error
    except ValueError as error:
        raise Unreachable(f"{str(error).strip()}; give a path or a URL such as s3://bucket/name") from error
    return Location(filesystem, protocol, str(path))


def failures() -> tuple[type[Exception], ...]:
    """What a client raises when a store cannot be reached, or refuses."""
    # A client that was not imported has raised nothing.
    client = sys.modules.get("botocore.exceptions")
    return (OSError,) if client is None else (OSError, client.BotoCoreError)


def explain(error: Exception) -> str:
    """Why a store refused, in a few words with what to do."""
    said = str(error).strip().partition("\n")[0].rstrip(".")
    name = type(error).__name__
    if "Credentials" in name:
        return f"{said}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if "bucket does not exist" in said:
        return f"{said}; check its name, or create it"
    if isinstance(error, PermissionError):
        return f"{said}; check the permissions of these credentials"
    if isinstance(error, FileNotFoundError):
        return "no such object"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{said}; free some space"
    return f"{said}; check the network and AWS_ENDPOINT_URL"
