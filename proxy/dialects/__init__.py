"""Provider wire APIs as pure translators over ``proxy/canonical.py``."""
