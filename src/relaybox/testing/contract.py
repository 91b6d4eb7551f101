"""The contract of a store as tests, for our stores and for your own.

Subclass ``StoreContract`` in a test module and give it a ``harness`` fixture. pytest (with pytest-asyncio in
auto mode) then runs the whole contract::

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def harness(self): ...
"""

from __future__ import annotations

from relaybox.testing.circuit_contract import CircuitContract, PauseContract, RateContract
from relaybox.testing.claim_contract import ChosenContract, ClaimContract
from relaybox.testing.dead_letter_contract import DeadLetterContract
from relaybox.testing.lease_contract import LeaseContract, SuspectContract
from relaybox.testing.order_contract import OrderContract, OrderedChosenContract, OrderedSuspectContract
from relaybox.testing.outcome_contract import OutcomeContract


class StoreContract(
    ClaimContract,
    ChosenContract,
    OutcomeContract,
    LeaseContract,
    SuspectContract,
    OrderContract,
    OrderedSuspectContract,
    OrderedChosenContract,
    CircuitContract,
    PauseContract,
    RateContract,
    DeadLetterContract,
):
    """The whole contract in ``relaybox.stores.store``; ``testing.harness`` says what a harness does."""
