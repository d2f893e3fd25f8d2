"""Workloads, timing and the tables of `flamia bench`."""
