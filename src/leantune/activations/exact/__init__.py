"""Savings of activation memory that change no number (see :mod:`leantune.activations.exact.apply`)."""
