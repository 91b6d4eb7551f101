"""The tables' versions, as Django's migrations."""
