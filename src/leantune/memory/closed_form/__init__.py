"""Training memory by arithmetic on a model's shape: no model is built, no tensor is made."""
