"""Recorded sessions as files that other tools train on."""
