"""Triton kernels on a device: each is checked against its reference, then timed beside what people use today."""
