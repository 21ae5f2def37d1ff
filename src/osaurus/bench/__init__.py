"""Measuring: workloads, how they are driven (in process, over HTTP, at a peer), how reported."""
