"""Uses the service as a person would, while the search engine is killed."""

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from stage import Stage

from relaybox.demo.processes import Broken

SECONDS = 90.0
Document = dict[str, Any]


class Person:
    """Calls the API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def write(self, title: str, body: str) -> Document:
        """Save a new document."""
        return self.ask("documents", "POST", {"title": title, "body": body})

    def edit(self, document: Document, body: str) -> Document:
        """Change its text."""
        return self.ask(f"documents/{document['id']}", "PUT", {**document, "body": body})

    def delete(self, document: Document) -> None:
        """Delete it."""
        self.ask(f"documents/{document['id']}?version={document['version']}", "DELETE")

    def found(self, words: str) -> list[str]:
        """The titles of what a search finds."""
        return sorted(hit["title"] for hit in self.ask(f"search?q={quote(words)}"))

    def sync(self, document: Document) -> Document:
        """Return what the page says of it: whether a search finds it."""
        [shown] = [one for one in self.ask("documents") if one["id"] == document["id"]]
        return shown["sync"]

    def ask(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """Return what the service answers."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._url}{path}", data, {"content-type": "application/json"}, method=method)
        with urlopen(request, timeout=SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def refused(self, work: Callable[[], Any]) -> int:
        """The status that the service refuses it with."""
        try:
            work()
        except HTTPError as error:
            with error:
                return error.code
        raise Broken("the service took what it should refuse")


class Check:
    """The steps, in their order."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._person = Person(stage.url)

    def save_and_find(self) -> None:
        """Check that a document that is saved is found."""
        person = self._person
        self._heron = person.write("Herons", "They stand in shallow water and wait for fish.")
        person.write("Kingfishers", "They dive for fish from a branch.")
        self._until(
            "two documents are saved, and a search finds both", self._finds("fish", "Herons", "Kingfishers")
        )
        self._until("the page says that they are in search", lambda: self._is("synced", self._heron))

    def bad_input(self) -> None:
        """Check what the service does not take."""
        person, heron = self._person, self._heron
        statuses = [
            person.refused(lambda: person.write("", "no title")),
            person.refused(lambda: person.write("t" * 201, "too long")),
            person.refused(lambda: person.edit({**heron, "version": 7}, "an older one")),
            person.refused(lambda: person.delete({**heron, "id": "0" * 32})),
        ]
        self._until(
            "no title, too long a one, an old version and a document that is gone are refused",
            lambda: statuses == [422, 422, 409, 404] and len(person.ask("documents")) == 2,
        )

    def outage(self) -> None:
        """Documents are written while the engine is away, and found when it is back."""
        if not self._stage.engine.is_new:
            return
        person, name = self._person, self._stage.engine.name
        self._stage.engine.kill()
        self._until(f"{name} is killed: a search says so", lambda: self._search_status("fish") == 503)
        otter = person.write("Otters", "They hunt for fish at dusk.")
        self._heron = person.edit(self._heron, "They stand still and wait for frogs.")
        self._until(
            "a document is saved and one edited: both wait, and the page says why", lambda: self._waits(otter)
        )
        self._stage.engine.start()
        self._until(f"{name} is back: a search finds the new one", self._finds("otters", "Otters"))
        self._until("the edited one is found by its new words", self._finds("frogs", "Herons"))
        self._until("and not by its old ones", self._finds("fish", "Kingfishers", "Otters"))

    def edit_and_delete(self) -> None:
        """The index follows."""
        self._heron = self._person.edit(self._heron, "They nest in high trees.")
        self._until("an edit is in the index", self._finds("nest", "Herons"))
        self._until("the old text is not", self._finds("frogs"))
        self._person.delete(self._heron)
        self._until("a deleted document is not found any more", self._finds("herons"))

    def compare(self) -> None:
        """The index and the database say the same."""
        self._until("compared document by document, the index has what the database has", self._same)

    def _same(self) -> bool:
        seen = self._person.ask("compare", "POST")
        counts = (seen["documents"], seen["differences"], seen["waiting"])
        return counts == (len(self._person.ask("documents")), 0, 0)

    def _finds(self, words: str, *titles: str) -> Callable[[], bool]:
        def finds() -> bool:
            try:
                return self._person.found(words) == sorted(titles)
            except HTTPError as error:
                with error:
                    return False

        return finds

    def _is(self, state: str, document: Document) -> bool:
        return self._person.sync(document)["state"] == state

    def _waits(self, otter: Document) -> bool:
        """True if both are ``syncing``, and the engine's state says that two changes wait."""
        seen, engine = self._person.sync(otter), self._person.ask("engine")
        both = seen["state"] == "syncing" and self._is("syncing", self._heron)
        return both and bool(seen["reason"]) and not engine["up"] and engine["waiting"] == 2

    def _search_status(self, words: str) -> int:
        try:
            self._person.found(words)
        except HTTPError as error:
            with error:
                return error.code
        return 200

    def _until(self, text: str, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not condition():
            self._stage.check()
            if time.monotonic() > began + SECONDS:
                seen = [self._person.ask("documents"), self._person.ask("engine")]
                raise Broken(f"not after {SECONDS:g} s: {text}; there is {seen}")
            time.sleep(0.1)
        print(f"ok {time.monotonic() - began:5.1f} s  {text}", flush=True)


def check(stage: Stage) -> None:
    """Say each step that came to its end; raises ``Broken`` at the first that does not."""
    steps = Check(stage)
    for step in (steps.save_and_find, steps.bad_input, steps.outage, steps.edit_and_delete, steps.compare):
        step()
    print(f"The index of {stage.engine.name} followed every change.", flush=True)
