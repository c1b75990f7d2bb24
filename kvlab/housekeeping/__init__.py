"""Looking after runs and caches: list, show, compare, and give room back. Loads no model."""
