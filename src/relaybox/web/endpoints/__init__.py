"""What the API answers, a module for each thing that is asked about."""
