"""What does a complete pretraining run look like? Typed configs, data, models, one program for all."""
