"""Kernels for the device, in Triton. This module imports nothing, and nothing imports its neighbours without a device."""
