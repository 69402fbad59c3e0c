"""Codecs: the wire format, and its implementations in plain torch and in Triton."""
