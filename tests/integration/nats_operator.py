"""An operator of NATS with an account and a user, each vouched for by a signed token."""

from __future__ import annotations

import json
import secrets
import time
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import nkeys

HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
NO_LIMITS = {
    **dict.fromkeys(
        ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "streams", "consumer"), -1
    ),
    **dict.fromkeys(("mem_storage", "disk_storage"), -1),
    "wildcards": True,
}
CREDS = """\
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class Key:
    """A pair of keys, whose public one is a name."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.name: str = self._pair.public_key.decode()

    def vouch(self, subject: Key, kind: str, **claims: Any) -> str:
        """A token that says who the subject is."""
        told = {"jti": secrets.token_hex(16), "iat": int(time.time()), "iss": self.name, "sub": subject.name}
        told["nats"] = {"type": kind, "version": 2, **claims}
        text = f"{_encoded(HEADER)}.{_encoded(told)}"
        return f"{text}.{urlsafe_b64encode(self._pair.sign(text.encode())).decode().rstrip('=')}"


def _encoded(value: Any) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def make_operator(directory: Path) -> tuple[str, Path]:
    """The configuration of a server that trusts a new operator, and the file of a user of it."""
    operator, user = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_USER)
    account, system = Key(nkeys.PREFIX_BYTE_ACCOUNT), Key(nkeys.PREFIX_BYTE_ACCOUNT)
    configuration = f"""
        operator: "{operator.vouch(operator, "operator")}"
        system_account: "{system.name}"
        resolver: MEMORY
        resolver_preload: {{
            {account.name}: "{operator.vouch(account, "account", limits=NO_LIMITS)}"
            {system.name}: "{operator.vouch(system, "account")}"
        }}
    """
    token = account.vouch(user, "user", pub={}, sub={}, subs=-1, data=-1, payload=-1)
    creds = directory / f"{user.name}.creds"
    creds.write_text(CREDS.format(token=token, seed=user.seed.decode()))
    return configuration, creds
