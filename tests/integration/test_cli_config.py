"""What is wrong is said before anything starts; ``relaybox init``, ``config`` and ``--app``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relaybox.core.values import key_lengths
from relaybox.database.migrations import NEWEST
from relaybox.wire.signature import parse_keys
from tests.integration.project import COMMAND, Project
from tests.integration.shop import Shop

APP = """
from relaybox import Outbox, Route, Destination

outbox = Outbox(destinations=[Destination("audit", "console:")], routes=[Route("*", to="audit")])
number = 3

def make():
    return outbox

def fail():
    raise RuntimeError("no such tenant")

@outbox.handler("order.*", name="on_order")
def on_order(event):
    print(f"on_order {event.payload}")
"""
TOML = """
[destinations.runner]
{settings}

[[routes]]
events = "*"
to = "runner"
"""


CONSOLE = TOML.format(settings='sink = "console:"')
SHOWN_ERRORS = "import sys; from relaybox import cli; sys.stderr = sys.stdout; cli.main()"
"""Runs the command with its complaints on standard output."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def assert_complaint(project: Project, message: str, *arguments: str, command: tuple[str, ...] = ()) -> None:
    """Run a command that complains in one line, without a secret."""
    said = project.run(*arguments, status=2, command=command)
    assert said.startswith(f"relaybox: {message}")
    assert said.count("\n") == 1
    assert "hush" not in said
    assert "127.0.0.1:1" not in said or "start it, or choose another with --database" in said


@pytest.fixture
def migrated(project: Project, migrated_database: Callable[[str], str]) -> Project:
    """Return the project with an application, and with tables in ``relaybox.db``."""
    project.write("shop.py", APP)
    shutil.copy(migrated_database("sqlite").removeprefix("sqlite:///"), project.directory / "relaybox.db")
    return project


FAILED = "cannot be imported: "
RELAY = "relay --app shop:outbox --database"
DEFAULT = "sqlite:///relaybox.db"
LOOPBACK = "127.0.0.1 is a loopback address; add it to allow of destination 'runner' if events may go there"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('sink = "console:"\ntimeout = "soon"', ": timeout = 'soon': write a duration"),
        ('sink = "console:"\ntimout = "1s"', " has no setting 'timout'; did you mean"),
        ('sink = "htps://example.org"', ": sink: 'htps' is not a known scheme; did you mean"),
        ('sink = "https:///events"', ": sink = 'https:///events': name a host"),
        ('sink = "https://me:hush@[::1/x"', ": sink = 'https://***@[::1/***' is not a valid"),
        ('sink = "opensearch:///documents"', ": sink = 'opensearch:///documents': write host:port"),
        (
            'sink = "https://example.org"\nsecret = "env:NOWHERE"',
            ": secret: env:NOWHERE is missing or empty; set the variable NOWHERE",
        ),
        (
            'sink = "console:"\nauth = "file:nowhere"',
            ": auth: file:nowhere is missing or empty; write the secret into nowhere",
        ),
        ('sink = "http://me:hush@127.0.0.1:99/"', f": sink = 'http://***@127.0.0.1:99/': {LOOPBACK}"),
        (
            'sink = "https://[::ffff:10.0.0.7]/"\nallow = ["127.0.0.0/8"]',
            ": sink = 'https://[::ffff:10.0.0.7]/': ",
        ),
        (
            'sink = "handler:nowhere:on_order"',
            ": sink = 'handler:nowhere:on_order': there is no module 'nowhere' in ",
        ),
        (
            'sink = "handler:shop:on_ordr"',
            ": sink = 'handler:shop:on_ordr': shop has no 'on_ordr'; did you mean",
        ),
        ('sink = "handler:shop:number"', ": sink = 'handler:shop:number': it is not a function"),
        ('sink = "handler:"', ": sink = 'handler:': it is not module:name; write handler:"),
    ],
)
def test_a_wrong_setting_is_one_line_and_the_status_2(settings: str, message: str, migrated: Project) -> None:
    migrated.write("relaybox.toml", TOML.format(settings=settings))
    assert_complaint(migrated, f"destination 'runner'{message}", "relay")


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("shop", "it is not module:name; write where the application's Outbox is, such as --app"),
        ("shopp:outbox", "there is no module 'shopp' in "),
        ("shop:outbux", "shop has no 'outbux'; did you mean 'outbox'?"),
        ("shop:number", "it is not an Outbox but of type int; "),
        ("shop:on_order", "it is not an Outbox but a function that needs arguments; "),
        ("shop:fail", "the call failed: RuntimeError: no such tenant (shop.py, line 11)"),
        ("needy:outbox", f"needy {FAILED}ModuleNotFoundError: No module named 'absent' (needy.py, line 1)"),
        ("wrong:outbox", f"wrong {FAILED}ConfigError: database = 'oracle://***@host/db': write one of"),
        ("broken:outbox", f"broken {FAILED}SyntaxError: "),
        ("leaves:outbox", f"leaves {FAILED}SystemExit: 3 (leaves.py, line 2)"),
    ],
)
def test_a_wrong_app_is_one_line_and_the_status_2(app: str, message: str, migrated: Project) -> None:
    migrated.write("needy.py", "import absent\n")
    migrated.write("broken.py", "outbox = = 1\n")
    migrated.write("wrong.py", "from relaybox import Outbox\noutbox = Outbox('oracle://me:hush@host/db')\n")
    migrated.write("leaves.py", "import sys\nsys.exit(3)\n")
    assert_complaint(migrated, f"app = '{app}': {message}", "relay", "--app", app)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("relay", "no destinations are configured: add a [destinations.NAME] table to relaybox.toml, or "),
        ("drain", "no destinations are configured: "),
        ("relay --patience soon", "--patience = 'soon': write a duration"),
        (f"{RELAY} postgresql://me:hush@127.0.0.1:1/db", "postgresql://***@127.0.0.1:1/db: "),
        (f"{RELAY} mysql://me:hush@127.0.0.1:1/db", "mysql://***@127.0.0.1:1/db: "),
        (f"{RELAY} sqlite:///other.db", "sqlite:///other.db: the tables are missing: run `relaybox migrate`"),
        (
            f"{RELAY} sqlite://",
            "database = 'sqlite://': it is in memory, where no other process sees it; name a file",
        ),
    ],
)
def test_what_a_relay_cannot_start_with_is_one_line(command: str, message: str, migrated: Project) -> None:
    assert_complaint(migrated, message, *command.split())


@pytest.mark.parametrize(
    ("package", "sink", "database", "message"),
    [
        ("aiohttp", "https://x.org", DEFAULT, "destination 'runner': aiohttp is not installed: pip install"),
        (
            "psycopg",
            "console:",
            "postgresql://h/db",
            "psycopg is not installed: pip install 'relaybox[postgres]'",
        ),
    ],
)
def test_a_missing_extra_is_named_with_its_fix(
    package: str, sink: str, database: str, message: str, migrated: Project
) -> None:
    migrated.write("relaybox.toml", TOML.format(settings=f'sink = "{sink}"'))
    migrated.write(f"{package}.py", f"raise ModuleNotFoundError('none', name='{package}')\n")
    assert_complaint(migrated, message, "relay", "--database", database, command=COMMAND)


@pytest.mark.parametrize("kind", ["postgresql-18", "sqlite"])
def test_tables_that_are_missing_or_older_are_named_with_the_fix(
    kind: str, project: Project, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    project.write("relaybox.toml", CONSOLE)
    assert "the tables are missing: run `relaybox migrate`" in project.run(
        "relay", "--database", url, status=2
    )
    project.run("migrate", "--database", url)
    newer = (
        "from relaybox import cli\nfrom relaybox.database import migrations as m\nm.NEWEST += 1\ncli.main()"
    )
    said = project.run("relay", "--database", url, status=2, command=(sys.executable, "-c", newer))
    versions = f"the tables are at version {NEWEST} and this release needs {NEWEST + 1}"
    assert f"{versions}: run `relaybox migrate`" in said
    assert said.count("\n") == 1


def test_a_doubtful_setting_is_a_line_and_no_error(migrated: Project) -> None:
    migrated.write("relaybox.toml", TOML.format(settings='sink = "console:"\nlease = "10s"'))
    said = migrated.run("drain", command=(sys.executable, "-c", SHOWN_ERRORS)).splitlines()
    warning = "relaybox: warning: destination 'runner': lease 10s is shorter than timeout 30s"
    assert said[0].startswith(warning)
    assert said[1].startswith("DESTINATION")


def test_the_app_is_the_flags_then_the_files(migrated: Project) -> None:
    migrated.write("other.py", APP.replace("audit", "other"))
    migrated.write("relaybox.toml", '[relaybox]\napp = "other:outbox"\n')

    def destinations(*arguments: str) -> list[str]:
        shown = json.loads(migrated.run("config", "show", "--json", *arguments))
        return [name for name in shown if name.startswith("destinations.")]

    assert destinations() == ["destinations.other", "destinations.on_order"]
    assert destinations("--app", "shop:outbox") == ["destinations.audit", "destinations.on_order"]
    assert destinations("--app", "shop:make") == ["destinations.audit", "destinations.on_order"]


def test_the_flags_reach_the_applications_outbox(migrated: Project) -> None:
    migrated.write("fixed.py", "from relaybox import Outbox\noutbox = Outbox('sqlite:///fixed.db')\n")
    migrated.write("named.toml", '[relaybox]\ndatabase = "sqlite:///named.db"\nprefix = "n_"\n')

    def database(*arguments: str, **env: str) -> tuple[str, str]:
        shown = json.loads(migrated.run("config", "show", "--json", *arguments, **env))
        return tuple(shown["relaybox"]["database"].values())

    assert database("--app", "fixed:outbox") == ('"sqlite:///fixed.db"', "app fixed:outbox")
    flag = ("--database", "sqlite:///flag.db")
    for app in ("fixed:outbox", "shop:outbox"):
        assert database("--app", app, *flag) == ('"sqlite:///flag.db"', "--database")
    named = ("--app", "shop:outbox", "--config", "named.toml")
    assert database(*named) == ('"sqlite:///named.db"', "named.toml")
    assert database("--app", "shop:outbox", RELAYBOX_CONFIG="named.toml") == database(*named)
    environment = database("--app", "shop:outbox", RELAYBOX_DATABASE="sqlite:///e.db")
    assert environment == ('"sqlite:///e.db"', "RELAYBOX_DATABASE")
    migrated.run("migrate", "--app", "fixed:outbox")
    assert (migrated.directory / "fixed.db").exists()


@pytest.mark.parametrize("arguments", [(), ("--app", "fixed:outbox")], ids=["of the file", "of the flag"])
def test_check_says_so_where_the_application_does_not_read_the_file(
    migrated: Project, arguments: tuple[str, ...]
) -> None:
    given = "'sqlite:///relaybox.db', destinations=[Destination('mine', 'console:')]"
    migrated.write("fixed.py", f"from relaybox import Destination, Outbox\noutbox = Outbox({given})\n")
    named = CONSOLE
    migrated.write("relaybox.toml", f'[relaybox]\napp = "fixed:outbox"\n{named}')
    said = migrated.run("config", "check", *arguments).splitlines()
    unread = "app fixed:outbox, whose Outbox is given a database and so reads no settings of relaybox.toml"
    assert said[0] == f"ok    settings  {unread}"
    assert "runner" not in "".join(said[1:])
    assert "# app fixed:outbox" in migrated.run("config", "show", *arguments)
    migrated.write("fixed.py", "from relaybox import Outbox\noutbox = Outbox()\n")
    assert "ok    settings  relaybox.toml, app fixed:outbox\n" in migrated.run("config", "check", *arguments)


def test_a_file_in_the_directory_replaces_no_package(migrated: Project) -> None:
    migrated.write("aiohttp.py", 'raise SystemExit("hijacked")')
    migrated.write("shop_of_this_test.py", APP)
    migrated.write("relaybox.toml", TOML.format(settings='sink = "https://example.org/events"'))
    command = (sys.executable, "-P", "-m", "relaybox")
    assert "hijacked" not in migrated.run("config", "check", command=command)
    shown = migrated.run("--app", "shop_of_this_test:outbox", "config", "show", command=command)
    assert "destinations.on_order" in shown


def test_init_writes_what_works(project: Project) -> None:
    assert project.run("init").splitlines()[0] == "wrote relaybox.toml"
    assert [path.name for path in project.directory.iterdir()] == ["relaybox.toml"]
    project.run("migrate")
    assert project.run("config", "check").splitlines() == [
        "ok    settings  relaybox.toml",
        "ok    console   console:",
        "ok    database  sqlite:///relaybox.db, tables at version 3",
    ]
    project.write(
        "emit.py",
        "import sqlite3\nfrom relaybox import Outbox\n"
        "with sqlite3.connect('relaybox.db') as connection:\n"
        "    connection.execute('BEGIN')\n"
        "    Outbox().emit(connection, 'Order', 1, 'order.paid', {'total': 42})\n",
    )
    project.run("emit.py", command=(sys.executable,))
    said = project.run("drain")
    assert "console: order.paid Order/1" in said
    assert '{"total":42}' in said


def test_init_overwrites_only_when_asked_to(project: Project) -> None:
    project.write("relaybox.toml", "mine")
    assert project.run("init", status=2) == "relaybox: relaybox.toml exists already; --force overwrites it\n"
    assert project.read("relaybox.toml") == "mine"
    project.run("init", "--force")
    assert "[destinations.console]" in project.read("relaybox.toml")


def test_init_leaves_pyproject_alone(project: Project) -> None:
    project.write("pyproject.toml", "[tool.relaybox]\n")
    assert "has a [tool.relaybox] table already" in project.run("init", status=2)
    assert "by hand" in project.run("init", "--config", "pyproject.toml", "--force", status=2)
    assert project.read("pyproject.toml") == "[tool.relaybox]\n"


def test_init_writes_the_database_it_is_given(project: Project) -> None:
    def database(*arguments: str, **env: str) -> str:
        said = project.run("init", "--force", *arguments, **env)
        assert "hush" not in said
        lines = project.lines("relaybox.toml")
        return next(line for line in lines if line.startswith("database = "))

    assert database() == 'database = "sqlite:///relaybox.db"'
    assert database(DATABASE_URL="sqlite:///x.db") == 'database = "env:DATABASE_URL"'
    assert database("--database", "env:SHOP_DB") == 'database = "env:SHOP_DB"'
    given = database("--database", 'postgres://me:hush"\\@host/db')
    assert given == 'database = "postgresql://me:hush\\"\\\\@host/db"'
    assert 'database = "postgresql://***@host/db"' in project.run("config", "show")
    assert "database is not a URL" in project.run("init", "--force", "--database", "shop", status=2)


def test_the_secret_path_of_a_webhook_is_shown_by_no_command(migrated: Project) -> None:
    for sink in ("https://hooks.slack.com/services/T0/hush", "env:SLACK_URL"):
        migrated.write("relaybox.toml", TOML.format(settings=f'sink = "{sink}"'))
        for command in (["config", "show"], ["config", "check"], ["doctor", "--skip", "sinks"]):
            status = 2 if sink.startswith("env:") and command == ["config", "check"] else 0
            shown = migrated.run(*command, status=status)
            assert "hush" not in shown
    assert 'sink = "env:SLACK_URL"' in migrated.run("config", "show")


def test_show_says_what_counts_and_where_it_comes_from(migrated: Project) -> None:
    migrated.write(
        "relaybox.toml",
        '[relaybox]\nprefix = "x_"\n'
        + TOML.format(
            settings='sink = "https://me:hush@x.org/?t=hush"\nsecret = "hush"\nauth = "file:token"\n'
            'rate_limit = "90/m"\nbackoff = { base = "90s" }\nretention = 0\nallow = ["10.0.0.0/8"]'
        ),
    )
    shown = migrated.run("config", "show")
    assert "hush" not in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines == [
        "[relaybox]",
        'database = "sqlite:///relaybox.db" # default',
        'prefix = "x_" # relaybox.toml',
        "",
        "[destinations.runner]",
        'sink = "https://***@x.org/?***" # relaybox.toml',
        'backoff = { base = "90s", cap = "1h", factor = 2, jitter = 0.1 } # relaybox.toml',
        'rate_limit = "1.5/s" # relaybox.toml',
        'retention = "0s" # relaybox.toml',
        'secret = "…" # relaybox.toml',
        'auth = "file:token" # relaybox.toml',
        'allow = ["10.0.0.0/8"] # relaybox.toml',
        "",
        "[routes.1]",
        'events = ["*"] # relaybox.toml',
        'to = ["runner"] # relaybox.toml',
        "",
        lines[-1],
    ]
    assert lines[-1].endswith("more are at their defaults; --all shows them")
    assert 'timeout = "30s"' in migrated.run("config", "show", "--all")
    everything = json.loads(migrated.run("config", "show", "--json"))
    assert everything["destinations.runner"]["lease"] == {"text": '"1m"', "source": "default"}


@pytest.mark.parametrize(
    ("settings", "text", "source"), [("", "true", "default"), ("ordered = false", "false", "relaybox.toml")]
)
def test_a_search_index_is_ordered_by_default(
    migrated: Project, settings: str, text: str, source: str
) -> None:
    sink = f'sink = "meilisearch://127.0.0.1/documents"\n{settings}'
    migrated.write("relaybox.toml", TOML.format(settings=sink))
    shown = json.loads(migrated.run("config", "show", "--json"))["destinations.runner"]["ordered"]
    assert shown == {"text": text, "source": source}


def test_check_tells_all_that_is_wrong(project: Project) -> None:
    project.write(
        "relaybox.toml",
        TOML.format(settings='sink = "https://x.org"\nsecret = "env:NOWHERE"')
        + '[destinations.well]\nsink = "console:"\n[destinations.ill]\nsink = "handler:nowhere:x"\n',
    )
    wrong = project.run("config", "check", status=2).splitlines()
    assert [line.split()[:2] for line in wrong] == [["wrong", one] for one in ("runner", "ill", "database")]
    project.run("migrate")
    project.write("relaybox.toml", CONSOLE)
    well = json.loads(project.run("config", "check", "--json", command=(sys.executable, "-c", SHOWN_ERRORS)))
    assert well["ok"]
    assert [one["what"] for one in well["checks"]] == ["settings", "runner", "database"]
    project.write("relaybox.toml", "[relaybox\n")
    assert project.run("config", "check", status=2).startswith("wrong settings  relaybox.toml cannot be read")


@pytest.mark.parametrize(
    "settings",
    [
        'sink = "http://localhost:9911/"',
        'sink = "http://192.168.1.4/"\nallow = ["192.168.0.0/16"]',
        'sink = "https://8.8.8.8/"',
    ],
)
def test_check_lets_names_and_addresses_pass_that_may_be_sent_to(settings: str, migrated: Project) -> None:
    migrated.write("relaybox.toml", TOML.format(settings=settings))
    assert "ok    runner" in migrated.run("config", "check")


def test_the_default_database_is_named_as_such_where_its_tables_are_missing(project: Project) -> None:
    project.write("relaybox.toml", CONSOLE)
    said = project.run("relay", status=2)
    assert said.startswith(f"relaybox: {DEFAULT} (the default; choose with --app or --database): the tables")
    named = project.run("drain", "--database", DEFAULT, status=2)
    assert named.startswith(f"relaybox: {DEFAULT}: the tables are missing")


def test_check_notes_a_destination_that_no_route_leads_to(migrated: Project) -> None:
    migrated.write("relaybox.toml", '[destinations.lonely]\nsink = "console:"\n')
    assert "lonely    console: (no route leads to it)" in migrated.run("config", "check")


def test_an_emitted_event_reaches_the_function_that_the_file_names(migrated: Project) -> None:
    migrated.write("relaybox.toml", TOML.format(settings='sink = "handler:shop:on_order"'))
    shop = Shop(f"sqlite:///{migrated.directory}/relaybox.db")
    shop.outbox.handler("order.*", name="runner")(print)
    shop.emit(1)
    shop.engine.dispose()
    script = str(Path(sys.executable).with_name("relaybox"))
    assert "on_order {'n': 0}" in migrated.run("drain", command=(script,))


def test_a_new_secret_is_one_that_nobody_argues_with(project: Project) -> None:
    made = [project.run("secret", "new").strip() for _ in range(2)]
    assert made[0] != made[1]
    [key] = parse_keys(made[0])
    assert (key.version, key_lengths(made[0])) == ("v1", [32])
