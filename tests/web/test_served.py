"""``relaybox web`` as it is run: a process, a port, signals, and a client on the other side of a socket."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.project import Project

TOKEN = "a-token-of-some-length"
USERS = f"[web.users.ann]\ntoken = '{TOKEN}'\nrole = 'operator'\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write("relaybox.toml", f"[destinations.a]\nsink = 'memory:'\n[web]\nport = 0\n{USERS}")
    project.run("migrate")
    return project


def port_of(project: Project) -> int:
    project.until(lambda: "http://" in project.read("out"))
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", project.read("out"))
    assert found, project.read("out")
    return int(found[1])


def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"authorization": f"Bearer {TOKEN}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_serves_and_stops_when_it_is_told_to(project: Project) -> None:
    with project.running("web") as process:
        port = port_of(project)
        assert ask(port, "GET", "/api/stats")[0] == 200
        assert ask(port, "GET", "/", accept="text/html")[0] == 200
        assert ask(port, "GET", "/api/stats", authorization="Bearer wrong-wrong")[0] == 401
        assert ask(port, "POST", "/api/destinations/a%2Fb/pause")[0] == 404
        assert ask(port, "GET", "/static/..%2f..%2fapp.py")[0] == 404
        with socket.create_connection(("127.0.0.1", port), 60) as raw:
            raw.sendall(b"POST /api/retry HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n")
            raw.sendall(f"authorization: Bearer {TOKEN}\r\n\r\n".encode())
            for _ in range(5):
                raw.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection(("127.0.0.1", port), 60) as live:
            live.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
            live.sendall(f"authorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert live.recv(1000).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, project.read("log")
    assert TOKEN not in project.read("log") + project.read("out")
    assert "Traceback" not in project.read("log")


def test_it_refuses_to_serve_everybody_without_users(project: Project) -> None:
    project.write("relaybox.toml", "[destinations.a]\nsink = 'memory:'\n")
    told = project.run("web", "--host", "0.0.0.0", status=2)
    assert "no users are configured; add a [web.users.NAME] table" in told
    told = project.run("web", "--port", "0", "--require-users", status=2)
    assert "--require-users, and no users are configured; add a [web.users.NAME] table" in told
    with project.running("web", "--port", "0"):
        assert ask(port_of(project), "GET", "/api/stats")[0] == 200


def test_a_port_that_is_taken_is_told(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        told = project.run("web", "--port", str(other.getsockname()[1]), status=2)
    assert "cannot be listened on" in told
    assert told.count("\n") == 1


def test_missing_tables_are_told_at_the_start(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert "migrate" in project.run("web", "--port", "0", status=2)


@pytest.mark.parametrize("package", ["starlette", "jinja2"])
def test_without_the_extra_one_line_says_what_to_install(package: str) -> None:
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == {package!r} else find(name, *a)\n"
        "from relaybox import Outbox\nfrom relaybox.web import api\n"
        "try:\n    api(Outbox('sqlite:///x.db'))\nexcept ImportError as error:\n    print(error)\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == f"{package} is not installed: pip install 'relaybox[web]'\n"
