"""nginx, from Debian's package: a reverse proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base

SETTINGS = """\
daemon off;
master_process off;
pid {directory}/pid;
error_log stderr notice;
events {{}}
http {{
  access_log {directory}/access.log;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  scgi_temp_path {directory}/scgi;
  uwsgi_temp_path {directory}/uwsgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {upstream}; proxy_http_version {version}; {more} }}
  }}
}}
"""


@contextmanager
def server(upstream: str, version: str, more: str = "") -> Iterator[str]:
    """Yield the URL of a new proxy that asks the upstream with this version of HTTP, and ``more`` settings.

    Without ``more`` it adds no header, and names the upstream's own address as the host.
    """
    program = program_path()
    with base.workspace() as directory:
        settings = directory / "nginx.conf"

        def command(port: int) -> base.Command:
            about = {"upstream": upstream, "version": version, "more": more}
            settings.write_text(SETTINGS.format(directory=directory, port=port, **about))
            return [program, "-e", "stderr", "-p", directory, "-c", settings]

        with base.running(command, directory, ready="OS: ") as port:
            yield f"http://127.0.0.1:{port}"


def program_path() -> Path:
    return Path(base.program("nginx", "nginx-light", service="nginx"))
