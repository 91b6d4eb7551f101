"""What a relay does beside its deliveries: be seen, lead, prune, sweep and count."""
