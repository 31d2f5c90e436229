"""Timing and static schedules of the kernels: python -m pallas_kernels.bench."""
