"""Tuning records: workloads and their measurements, in files."""
