"""Tests that kill, stall and race real processes."""
