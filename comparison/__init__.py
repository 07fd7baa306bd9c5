"""The parts of compare.py: a plan, its trainings, their numbers, the verdict and the report."""
