"""From a config to a plan, and to the method that fits."""
