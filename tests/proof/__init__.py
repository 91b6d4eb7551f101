"""The long version of the proof: ``make proof``."""
