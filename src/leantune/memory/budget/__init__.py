"""Will it fit: stages of a run against budgets, advice, the largest run that fits."""
