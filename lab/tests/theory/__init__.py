"""The papers' theory as running checks: what is printed, and what is meant."""
