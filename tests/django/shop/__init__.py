"""A shop whose orders are announced."""
