"""Kernels for the device, in Triton, which only this package imports. This module imports nothing."""
