"""The measured Django project; the environment names its database and its broker."""
