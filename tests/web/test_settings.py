"""The ``[web]`` table: what it takes, and what it says of what it does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relaybox.core.settings import Settings
from relaybox.errors import ConfigError
from relaybox.web.settings import WebSettings, is_loopback
from tests.integration.project import Project

TOKEN = "never-to-be-shown"


def test_the_file_has_it_as_a_table_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "relaybox.toml"
    path.write_text(
        "[web]\nhost = '0.0.0.0'\nport = 80\nhosts = ['Outbox.example.org']\nredact = ['customer.email']\n"
        f"[web.users.ann]\ntoken = '{TOKEN}'\nrole = 'operator'\n[web.users.eve]\ntoken = 'env:EVE'\n"
    )
    web = WebSettings.of(Settings.load(path, {}).web)
    assert (web.host, web.port) == ("0.0.0.0", 80)
    assert (web.hosts, web.redact) == (("outbox.example.org",), ("customer.email",))
    assert [(user.name, user.role) for user in web.users] == [("ann", "operator"), ("eve", "viewer")]
    assert TOKEN not in repr(web) + repr(web.users) + repr(Settings.load(path, {}))
    assert WebSettings.of({"port": 1}, port=2).port == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"prot": 80}, "did you mean 'port'"),
        ({"token": TOKEN}, r"write it in a \[web.users.NAME\] table"),
        ({"host": ""}, "web: host = ''"),
        ({"host": "http://a"}, "web: host"),
        ({"host": 5}, "web: host = 5"),
        ({"port": 65_536}, "web: port = 65536"),
        ({"port": "80"}, "web: port"),
        ({"port": True}, "web: port = True"),
        ({"hosts": "a.example"}, "write a list"),
        ({"hosts": ["https://a.example"]}, "without scheme and port"),
        ({"hosts": ["a.example:80"]}, "without scheme and port"),
        ({"redact": ["a..b"]}, "web: redact"),
        ({"redact": [5]}, "web: redact"),
        ({"secret": ""}, "web: secret is empty"),
        ({"users": []}, r"\[web.users.NAME\] table"),
        ({"users": {"ann": {}}}, "'ann' has no token; .* 'env:ANN_TOKEN'"),
        ({"users": {"ann": TOKEN}}, "write a table"),
        ({"users": {"ann": {"password": TOKEN}}}, "did you mean 'token'"),
        ({"users": {"ann": {"token": TOKEN, "role": "admin"}}}, "role = 'admin': choose 'viewer' or 'oper"),
        ({"users": {"ann": {"token": 5}}}, "token is of type int"),
        ({"users": {"a\nb": {"token": TOKEN}}}, "control characters"),
        *(
            ({"users": {name: {"token": TOKEN}}}, "the audit calls others so; choose another name")
            for name in ("local", "Unknown", "relay")
        ),
    ],
)
def test_what_is_wrong_is_reported_without_what_is_secret(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        WebSettings.of(table)
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"ann": {"token": "fifteen-letters"}}, "'ann': token is too short"),
        ({"ann": {"token": "long-enough-for-all x"}}, "too short"),
        ({"ann": {"token": "env:NO_SUCH_TOKEN"}}, "set the variable NO_SUCH_TOKEN"),
        ({"ann": {"token": TOKEN}, "eve": {"token": TOKEN}}, "'ann' and 'eve' have the same token"),
    ],
)
def test_tokens_are_checked_before_anything_is_served(users: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        WebSettings.of({"users": users}).reveal()
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "outbox.example.org"])
def test_without_users_it_is_bound_to_this_host_alone(host: str) -> None:
    with pytest.raises(ConfigError, match=r"no users are configured; add a \[web.users.NAME\] table"):
        WebSettings.of({"host": host}).check_binding()
    WebSettings.of({"host": host, "users": {"ann": {"token": TOKEN}}}).check_binding()


@pytest.mark.parametrize(
    ("is_it", "hosts"),
    [
        (True, ["localhost", "LOCALHOST.", "127.9.9.9", "::1", "::ffff:127.0.0.1"]),
        (False, ["localhost.evil.example", "0.0.0.0", "::", "128.0.0.1", "127.1", "2130706433", ""]),
    ],
)
def test_loopback(is_it: bool, hosts: list[str]) -> None:
    assert {host: is_loopback(host) for host in hosts} == dict.fromkeys(hosts, is_it)


def test_config_show_and_check_know_it(tmp_path: Path) -> None:
    project = Project(tmp_path)
    text = f"[web]\nport = 80\n[web.users.ann]\ntoken = '{TOKEN}'\nrole = 'operator'\n"
    project.write("relaybox.toml", f"[destinations.a]\nsink = 'memory:'\n{text}")
    shown = project.run("config", "show")
    assert "[web]\nport = 80" in shown
    assert '[web.users.ann]\ntoken = "…"' in shown
    project.run("migrate")
    checked = project.run("config", "check")
    assert "ann (operator)" in checked
    text += "[web.users.eve]\ntoken = 'env:EVE'\n"
    project.write("relaybox.toml", f"[destinations.a]\nsink = 'memory:'\n{text}")
    wrong = project.run("config", "check", status=2)
    assert "set the variable EVE" in wrong
    assert TOKEN not in shown + checked + wrong
