"""The Django project that is measured; the environment says where its database and its broker are."""
