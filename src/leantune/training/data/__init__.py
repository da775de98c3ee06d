"""Rows of any shape, checked and tokenised."""
