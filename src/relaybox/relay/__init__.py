"""The relay: moves deliveries from a store to sinks, one lane a destination."""
