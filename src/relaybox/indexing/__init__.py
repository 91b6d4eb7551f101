"""Keep a search index in step with a database: backfill, reindex, reconcile."""
