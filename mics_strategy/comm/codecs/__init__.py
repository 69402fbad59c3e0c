"""Codecs: the format on the wire, and its implementations in plain torch and in Triton."""
