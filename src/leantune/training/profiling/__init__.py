"""A few real steps of a run, every stage measured."""
