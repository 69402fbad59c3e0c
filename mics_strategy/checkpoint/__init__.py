"""What a checkpoint holds, how it is written so that it is never half there, and who can read it."""
