"""What starts Relaybox elsewhere names commands, options, settings and variables that there are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import yaml

from relaybox.core.settings import Settings
from relaybox.core.values import parse_duration
from relaybox.database.migrations import migrate
from relaybox.database.roles import grants
from tests.conftest import give_up
from tests.deploy.pack import DEPLOY, ROOT, check_command, manifests
from tests.schema_snapshot import run_script
from tests.servers import base

READ = {"RELAYBOX_CONFIG", "RELAYBOX_DATABASE", "DATABASE_URL", "NO_COLOR"}
"""The variables that the command reads itself."""
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "relaybox"}
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SETTINGS = DEPLOY / "relaybox.toml"
PATIENCE = 30.0
SECRETS = {
    name: name.replace("migrate", "owner") for name in ("relaybox-migrate", "relaybox-relay", "relaybox-web")
}
"""The secret of each workload; each holds another database user."""


def workloads() -> dict[str, dict[str, Any]]:
    """Return the pod of each Kubernetes workload, by its name."""
    return {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for documents in manifests().values()
        for document in documents
        if document["kind"] in ("Deployment", "Job")
    }


def config_map() -> dict[str, Any]:
    [document] = manifests()["configmap.yaml"]
    return document["data"]  # type: ignore[no-any-return]


def referred(toml: str) -> set[str]:
    """Return the secret files that settings name."""
    assert '"env:' not in toml
    return set(re.findall(r'"file:/run/secrets/([\w-]+)"', toml))


def patience(words: list[str]) -> float:
    if "--patience" not in words:
        return PATIENCE
    return parse_duration(words[words.index("--patience") + 1], "--patience")


def unit(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_the_compose_file_is_one_that_starts(name: str) -> None:
    service = OURS[name]
    check_command(service["command"])
    assert set(service.get("environment", ())) <= READ
    assert f"./{SETTINGS.name}:{service['environment']['RELAYBOX_CONFIG']}:ro" in service["volumes"]


def test_the_compose_file_has_everything_and_gives_relays_time_to_stop() -> None:
    services = {"postgres", "migrate", "roles", "relay", "web", "prometheus", "grafana"}
    assert {*COMPOSE["services"]} == services
    relay = COMPOSE["services"]["relay"]
    assert relay["deploy"]["replicas"] == 2
    assert parse_duration(relay["stop_grace_period"], "stop_grace_period") > patience(relay["command"]) + 5
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"]
    for port in [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]:
        assert port.startswith("127.0.0.1:"), port


def test_prometheus_of_the_compose_file_scrapes_where_the_others_listen() -> None:
    written = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    relay, web = written["scrape_configs"]
    assert f"0.0.0.0:{relay['dns_sd_configs'][0]['port']}" in OURS["relay"]["command"]
    assert relay["dns_sd_configs"][0]["names"] == ["relay"]
    [target] = web["static_configs"][0]["targets"]
    assert target == f"web:{OURS['web']['command'][-1]}"
    assert target.partition(":")[0] in Settings.load(SETTINGS, ENVIRONMENT).web["hosts"]


ENVIRONMENT: Mapping[str, str] = {
    "RELAYBOX_DATABASE": "postgresql://relaybox@localhost/relaybox",
}


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


def relaybox(directory: Path, *words: str, **variables: str) -> str:
    """Return what the command prints with the settings of the pack."""
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment |= {"RELAYBOX_CONFIG": str(SETTINGS), **variables}
    done = run(sys.executable, "-m", "relaybox", *words, env=environment, cwd=directory)
    assert done.returncode == 0, done
    return done.stdout


def test_the_settings_are_ones_that_a_relay_takes(tmp_path: Path) -> None:
    assert config_map()["relaybox.toml"] == SETTINGS.read_text()
    shown = relaybox(tmp_path, "config", "show", **ENVIRONMENT)
    assert 'sink = "console:"' in shown
    assert 'token = "file:/run/secrets/operator-token"' in shown


def test_a_relay_starts_with_these_settings_and_needs_no_secret_of_the_web(tmp_path: Path) -> None:
    for words in (["migrate"], ["relay", "--once"]):
        relaybox(tmp_path, *words, RELAYBOX_DATABASE="sqlite:///relaybox.db")


@pytest.mark.parametrize("name", workloads())
def test_a_workload_is_one_that_starts_and_says_little_of_its_secrets(name: str) -> None:
    pod = workloads()[name]
    [container] = pod["containers"]
    check_command(container["args"])
    variables = {each["name"]: each for each in container["env"]}
    # No secret is in the environment, where every child process and crash report has it.
    assert set(variables) <= READ
    assert all("valueFrom" not in variable for variable in variables.values())
    [secrets] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "secrets"]
    assert secrets == {"secretName": SECRETS[name], "defaultMode": 0o440}
    assert {"name": "secrets", "mountPath": "/run/secrets", "readOnly": True} in container["volumeMounts"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["resources"]["limits"]["memory"]


def test_a_relay_of_kubernetes_is_probed_where_it_listens_and_has_time_to_stop() -> None:
    pod = workloads()["relaybox-relay"]
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > patience(container["args"]) + 5
    [port] = container["ports"]
    assert f"0.0.0.0:{port['containerPort']}" in container["args"]
    for probe, path in {"liveness": "/livez", "startup": "/livez", "readiness": "/readyz"}.items():
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
    _, budget = manifests()["relay.yaml"]
    assert (budget["kind"], budget["spec"]["minAvailable"]) == ("PodDisruptionBudget", 1)


def test_kubernetes_names_lead_to_each_other() -> None:
    documents = [document for group in manifests().values() for document in group]
    files = manifests().keys() - {"kustomization.yaml", "monitoring.yaml"}
    [kustomization] = manifests()["kustomization.yaml"]
    assert set(kustomization["resources"]) == files
    pods = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in documents
        if document["kind"] in ("Deployment", "Job")
    ]
    for document in documents:
        selector = document.get("spec", {}).get("selector", {})
        if document["kind"] == "Service":
            assert selector in pods
        elif selector:
            assert selector["matchLabels"] in pods
    for pod in workloads().values():
        mounted = [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
        assert [volume["name"] for volume in pod["volumes"]] == mounted
        assert all(
            volume.get("configMap", {}).get("name", "relaybox") == "relaybox" for volume in pod["volumes"]
        )


def test_kustomize_makes_one_set_of_the_manifests() -> None:
    if not shutil.which("kubectl"):
        # Not a failure where servers are required: no package of Debian has one that is new enough.
        pytest.skip(
            "no kubectl: Debian's, 1.20, does not know `labels` of a kustomization; install a newer one"
        )
    built = run("kubectl", "kustomize", DEPLOY / "kubernetes", check=True)
    documents = list(yaml.safe_load_all(built.stdout))
    named = {document["metadata"]["labels"]["app.kubernetes.io/name"] for document in documents}
    assert named == {"relaybox"}
    images = set(re.findall(r"image: (.*)", built.stdout))
    assert images == {"registry.example.org/relaybox:0.1.0"}


def test_each_process_has_only_the_secrets_that_it_needs() -> None:
    tokens = referred(SETTINGS.read_text()) - {"database"}
    assert tokens == {"operator-token", "viewer-token"}
    given = {name: secrets_of(service) for name, service in COMPOSE["services"].items()}
    assert given["migrate"] == {"database": "owner-database"}
    assert given["relay"] == {"database": "relay-database"}
    assert given["web"] == {"database": "web-database"} | {token: token for token in tokens}
    assert len(set(SECRETS.values())) == len(SECRETS)
    for path in UNITS:
        assert "RELAYBOX_DATABASE=file:%d/database" in path.read_text()
        assert (
            f"LoadCredential=database:/etc/relaybox/{path.stem.partition('-')[2]}-database"
            in path.read_text()
        )
    for file in (DEPLOY / "compose.yaml", *UNITS, *(DEPLOY / "kubernetes").glob("*.yaml")):
        assert not re.search(r"\$\{\w*(PASSWORD|TOKEN)|secretKeyRef|^EnvironmentFile", file.read_text(), re.M)


def secrets_of(service: dict[str, Any]) -> dict[str, str]:
    """Return the secrets of a service of the compose file, by the names that it sees."""
    each = [
        {"source": one, "target": one} if isinstance(one, str) else one for one in service.get("secrets", ())
    ]
    return {one["target"]: one["source"] for one in each}


def test_the_secrets_are_made_once_and_fit_together(tmp_path: Path) -> None:
    script = tmp_path / "make-secrets"
    shutil.copy(DEPLOY / "make-secrets", script)
    run(script, check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert made.keys() == COMPOSE["secrets"].keys()
    for name, place in COMPOSE["secrets"].items():
        assert place == {"file": f"secrets/{name}"}
    for who in ("owner", "relay", "web"):
        assert made[f"{who}-password"] in made[f"{who}-database"]
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert len({*made.values()}) == len(made)
    run(script, check=True)
    assert made == {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}


def test_the_printed_roles_are_those_of_this_release() -> None:
    _, _, printed = (DEPLOY / "roles.sql").read_text().partition("\n")
    assert printed == "".join(f"{statement};\n" for statement in grants("postgresql"))


def test_the_users_of_the_pack_work_and_only_their_owner_migrates(
    fresh_database: Callable[[str], str],
) -> None:
    if not shutil.which("psql"):
        give_up("psql", "it is not installed")
    url = fresh_database("postgresql-18")
    migrate(url)
    command = ["psql", "-X", "-1", "-v", "ON_ERROR_STOP=1", "-v", "relay=one", "-v", "web=two"]
    try:
        for _ in range(2):
            run(*command, "-f", DEPLOY / "roles.sql", "-f", DEPLOY / "logins.sql", url, check=True)
        for user, password in {"shop_relay": "one", "shop_web": "two"}.items():
            own = sa.make_url(url).set(username=user, password=password)
            with psycopg.connect(own.render_as_string(hide_password=False)) as connection:
                connection.execute(
                    "INSERT INTO outbox_audit (actor, action, details) VALUES ('a', 'b', '{}')"
                )
                for statement in ("DELETE FROM outbox_audit", "DROP TABLE outbox_event"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
                        connection.execute(statement)
    finally:
        everyone = (
            "shop_relay, shop_web, relaybox_emitter, relaybox_relay, relaybox_viewer, relaybox_consumer"
        )
        run_script(url, f"DROP OWNED BY {everyone}; DROP ROLE {everyone}")


def test_images_are_pinned_to_a_release() -> None:
    [base] = re.findall(r"^ARG BASE=(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    images = [service["image"] for service in COMPOSE["services"].values()]
    assert set(re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)) == {"${BASE}"}
    for image in {base, *images} - {"relaybox"}:
        assert re.search(r":v?\d+\.\d+(\.\d+)?(-|@|$)", image), image


def test_each_pod_talks_only_to_whom_it_must() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests()["networkpolicy.yaml"]}
    assert policies.keys() == workloads().keys()
    ports = {
        port["name"]
        for pod in workloads().values()
        for container in pod["containers"]
        for port in container.get("ports", ())
    }
    for name, policy in policies.items():
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["podSelector"]["matchLabels"] == {
            "app.kubernetes.io/component": name.removeprefix("relaybox-")
        }
        for rule in policy.get("ingress", ()):
            assert rule["from"]
            assert {port["port"] for port in rule["ports"]} <= ports
    assert "ingress" not in policies["relaybox-migrate"]
    [_, receivers] = policies["relaybox-relay"]["egress"]
    assert "169.254.0.0/16" in receivers["to"][0]["ipBlock"]["except"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is_and_gives_it_time_to_stop(path: Path) -> None:
    settings = unit(path)
    program, *words = shlex.split(settings["ExecStart"])
    assert program.endswith("/bin/relaybox")
    check_command(words)
    if words[0] == "relay":
        assert parse_duration(settings["TimeoutStopSec"], "TimeoutStopSec") > patience(words) + 5
    assert settings["Restart"] == "always"
    assert settings["NoNewPrivileges"] == "yes"


@pytest.fixture(scope="module")
def systemd_analyze() -> None:
    """See to it that systemd-analyze is there."""
    with suppress(base.Unavailable):
        if not shutil.which("systemd-analyze"):
            base.apt_install("systemd")
    if not shutil.which("systemd-analyze"):
        give_up("systemd-analyze", "it is not installed")


@pytest.mark.usefixtures("systemd_analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_a_unit_and_finds_it_little_exposed(path: Path, tmp_path: Path) -> None:
    # Verified is also that the program is there.
    text = path.read_text().replace(
        "/srv/shop/.venv/bin/relaybox", str(Path(sys.executable).with_name("relaybox"))
    )
    copy = tmp_path / path.name
    copy.write_text(text)
    done = run("systemd-analyze", "verify", copy)
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, complaints) == (0, []), done
    judged = run("systemd-analyze", "security", "--offline=yes", "--threshold=25", copy)
    assert judged.returncode == 0, judged


def test_the_image_copies_what_there_is_and_installs_extras_that_there_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [(files, extras)] = re.findall(r"^COPY (.*) /source/$.*?\[([a-z,]+)\]'", text, re.MULTILINE | re.DOTALL)
    assert all((ROOT / file).is_file() for file in files.split())
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras.split(","))
    [started] = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    check_command(yaml.safe_load(started))


def test_what_was_not_run_says_so_at_its_top() -> None:
    files = [DEPLOY / "compose.yaml", DEPLOY / "Dockerfile", *(DEPLOY / "kubernetes").glob("*.yaml")]
    for path in (*UNITS, *files):
        head = path.read_text().splitlines()[:4]
        assert any(re.search(r"NOT (RUN|BUILT)", line) for line in head), path.name


def test_wherever_a_proxy_may_stand_in_front_the_web_does_not_start_without_users() -> None:
    unit_of_web = unit(DEPLOY / "systemd" / "relaybox-web.service")
    assert "--require-users" in shlex.split(unit_of_web["ExecStart"])
    assert "--require-users" in OURS["web"]["command"]
    assert "--require-users" in workloads()["relaybox-web"]["containers"][0]["args"]
    assert "FORWARDED_ALLOW_IPS=127.0.0.1" in (DEPLOY / "systemd" / "relaybox-web.service").read_text()
