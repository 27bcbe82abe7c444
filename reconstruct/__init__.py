"""Recorded calls to a lineage-checked token tree to samples; audit and exports."""
