"""What tuning found: workloads and their measurements, in files."""
