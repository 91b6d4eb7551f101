"""The contract of a store as tests, for every store there is and for one of your own.

Subclass ``StoreContract`` in a test module, give it a ``harness`` fixture, and pytest (with
pytest-asyncio in auto mode) runs the whole contract on it::

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def harness(self): ...
"""

from __future__ import annotations

from relaybox.testing.circuit_contract import CircuitContract
from relaybox.testing.dead_letter_contract import DeadLetterContract
from relaybox.testing.lease_contract import LeaseContract
from relaybox.testing.order_contract import OrderContract


class StoreContract(LeaseContract, OrderContract, CircuitContract, DeadLetterContract):
    """The whole contract in ``relaybox.stores.store``; ``testing.harness`` says what a harness does."""
