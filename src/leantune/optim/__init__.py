"""Update rules: one file each. A rule is one pure function; ``LeanOptimizer.update`` is the one path by which it
reaches a weight."""
