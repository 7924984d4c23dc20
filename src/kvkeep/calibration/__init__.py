"""Calibration: which KV heads of a model need the far past, measured by taking it from them."""
