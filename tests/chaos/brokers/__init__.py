"""Brokers that events are relayed to, and the harm that can be done to each of them."""
