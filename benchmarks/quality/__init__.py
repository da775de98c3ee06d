"""What benchmarks/quality_optim.py and benchmarks/ternary_ablation.py share: tasks, methods, runs, search, tables."""
