"""What would streams, events and NCCL do? Checked without a GPU, see docs/design/cuda-harness.md."""
