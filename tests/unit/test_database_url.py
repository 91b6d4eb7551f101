"""What a database's URL holds, and what of it messages show."""

from __future__ import annotations

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.config import normalize_url
from relaybox.connect import connected
from relaybox.errors import ConfigError, StoreError
from relaybox.schema import make_tables
from relaybox.setting import without_password
from relaybox.stores.dialects import refusal
from relaybox.stores.postgres import open_store


@pytest.mark.parametrize("secret", ["pass word", "hu%sh", "hush%", "hush%2", "hush%zz", "hu\tsh", "hu\nsh"])
@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "postgres+psycopg"])
def test_what_drivers_cannot_read_is_refused_at_once_and_not_shown(scheme: str, secret: str) -> None:
    with pytest.raises(ConfigError, match="write %20 for a space and %25 for a %") as raised:
        normalize_url(f"{scheme}://me:{secret}@db/shop")
    assert secret not in str(raised.value)
    with pytest.raises(ConfigError):
        normalize_url(f"{scheme}://{secret}@db/shop")


@pytest.mark.parametrize(
    "url",
    [
        *("postgresql://me:hu%20sh%25@db/shop", "postgresql://me:hush@db/shop?options=-c%20x%3D1"),
        *("postgresql://db/shop", "mysql://me:100%25@db/shop"),
    ],
)
def test_what_they_can_read_is_taken(url: str) -> None:
    assert normalize_url(url) == url


URLS = [
    *("postgresql://me:hush-hush%zz@db/shop", "postgresql://me:hush hush@db/shop"),
    *("postgresql://me:hush-hush/x@db/shop", "postgresql://me:hush-hush?x@db/shop"),
    "postgresql://me@db/shop?password=hush-hush%zz",
    "postgresql://me@db/shop?sslpassword=hush%20hush&nothing=5",
]


@pytest.mark.parametrize("url", URLS)
async def test_a_password_that_libpq_stumbles_over_is_in_no_message(url: str) -> None:
    with pytest.raises((StoreError, ConfigError)) as raised, connected(url) as execute:
        execute("SELECT 1")
    assert "hush" not in str(raised.value)
    store = open_store(url, make_tables(sa.MetaData()))
    with pytest.raises(StoreError) as refused:
        await store.now()
    assert "hush" not in str(refused.value)
    await store.close()


def test_raw_and_decoded_both_are_hidden() -> None:
    url = "postgresql://me:hu%2Fsh%40@db/shop?password=se%20cret&sslmode=require"
    said = f"of {url}: hu%2Fsh%40, hu/sh@, se%20cret, se cret; db refuses me"
    shown = "of postgresql://***@db/shop?***: ***, ***, ***, ***; db refuses me"
    assert without_password(said, url) == shown
    assert str(refusal(psycopg.OperationalError(said), url)) == shown
    assert without_password("no more room", "postgresql://me:no@db/shop") == "no more room"
