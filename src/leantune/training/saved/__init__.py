"""What a run left: merged, evaluated, compared."""
