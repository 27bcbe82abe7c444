"""Samples to batches to loss to update to published weights; supervised fine-tuning."""
