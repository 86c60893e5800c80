"""A store that speaks S3's protocol on loopback, whose requests a test may spoil."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Environ = dict[str, Any]
Application = Callable[[Environ, Any], Iterable[bytes]]
Spoil = Callable[[Environ, Application, Any], Iterable[bytes]]
KEYS = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class _Silent(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Says nothing."""


@dataclass
class S3:
    """A running store. `requests` are the methods and paths that came; `spoil` stands before the store."""

    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    spoil: Spoil | None = None

    @property
    def environment(self) -> dict[str, str]:
        return KEYS | {"AWS_ENDPOINT_URL": self.endpoint}

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=KEYS["AWS_DEFAULT_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=bucket, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", [])]

    def read(self, bucket: str, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def write(self, bucket: str, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def files(self, bucket: str, out: str) -> dict[str, bytes]:
        """The files of a result by name."""
        return {key.rpartition("/")[2]: self.read(bucket, key) for key in self.keys(bucket, out + "/part-")}


@contextmanager
def running() -> Iterator[S3]:
    """A store until the block ends. Requests are served one after the other, so that conditions are as in S3 atomic."""
    store, turn = S3(), threading.Lock()
    backend = DomainDispatcherApplication(create_backend_app)

    def application(environ: Environ, start: Any) -> Iterable[bytes]:
        with turn:
            store.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            if store.spoil is not None:
                return list(store.spoil(environ, backend, start))
            return list(backend(environ, start))

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Silent)
    store.endpoint = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def without_conditions(environ: Environ, application: Application, start: Any) -> Iterable[bytes]:
    """As a store that does not know conditional writes."""
    environ.pop("HTTP_IF_NONE_MATCH", None)
    return application(environ, start)
